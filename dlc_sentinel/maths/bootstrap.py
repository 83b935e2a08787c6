"""Weight sums per prompt group, and a bootstrap interval of the ESS that resamples whole groups.

Responses to one prompt are not independent, so the group is the unit. Axes: G groups, D bootstrap draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from dlc_sentinel.maths.arrays import F64, I64, dot
from dlc_sentinel.maths.ess import EssSums

__all__ = ["GroupSums", "ess_interval"]

MAX_PENDING = 64
"""Unmerged pieces held before they are folded together."""

_Piece = tuple[I64, F64, F64, F64, I64]


@dataclass(slots=True)
class GroupSums:
    """Mergeable EssSums per group key (int64), kept as arrays; reading folds equal keys and sorts by key.

    merge = concatenation, order-free; empty has no key.
    """

    _pieces: list[_Piece] = field(default_factory=list)

    def add(self, key_G: I64, m_G: F64, s1_G: F64, s2_G: F64, n_G: I64) -> None:
        """Adds sums relative to exp(m): [G] each, keys may repeat and come in any order."""
        if len(key_G):
            self._pieces.append((key_G, m_G, s1_G, s2_G, n_G))
        if len(self._pieces) > MAX_PENDING:
            self._fold()

    def merge(self, other: GroupSums) -> Self:
        """Self, which now also holds what `other` holds; `other` is unchanged."""
        for piece in tuple(other._pieces):
            self.add(*piece)
        return self

    @property
    def keys_G(self) -> I64:
        """Group keys, ascending, [G] int64."""
        return self._fold()[0]

    @property
    def m_G(self) -> F64:
        """Largest log weight of each group, nats."""
        return self._fold()[1]

    @property
    def s1_G(self) -> F64:
        """Sum of weights of each group, relative to exp(m_G)."""
        return self._fold()[2]

    @property
    def s2_G(self) -> F64:
        """Sum of squared weights of each group, relative to exp(2 m_G)."""
        return self._fold()[3]

    @property
    def n_G(self) -> I64:
        """Number of blocks of each group."""
        return self._fold()[4]

    @property
    def num_groups(self) -> int:
        """Number of distinct keys."""
        return len(self.keys_G)

    def total(self) -> EssSums:
        """The EssSums of all groups together."""
        _, m_G, s1_G, s2_G, n_G = self._fold()
        if not len(m_G):
            return EssSums()
        m = float(m_G.max())
        scale_G = np.exp(m_G - m)
        return EssSums(m, dot(s1_G, scale_G), dot(s2_G, scale_G * scale_G), int(n_G.sum()))

    def _fold(self) -> _Piece:
        if not self._pieces:
            none = np.zeros(0)
            return np.zeros(0, np.int64), none, none, none, np.zeros(0, np.int64)
        if len(self._pieces) > 1 or not _is_folded(self._pieces[0][0]):
            key_R, m_R, s1_R, s2_R, n_R = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
            order_R = np.argsort(key_R, kind="stable")
            key_R = key_R[order_R]
            start_G = np.flatnonzero(np.concatenate(([True], key_R[1:] != key_R[:-1])))
            m_R = m_R[order_R]
            m_G = np.maximum.reduceat(m_R, start_G)
            scale_R = np.exp(m_R - np.repeat(m_G, np.diff(np.append(start_G, len(key_R)))))
            s1_G = np.add.reduceat(s1_R[order_R] * scale_R, start_G)
            s2_G = np.add.reduceat(s2_R[order_R] * scale_R * scale_R, start_G)
            self._pieces = [(key_R[start_G], m_G, s1_G, s2_G, np.add.reduceat(n_R[order_R], start_G))]
        return self._pieces[0]


def ess_interval(group_sums: GroupSums, *, level: float = 0.90, draws: int = 200, seed: int = 0) -> tuple[float, float]:
    """(low, high): two-sided percentile bootstrap interval of the ESS share over groups; (nan, nan) under two groups.

    Depends on the sums, level, draws and seed only, not on the order in which groups came. Source: percentile bootstrap
    of clusters, Efron and Tibshirani 1993.
    """
    num = group_sums.num_groups
    if num < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    m_G, s1_G, s2_G, n_G = group_sums.m_G, group_sums.s1_G, group_sums.s2_G, group_sums.n_G.astype(np.float64)
    ratios_D = np.empty(draws)
    for draw in range(draws):
        picked_G = rng.integers(0, num, size=num)
        m_P = m_G[picked_G]
        scale_P = np.exp(m_P - m_P.max())
        s1 = dot(s1_G[picked_G], scale_P)
        s2 = dot(s2_G[picked_G], scale_P * scale_P)
        ratios_D[draw] = min(s1 * s1 / (float(n_G[picked_G].sum()) * s2), 1.0)
    low, high = np.quantile(ratios_D, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def _is_folded(key_G: I64) -> bool:
    return bool(np.all(key_G[1:] > key_G[:-1]))
