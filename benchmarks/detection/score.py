"""What the labelled runs add up to: accuracy, confusion, delay, and the severity from which a kind is found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from dlc_sentinel.records import Json

Row = Mapping[str, Json]

NAMES: dict[str, tuple[str, ...]] = {
    "top_p": ("kept_mass",),
    "top_k": ("kept_mass",),
    "level": ("level", "changed"),
    "changed": ("changed", "level"),
    "drift": ("drift", "drift_or_undelivered"),
    "never_delivered_unproven": ("stale_or_drift", "drift_or_undelivered"),
    "never_delivered_measured": ("never_delivered", "stale_or_drift"),
    "future": ("future_version",),
    "calibrated": ("queue", "old_weights"),
    "unusable": ("unusable_tokens",),
}
"""Kind of the grid -> kinds of findings that name it, where they are called otherwise."""
MISSED = ("name", "verdict", "called", "kinds")


def summary(rows: Sequence[Row]) -> dict[str, Json]:
    """All figures of the labelled runs, JSON-ready. Accuracy is over runs at visible severity."""
    visible = [row for row in rows if row["visible"]]
    healthy_called = [row["name"] for row in rows if row["catastrophic"] and row["called"] == "HEALTHY"]
    kinds: dict[str, list[Row]] = {f"{row['verdict']}/{row['kind']}": [] for row in rows}
    for row in rows:
        kinds[f"{row['verdict']}/{row['kind']}"].append(row)
    return {
        "runs": len(rows),
        "visible": len(visible),
        "accuracy": _share(row["right"] for row in visible),
        "verdicts": {verdict: _accuracy(visible, verdict) for verdict in dict.fromkeys(row["verdict"] for row in rows)},
        "kinds": {name: _kind(of) for name, of in kinds.items()},
        "confusion": _confusion(visible),
        "catastrophic": sum(bool(row["catastrophic"]) for row in rows),
        "catastrophic_called_healthy": healthy_called,
        "early_findings": [row["name"] for row in rows if row["early"]],
        "missed": [{key: row[key] for key in MISSED} for row in visible if not row["right"]],
    }  # fmt: skip


def _accuracy(visible: Sequence[Row], verdict: str) -> dict[str, Json]:
    of = [row["right"] for row in visible if row["verdict"] == verdict]
    return {"visible": len(of), "accuracy": _share(of)}


def _kind(rows: Sequence[Row]) -> dict[str, Json]:
    """Of one kind: accuracy where visible, delay in steps, the share found at each severity, the first one found."""
    visible = [row for row in rows if row["visible"]]
    delays = [row["delay"] for row in visible if row["right"] and row["delay"] is not None]
    curve = []
    for severity in sorted({row["severity"] for row in rows}):
        at = [row for row in rows if row["severity"] == severity]
        curve.append([severity, _share(row["delay"] is not None for row in at), len(at)])
    # a larger number is a milder fault where it is a temperature, a kept mass or a number of entries
    milder_first = curve[::-1] if rows[0]["verdict"] == "TRANSFORM" else curve
    return {
        "visible": len(visible),
        "accuracy": _share(row["right"] for row in visible),
        "kind_named": _share(bool(_named(row)) for row in visible),
        "median_delay_steps": median(delays) if delays else None,
        "longest_delay_steps": max(delays, default=None),
        "curve": curve,
        "first_found": next((severity for severity, share, _ in milder_first if share >= 0.5), None),
    }


def _named(row: Row) -> bool:
    wanted = NAMES.get(row["kind"], (row["kind"],))
    return any(name.split("/")[1] in wanted for name in row["kinds"])


def _confusion(visible: Sequence[Row]) -> dict[str, dict[str, int]]:
    """True verdict -> called -> runs."""
    out: dict[str, dict[str, int]] = {}
    for row in visible:
        called = out.setdefault(row["verdict"], {})
        name = row["verdict"] if row["right"] else row["called"]
        called[name] = called.get(name, 0) + 1
    return out


def _share(values: Iterable[bool]) -> float | None:
    seen = list(values)
    return sum(seen) / len(seen) if seen else None
