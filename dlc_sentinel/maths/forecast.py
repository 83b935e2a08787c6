"""Where lag is heading: steps to ESS < 1/2, loop gain between windows, growth exponent of the second moment.

A window is the time between two resyncs. Axes: P points (one per step, or per age), C courses, K steps ahead. Limits of
loop gain and growth exponent come from least squares with Student's t for the few points there are.

The forecast is the time at which a noisy series first passes a level. With M = -log ESS, the variance of a block's lag
where log weights are normal, and age scaled to 1 now, a course is
    log M(age) = c + p u(age) + s e,    u = log age  (power law: p = 1 diffusion, 2 drift)
                                     or u = age - 1  (exponential: lag that feeds itself)
where p is the growth exponent now under both laws and e standard normal, independent from step to step. Courses form a
grid over law, p (its prior log-normal, with a share for p = 0) and s (prior log-normal); each has as its weight prior
times likelihood, points counting by their age (the first ones say least of what comes next), c at its weighted mean.
A course stays under the goal g for k steps with probability prod_j Phi((g - c - p u_j) / s). Beside the courses of the
past, growth may turn now: to an exponential of FASTER times the exponents of the prior, or to a power law of SLOWER
times those, each with the weight TURNS against 1 for the past. Quantiles of the mixture are the forecast, no further
ahead than REACH times the present age. Priors are set by real tiny runs (benchmarks/detection) and simulated curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import F64

__all__ = [
    "Forecast", "GrowthExponent", "LoopGain", "forecast_steps", "growth_exponent", "is_feedback", "loop_gain",
    "t_quantile",
]  # fmt: skip

MIN_POINTS: Final = 3
MIN_SPAN: Final = 2.0
"""Ages that a window must span, in versions: less is no course."""
REACH: Final = 4.0
EXPONENT: Final = (2.0, 0.6)
"""Median of the growth exponent before any data, and the standard deviation of its logarithm."""
FLAT: Final = 0.1
"""Prior probability that lag does not grow."""
NOISE: Final = (0.3, 0.7)
"""The same of the noise of log M: tiny real runs scatter by 0.2 to 0.6, large batches by less."""
TURNS: Final = 0.15
FASTER: Final = 2.0
SLOWER: Final = 0.5
_NUM_EXPONENTS, _NUM_NOISES, _NUM_AHEAD = 25, 5, 40
_NORMAL: Final = NormalDist()
_Z: Final = np.linspace(-8.0, 8.0, 1601)
_LOG_PHI: Final = np.log([_NORMAL.cdf(z) for z in _Z.tolist()])


@dataclass(frozen=True, slots=True)
class Forecast:
    """Steps from now until the ESS falls below its threshold; 0 = below, inf = out of reach, nan = no basis."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class LoopGain:
    """Lag per unit age of one window over that of the window before; `low` its lower limit. nan = no data."""

    value: float
    low: float


@dataclass(frozen=True, slots=True)
class GrowthExponent:
    """Slope of log second moment of lag against log age; `low` its lower limit. 1 diffusion, 2 drift, more feedback."""

    value: float
    low: float


def forecast_steps(
    age_P: F64, ess_P: F64, *, age_per_step: float = 1.0, threshold: float = 0.5, level: float = 0.90
) -> Forecast:
    """Steps until the ESS is first seen below `threshold`, with a two-sided interval at `level`, from this window.

    age_P [P] age in versions, ESS [P] in (0, 1], in the order of the steps; points with a nan, age <= 0, ESS <= 0 or
    ESS >= 1 are left out. age_per_step: how much age one more step adds. nan under MIN_POINTS points or MIN_SPAN ages;
    0 throughout where the last point is below. `mid` inf: as likely as not there is no crossing within reach, and
    `low` says how far it is at least; `high` inf: none cannot be excluded. Source: the module's docstring.
    """
    _same_length("forecast_steps", age_P, ess_P)
    used_P = np.isfinite(age_P) & (age_P > 0.0) & (ess_P > 0.0) & (ess_P < 1.0)
    age_U, y_U = age_P[used_P], np.log(-np.log(ess_P[used_P]))
    if len(age_U) < MIN_POINTS or np.ptp(age_U) < MIN_SPAN or not age_per_step > 0.0:
        return Forecast(math.nan, math.nan, math.nan)
    goal, now = math.log(-math.log(threshold)), float(age_U.max())
    if y_U[-1] > goal:
        return Forecast(0.0, 0.0, 0.0)
    step_K = _steps_ahead(max(int(REACH * now / age_per_step), MIN_POINTS))
    crossed_K = _crossed_by(age_U / now, y_U - goal, step_K, age_per_step / now)
    tail = (1.0 - level) / 2.0
    low, mid, high = (int(np.searchsorted(crossed_K, p)) for p in (tail, 0.5, 1.0 - tail))
    reach_K = np.append(step_K, math.inf)
    return Forecast(float(reach_K[low]), float(reach_K[mid]), float(reach_K[high]))


