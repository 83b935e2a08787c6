"""Everything a window needs to know about its lag: block-ESS ladder, ages, groups and KL, in one mergeable object.

Rows wait, copied, until a chunk is full or something is read. Then one expm1 pass over the tokens serves ESS_1, k3 and
j3, and one running product of the ratios r = 1 + expm1(lag) serves the block weights of every horizon and the prefix
weights. Where that product leaves [1e-140, 1e140] the rows concerned, and only they, are done in log space.
Axes: S rows, N packed tokens, K spans, B blocks, H finite horizons other than 1.
"""

from __future__ import annotations

import math
from typing import Final, Self

import numpy as np

from dlc_sentinel.maths.action import ActionSums
from dlc_sentinel.maths.arrays import CHUNK_TOKENS, DIRECT_TOKENS, F64, I64, UNKNOWN_AGE, dot, row_chunks
from dlc_sentinel.maths.bootstrap import GroupSums
from dlc_sentinel.maths.ess import HORIZONS, RUNGS, Blocks, EssSums, blocks, half_horizon, rung_name, sum_blocks
from dlc_sentinel.maths.kl import KlSums, KlValues
from dlc_sentinel.maths.positions import PositionSums
from dlc_sentinel.maths.rows import Rows, checked_rows, joined

__all__ = ["LagStats"]

_RANGE: Final = 1e140
"""Holds for single ratios too: their squares are summed."""
_SMALL_RATIO: Final = 0.02
"""Below this, 1 + expm1(x) has lost digits and exp(x) is taken instead."""
_CANCELLED: Final = 0.1
"""A mean ratio below this has lost digits in n + sum of expm1."""


