"""KL divergences between the generator's and the present policy, from samples of the generator.

x = log(p/q) of a token sampled from q, nats.  KL(q||p): k1 = -x, k3 = expm1(x) - x >= 0.  KL(p||q) at q's prefixes:
j3 = x e^x - expm1(x) >= 0.  Source: Schulman 2020, joschu.net/blog/kl-approx.html; j3 is k3 with p and q swapped.
"gen" = trainer at the generator's weights, "now" = trainer now; gen_now = KL(gen||now), now_gen = KL(now||gen).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from dlc_sentinel.maths.arrays import F64, dot
from dlc_sentinel.maths.tail import pareto_k, pareto_k_threshold

__all__ = ["KlSums", "KlValues", "Reliability", "j3", "k1", "k3", "reliability"]

_LOG_LARGEST = math.log(sys.float_info.max)

Reliability = Literal["ok", "low", "none"]

MIN_SEQUENCES = 256
"""Fewer sampled responses than this make now_gen_full `low`."""
MAX_RELIABLE_NATS = 1.0
"""now_gen_full at or above this is `low`: a self-normalised estimate needs about exp(KL) samples."""


def k1(x_N: F64) -> F64:
    """Unbiased, signed estimate of KL(q||p) per token, nats."""
    return -x_N


def k3(x_N: F64) -> F64:
    """Non-negative estimate of KL(q||p) per token, nats; unbiased where E_q[e^x] = 1. inf above 709 nats."""
    out_N: F64 = np.expm1(x_N) - x_N
    return out_N


def j3(x_N: F64) -> F64:
    """Non-negative estimate of KL(p||q) per token at q's prefixes, nats. inf above 702 nats."""
    e_N = np.expm1(x_N)
    out_N: F64 = x_N * e_N - (e_N - x_N)
    return out_N


@dataclass(slots=True)
class KlSums:
    """Mergeable token sums of lag, k3 and j3; the last two relative to exp(m), m >= 0: 700 nats do not overflow."""

    num_tokens: int = 0
    lag: float = 0.0
    m: float = 0.0
    k3: float = 0.0
    j3: float = 0.0

    @classmethod
    def of(cls, lag_N: F64) -> KlSums:
        """Sums over [N] finite lags of any size."""
        if not len(lag_N):
            return cls()
        m = max(float(np.maximum.reduce(lag_N)), 0.0)
        small = math.exp(-m)
        if m < 1.0:
            k3_N = np.expm1(lag_N) - lag_N
            cross = dot(np.expm1(lag_N), lag_N)
        else:
            e_N = np.where(lag_N > 1.0, np.exp(lag_N - m) - small, np.expm1(np.minimum(lag_N, 1.0)) * small)
            k3_N = e_N - lag_N * small
            cross = dot(e_N, lag_N)
            small = 1.0
        k3_sum = float(np.add.reduce(k3_N)) * small
        return cls(len(lag_N), float(np.add.reduce(lag_N)), m, k3_sum, cross * small - k3_sum)

    def merge(self, other: KlSums) -> Self:
        """Self, which now also holds what `other` holds; `other` is unchanged."""
        m = max(self.m, other.m)
        mine, theirs = math.exp(self.m - m), math.exp(other.m - m)
        self.num_tokens += other.num_tokens
        self.lag += other.lag
        self.k3 = self.k3 * mine + other.k3 * theirs
        self.j3 = self.j3 * mine + other.j3 * theirs
        self.m = m
        return self


@dataclass(frozen=True, slots=True)
class KlValues:
    """KL of one window, nats; nan = no data. prefix: mean per token at the generator's prefixes; full: a trajectory."""

    gen_now_prefix: float
    """KL(gen||now): mean of k3(lag) over tokens."""
    gen_now_full: float
    """KL(gen||now): sum of k3(lag) per trajectory."""
    gen_now_k1: float
    """-sum of lag per trajectory: the same quantity up to O(discrepancy x lag); may be negative."""
    now_gen_prefix: float
    """KL(now||gen) at the generator's prefixes: mean of r lag - r + 1 over tokens."""
    now_gen_full: float
    """KL(now||gen) with prefixes weighted: sum over positions of the self-normalised mean of W_<=t lag_t."""
    blind_spot: float
    """now_gen_full / (now_gen_prefix x mean length); nan unless reliability is ok. 1 = generator prefixes show all."""
    reliability: Reliability
    """Of now_gen_full: ok, low (probably too small), none (no usable estimate)."""
    k_hat: float
    """Pareto shape of the trajectory weights' tail; nan under 25 trajectories."""
    num_censored: int = 0
    """Trajectories cut at the length limit: the full values count what they would have added as zero."""

    @classmethod
    def of(cls, sums: KlSums, now_gen_full: float, logw_S: F64, num_censored: int) -> KlValues:
        """The values from token sums, the weighted sum over positions, and log weights [S] of whole trajectories."""
        num_rows, num_tokens = len(logw_S), sums.num_tokens
        if not num_rows:
            nan = math.nan
            return cls(nan, nan, nan, nan, nan, nan, "none", nan, 0)
        k_hat = pareto_k(logw_S)
        grade = reliability(k_hat, num_rows, now_gen_full)
        now_gen_prefix = _rescaled(sums.j3 / num_tokens, sums.m)
        seen = now_gen_prefix * num_tokens / num_rows
        return cls(
            gen_now_prefix=_rescaled(sums.k3 / num_tokens, sums.m),
            gen_now_full=_rescaled(sums.k3 / num_rows, sums.m),
            gen_now_k1=-sums.lag / num_rows,
            now_gen_prefix=now_gen_prefix,
            now_gen_full=now_gen_full,
            blind_spot=now_gen_full / seen if grade == "ok" and seen > 0.0 else math.nan,
            reliability=grade,
            k_hat=k_hat,
            num_censored=num_censored,
        )


def reliability(k_hat: float, num_rows: int, value_nats: float) -> Reliability:
    """How far to trust a weighted estimate from `num_rows` trajectories.

    none: no value, no k-hat (under 25 trajectories), or k-hat >= 1, where the mean itself does not exist.
    """
    if math.isnan(value_nats) or math.isnan(k_hat) or k_hat >= 1.0:
        return "none"
    good = k_hat < pareto_k_threshold(num_rows) and num_rows >= MIN_SEQUENCES and value_nats < MAX_RELIABLE_NATS
    return "ok" if good else "low"


def _rescaled(value: float, m: float) -> float:
    """value x exp(m), held at the largest float instead of infinity."""
    if value <= 0.0 or m == 0.0:
        return value
    log_value = math.log(value) + m
    if log_value >= _LOG_LARGEST:
        return sys.float_info.max
    return value * math.exp(m) if m < _LOG_LARGEST else math.exp(log_value)
