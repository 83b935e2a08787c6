"""Effective sample size of weights exp(l) as a share of their count, in log space, and blocks of a horizon.

    ESS = (sum w)^2 / (n sum w^2),  w = exp(l);  in [1/n, 1], 1 when all weights are equal.

Block rule (horizon h): a row's tokens in order are cut from the start into blocks of h; if tokens are left over, the
last h tokens are one more block, which overlaps the one before, so that late lag is not lost. A row shorter than h is
one block. A block's weight is exp(sum of lag in it). h = 1 is the token level, h = inf the whole row.
Axes: S rows, N packed tokens, B blocks, H horizons, R = H x S pairs of horizon and row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from dlc_sentinel.maths.arrays import F64, I64, check_offsets, dot

__all__ = ["HORIZONS", "RUNGS", "Blocks", "EssSums", "block_sums", "blocks", "half_horizon", "pooled_ess", "rung_name"]

HORIZONS: Final = (1, 8, 32, 128, 512)
"""The finite rungs of the ladder, in tokens."""

RUNGS: Final = ("1", "8", "32", "128", "512", "inf")
"""Names of all rungs, in order."""

_SMALLEST: Final = 1e-300


def rung_name(horizon: float) -> str:
    """Name of a horizon in tables and JSON: "32", or "inf"."""
    return "inf" if math.isinf(horizon) else str(int(horizon))


def half_horizon(ess: Mapping[str, float], coverage: Mapping[str, float]) -> float:
    """Largest rung, in tokens, up to which every ESS is >= 1/2; 0 when ESS_1 is below; nan when it is nan.

    Never above the largest finite rung with coverage >= 1/2; inf only where every finite rung is so covered.
    """
    if math.isnan(ess["1"]):
        return math.nan
    reached = 0.0
    for name in RUNGS:
        if not (ess[name] >= 0.5 and coverage[name] >= 0.5):
            break
        reached = float(name)
    return reached


def pooled_ess(num_P: Sequence[int], ess_P: Sequence[float]) -> float:
    """ESS (0..1) of parts put together whose weights average alike: harmonic mean by their [P] numbers of weights.

    Parts without a weight count for nothing; nan when none has one, or where a part with weights is nan.
    """
    kept = [(num, ess) for num, ess in zip(num_P, ess_P, strict=True) if num]
    if not kept:
        return math.nan
    return sum(num for num, _ in kept) / sum(num / max(ess, _SMALLEST) for num, ess in kept)


@dataclass(slots=True)
class EssSums:
    """Mergeable sums behind an ESS: sums of w and w^2 relative to exp(m), where m is the largest log weight so far.

    Empty: n = 0, m = -inf, and every value nan. Source: (sum w)^2 / (n sum w^2), Kish 1965.
    """

    m: float = -math.inf
    s1: float = 0.0
    s2: float = 0.0
    n: int = 0

    @classmethod
    def of(cls, logw_B: F64) -> EssSums:
        """Sums over [B] finite log weights (nats) of any size."""
        if not len(logw_B):
            return cls()
        m = float(np.maximum.reduce(logw_B))
        w_B = np.exp(logw_B - m)
        return cls(m, float(np.add.reduce(w_B)), dot(w_B, w_B), len(logw_B))

    def merge(self, other: EssSums) -> Self:
        """Self, which now also holds what `other` holds; `other` is unchanged."""
        if not other.n:
            return self
        m = max(self.m, other.m)
        mine, theirs = math.exp(self.m - m), math.exp(other.m - m)
        self.s1 = self.s1 * mine + other.s1 * theirs
        self.s2 = self.s2 * mine * mine + other.s2 * theirs * theirs
        self.m, self.n = m, self.n + other.n
        return self

    @property
    def ratio(self) -> float:
        """ESS as a share of the count, 0..1; nan when empty."""
        return min(self.s1 * self.s1 / (self.n * self.s2), 1.0) if self.n else math.nan

    @property
    def max_share(self) -> float:
        """Share (0..1) of the largest weight in the sum of all; nan when empty."""
        return 1.0 / self.s1 if self.n else math.nan


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of several horizons over packed rows, b = tokens first[b]:last[b]; by horizon, then row; int64."""

    first_B: I64
    last_B: I64
    num_R: I64
    """Blocks of each pair of horizon and row, never 0."""
    start_R: I64
    """First block of each pair."""
    num_full_H: I64
    """Blocks that have as many tokens as the horizon asks."""


def blocks(offsets_S1: I64, horizons: Sequence[int]) -> Blocks:
    """The blocks of finite horizons, in tokens, over rows none of which is empty."""
    length_S = np.diff(offsets_S1)
    h_H1 = np.array(horizons, dtype=np.int64)[:, None]
    num_HS = -(-length_S // h_H1)
    size_R = np.minimum(length_S, h_H1).ravel()
    num_R = num_HS.ravel()
    end_R = np.cumsum(num_R)
    start_R = end_R - num_R
    h_R = np.repeat(h_H1.ravel(), len(length_S))
    row_start_R = np.tile(offsets_S1[:-1], len(horizons))
    # first_B steps by h inside a pair and jumps to the row's start at its first block: one cumulative sum makes it
    first_B = np.repeat(h_R, num_R)
    first_B[start_R] = row_start_R
    first_B[start_R[1:]] -= row_start_R[:-1] + (num_R[:-1] - 1) * h_R[:-1]
    np.cumsum(first_B, out=first_B)
    first_B[end_R - 1] = np.tile(offsets_S1[1:], len(horizons)) - size_R
    last_B = np.repeat(size_R, num_R)
    last_B += first_B
    return Blocks(first_B, last_B, num_R, start_R, np.sum(num_HS * (length_S >= h_H1), axis=1))


def block_sums(x_N: F64, offsets_S1: I64, horizon: float) -> tuple[F64, I64, I64]:
    """(sums_B, row_B, first_B): sum of x in nats over each block, the row it is of, its first packed token.

    A row without a token has no block. Raises ShapeError if the offsets do not fit. Block rule: module docstring.
    """
    check_offsets(offsets_S1, len(x_N), "block_sums")
    filled_F = np.flatnonzero(offsets_S1[1:] > offsets_S1[:-1]).astype(np.int64, copy=False)
    if not len(filled_F):
        return np.zeros(0), filled_F, filled_F
    filled_offsets = np.append(offsets_S1[filled_F], len(x_N))
    cut = blocks(filled_offsets, [len(x_N) if math.isinf(horizon) else int(horizon)])
    return sum_blocks(x_N, cut), np.repeat(filled_F, cut.num_R), cut.first_B


def sum_blocks(x_N: F64, cut: Blocks) -> F64:
    """Sum of x over each block, [B]; each is added on its own, so that other blocks leave no rounding in it."""
    edges = np.stack((cut.first_B, cut.last_B), axis=1).ravel()
    out_B: F64 = np.add.reduceat(np.append(x_N, 0.0), edges)[::2]
    return out_B