class LagStats:
    """Mergeable statistics of lag (nats) over whole rows of policy tokens; merge = concatenation, order-free.

    `action_horizon` is the block length in tokens of `by_age`, `group_sums` and `action_ess`.
    >>> stats = LagStats(action_horizon=8)
    >>> stats.add(np.log([1.0, 3.0]), np.array([0, 1, 2]), group_S=np.array([0, 1]))
    >>> round(stats.ess()["inf"], 12)  # 4^2 / (2 x 10)
    0.8
    """

    __slots__ = (
        "_action", "_action_name", "_horizons", "_kl", "_logw_pieces", "_num_full", "_num_waiting", "_positions",
        "_sums", "_waiting", "action_horizon", "num_censored", "num_rows", "num_tokens",
    )  # fmt: skip

    def __init__(self, action_horizon: int = 32) -> None:
        self.action_horizon = action_horizon
        self.num_rows = 0
        self.num_tokens = 0
        self.num_censored = 0
        self._action_name = rung_name(action_horizon)
        self._horizons = sorted({*HORIZONS, action_horizon} - {1})
        self._sums = {name: EssSums() for name in (*RUNGS, self._action_name)}
        self._num_full = dict.fromkeys(self._sums, 0)
        self._action = ActionSums()
        self._kl = KlSums()
        self._positions = PositionSums()
        self._logw_pieces: list[F64] = []
        self._waiting: list[Rows] = []
        self._num_waiting = 0

    def add(
        self,
        lag_N: F64,
        offsets_S1: I64,
        *,
        group_S: I64,
        age_N: I64 | None = None,
        span_start_K: I64 | None = None,
        span_age_K: I64 | None = None,
        num_censored: int = 0,
    ) -> None:
        """Adds whole rows: [N] finite float64 lags without masked positions; rows without a token are left out.

        group_S: key of each row's prompt group. Ages (trainer version - token version, UNKNOWN_AGE where unknown):
        per token, or per span with ascending starts, the first 0; neither = all unknown. num_censored: how many of the
        rows were cut at the length limit. Raises ShapeError when lengths disagree.
        """
        rows = checked_rows(lag_N, offsets_S1, group_S, age_N, span_start_K, span_age_K)
        num = len(lag_N)
        if not num:
            return
        self.num_rows += len(rows.group_S)
        self.num_tokens += num
        self.num_censored += num_censored
        if num >= DIRECT_TOKENS:
            for first, last in row_chunks(rows.offsets_S1):
                self._add_rows(rows.cut(first, last))
            return
        if self._num_waiting + num > CHUNK_TOKENS:
            self._fold()
        self._waiting.append(rows.copy())
        self._num_waiting += num

    def _fold(self) -> Self:
        if self._waiting:
            rows = joined(self._waiting)
            self._waiting, self._num_waiting = [], 0
            self._add_rows(rows)
        return self

    def _add_rows(self, rows: Rows) -> None:
        """Adds rows by running products; where those leave their range, halves, and at last one row in log space."""
        if self._add_products(rows):
            return
        num = len(rows.group_S)
        if num == 1:
            self._add_log_row(rows)
            return
        self._add_rows(rows.cut(0, num // 2))
        self._add_rows(rows.cut(num // 2, num))

    def _add_products(self, rows: Rows) -> bool:
        """Adds the rows and returns True, or adds nothing and returns False where weights leave their range."""
        x_N, offsets_S1 = rows.lag_N, rows.offsets_S1
        products = _running_products(x_N)
        if products is None:
            return False
        e_N, w_N1, largest = products
        self._add_tokens(x_N, e_N, largest)
        inverse_S = 1.0 / w_N1[offsets_S1[:-1]]
        last_S = w_N1[offsets_S1[1:]] * inverse_S
        self._positions.add_weights(x_N, w_N1[1:], last_S, inverse_S, offsets_S1)
        self._add_whole(np.log(last_S))
        cut = blocks(offsets_S1, self._horizons)
        w_B = w_N1[cut.last_B]
        w_B /= w_N1[cut.first_B]
        self._add_action(cut, np.log(w_B[self._action_blocks(cut)]), rows)
        start_H = cut.start_R[:: len(last_S)]
        largest_H = np.maximum.reduceat(w_B, start_H)
        w_B /= np.repeat(largest_H, np.diff(start_H, append=len(w_B)))
        self._add_ladder(cut, start_H, np.log(largest_H), w_B)
        return True

    def _add_log_row(self, rows: Rows) -> None:
        """Adds one row of any finite lags in log space."""
        x_N = rows.lag_N
        self._kl.merge(KlSums.of(x_N))
        self._sums["1"].merge(EssSums.of(x_N))
        self._num_full["1"] += len(x_N)
        logw_N = np.cumsum(x_N)
        self._positions.add_log(x_N, logw_N)
        self._add_whole(logw_N[-1:].copy())
        cut = blocks(rows.offsets_S1, self._horizons)
        logw_B = sum_blocks(x_N, cut)
        self._add_action(cut, logw_B[self._action_blocks(cut)], rows)
        m_H = np.maximum.reduceat(logw_B, cut.start_R)
        self._add_ladder(cut, cut.start_R, m_H, np.exp(logw_B - np.repeat(m_H, cut.num_R)))

    def _add_tokens(self, x_N: F64, e_N: F64, largest: float) -> None:
        """Adds ESS_1 and the KL sums from e = expm1(lag), which is overwritten; largest = the largest exp(lag)."""
        num, sum_e, sum_e2 = len(x_N), float(np.add.reduce(e_N)), dot(e_N, e_N)
        cross = dot(e_N, x_N)
        e_N -= x_N
        k3_sum = float(np.add.reduce(e_N))
        self._kl.merge(KlSums(num, float(np.add.reduce(x_N)), 0.0, k3_sum, cross - k3_sum))
        self._num_full["1"] += num
        if num + sum_e < _CANCELLED * num:
            self._sums["1"].merge(EssSums.of(x_N))
            return
        s1, s2 = (num + sum_e) / largest, (num + 2.0 * sum_e + sum_e2) / (largest * largest)
        self._sums["1"].merge(EssSums(math.log(largest), s1, s2, num))

    def _add_whole(self, logw_S: F64) -> None:
        self._sums["inf"].merge(EssSums.of(logw_S))
        self._num_full["inf"] += len(logw_S)
        self._logw_pieces.append(logw_S)

    def _add_ladder(self, cut: Blocks, start_H: I64, m_H: F64, w_B: F64) -> None:
        """Adds block weights relative to exp(m_H), which are overwritten."""
        s1_H = np.add.reduceat(w_B, start_H)
        w_B *= w_B
        s2_H = np.add.reduceat(w_B, start_H)
        num_H = np.diff(start_H, append=len(w_B))
        values = (array.tolist() for array in (m_H, s1_H, s2_H, num_H, cut.num_full_H))
        for horizon, m, s1, s2, num, num_full in zip(self._horizons, *values, strict=True):
            self._sums[str(horizon)].merge(EssSums(m, s1, s2, num))
            self._num_full[str(horizon)] += num_full

    def _action_pairs(self, cut: Blocks) -> slice:
        """Which pairs of horizon and row are of the action horizon; none when it is 1, whose blocks are the tokens."""
        if self.action_horizon == 1:
            return slice(0, 0)
        num_rows = len(cut.num_R) // len(self._horizons)
        first = self._horizons.index(self.action_horizon) * num_rows
        return slice(first, first + num_rows)

    def _action_blocks(self, cut: Blocks) -> slice:
        pairs = self._action_pairs(cut)
        if not pairs.stop:
            return slice(0, 0)
        return slice(int(cut.start_R[pairs.start]), int(cut.start_R[pairs.stop - 1] + cut.num_R[pairs.stop - 1]))

    def _add_action(self, cut: Blocks, logw_B: F64, rows: Rows) -> None:
        """Adds the action horizon's block log weights to groups and ages."""
        if self.action_horizon == 1:
            first_B = np.arange(len(rows.lag_N), dtype=np.int64)
            num_S, last_B, logw_B = np.diff(rows.offsets_S1), first_B + 1, rows.lag_N.copy()
        else:
            where = self._action_blocks(cut)
            num_S, first_B, last_B = cut.num_R[self._action_pairs(cut)], cut.first_B[where], cut.last_B[where]
        self._action.add(logw_B, num_S, rows.group_S, rows.block_ages(num_S, first_B, last_B))

    def merge(self, other: LagStats) -> Self:
        """Self, which now also holds what `other` holds; `other` keeps its values.

        Raises ValueError where the action horizons differ.
        """
        if other.action_horizon != self.action_horizon:
            raise ValueError(
                f"LagStats.merge: action horizons differ, {self.action_horizon} and {other.action_horizon} tokens; "
                f"block sums of different horizons cannot be pooled"
            )
        other._fold()
        self.num_rows += other.num_rows
        self.num_tokens += other.num_tokens
        self.num_censored += other.num_censored
        for name, sums in other._sums.items():
            self._sums[name].merge(sums)
            self._num_full[name] += other._num_full[name]
        self._action.merge(other._action)
        self._kl.merge(other._kl)
        self._positions.merge(other._positions)
        self._logw_pieces.extend(other._logw_pieces)
        return self

    @property
    def action_ess(self) -> float:
        """ESS (0..1) at the action horizon; nan when empty."""
        return self._fold()._sums[self._action_name].ratio

    @property
    def action_blocks(self) -> int:
        """Number of blocks at the action horizon."""
        return self._fold()._sums[self._action_name].n

    def ess(self) -> dict[str, float]:
        """ESS (0..1) by rung, "1" to "inf"; nan when empty."""
        self._fold()
        return {name: self._sums[name].ratio for name in RUNGS}

    def num_blocks(self) -> dict[str, int]:
        """Number of blocks by rung."""
        self._fold()
        return {name: self._sums[name].n for name in RUNGS}

    def coverage(self) -> dict[str, float]:
        """Share (0..1) of blocks as long as their rung asks; "inf" = 1, a whole row is all of it; nan when empty."""
        return {name: self._num_full[name] / n if n else math.nan for name, n in self.num_blocks().items()}

    def half_horizon(self) -> float:
        """`ess.half_horizon` of the window's ladder and coverage; nan when empty."""
        return half_horizon(self.ess(), self.coverage())

    def by_age(self) -> dict[int, float]:
        """ESS (0..1) at the action horizon by the age of a block's oldest token, ascending; unknown ages left out."""
        sums = self._fold()._action.by_age()
        return {age: sums[age].ratio for age in sorted(sums) if age != UNKNOWN_AGE}

    def group_sums(self) -> GroupSums:
        """Weight sums at the action horizon by prompt group, for `ess_interval`."""
        return self._fold()._action.groups()

    def kl(self) -> KlValues:
        """KL values in nats, all nan when empty."""
        self._fold()
        logw_S = np.concatenate(self._logw_pieces) if self._logw_pieces else np.zeros(0)
        return KlValues.of(self._kl, self._positions.value(), logw_S, self.num_censored)


def _running_products(x_N: F64) -> tuple[F64, F64, float] | None:
    """(expm1(x), running products of exp(x) after a leading 1, largest exp(x)); None where one leaves its range."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        e_N = np.expm1(x_N)
        w_N1 = np.empty(len(x_N) + 1)
        w_N1[0] = 1.0
        r_N = w_N1[1:]
        np.add(e_N, 1.0, out=r_N)
        smallest, largest = float(np.minimum.reduce(r_N)), float(np.maximum.reduce(r_N))
        if smallest < _SMALL_RATIO:
            low = np.flatnonzero(r_N < _SMALL_RATIO)
            r_N[low] = np.exp(x_N[low])
        np.multiply.accumulate(r_N, out=r_N)
        in_range = np.minimum.reduce(r_N) > 1.0 / _RANGE and max(np.maximum.reduce(r_N), largest) < _RANGE
    return (e_N, w_N1, largest) if in_range else None
