"""The definitions of the package's docstring, applied to rows: failure, crossing, band, intervals.

A series has a value per evaluation; evaluation i is at step i * row["every"]. nan = not defined there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.experiments.store import Row, array
from dlc_sentinel.records import F64

BAND = 2.0
WARM_UP_SHARE = 0.1
LASTS = {1: 5, 10: 2}
"""Steps between evaluations -> evaluations in a row that make a failure."""
DRAWS, SEED = 4000, 11


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval over runs; nan without runs."""

    mean: float
    low: float
    high: float
    num: int


def interval(values: Sequence[float] | F64) -> Interval:
    """Of the mean of finite values, one a run."""
    known = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    if not len(known):
        return Interval(math.nan, math.nan, math.nan, 0)
    rng = np.random.default_rng(SEED)
    means = known[rng.integers(0, len(known), (DRAWS, len(known)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(known.mean()), float(low), float(high), len(known))


def warm_up(row: Row) -> int:
    """First judged evaluation."""
    first: int = math.ceil(WARM_UP_SHARE * row["num_steps"] / row["every"])
    return first


def judged(row: Row, key: str = "ratio") -> F64:
    """A series without its warm-up."""
    return array(row[key])[warm_up(row) :]


def failure(row: Row) -> int | None:
    """Step from which the full KL ratio stays above the band long enough; None = never."""
    lasts = LASTS[row["every"]]
    above = judged(row) > BAND
    for at in range(len(above) - lasts + 1):
        if above[at : at + lasts].all():
            return int((at + warm_up(row)) * row["every"])
    return None


def failure_for_good(row: Row) -> int | None:
    """Step from which the full KL ratio stays above the band to the end; None = never."""
    above = judged(row) > BAND
    if not above[-1]:
        return None
    inside = np.flatnonzero(~above)
    first = int(inside[-1]) + 1 if len(inside) else 0
    return int((first + warm_up(row)) * row["every"])


def crossing(row: Row, horizon: str) -> int | None:
    """First step at which ESS of this rung is below one half; None = never."""
    below = np.flatnonzero(array(row["ess"][horizon]) < 0.5)
    # the ESS of C is the batch's, one a step; of A, B, D the population's, one a step too
    return int(below[0]) if len(below) else None


def mean_course(rows: Sequence[Row], key: str = "ratio") -> F64:
    """Mean over seeds of a series, without the warm-up."""
    out: F64 = np.mean([judged(row, key) for row in rows], axis=0)
    return out


def mean_ratio(row: Row, key: str = "ratio") -> float:
    """Mean of a run's KL ratio over judged steps."""
    return float(np.nanmean(judged(row, key)))


def end_of(row: Row, key: str) -> float:
    """Mean of a series over the last 10 % of its evaluations."""
    values = array(row[key])
    return float(np.nanmean(values[-max(len(values) // 10, 1) :]))


def quarters(row: Row, key: str) -> tuple[float, float]:
    """Means of a per-step series over the first and the last quarter of the judged steps."""
    values = array(row[key])[math.ceil(WARM_UP_SHARE * row["num_steps"]) :]
    size = len(values) // 4
    return float(values[:size].mean()), float(values[-size:].mean())