def loop_gain(age_before_P: F64, rms_before_P: F64, age_P: F64, rms_P: F64, *, level: float = 0.95) -> LoopGain:
    """Lag rms per unit age of this window over that of the window before, with its one-sided lower limit at `level`.

    Each window gives points (age > 0, lag rms in nats > 0); others are left out. Per window the geometric mean of
    rms/age; the limit is Welch's on the logarithm. `low` is nan where a window has fewer than two points.
    """
    before_U, now_U = _log_rates(age_before_P, rms_before_P), _log_rates(age_P, rms_P)
    if not len(before_U) or not len(now_U):
        return LoopGain(math.nan, math.nan)
    log_gain = float(now_U.mean() - before_U.mean())
    if len(before_U) < 2 or len(now_U) < 2:
        return LoopGain(math.exp(log_gain), math.nan)
    parts = [(float(x_U.var(ddof=1)) / len(x_U), len(x_U) - 1) for x_U in (before_U, now_U)]
    variance = sum(part for part, _ in parts)
    if variance == 0.0:
        return LoopGain(math.exp(log_gain), math.exp(log_gain))
    dof = variance**2 / sum(part**2 / free for part, free in parts)
    return LoopGain(math.exp(log_gain), math.exp(log_gain - t_quantile(level, dof) * math.sqrt(variance)))


def is_feedback(gains: Sequence[LoopGain], *, windows: int = 3) -> bool:
    """True where the lower limit of the loop gain was above 1 in each of the last `windows` windows."""
    return len(gains) >= windows and all(gain.low > 1.0 for gain in gains[-windows:])


def growth_exponent(age_P: F64, second_moment_P: F64, *, level: float = 0.95) -> GrowthExponent:
    """Log-log slope of the lag second moment (nats^2) against age, with its one-sided lower limit at `level`.

    Points with age <= 0 or moment <= 0 or nan are left out. nan under two distinct ages; `low` nan under three points.
    """
    _same_length("growth_exponent", age_P, second_moment_P)
    used_P = (age_P > 0.0) & (second_moment_P > 0.0) & np.isfinite(age_P) & np.isfinite(second_moment_P)
    x_U, y_U = np.log(age_P[used_P]), np.log(second_moment_P[used_P])
    if len(x_U) < 2 or not np.ptp(x_U) > 0.0:
        return GrowthExponent(math.nan, math.nan)
    x_U = x_U - x_U.mean()
    spread = float(np.dot(x_U, x_U))
    slope = float(np.dot(x_U, y_U)) / spread
    if len(x_U) < 3:
        return GrowthExponent(slope, math.nan)
    residual_U = y_U - y_U.mean() - slope * x_U
    error = math.sqrt(float(np.dot(residual_U, residual_U)) / (len(x_U) - 2) / spread)
    return GrowthExponent(slope, slope - t_quantile(level, len(x_U) - 2) * error)


def t_quantile(p: float, dof: float) -> float:
    """Quantile p of Student's t with `dof` >= 1 degrees of freedom, to about 1 %; exact at 1 and 2.

    Source: Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5; between 1 and 3 linear in 1/dof.
    """
    if dof < 3.0:
        ends = {1: math.tan(math.pi * (p - 0.5)), 2: (2.0 * p - 1.0) * math.sqrt(2.0 / (4.0 * p * (1.0 - p)))}
        low = 1 if dof < 2.0 else 2
        other = ends[2] if low == 1 else t_quantile(p, 3.0)
        share = (1.0 / low - 1.0 / max(dof, 1.0)) / (1.0 / low - 1.0 / (low + 1))
        return ends[low] + share * (other - ends[low])
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160.0,
    )
    return z + sum(term / dof ** (order + 1) for order, term in enumerate(terms))


