"""KL(now||gen) over whole trajectories: a per-decision, self-normalised sum over token positions.

    sum_t (sum_i W_i,<=t x_i,t) / (sum_i W_i,<=t),   W_<=t = exp(sum of lag up to and with t),   x = lag

At position t a finished response adds nothing above the line and stays below it with its last weight. The sums are kept
per position, so responses of different lengths and pieces from different frames merge. Rows whose weights stay in range
are summed as they are (`add_weights`); the others relative to exp(m_t), each position with its scale (`add_log`).
Axes: P positions (the longest row so far), T tokens of one row, N packed tokens.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np

from dlc_sentinel.maths.arrays import F64, I64

__all__ = ["PositionSums"]

LONG_ROW = 512
"""Rows of at least this mean length are added one by one; shorter ones all together by position."""


class PositionSums:
    """Mergeable sums per position; value() is nan when empty."""

    __slots__ = ("_den_P", "_fin_P", "_log_P", "_num_P", "num_rows")

    def __init__(self) -> None:
        self.num_rows = 0
        self._num_P = np.zeros(0)
        self._den_P = np.zeros(0)
        self._fin_P = np.zeros(0)  # fin[L]: last weights of rows of L tokens, below the line from position L on
        self._log_P: _LogSums | None = None

    def add_weights(self, x_N: F64, w_N: F64, w_last_S: F64, inverse_S: F64, offsets_S1: I64) -> None:
        """Adds packed rows without an empty one: w_N cumulative weights up to a factor per row, `inverse_S`.

        w_last_S are the true last weights. All finite, of a size whose sums stay finite.
        """
        length_S = np.diff(offsets_S1)
        longest = int(length_S.max())
        self._grow(longest + 1)
        self.num_rows += len(length_S)
        if len(x_N) >= LONG_ROW * len(length_S):
            self._add_long(x_N, w_N, inverse_S, offsets_S1)
        else:
            self._add_short(x_N, w_N, inverse_S, offsets_S1, length_S, longest)
        np.add.at(self._fin_P, length_S, w_last_S)

    def _add_long(self, x_N: F64, w_N: F64, inverse_S: F64, offsets_S1: I64) -> None:
        ends = offsets_S1.tolist()
        for start, end, inverse in zip(ends[:-1], ends[1:], inverse_S.tolist(), strict=True):
            w_T = w_N[start:end] * inverse
            self._den_P[: end - start] += w_T
            w_T *= x_N[start:end]
            self._num_P[: end - start] += w_T

    def _add_short(self, x_N: F64, w_N: F64, inverse_S: F64, offsets_S1: I64, length_S: I64, longest: int) -> None:
        if len(x_N) == longest * len(length_S):  # all of one length
            true_ST = w_N.reshape(-1, longest) * inverse_S[:, None]
            self._den_P[:longest] += true_ST.sum(axis=0)
            true_ST *= x_N.reshape(-1, longest)
            self._num_P[:longest] += true_ST.sum(axis=0)
            return
        position_N = np.arange(len(x_N))
        position_N -= np.repeat(offsets_S1[:-1], length_S)
        true_N = w_N * np.repeat(inverse_S, length_S)
        self._den_P[:longest] += np.bincount(position_N, weights=true_N, minlength=longest)
        true_N *= x_N
        self._num_P[:longest] += np.bincount(position_N, weights=true_N, minlength=longest)

    def add_log(self, x_T: F64, logw_T: F64) -> None:
        """Adds one row of T > 0 tokens by its cumulative log weights, of any finite size."""
        self.num_rows += 1
        if self._log_P is None:
            self._log_P = _LogSums()
        self._log_P.add(x_T, logw_T)

    def merge(self, other: PositionSums) -> Self:
        """Self, which now also holds what `other` holds; `other` is unchanged."""
        size = len(other._den_P)
        self._grow(size)
        self._num_P[:size] += other._num_P
        self._den_P[:size] += other._den_P
        self._fin_P[:size] += other._fin_P
        self.num_rows += other.num_rows
        if other._log_P is not None:
            self._log_P = _LogSums() if self._log_P is None else self._log_P
            self._log_P.merge(other._log_P)
        return self

    def value(self) -> float:
        """KL(now||gen) in nats per trajectory; nan when empty."""
        if not self.num_rows:
            return math.nan
        if self._log_P is None:
            below_P = self._den_P + np.cumsum(self._fin_P)
            used_P = self._den_P > 0.0
            return float(np.sum(self._num_P[used_P] / below_P[used_P]))
        plain = _LogSums()
        plain.set_plain(self._num_P, self._den_P, self._fin_P)
        return plain.merge(self._log_P).value()

    def _grow(self, size: int) -> None:
        if size > len(self._den_P):
            more = max(size, min(2 * len(self._den_P), size + 4096)) - len(self._den_P)
            self._num_P, self._den_P, self._fin_P = (
                np.concatenate((old_P, np.zeros(more))) for old_P in (self._num_P, self._den_P, self._fin_P)
            )


class _LogSums:
    """The same sums where position t is held relative to exp(m_t), and finished weights relative to exp(mf_t)."""

    __slots__ = ("den_P", "fin_P", "m_P", "mf_P", "num_P")

    def __init__(self) -> None:
        self.m_P = np.zeros(0)
        self.num_P = np.zeros(0)
        self.den_P = np.zeros(0)
        self.mf_P = np.zeros(0)
        self.fin_P = np.zeros(0)

    def set_plain(self, num_P: F64, den_P: F64, fin_P: F64) -> None:
        """Takes sums at scale exp(0); a position without any has no scale yet."""
        self.m_P = np.where(den_P > 0.0, 0.0, -math.inf)
        self.mf_P = np.where(fin_P > 0.0, 0.0, -math.inf)
        self.num_P, self.den_P, self.fin_P = num_P.copy(), den_P.copy(), fin_P.copy()

    def add(self, x_T: F64, logw_T: F64) -> None:
        size = len(x_T)
        self._grow(size + 1)
        self._raise_scale(logw_T)
        w_T = np.exp(logw_T - self.m_P[:size])
        self.den_P[:size] += w_T
        self.num_P[:size] += w_T * x_T
        last, before = float(logw_T[-1]), float(self.mf_P[size])
        scale = max(last, before)
        self.fin_P[size] = self.fin_P[size] * math.exp(before - scale) + math.exp(last - scale)
        self.mf_P[size] = scale

    def merge(self, other: _LogSums) -> Self:
        size = len(other.m_P)
        self._grow(size)
        self._raise_scale(other.m_P)
        scale_P = _ratio(other.m_P, self.m_P[:size])
        self.den_P[:size] += other.den_P * scale_P
        self.num_P[:size] += other.num_P * scale_P
        mf_P = np.maximum(self.mf_P[:size], other.mf_P)
        self.fin_P[:size] = self.fin_P[:size] * _ratio(self.mf_P[:size], mf_P) + other.fin_P * _ratio(other.mf_P, mf_P)
        self.mf_P[:size] = mf_P
        return self

    def value(self) -> float:
        used = int(np.count_nonzero(self.den_P > 0.0))  # positions in use are the first ones
        with np.errstate(divide="ignore"):
            log_fin_P = np.logaddexp.accumulate(np.log(self.fin_P[:used]) + self.mf_P[:used])
        log_below_P = np.logaddexp(np.log(self.den_P[:used]) + self.m_P[:used], log_fin_P)
        return float(np.sum(self.num_P[:used] * np.exp(self.m_P[:used] - log_below_P)))

    def _raise_scale(self, m_T: F64) -> None:
        size = len(m_T)
        new_T = np.maximum(self.m_P[:size], m_T)
        scale_T = _ratio(self.m_P[:size], new_T)
        self.den_P[:size] *= scale_T
        self.num_P[:size] *= scale_T
        self.m_P[:size] = new_T

    def _grow(self, size: int) -> None:
        more = size - len(self.m_P)
        if more > 0:
            none, zero = np.full(more, -math.inf), np.zeros(more)
            self.m_P, self.mf_P = np.concatenate((self.m_P, none)), np.concatenate((self.mf_P, none))
            self.num_P, self.den_P, self.fin_P = (
                np.concatenate((old_P, zero)) for old_P in (self.num_P, self.den_P, self.fin_P)
            )


def _ratio(from_P: F64, to_P: F64) -> F64:
    """exp(from - to), 0 where `from` has no scale (-inf)."""
    out_P = np.zeros(len(from_P))
    np.exp(np.subtract(from_P, to_P, where=from_P > -math.inf, out=np.full(len(from_P), -math.inf)), out=out_P)
    return out_P
