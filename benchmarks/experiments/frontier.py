"""Figures of claim 5: what a sync rule of horizon h buys, against a fixed period with as many syncs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.experiments.arms import FRONTIER_HORIZONS, rule_name
from benchmarks.experiments.judge import BAND, Interval, crossing, failure, interval, mean_course, mean_ratio
from benchmarks.experiments.store import Row
from dlc_sentinel.maths.ess import rung_name
from dlc_sentinel.records import Json

LONG = 256
HEALTHY_TOKEN_ESS = (0.996, 0.998)
"""Of stable arms in public long-CoT logs (theory notes)."""
DEFAULT = 32.0


def table(rows: Sequence[Row]) -> dict[str, Json]:
    """By length and horizon: syncs, KL ratio of the rule and of its period, and the lead over the failure."""
    lengths = sorted({row["length"] for row in rows})
    lines = [
        _line([row for row in rows if row["length"] == length], length, horizon)
        for length in lengths
        for horizon in FRONTIER_HORIZONS
        if math.isinf(horizon) or horizon < length
    ]
    kept = [line for line in lines if line["runs"]]
    favoured = [h for h in FRONTIER_HORIZONS if _is_within(kept, h)]
    return {
        "table": kept,
        "favoured": rung_name(favoured[0]) if favoured else None,
        "unsynced": [_unsynced([row for row in rows if row["length"] == length], length) for length in lengths],
        "beats": sum(line["log_ratio"].high < 0 for line in kept),
        "loses": sum(line["log_ratio"].low > 0 for line in kept),
        "movement": [_movement(h) for h in FRONTIER_HORIZONS if not math.isinf(h)],
    }


def _is_within(lines: Sequence[dict[str, Json]], horizon: float) -> bool:
    of = [line for line in lines if line["horizon"] == rung_name(horizon)]
    return bool(of) and all(line["within"] for line in of)


def _line(rows: Sequence[Row], length: int, horizon: float) -> dict[str, Json]:
    name = rule_name(horizon)
    arm = "DLC" if horizon == DEFAULT else f"DLC, {name}"
    rule = [row for row in rows if row["arm"] == arm]
    period = {(row["world"], row["seed"]): row for row in rows if row["arm"] == f"DLC, period like {name}"}
    pairs = [(row, period[row["world"], row["seed"]]) for row in rule if (row["world"], row["seed"]) in period]
    worlds = [[row for row in rule if row["world"] == world] for world in dict.fromkeys(row["world"] for row in rule)]
    largest = [float(np.nanmax(mean_course(of))) for of in worlds]
    return {
        "length": length, "horizon": rung_name(horizon), "runs": len(rule),
        "syncs": interval([float(len(row["syncs"])) for row in rule]),
        "rule": interval([mean_ratio(row) for row in rule]),
        "period": interval([mean_ratio(row) for row in period.values()]),
        "log_ratio": interval([math.log(mean_ratio(left) / mean_ratio(right)) for left, right in pairs]),
        "largest": max(largest, default=math.nan), "within": all(value <= BAND for value in largest),
        "lead": lead([row for row in rows if row["arm"] in ("IS", "TIS", "DLC, no resync")], rung_name(horizon)),
    }  # fmt: skip


def lead(rows: Sequence[Row], rung: str) -> Interval:
    """Steps from the crossing of ESS_h to the failure, in corrected runs that are never synced and fail."""
    ends = [(failure(row), crossing(row, rung)) for row in rows]
    return interval([float(fail - cross) for fail, cross in ends if fail is not None and cross is not None])


def _unsynced(rows: Sequence[Row], length: int) -> dict[str, Json]:
    of = [row for row in rows if row["arm"] == "DLC, no resync"]
    return {"length": length, "ratio": interval([mean_ratio(row) for row in of])}


def _movement(horizon: float) -> dict[str, Json]:
    """What ESS_h >= 1/2 certifies: rms lag a token if its sum over a block is normal; and what healthy logs give."""
    low, high = (ess**horizon for ess in HEALTHY_TOKEN_ESS)
    return {"horizon": rung_name(horizon), "rms": math.sqrt(math.log(2.0) / horizon), "healthy": [low, high]}
