"""The lag's ESS without the trainer's logprob at the generator's weights, from stale rows and a pool of lag-0 rows.

Only one number is taken from the lag-0 rows: v, the second moment of the discrepancy per token, as the stale rows' mix
of cells has it. The discrepancy of a sampled token is a martingale difference to second order, so a block of L tokens
holds L v of it. With V the second moment of a token's total and b the block sums:

    W = ESS of s b,  s^2 = max(0, 1 - v L / Var(b));   M = exp(-L max(0, V - v))
    log ESS = s^2 log W + (1 - s^2) log M;   rms^2 = max(0, V - v);   KL = mean k3(total) - v / 2

W keeps the tails of the stale rows, M is precise where the discrepancy is large; s^2 is the lag's share of a block.
Nats throughout.
Axes: C cells, S rows, B blocks, G groups, R calibration rows, D bootstrap draws.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dlc_sentinel.maths.arrays import F64
from dlc_sentinel.maths.cells import NUM_LOGP, NUM_POSITION, DiscrepancyCells, drifted, moment_ratio
from dlc_sentinel.maths.ess import RUNGS, rung_name
from dlc_sentinel.maths.resample import resampled_ess, resampled_noise, scale_of, x_ess
from dlc_sentinel.maths.stale import StaleRows

__all__ = ["Calibrated", "CalibrationPool", "calibrate"]

COVARIANCE: Final = 0.3
"""Largest correlation seen between a token's lag and its own discrepancy; the interval is widened by it."""
MIN_ROWS: Final = 3
MIN_ROWS_NOISY: Final = 13
"""Lag-0 rows needed where the discrepancy is larger than the lag."""
RESOLVED_KAPPA: Final = 0.5
"""rms and KL are numbers only below this."""
MIN_COVERAGE: Final = 0.9
COVERED_TOKENS: Final = 30
NEGATIVE_Z: Final = 3.0

POOL_ROWS: Final = 192
POOL_STEPS: Final = 64

_NAN: Final = math.nan
_NO_ESS: Final = dict.fromkeys(RUNGS, _NAN)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What the stale rows of a window say of their lag; numbers are nan where there is nothing to say."""

    ess: dict[str, float] = field(default_factory=lambda: dict(_NO_ESS))
    """Lag ESS (0..1) by rung."""
    action_ess: float = _NAN
    """Lag ESS (0..1) at the action horizon."""
    interval: tuple[float, float] = (_NAN, _NAN)
    """90 % interval of action_ess."""
    rms: float = _NAN
    """rms of lag, nats; nan where kappa >= 0.5."""
    kl: float = _NAN
    """KL(generator || now), nats per token; nan where kappa >= 0.5."""
    noise_rms: float = _NAN
    """rms of the discrepancy in the stale rows' mix of cells, nats."""
    kappa: float = _NAN
    """rms of discrepancy over rms of lag; inf where no lag is left."""
    coverage: float = _NAN
    """Share (0..1) of stale tokens of a kind that the lag-0 rows hold enough of."""
    reason: str = "there are no stale rows"
    """Why the numbers must not be acted on; empty when they may."""

    @property
    def valid(self) -> bool:
        """True when the split may be called calibrated."""
        return not self.reason


def calibrate(
    stale: StaleRows, cells: DiscrepancyCells, *, level: float = 0.90, draws: int = 200, seed: int = 0
) -> Calibrated:
    """The lag of `stale`, with the noise of `cells` taken out: module docstring. Depends on the data and seed only."""
    if not stale.num_tokens:
        return Calibrated()
    if not cells.num_rows:
        return Calibrated(reason="no row without lag has been seen since the engine's law last changed")
    mix_C = mix_of(stale)
    noise, total = noise_of(stale, cells), stale.second_moment
    lag = max(total - noise, 0.0)
    kappa = math.sqrt(noise / lag) if lag > 0.0 else (math.inf if noise > 0.0 else 0.0)
    action = rung_name(stale.action_horizon)
    resolved = kappa < RESOLVED_KAPPA
    coverage = _coverage(cells.count_C, mix_C)
    return Calibrated(
        ess={name: ess_without(stale, name, noise) for name in RUNGS},
        action_ess=ess_without(stale, action, noise),
        interval=_interval(stale, cells, noise, level=level, draws=draws, seed=seed),
        rms=math.sqrt(lag) if resolved else _NAN,
        kl=stale.k3 - noise / 2.0 if resolved else _NAN,
        noise_rms=math.sqrt(noise),
        kappa=kappa,
        coverage=coverage,
        reason=_reason(stale, cells, kappa, coverage),
    )


def mix_of(stale: StaleRows) -> F64:
    """Share (0..1) of the stale tokens in each cell, [C]."""
    count_C, _, _ = stale.cell_sums()
    return count_C / stale.num_tokens


def noise_of(stale: StaleRows, cells: DiscrepancyCells) -> float:
    """Second moment of the discrepancy in the stale rows' mix of cells, nats^2 per token."""
    return float((mix_of(stale) * cells.second_moments()).sum())


def ess_without(stale: StaleRows, rung: str, noise: float) -> float:
    """Estimator X (0..1) at a rung for a given second moment of the discrepancy, nats^2 per token."""
    sketch, length = stale.sketch(rung), stale.block_length(rung)
    scale = scale_of(sketch.variance, length, noise)
    return x_ess(sketch.ess(scale), scale, length, stale.second_moment, noise)


