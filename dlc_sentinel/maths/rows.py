"""Packed rows of lag with their groups and the ages of their tokens: checked, cut, joined.

Axes: S rows, N packed tokens, K spans of one age, B blocks, P pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import F64, I64, UNKNOWN_AGE, check_offsets

__all__ = ["Rows"]


class Rows(NamedTuple):
    """Whole rows, none of them empty; spans are not empty either and the first starts at token 0."""

    lag_N: F64
    offsets_S1: I64
    group_S: I64
    span_start_K: I64
    span_age_K: I64

    def cut(self, first: int, last: int) -> Rows:
        """Rows first:last, with offsets and spans counted from their first token."""
        if first == 0 and last == len(self.group_S):
            return self
        start, end = int(self.offsets_S1[first]), int(self.offsets_S1[last])
        low = int(np.searchsorted(self.span_start_K, start, side="right")) - 1
        high = int(np.searchsorted(self.span_start_K, end, side="left"))
        return Rows(
            self.lag_N[start:end],
            self.offsets_S1[first : last + 1] - start,
            self.group_S[first:last],
            np.maximum(self.span_start_K[low:high] - start, 0),
            self.span_age_K[low:high],
        )

    def copy(self) -> Rows:
        """The same rows in arrays of their own."""
        return Rows(
            self.lag_N.copy(),
            self.offsets_S1.copy(),
            self.group_S.copy(),
            self.span_start_K.copy(),
            self.span_age_K.copy(),
        )

    def block_ages(self, num_S: I64, first_B: I64, last_B: I64) -> I64:
        """Age of each block's oldest token; blocks are tokens first:last, num_S of them in each row."""
        start_K, age_K = self.span_start_K, self.span_age_K
        if np.all(age_K == age_K[0]):
            return np.full(len(first_B), age_K[0])
        if len(age_K) == len(num_S) and np.array_equal(start_K, self.offsets_S1[:-1]):
            return np.repeat(age_K, num_S)
        low_B = np.searchsorted(start_K, first_B, side="right") - 1
        high_B = np.searchsorted(start_K, last_B, side="left")
        pairs = np.stack((low_B, high_B), axis=1).ravel()
        out_B: I64 = np.maximum.reduceat(np.append(age_K, age_K[-1]), pairs)[::2]
        return out_B


def checked_rows(
    lag_N: F64, offsets_S1: I64, group_S: I64, age_N: I64 | None, start_K: I64 | None, age_K: I64 | None
) -> Rows:
    """The rows that have a token. Raises ShapeError when lengths disagree; argument rules: LagStats.add."""
    check_offsets(offsets_S1, len(lag_N), "LagStats.add")
    if len(group_S) != len(offsets_S1) - 1:
        raise ShapeError(f"LagStats.add: {len(group_S)} group keys for {len(offsets_S1) - 1} rows; give one each")
    start_K, age_K = _spans(len(lag_N), age_N, start_K, age_K)
    full_S = offsets_S1[1:] > offsets_S1[:-1]
    if not full_S.all():
        offsets_S1 = np.append(offsets_S1[:-1][full_S], offsets_S1[-1])
        group_S = group_S[full_S]
    return Rows(lag_N, offsets_S1, group_S, start_K, age_K)


def joined(pieces: list[Rows]) -> Rows:
    """The rows of all pieces as one, in order."""
    if len(pieces) == 1:
        return pieces[0]
    before_P = np.cumsum([0] + [len(piece.lag_N) for piece in pieces[:-1]]).tolist()
    offsets = [piece.offsets_S1[1:] + before for piece, before in zip(pieces, before_P, strict=True)]
    starts = [piece.span_start_K + before for piece, before in zip(pieces, before_P, strict=True)]
    return Rows(
        np.concatenate([piece.lag_N for piece in pieces]),
        np.concatenate([np.zeros(1, np.int64), *offsets]),
        np.concatenate([piece.group_S for piece in pieces]),
        np.concatenate(starts),
        np.concatenate([piece.span_age_K for piece in pieces]),
    )


def _spans(num: int, age_N: I64 | None, start_K: I64 | None, age_K: I64 | None) -> tuple[I64, I64]:
    """Spans (starts, ages) of tokens with one age, none of them empty."""
    if age_N is not None:
        if len(age_N) != num:
            raise ShapeError(f"LagStats.add: {len(age_N)} ages for {num} tokens; give one each, or spans")
        change = np.flatnonzero(age_N[1:] != age_N[:-1]) + 1
        start_K = np.concatenate((np.zeros(1, np.int64), change))
        return start_K, age_N[start_K] if num else age_N
    if start_K is None or age_K is None:
        return np.zeros(1, np.int64), np.full(1, UNKNOWN_AGE, np.int64)
    if len(start_K) != len(age_K) or (num and (not len(start_K) or start_K[0] != 0)):
        raise ShapeError(
            f"LagStats.add: {len(start_K)} span starts, {len(age_K)} span ages, first start "
            f"{start_K[0] if len(start_K) else 'missing'}; spans must begin at token 0 and have one age each"
        )
    filled_K = np.append(start_K[1:], num) > start_K
    return (start_K, age_K) if filled_K.all() else (start_K[filled_K], age_K[filled_K])
