"""Mergeable statistics of one stream of log ratios: moments, largest value, an exact-count log-bucket sketch of |x|.

The sketch: |x| falls into one of 128 buckets per octave between 2**-30 and 2**12 nats, told by the upper bits of its
float64 pattern. Counts are exact integers, so the sketch does not depend on order or chunking. A bucket stands for its
midpoint, which is within 2**-8 (0.39 %) of every value in it; |x| < 2**-30 counts as 0. `quantile_abs` computes the
same definition from a plain array. Small pieces wait, copied, until a chunk is full or something is read.
"""

from __future__ import annotations

import math
from typing import Final, Self

import numpy as np

from dlc_sentinel.maths.arrays import CHUNK_TOKENS, DIRECT_TOKENS, F64, I64, dot

__all__ = ["RELATIVE_PRECISION", "SquareSum", "StreamStats", "quantile_abs"]

RELATIVE_PRECISION: Final = 2.0**-8
"""Largest relative distance of a published quantile of |x| from the value of that rank."""

_SHIFT: Final = 45  # 52 mantissa bits minus the 7 that tell 128 buckets per octave
_LOW, _HIGH = 2.0**-30, 2.0**12
_BASE: Final = (1023 - 30) * 128 - 1  # bucket 0 = everything below 2**-30
_BELOW: Final = float(np.nextafter(_LOW, 0.0))
_TOP: Final = float(np.nextafter(_HIGH, 0.0))
_NUM_BUCKETS: Final = 42 * 128 + 1


class StreamStats:
    """Count, sums, largest |x| and quantiles of |x| of a stream of finite values in nats; everything is nan when empty.

    merge = concatenation, chunked = at once, order-free.
    >>> stats = StreamStats()
    >>> stats.add(np.array([3.0, -4.0]))
    >>> stats.num, stats.mean, stats.mean_abs, stats.max_abs
    (2, -0.5, 3.5, 4.0)
    """

    __slots__ = ("_counts_B", "_max_abs", "_num", "_num_waiting", "_sum", "_sum_abs", "_sum_sq", "_waiting")

    def __init__(self) -> None:
        self._num = 0
        self._sum = 0.0
        self._sum_sq = 0.0
        self._sum_abs = 0.0
        self._max_abs = 0.0
        self._counts_B = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._waiting: list[F64] = []
        self._num_waiting = 0

    def add(self, x_N: F64) -> None:
        """Adds [N] finite float64 values.

        NaN and infinity are refused before this floor; one that slips through raises ValueError at the next fold.
        """
        if len(x_N) >= DIRECT_TOKENS:
            for start in range(0, len(x_N), CHUNK_TOKENS):
                self._add_chunk(x_N[start : start + CHUNK_TOKENS])
            return
        if self._num_waiting + len(x_N) > CHUNK_TOKENS:
            self._fold()
        self._waiting.append(x_N.copy())
        self._num_waiting += len(x_N)

    def _fold(self) -> Self:
        if self._waiting:
            x_N = np.concatenate(self._waiting)
            self._waiting, self._num_waiting = [], 0
            self._add_chunk(x_N)
        return self

    def _add_chunk(self, x_N: F64) -> None:
        if not len(x_N):
            return
        abs_N = np.abs(x_N)
        largest = float(np.maximum.reduce(abs_N))
        if not largest < math.inf:
            raise ValueError("StreamStats got NaN or infinity; refuse and count such tokens before adding")
        self._num += len(x_N)
        self._sum += float(np.add.reduce(x_N))
        self._sum_sq += dot(x_N, x_N)
        self._sum_abs += float(np.add.reduce(abs_N))
        self._max_abs = max(self._max_abs, largest)
        self._counts_B += np.bincount(_buckets(abs_N, largest), minlength=_NUM_BUCKETS)

    def merge(self, other: StreamStats) -> Self:
        """Self, which now also holds what `other` holds; `other` keeps its values."""
        other._fold()
        self._num += other._num
        self._sum += other._sum
        self._sum_sq += other._sum_sq
        self._sum_abs += other._sum_abs
        self._max_abs = max(self._max_abs, other._max_abs)
        self._counts_B += other._counts_B
        return self

    @property
    def num(self) -> int:
        """Number of values."""
        return self._num + self._num_waiting

    @property
    def mean(self) -> float:
        """Mean in nats; nan when empty."""
        return self._fold()._sum / self.num if self.num else math.nan

    @property
    def rms(self) -> float:
        """Root mean square in nats, about zero; nan when empty."""
        return math.sqrt(self._fold()._sum_sq / self.num) if self.num else math.nan

    @property
    def mean_abs(self) -> float:
        """Mean of |x| in nats; nan when empty."""
        return self._fold()._sum_abs / self.num if self.num else math.nan

    @property
    def max_abs(self) -> float:
        """Largest |x| in nats, exact; nan when empty."""
        return self._fold()._max_abs if self.num else math.nan

    @property
    def p50_abs(self) -> float:
        """Median of |x| in nats, to RELATIVE_PRECISION; nan when empty."""
        return self.quantile_abs(0.50)

    @property
    def p99_abs(self) -> float:
        """99th percentile of |x| in nats, to RELATIVE_PRECISION; nan when empty."""
        return self.quantile_abs(0.99)

    def quantile_abs(self, q: float) -> float:
        """Midpoint, in nats, of the bucket that holds the value of rank ceil(q n) of |x|; nan when empty."""
        return _quantile(self._fold()._counts_B, self.num, q)

    def share_above(self, tau: float) -> float:
        """Share (0..1) of |x| in buckets wholly above `tau` nats; nan when empty.

        Exact when tau is a bucket edge (any power of two in range); else values in tau's own bucket are left out.
        """
        if not self.num:
            return math.nan
        edge = int(_buckets(np.array([abs(tau)]), abs(tau))[0])
        if edge and _lower_edge(edge) == abs(tau):
            edge -= 1
        return int(self._fold()._counts_B[edge + 1 :].sum()) / self.num


