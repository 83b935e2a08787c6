"""The ground floor: statistics of log ratios. numpy only, pure, float64; usable in a notebook.

ratio: split, compress, remap. running: StreamStats. ess: block ladder, EssSums. lag: LagStats, which holds a window's.
bootstrap: GroupSums, ess_interval. kl: KlValues and estimators. tail: pareto_k. forecast: what comes next.
cells, stale, calibrated: DiscrepancyCells, StaleRows, calibrate, where the trainer's logprob at the generator's weights
is missing.
"""

from __future__ import annotations

from dlc_sentinel.maths.arrays import CHUNK_TOKENS, UNKNOWN_AGE, prime_allocator, row_chunks
from dlc_sentinel.maths.bootstrap import GroupSums, ess_interval
from dlc_sentinel.maths.calibrated import Calibrated, CalibrationPool, calibrate
from dlc_sentinel.maths.cells import DiscrepancyCells, drifted, row_positions
from dlc_sentinel.maths.ess import HORIZONS, RUNGS, EssSums, block_sums, half_horizon, pooled_ess, rung_name
from dlc_sentinel.maths.forecast import (
    Forecast,
    GrowthExponent,
    LoopGain,
    forecast_steps,
    growth_exponent,
    is_feedback,
    loop_gain,
)
from dlc_sentinel.maths.kl import KlValues, j3, k1, k3, reliability
from dlc_sentinel.maths.lag import LagStats
from dlc_sentinel.maths.ratio import Split, compress, log_ratio, remap, split
from dlc_sentinel.maths.running import RELATIVE_PRECISION, StreamStats, quantile_abs
from dlc_sentinel.maths.stale import StaleRows
from dlc_sentinel.maths.tail import pareto_k, pareto_k_threshold

__all__ = [
    "CHUNK_TOKENS", "HORIZONS", "RELATIVE_PRECISION", "RUNGS", "UNKNOWN_AGE", "Calibrated", "CalibrationPool",
    "DiscrepancyCells", "EssSums", "Forecast", "GroupSums", "GrowthExponent", "KlValues", "LagStats", "LoopGain",
    "Split", "StaleRows", "StreamStats", "block_sums", "calibrate", "compress", "drifted", "ess_interval",
    "forecast_steps", "growth_exponent", "half_horizon", "is_feedback", "j3", "k1", "k3", "log_ratio", "loop_gain",
    "pareto_k", "pareto_k_threshold", "pooled_ess", "prime_allocator", "quantile_abs", "reliability", "remap",
    "row_chunks", "row_positions", "rung_name", "split",
]  # fmt: skip
