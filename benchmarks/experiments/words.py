"""Sentences of the page that depend on what was found: the claim table and the paragraph on the default horizon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.experiments.claims import FACTOR
from benchmarks.experiments.tables import interval, number, quartiles
from dlc_sentinel.config import Ess
from dlc_sentinel.maths.ess import rung_name
from dlc_sentinel.records import Json

Found = Mapping[str, Json]
BF16_FLOOR = 0.045
"""Rms discrepancy of a healthy bf16 engine, nats: dlc_sentinel.config.Floor."""


def summary(found: Found) -> list[tuple[str, str, str]]:
    """(claim, verdict, one line) of each claim."""
    constant, gaps, inside, trap, frontier = (
        found[key] for key in ("constant", "crossing", "band", "trap", "frontier")
    )
    overall, num_arms = gaps["overall"], len(trap["table"])
    unsynced = sum(line["syncs"] == 0 and line["arm"] in UNSYNCED for line in trap["table"]) if num_arms else 0
    return [
        (
            "1. Discrepancy is roughly constant, lag is not",
            _verdict(constant["holds"], in_part=_all_even(constant), is_known=bool(constant["table"])),
            _constant(constant),
        ),
        (
            "2. Importance weighting leaves the band where token ESS crosses 1/2",
            _verdict(gaps["holds"]),
            f"failure minus crossing, IS and TIS: quartiles {quartiles(overall['gap_1'])} steps; of {overall['runs']} "
            f"runs {overall['failed']} failed, {overall['failed_uncrossed']} of them without a crossing, and "
            f"{overall['crossed_unfailed']} crossed without failing",
        ),
        (
            "3. DLC stays in the band, mean over seeds",
            _verdict(inside["holds"], in_part=inside["within"] > 0),
            f"at every judged step in {inside['within']} of {len(inside['worlds'])} worlds, without resync in "
            f"{inside['stale_within']}; " + ", ".join(_range(inside["worlds"], "mean", "mean KL ratio")),
        ),
        (
            "4. The invisible collapse; resync prevents it",
            _verdict(trap["holds"], in_part=bool(trap["hidden"]) and trap["saved"]),
            f"prefix ratio < 2 < full ratio with the return lost: {len(trap['hidden'])} of {unsynced} unsynced arms "
            f"({' / '.join(trap['hidden'])}); the default rule {'keeps' if trap['saved'] else 'loses'} the return",
        ),
        (
            "5. Rules on ESS_h lie below fixed periods",
            _verdict(2 * frontier["beats"] > len(frontier["table"])),
            f"{frontier['beats']} of {len(frontier['table'])} pairs better, {frontier['loses']} worse, the rest not "
            f"told apart",
        ),
    ]  # fmt: skip


RESYNCED = ("resync alone", "clip + resync", "centring + resync", "centring + IS + resync", "DLC")
STALE = ("uncorrected", "clip alone", "centring alone", "DLC, no resync")
UNSYNCED = ("uncorrected", "IS", "TIS", "PPO", "DLC, no resync")


def _verdict(holds: bool, *, in_part: bool = False, is_known: bool = True) -> str:
    if not is_known:
        return "not run"
    return "yes" if holds else "in part" if in_part else "**no**"


def _all_even(found: Found) -> bool:
    """The discrepancy's half of claim 1."""
    return all(line["even"] for line in found["table"])


def _constant(found: Found) -> str:
    parts = [
        f"{line['arm']}: discrepancy x {number(line['discrepancy_factor'][0])}"
        + ("" if line["lag_factor"][0] is None else f", lag x {number(line['lag_factor'][0])}")
        for line in found["table"]
    ]
    return "last quarter over first: " + "; ".join(parts) if parts else "no run yet"


def constant(found: Found) -> str:
    """What becomes of the discrepancy where the engine's weights do change."""
    of = {line["arm"]: line for line in found["table"]}
    if "synced" not in of:
        return ""
    factor = of["synced"]["discrepancy_factor"][0]
    way = "stays" if 1 / FACTOR <= factor <= FACTOR else "falls" if factor < 1 else "grows"
    why = "; a policy that is sure of its tokens leaves rounding little to change" if way == "falls" else ""
    return f"\nWhere the weights change, the discrepancy {way} (x {number(factor)}){why}.\n"


def crossing(found: Found) -> str:
    """What the distribution of the differences says."""
    overall, (low, high) = found["overall"], found["quartile_shares"]
    if low is None:
        return "\nNo run failed and crossed.\n"
    early = overall["gap_1"][1]
    side = "after" if early > 0 else "before"
    long, short = found["long"], found["short"]
    return (
        f"\nOver all {len(overall['gaps'])} IS and TIS runs that did both, the failure comes {abs(early):.0f} steps "
        f"(median) {side} token ESS crosses 1/2; the middle half lies from {low:+.0%} to {high:+.0%} of a run. "
        f"Of 64 tokens and more ({len(long['gaps'])} runs): quartiles {quartiles(long['gap_1'])} steps, "
        f"{long['failed_uncrossed']} failed and never crossed; shorter ({len(short['gaps'])} runs): "
        f"{quartiles(short['gap_1'])} steps, {short['failed_uncrossed']} never crossed. "
        f"ESS_8 leads by {quartiles(overall['gap_8'])} steps, ESS_32 by {quartiles(overall['gap_32'])} (quartiles; "
        f"responses longer than that only), the whole response by {quartiles(overall['gap_inf'])}.\n"
    )