class SquareSum:
    """Count and root mean square of a stream, where nothing else is asked for; nan when empty. Order- and chunk-free.

    >>> total = SquareSum()
    >>> total.add(np.array([3.0, -4.0]))
    >>> total.num, round(total.rms, 6)
    (2, 3.535534)
    """

    __slots__ = ("num", "square_sum")

    def __init__(self) -> None:
        self.num = 0
        self.square_sum = 0.0

    def add(self, x_N: F64) -> None:
        """Adds [N] finite float64 values."""
        self.num += len(x_N)
        self.square_sum += dot(x_N, x_N)

    @property
    def rms(self) -> float:
        """Root mean square, in the unit of the values."""
        return math.sqrt(self.square_sum / self.num) if self.num else math.nan


def quantile_abs(x_N: F64, q: float) -> float:
    """The quantile of |x| that StreamStats publishes, in nats, from a plain array by sorting; nan when empty."""
    if not len(x_N):
        return math.nan
    rank = max(math.ceil(q * len(x_N)), 1)
    value_1 = np.sort(np.abs(np.asarray(x_N, dtype=np.float64)))[rank - 1 : rank]
    return _midpoint(int(_buckets(value_1, float(value_1[0]))[0]))


def _buckets(abs_N: F64, largest: float) -> I64:
    """Bucket of each |x|."""
    capped_N = np.maximum(abs_N, _BELOW)
    if largest > _TOP:
        np.minimum(capped_N, _TOP, out=capped_N)
    bits_N: I64 = capped_N.view(np.int64)
    np.right_shift(bits_N, _SHIFT, out=bits_N)
    np.subtract(bits_N, _BASE, out=bits_N)
    return bits_N


def _quantile(counts_B: I64, num: int, q: float) -> float:
    if not num:
        return math.nan
    rank = max(math.ceil(q * num), 1)
    return _midpoint(int(np.searchsorted(np.cumsum(counts_B), rank, side="left")))


def _lower_edge(bucket: int) -> float:
    return float(np.array([(bucket + _BASE) << _SHIFT], dtype=np.int64).view(np.float64)[0])


def _midpoint(bucket: int) -> float:
    return 0.5 * (_lower_edge(bucket) + _lower_edge(bucket + 1)) if bucket else 0.0
