"""Where lag is heading: steps to ESS < 1/2, loop gain between windows, growth exponent of the second moment.

A window is the time between two resyncs. Axes: P points (one per step, or per age). All limits come from least squares
with Student's t for the few points there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import F64

__all__ = [
    "Forecast", "GrowthExponent", "LoopGain", "forecast_steps", "growth_exponent", "is_feedback", "loop_gain",
    "t_quantile",
]  # fmt: skip

_ELLIPSE_POINTS = 64


@dataclass(frozen=True, slots=True)
class Forecast:
    """Steps from now until the ESS falls below its threshold; 0 = below, inf = not on this course, nan = no data."""

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
    age_P: F64, ess_P: F64, *, now_age: float | None = None, threshold: float = 0.5, level: float = 0.90
) -> Forecast:
    """Steps until ESS crosses `threshold`, with a two-sided interval at `level`, from this window's points.

    age_P [P] age in steps, ESS [P] in (0, 1]; points with a nan, age <= 0 or ESS <= 0 are left out; nan under two.
    now_age: where the count starts, default the largest age; one step is one unit of age. Model: -log ESS =
    a age + b age^2 with a, b >= 0 (a diffusion, b drift), least squares; interval: where the two edges of the fit's
    pointwise confidence band cross.
    """
    _same_length("forecast_steps", age_P, ess_P)
    used_P = np.isfinite(age_P) & np.isfinite(ess_P) & (age_P > 0.0) & (ess_P > 0.0)
    age_U, y_U = age_P[used_P], np.maximum(-np.log(ess_P[used_P]), 0.0)
    if len(age_U) < 2 or not np.ptp(age_U) > 0.0:
        return Forecast(math.nan, math.nan, math.nan)
    start = float(age_U.max()) if now_age is None else now_age
    a, b = _fit_curve(age_U, y_U)
    goal = -math.log(threshold)
    mid = _steps(a, b, goal, start)
    ends = [_steps(a + da, b + db, goal, start) for da, db in _ellipse(age_U, y_U, a, b, level)]
    return Forecast(min(mid, *ends), mid, max(mid, *ends))


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


def _fit_curve(age_U: F64, y_U: F64) -> tuple[float, float]:
    """(a, b) of y = a age + b age^2, a and b >= 0, by least squares."""
    design = np.stack((age_U, age_U**2), axis=1)
    if len(age_U) >= 3:
        (a, b), *_ = np.linalg.lstsq(design, y_U, rcond=None)
        if a >= 0.0 and b >= 0.0:
            return float(a), float(b)
    lone = [max(float(np.dot(x_U, y_U) / np.dot(x_U, x_U)), 0.0) for x_U in design.T]
    lost = [float(np.sum((y_U - scale * x_U) ** 2)) for scale, x_U in zip(lone, design.T, strict=True)]
    return (lone[0], 0.0) if lost[0] <= lost[1] else (0.0, lone[1])


def _ellipse(age_U: F64, y_U: F64, a: float, b: float, level: float) -> list[tuple[float, float]]:
    """Offsets of (a, b) on the ellipse whose curves touch the pointwise confidence band of the fit."""
    design = np.stack((age_U, age_U**2), axis=1)
    dof = max(len(age_U) - 2, 1)
    variance = float(np.sum((y_U - design @ np.array([a, b])) ** 2)) / dof
    radius = t_quantile(0.5 + level / 2.0, dof) * math.sqrt(variance)
    upper = np.linalg.qr(design, mode="r")  # covariance of (a, b) = variance x inverse(upper' upper)
    angle = np.linspace(0.0, 2.0 * math.pi, _ELLIPSE_POINTS, endpoint=False)
    circle = radius * np.stack((np.cos(angle), np.sin(angle)))
    da, db = np.linalg.solve(upper, circle).tolist()
    return list(zip(da, db, strict=True))


def _steps(a: float, b: float, goal: float, start: float) -> float:
    """Units of age after `start` at which a age + b age^2 first reaches `goal`; inf if it never does."""
    inside = a * a + 4.0 * b * goal
    slope = a + math.sqrt(inside) if inside >= 0.0 else 0.0
    return max(2.0 * goal / slope - start, 0.0) if slope > 0.0 else math.inf


def _log_rates(age_P: F64, rms_P: F64) -> F64:
    _same_length("loop_gain", age_P, rms_P)
    used_P = (age_P > 0.0) & (rms_P > 0.0) & np.isfinite(age_P) & np.isfinite(rms_P)
    out_U: F64 = np.log(rms_P[used_P] / age_P[used_P])
    return out_U


def _same_length(where: str, age_P: F64, other_P: F64) -> None:
    if len(age_P) != len(other_P):
        raise ShapeError(f"{where}: {len(age_P)} ages for {len(other_P)} values; give one value per age")