def band(found: Found) -> str:
    """Which part of DLC carries it, group by group."""
    sentences = []
    for group, lines in found["parts"].items():
        of = {line["arm"]: line for line in lines}
        synced = [line for name, line in of.items() if name in RESYNCED]
        stale = [line for name, line in of.items() if name in STALE]
        if not synced or not stale:
            continue
        sentences.append(
            f"* {group}: with resync {' and '.join(_range(synced, 'mean', 'mean ratios'))}, without "
            f"{' and '.join(_range(stale, 'mean', ''))}. Centring changes DLC's mean ratio by a factor "
            f"{_factor(of, 'DLC', 'clip + resync')}, the clip by {_factor(of, 'DLC', 'centring + IS + resync')}, both "
            f"together by {_factor(of, 'DLC', 'resync alone')}.\n"
        )
    return "\nWhat carries it:\n\n" + "".join(sentences) if sentences else ""


def _range(lines: Sequence[Found], key: str, what: str) -> list[str]:
    means = [line[key][0] for line in lines if line[key][0] is not None]
    return [f"{what} {number(min(means))} to {number(max(means))}".strip()] if means else []


def _factor(of: Mapping[str, Found], arm: str, other: str) -> str:
    if arm not in of or other not in of:
        return "-"
    return number(of[arm]["mean"][0] / of[other]["mean"][0])


def horizon(found: Found) -> str:
    """The default action horizon: what the data favour, against the present default."""
    present, favoured = Ess().horizon, found["favoured"]
    lines = found["table"]
    if not lines:
        return "\nNo run yet.\n"
    floor = math.log(2.0) / BF16_FLOOR**2
    best = "no rule kept DLC in the band everywhere" if favoured is None else (
        f"the smallest h that kept DLC in the band at every judged step of every world is **{favoured}**"
    )  # fmt: skip
    head = (
        f"\n**The default action horizon.** By the criterion set before the runs, {best}; the present default is "
        f"{present}. {_beside(lines)}\n\n"
    )
    reason = (
        f"In design terms: a rule must certify less movement than does harm, and more than health shows. ESS_1 >= 1/2 "
        f"allows {number(_rms(found, '1'))} nats rms a token, ESS_8 {number(_rms(found, '8'))}, ESS_{present} "
        f"{number(_rms(found, str(present)))}, ESS_512 {number(_rms(found, '512'), 3)}. A healthy bf16 engine alone is "
        f"{BF16_FLOOR} nats off, so lag of that size cannot be told from noise: ESS_h of such a lag falls below 1/2 at "
        f"h = {floor:.0f}, and by the table healthy long runs break a rule of h = 512.\n"
    )
    return head + reason + _change(found, present)


def _change(found: Found, present: int) -> str:
    """What the favoured horizon costs and buys against the present default; nothing where they are the same."""
    favoured, movement = found["favoured"], {line["horizon"]: line for line in found["movement"]}
    if favoured is None or favoured == str(present) or favoured not in movement:
        return ""
    more = []
    for length in sorted({line["length"] for line in found["table"]}):
        of = {line["horizon"]: line for line in found["table"] if line["length"] == length}
        if favoured in of and str(present) in of:
            more.append(f"{of[favoured]['syncs'][0] / of[str(present)]['syncs'][0] - 1.0:+.0%} at T = {length}")
    low, high = movement[favoured]["healthy"]
    return (
        f"\nFrom {present} to {favoured}, syncs change by {' and '.join(more)}; a quiet rule allows "
        f"{number(_rms(found, favoured), 3)} instead of {number(_rms(found, str(present)), 3)} nats rms a "
        f"token; healthy logs stand at {number(low)} to {number(high)}, where 0.6 closes a finding.\n"
        f"\nThe default stays {present} all the same: what it misses by is small and late, a RESYNC costs a real job "
        f"its queue, and the leads and false alarms of the detection bench (detection.md) were measured at {present}. "
        f"`ess.horizon = {favoured}` is the careful setting.\n"
    )


def _beside(lines: list[Found]) -> str:
    """Syncs and KL ratio of neighbouring rules at each length."""
    wanted = ("8", "32", "64", "128")
    lengths = sorted({line["length"] for line in lines})
    sentences = []
    for length in lengths:
        of = {line["horizon"]: line for line in lines if line["length"] == length}
        parts = [
            f"h = {h}: {number(of[h]['syncs'][0], 1)} syncs, ratio {interval(of[h]['rule'])}, largest "
            f"{number(of[h]['largest'])}"
            for h in wanted
            if h in of
        ]
        sentences.append(f"At T = {length}, " + "; ".join(parts) + ".")
    return " ".join(sentences)


def _rms(found: Found, rung: str) -> float:
    known = {line["horizon"]: float(line["rms"]) for line in found["movement"]}
    return known.get(rung, math.sqrt(math.log(2.0) / float(rung_name(float(rung)))))
