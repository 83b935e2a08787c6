"""Pareto shape k of the upper tail of importance weights, the test whether averages over them can be trusted.

Source: Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", JMLR 2024 (tail size, prior on k,
threshold); Zhang and Stephens, Technometrics 2009 (the fit of the generalised Pareto distribution).
"""

from __future__ import annotations

import math

import numpy as np

from dlc_sentinel.maths.arrays import F64

__all__ = ["pareto_k", "pareto_k_threshold"]

MIN_TAIL = 5
"""Fewer tail weights than this cannot be fitted."""
_TINY = 1e-200
"""A quartile of the excess below this share of its largest value is left to the mean log excess."""
PRIOR_WEIGHT = 10.0
PRIOR_K = 0.5
"""The fitted k is averaged with 0.5 at the weight of ten observations, as in the source."""


def pareto_k(logw_S: F64) -> float:
    """Pareto k-hat of the weights exp(logw), [S] finite log weights; nan when too few for a tail (under 25).

    Where the tail has no spread to fit, or more than a float64 holds, the mean log excess (Hill 1975) stands in for the
    fit, with the same prior: near 0 for equal weights, large for weights hundreds of nats apart.
    """
    num = len(logw_S)
    num_tail = int(min(0.2 * num, 3.0 * math.sqrt(num)))
    if num_tail < MIN_TAIL:
        return math.nan
    top_T = np.partition(logw_S, num - num_tail - 1)[num - num_tail - 1 :]
    top_T.sort()
    cutoff, tail_T = float(top_T[0]), top_T[1:]
    with np.errstate(under="ignore"):
        # exp(t - max) - exp(cutoff - max) without cancellation where all weights are nearly equal
        excess_T = np.exp(tail_T - float(tail_T[-1])) * -np.expm1(cutoff - tail_T)
    if excess_T[_quartile(num_tail)] > _TINY * float(excess_T[-1]) > 0.0:
        return _shrunk(_generalised_pareto_k(excess_T), num_tail)
    return _shrunk(float(np.mean(tail_T - cutoff)), num_tail)


def pareto_k_threshold(num: int) -> float:
    """k-hat below which an average over `num` weights is trustworthy: min(1 - 1/log10(num), 0.7)."""
    return min(1.0 - 1.0 / math.log10(num), 0.7) if num > 10 else 0.0


def _generalised_pareto_k(x_T: F64) -> float:
    """Shape, before the prior on k, of a generalised Pareto distribution for ascending, positive exceedances [T]."""
    num = len(x_T)
    num_grid = 30 + int(math.sqrt(num))
    quartile = float(x_T[_quartile(num)])
    b_M = 1.0 - np.sqrt(num_grid / (np.arange(1, num_grid + 1) - 0.5))
    b_M = b_M / (3.0 * quartile) + 1.0 / float(x_T[-1])
    k_M = np.log1p(-b_M[:, None] * x_T).mean(axis=1)
    loglik_M = num * (np.log(-b_M / k_M) - k_M - 1.0)
    weight_M = np.exp(loglik_M - loglik_M.max())
    weight_M /= weight_M.sum()
    b = float(np.dot(b_M, weight_M))
    return float(np.log1p(-b * x_T).mean())


def _quartile(num: int) -> int:
    return int(num / 4 + 0.5) - 1


def _shrunk(k: float, num: int) -> float:
    return (num * k + PRIOR_WEIGHT * PRIOR_K) / (num + PRIOR_WEIGHT)