def _steps_ahead(last: int) -> F64:
    """[K] every step up to 32, then ever fewer, up to `last`."""
    near_K = np.arange(1.0, min(last, 32) + 1.0)
    return np.unique(np.append(near_K, np.round(np.geomspace(1.0, last, _NUM_AHEAD))))


def _crossed_by(age_U: F64, y_U: F64, step_K: F64, age_per_step: float) -> F64:
    """[K] probability that log M has passed 0 by then; ages in units of the present one, y = log M - goal."""
    ahead_K = age_per_step * step_K
    median, spread = EXPONENT
    z_E = np.linspace(-2.4, 2.4, _NUM_EXPONENTS)
    prior_E, exponent_E = _density(z_E), median * np.exp(spread * z_E)
    noise_S = NOISE[0] * np.exp(NOISE[1] * np.linspace(-1.6, 1.6, _NUM_NOISES))
    p_C, flat_C = np.append(0.0, exponent_E), np.append(FLAT, (1.0 - FLAT) * prior_E)
    prior_CS = np.log(np.outer(flat_C, _density(np.linspace(-1.6, 1.6, _NUM_NOISES))))
    laws = ((np.log(age_U), np.log1p(ahead_K)), (age_U - 1.0, ahead_K))
    fits = [_fit(u_U, y_U, age_U, p_C, noise_S) for u_U, _ in laws]
    log_LCS = np.stack([log_CS + prior_CS for _, log_CS in fits])
    weight_LCS = np.exp(log_LCS - log_LCS.max())
    weight_LCS /= weight_LCS.sum()
    crossed_K = np.zeros(len(step_K))
    for (c_C, _), (_, u_K), weight_CS in zip(fits, laws, weight_LCS, strict=True):
        crossed_CSK = _first_passage(c_C[:, None] + np.outer(p_C, u_K), noise_S, step_K)
        crossed_K += np.einsum("cs,csk->k", weight_CS, crossed_CSK)
    now = sum(float(weight_CS.sum(1) @ c_C) for (c_C, _), weight_CS in zip(fits, weight_LCS, strict=True))
    for gain, u_K in ((FASTER, ahead_K), (SLOWER, np.log1p(ahead_K))):
        turned_ESK = _first_passage(now + gain * np.outer(exponent_E, u_K), noise_S, step_K)
        crossed_K += TURNS * np.einsum("e,s,esk->k", prior_E, weight_LCS.sum((0, 1)), turned_ESK)
    out_K: F64 = crossed_K / (1.0 + 2.0 * TURNS)
    return out_K


def _fit(u_U: F64, y_U: F64, weight_U: F64, p_C: F64, noise_S: F64) -> tuple[F64, F64]:
    """Level [C] now of the courses y = c + p u, and their log likelihood [C,S]; points count by their weight."""
    rest_CU = y_U - np.outer(p_C, u_U)
    num = float(weight_U.sum())
    c_C: F64 = rest_CU @ weight_U / num
    lost_C = (rest_CU - c_C[:, None]) ** 2 @ weight_U
    log_CS: F64 = -num * np.log(noise_S) - lost_C[:, None] / (2.0 * noise_S**2)
    return c_C, log_CS


def _first_passage(mean_CK: F64, noise_S: F64, step_K: F64) -> F64:
    """[C,S,K] probability that a series with these means and normal noise has been above 0 by step k."""
    z_CSK = -mean_CK[:, None, :] / noise_S[None, :, None]
    log_stay_CSK = np.interp(z_CSK, _Z, _LOG_PHI) * np.diff(step_K, prepend=0.0)
    out_CSK: F64 = -np.expm1(np.cumsum(log_stay_CSK, axis=-1))
    return out_CSK


def _density(z_N: F64) -> F64:
    """[N] weights of the standard normal on an even grid; sum 1."""
    weight_N: F64 = np.exp(-0.5 * z_N**2)
    weight_N /= weight_N.sum()
    return weight_N


def _log_rates(age_P: F64, rms_P: F64) -> F64:
    _same_length("loop_gain", age_P, rms_P)
    used_P = (age_P > 0.0) & (rms_P > 0.0) & np.isfinite(age_P) & np.isfinite(rms_P)
    out_U: F64 = np.log(rms_P[used_P] / age_P[used_P])
    return out_U


def _same_length(where: str, age_P: F64, other_P: F64) -> None:
    if len(age_P) != len(other_P):
        raise ShapeError(f"{where}: {len(age_P)} ages for {len(other_P)} values; give one value per age")
