"""A mergeable sketch of signed values in nats, from which the ESS of exp(s x) can be had for any s.

|x| falls into one of 128 buckets per octave between 2**-20 and 2**12 nats; a bucket stands for its midpoint, which is
within 2**-8 (0.39 %) of every value in it; smaller values count as 0, larger ones as the last bucket. Counts are exact
integers, so the sketch does not depend on order or chunking; count, sum and sum of squares are kept beside it.
Axes: B values, K buckets in use.
"""

from __future__ import annotations

import math
from typing import Final, Self

import numpy as np

from dlc_sentinel.maths.arrays import F64, I64, dot

__all__ = ["SignedSketch"]

_SHIFT: Final = 45  # 52 mantissa bits minus the 7 that tell 128 buckets per octave
_BASE: Final = (1023 - 20) * 128 - 1  # bucket 0 = everything below 2**-20
_NUM_BUCKETS: Final = 32 * 128 + 1
_SMALLEST: Final = float(np.nextafter(2.0**-20, 0.0))
_LARGEST: Final = float(np.nextafter(2.0**12, 0.0))


class SignedSketch:
    """Count, moments and signed log buckets of a stream of finite values; merge = concatenation, order-free."""

    __slots__ = ("_counts_2B", "num", "sum", "sum_sq")

    def __init__(self) -> None:
        self.num = 0
        self.sum = 0.0
        self.sum_sq = 0.0
        self._counts_2B = np.zeros(2 * _NUM_BUCKETS, dtype=np.int64)

    def add(self, x_B: F64) -> None:
        """Adds [B] finite float64 values, nats."""
        if not len(x_B):
            return
        self.num += len(x_B)
        self.sum += float(np.add.reduce(x_B))
        self.sum_sq += dot(x_B, x_B)
        abs_B = np.abs(x_B)
        np.clip(abs_B, _SMALLEST, _LARGEST, out=abs_B)
        bucket_B: I64 = abs_B.view(np.int64)
        np.right_shift(bucket_B, _SHIFT, out=bucket_B)
        bucket_B -= _BASE
        bucket_B += np.where(x_B < 0.0, _NUM_BUCKETS, 0)
        self._counts_2B += np.bincount(bucket_B, minlength=2 * _NUM_BUCKETS)

    def merge(self, other: SignedSketch) -> Self:
        """Self, which now also holds what `other` holds; `other` is unchanged."""
        self.num += other.num
        self.sum += other.sum
        self.sum_sq += other.sum_sq
        self._counts_2B += other._counts_2B
        return self

    @property
    def variance(self) -> float:
        """Population variance, nats^2; nan when empty."""
        if not self.num:
            return math.nan
        return max(self.sum_sq / self.num - (self.sum / self.num) ** 2, 0.0)

    def ess(self, scale: float) -> float:
        """ESS (0..1) of the weights exp(scale x); nan when empty."""
        if not self.num:
            return math.nan
        used_K = np.flatnonzero(self._counts_2B)
        count_K = self._counts_2B[used_K].astype(np.float64)
        x_K = scale * _midpoints(used_K)
        w_K = np.exp(x_K - x_K.max())
        weighted_K = w_K * count_K
        return min(float(weighted_K.sum()) ** 2 / (self.num * float((weighted_K * w_K).sum())), 1.0)


def _midpoints(bucket_K: I64) -> F64:
    """Value in nats that each bucket stands for."""
    abs_K = bucket_K % _NUM_BUCKETS
    low_K = ((abs_K + _BASE) << _SHIFT).view(np.float64)
    high_K = ((abs_K + _BASE + 1) << _SHIFT).view(np.float64)
    mid_K: F64 = np.where(abs_K > 0, 0.5 * (low_K + high_K), 0.0)
    return np.where(bucket_K < _NUM_BUCKETS, mid_K, -mid_K)
