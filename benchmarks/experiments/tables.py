"""The page's tables: columns, and rows made of lines of claims.json; null there is a dash here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dlc_sentinel.records import Json

Line = Mapping[str, Json]
Lines = Sequence[Line]


def markdown(columns: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns: their names, apart by " | ". Without a row it says so."""
    head = f"| {columns} |\n|{'---|' * (columns.count(' | ') + 1)}\n"
    return head + ("".join(f"| {' | '.join(row)} |\n" for row in rows) or "\nNo run yet.\n")


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash; large ones without decimals."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}f}"


def interval(values: Sequence[float | None], digits: int = 2) -> str:
    """Mean and its interval: `1.28 (0.99, 1.57)`."""
    mean, low, high = values[:3]
    return "-" if mean is None else f"{number(mean, digits)} ({number(low, digits)}, {number(high, digits)})"


def quartiles(values: Sequence[float | None]) -> str:
    """Lower quartile, median, upper quartile, in whole steps."""
    low, middle, high = values
    return "-" if low is None else f"{low:.0f}, {middle:.0f}, {high:.0f}"


def _constant(line: Line) -> list[str]:
    return [
        line["arm"], str(line["runs"]), interval(line["discrepancy_factor"]), interval(line["lag_factor"]),
        interval(line["discrepancy_rms"], 4), interval(line["lag_rms"]),
    ]  # fmt: skip


def _crossing(line: Line) -> list[str]:
    return [
        str(line["length"]), line["arm"], str(line["runs"]), f"{line['failed']} ({line['failed_for_good']})",
        str(line["crossed"]), quartiles(line["fail_step"]),
        *(quartiles(line[f"gap_{rung}"]) for rung in ("1", "8", "32", "64", "inf")),
    ]  # fmt: skip


def _world(line: Line) -> list[str]:
    return [
        line["world"], str(line["runs"]), interval(line["mean"]), number(line["largest"]),
        f"{line['share_within']:.0%}", interval(line["reverse"]), number(line["syncs"], 1), yes(line["within"]),
        number(line["synced_largest"]), number(line["stale_largest"]),
    ]  # fmt: skip


def _part(line: Line) -> list[str]:
    return [
        line["arm"], str(line["runs"]), interval(line["mean"]), number(line["largest"]),
        f"{line['share_within']:.0%}", number(line["syncs"], 1), interval(line["end_return"]),
    ]  # fmt: skip


def _trap(line: Line) -> list[str]:
    return [
        line["arm"], interval(line["full"]), interval(line["prefix"]), number(line["peak"][0]),
        interval(line["end"]), number(line["seen_start"][0]), number(line["seen_end"][0]),
        quartiles(line["cross_1"]), quartiles(line["cross_inf"]), number(line["syncs"], 1),
    ]  # fmt: skip


def _frontier(line: Line) -> list[str]:
    over = [None if value is None else math.exp(value) for value in line["log_ratio"][:3]]
    return [
        str(line["length"]), line["horizon"], str(line["runs"]), number(line["syncs"][0], 1), interval(line["rule"]),
        interval(line["period"]), interval(over), number(line["largest"]), yes(line["within"]),
        interval(line["lead"], 0),
    ]  # fmt: skip


def _movement(line: Line) -> list[str]:
    low, high = line["healthy"]
    return [line["horizon"], f"{line['rms']:.3f}", f"{low:.2f} to {high:.2f}"]


def _tiny(line: Line) -> list[str]:
    return [
        line["arm"], str(line["runs"]), interval(line["mean"]), number(line["largest"]), interval(line["prefix"]),
        f"{line['failed']} of {line['runs']}", interval(line["end_return"]), interval(line["seen_return"]),
        number(line["syncs"], 1),
    ]  # fmt: skip


def yes(holds: bool) -> str:
    return "yes" if holds else "no"


def summary(rows: Sequence[tuple[str, str, str]]) -> str:
    """The claim table."""
    return markdown("claim | holds here? | in one line", rows)


def constant(lines: Lines) -> str:
    """Claim 1."""
    columns = "arm | runs | discrepancy, last over first | lag, last over first | discrepancy, nats, at the end | lag"
    return markdown(columns, [_constant(line) for line in lines])


def crossing(lines: Lines) -> str:
    """Claim 2."""
    columns = (
        "tokens | arm | runs | failed (for good) | crossed | failed at | h = 1 | h = 8 | h = 32 | h = 64 | "
        "whole response"
    )
    return markdown(columns, [_crossing(line) for line in lines])


def worlds(lines: Lines) -> str:
    """Claim 3, world by world."""
    columns = (
        "world | runs | mean KL ratio | largest | steps within | reverse | syncs of 150 | in the band | "
        "largest, `synced` | largest, no resync"
    )
    return markdown(columns, [_world(line) for line in lines])


def parts(lines: Lines) -> str:
    """The parts of DLC, of one group of worlds."""
    columns = "arm | runs | mean KL ratio | largest | steps within | syncs | return at the end"
    return markdown(columns, [_part(line) for line in lines])


def trap(lines: Lines) -> str:
    """Claim 4."""
    columns = (
        "arm | full KL ratio | prefix KL ratio | return on prompt B, peak | end | seen, start | seen, end | "
        "ESS_1 crosses | ESS_32 (whole) crosses | syncs"
    )
    return markdown(columns, [_trap(line) for line in lines])


def frontier(lines: Lines) -> str:
    """Claim 5."""
    columns = (
        "tokens | h | runs | syncs of 150 | mean KL ratio, rule | period | rule over period | largest, rule | "
        "in the band | lead, steps"
    )
    return markdown(columns, [_frontier(line) for line in lines])


def movement(lines: Lines) -> str:
    """What a rule certifies."""
    columns = "h | certified rms lag, nats a token | ESS_h of healthy logs"
    return markdown(columns, [_movement(line) for line in lines])


def tiny(lines: Lines) -> str:
    """Testbed C."""
    columns = "arm | runs | mean KL ratio | largest | prefix KL ratio | failed | return at the end | seen | syncs"
    return markdown(columns, [_tiny(line) for line in lines])
