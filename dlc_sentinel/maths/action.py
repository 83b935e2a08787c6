"""Block weights at the action horizon, kept apart by prompt group and by the age of a block's oldest token.

Blocks are gathered and folded many at a time, because a message may hold few of them. Axes: S rows, B blocks.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

import numpy as np

from dlc_sentinel.maths.arrays import F64, I64
from dlc_sentinel.maths.bootstrap import GroupSums
from dlc_sentinel.maths.ess import EssSums

__all__ = ["ActionSums"]

FOLD_BLOCKS: Final = 16384
"""Blocks that wait before they are folded."""


class _Waiting(NamedTuple):
    logw_B: F64
    num_S: I64
    group_S: I64
    age_B: I64


class ActionSums:
    """Mergeable EssSums by group and by age; merge = concatenation, order-free."""

    __slots__ = ("_ages", "_groups", "_num_waiting", "_waiting")

    def __init__(self) -> None:
        self._ages: dict[int, EssSums] = {}
        self._groups = GroupSums()
        self._waiting: list[_Waiting] = []
        self._num_waiting = 0

    def add(self, logw_B: F64, num_S: I64, group_S: I64, age_B: I64) -> None:
        """Adds [B] finite log weights, in rows of num_S > 0 blocks each; the arrays are kept, not copied."""
        self._waiting.append(_Waiting(logw_B, num_S, group_S, age_B))
        self._num_waiting += len(logw_B)
        if self._num_waiting >= FOLD_BLOCKS:
            self._fold()

    def merge(self, other: ActionSums) -> Self:
        """Self, which now also holds what `other` holds; `other` keeps its values."""
        other._fold()
        self._groups.merge(other._groups)
        for age, sums in other._ages.items():
            self._ages.setdefault(age, EssSums()).merge(sums)
        return self

    def groups(self) -> GroupSums:
        """Sums by group key."""
        self._fold()
        return self._groups

    def by_age(self) -> dict[int, EssSums]:
        """Sums by age, in no order."""
        self._fold()
        return self._ages

    def _fold(self) -> None:
        if not self._waiting:
            return
        logw_B, num_S, group_S, age_B = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._num_waiting = [], 0
        start_S = np.cumsum(num_S) - num_S
        m_S = np.maximum.reduceat(logw_B, start_S)
        w_B = np.exp(logw_B - np.repeat(m_S, num_S))
        s1_S = np.add.reduceat(w_B, start_S)
        w_B *= w_B
        self._groups.add(group_S, m_S, s1_S, np.add.reduceat(w_B, start_S), num_S)
        changes = np.flatnonzero(age_B[1:] != age_B[:-1])
        for age in np.unique(age_B[np.append(changes, len(age_B) - 1)]).tolist():
            of_age_B = logw_B[age_B == age] if len(changes) else logw_B
            self._ages.setdefault(age, EssSums()).merge(EssSums.of(of_age_B))