def _interval(
    stale: StaleRows, cells: DiscrepancyCells, noise: float, *, level: float, draws: int, seed: int
) -> tuple[float, float]:
    """Percentile bootstrap at the action horizon, then widened for what a token's lag and discrepancy share."""
    rng = np.random.default_rng(seed)
    kept = stale.kept()
    noise_D = resampled_noise(cells, mix_of(stale), draws, rng)
    ess_D = resampled_ess(kept, stale.action_horizon, noise_D, rng)
    low, high = np.quantile(ess_D[1:], [(1.0 - level) / 2.0, (1.0 + level) / 2.0]) / ess_D[0]
    # the same token's lag and discrepancy may be correlated by up to COVARIANCE either way, which no resampling shows
    shift = 2.0 * COVARIANCE * math.sqrt(noise * max(stale.second_moment - noise, 0.0))
    rung = rung_name(stale.action_horizon)
    lower = ess_without(stale, rung, max(noise - shift, 0.0))
    upper = ess_without(stale, rung, noise + shift)
    return float(low) * lower, min(float(high) * upper, 1.0)


def _reason(stale: StaleRows, cells: DiscrepancyCells, kappa: float, coverage: float) -> str:
    need = MIN_ROWS_NOISY if kappa > 1.0 else MIN_ROWS
    if cells.num_rows < need:
        return f"{cells.num_rows} rows without lag, {need} are needed at {kappa:.2g} times as much discrepancy as lag"
    if coverage < MIN_COVERAGE:
        return f"the rows without lag are of another kind: they cover {coverage:.0%} of the stale tokens"
    if negative_variance(stale, cells):
        return "the rows without lag are of another engine: the total varies less than their discrepancy alone"
    return ""


def negative_variance(stale: StaleRows, cells: DiscrepancyCells) -> bool:
    """True when the total's second moment lies below the discrepancy's, beyond chance, over all tokens or in a cell.

    Sees a law that is too large only.
    """
    count_C, sum2_C, sum4_C = stale.cell_sums()
    count_1, moment_1 = np.append(count_C, count_C.sum()), np.append(sum2_C, sum2_C.sum())
    mix_C = count_C / count_C.sum()
    law_C = cells.second_moments()
    law_1 = np.append(law_C, (law_C * mix_C).sum())
    calibrated_1 = np.append(cells.count_C, cells.num_tokens)
    kurtosis = max(cells.kurtosis(), 3.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        moment_1 = moment_1 / count_1
        fourth_1 = np.append(sum4_C, sum4_C.sum()) / count_1
        error_1 = np.sqrt((kurtosis - 1.0) * law_1**2 / calibrated_1 + (fourth_1 - moment_1**2) / count_1)
        z_1 = (law_1 - moment_1) / error_1
    enough_1 = (count_1 >= COVERED_TOKENS) & (calibrated_1 >= COVERED_TOKENS)
    return bool(np.any(z_1[enough_1] > NEGATIVE_Z))


def _coverage(calibrated_C: F64, mix_C: F64) -> float:
    """Share of stale tokens whose logp bin and whose position bin both hold COVERED_TOKENS calibration tokens."""
    shape = NUM_LOGP, NUM_POSITION
    held = calibrated_C.reshape(shape)
    of_logp = held.sum(1, keepdims=True) >= COVERED_TOKENS
    of_position = held.sum(0, keepdims=True) >= COVERED_TOKENS
    return float(mix_C.reshape(shape)[of_logp & of_position].sum())


class CalibrationPool:
    """The newest steps' lag-0 rows, 192 rows or 64 steps of them, begun anew where the engine's law changes.

    The law before a change is kept: rows generated before it are still of that law, and with the new one the change
    would be read as lag.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, DiscrepancyCells]] = deque()
        self._before: DiscrepancyCells | None = None
        self._before_last = -1
        self.since_version = -1
        """First version known to be of the present law; -1 where no change was seen."""
        self.change_ratio = _NAN
        """Second moment of the rows added last over that of the law before them; nan unless they changed it."""

    def add(self, cells: DiscrepancyCells, version: int) -> bool:
        """Takes a step's lag-0 rows, generated at `version`; True when they are of another law than the pool's."""
        if not cells.num_rows:
            self.change_ratio = _NAN
            return False
        changed = bool(self._steps) and drifted(self.cells(), cells)
        self.change_ratio = moment_ratio(self.cells(), cells) if changed else _NAN
        if changed:
            self._before, self._before_last = self.cells(), self._steps[-1][0]
            self.since_version = version
            self._steps.clear()
        self._steps.append((version, cells))
        num = sum(step.num_rows for _, step in self._steps)
        while len(self._steps) > POOL_STEPS or num - self._steps[0][1].num_rows >= POOL_ROWS:
            num -= self._steps.popleft()[1].num_rows
        return changed

    def cells(self) -> DiscrepancyCells:
        """The present law."""
        pooled = DiscrepancyCells()
        for _, cells in self._steps:
            pooled.merge(cells)
        return pooled

    def law(self, oldest_version: int, newest_version: int) -> DiscrepancyCells | None:
        """The law of rows generated at these versions; None where it changed among them or may have."""
        if oldest_version >= self.since_version:
            return self.cells()
        return self._before if newest_version <= self._before_last else None
