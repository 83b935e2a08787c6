"""Rows whose lag is not known apart from the discrepancy: sums of their total ratio, for `calibrate`.

Every rung of the ladder keeps a signed sketch of its block sums; at the action horizon the block sums themselves are
kept too (float32, with their prompt groups), for the bootstrap. There may be MAX_BLOCKS of those: beyond, rows are left
out of the bootstrap, told by their own content, and the interval gets wider, never narrower.
Axes: S rows, N packed tokens, B blocks, C cells, G prompt groups.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import CHUNK_TOKENS, DIRECT_TOKENS, F32, F64, I64, Bool, check_offsets, row_chunks
from dlc_sentinel.maths.cells import NUM_CELLS, binned, cell_index, mixed
from dlc_sentinel.maths.ess import HORIZONS, RUNGS, blocks, rung_name, sum_blocks
from dlc_sentinel.maths.signed import SignedSketch

__all__ = ["StaleRows"]

U64: TypeAlias = NDArray[np.uint64]

MAX_BLOCKS: Final = 1 << 22
MIN_ROWS: Final = 64
"""Rows are not left out below this many, however long they are."""

MAX_PENDING: Final = 64
MAX_RATE: Final = 32


class _Rows(NamedTuple):
    total_N: F64
    engine_N: F64
    position_N: I64
    length_S: I64
    group_S: I64

    def cut(self, first: int, last: int, offsets_S1: I64) -> _Rows:
        tokens = slice(int(offsets_S1[first]), int(offsets_S1[last]))
        streams = self.total_N[tokens], self.engine_N[tokens], self.position_N[tokens]
        return _Rows(*streams, self.length_S[first:last], self.group_S[first:last])

    def copy(self) -> _Rows:
        streams = self.total_N.copy(), self.engine_N.copy(), self.position_N.copy()
        return _Rows(*streams, self.length_S.copy(), self.group_S.copy())


class Kept(NamedTuple):
    """Rows of the bootstrap, ordered by group: [S] each, and the block sums of all of them, nats."""

    group_S: I64
    num_tokens_S: I64
    num_blocks_S: I64
    sum_sq_S: F64
    """Sum of squares of the row's token totals, nats^2."""
    block_B: F32

    def taken(self, which_S: Bool | I64, block_B: F32) -> Kept:
        """The rows picked, with the block sums given."""
        parts = self.group_S[which_S], self.num_tokens_S[which_S], self.num_blocks_S[which_S], self.sum_sq_S[which_S]
        return Kept(*parts, block_B)


class StaleRows:
    """Mergeable statistics of total = trainer now - engine (nats) over whole rows; merge = concatenation, order-free.

    `action_horizon`: block length in tokens of the rung for which an interval is wanted.
    """

    __slots__ = (
        "_count_C", "_k3", "_kept", "_lengths", "_num_full", "_num_waiting", "_rate", "_sketches", "_sum2_C",
        "_sum4_C", "_waiting", "action_horizon", "num_rows", "num_tokens",
    )  # fmt: skip

    def __init__(self, action_horizon: int = 32) -> None:
        self.action_horizon = action_horizon
        self.num_rows = 0
        self.num_tokens = 0
        names = dict.fromkeys((*RUNGS, rung_name(action_horizon)))
        self._sketches = {name: SignedSketch() for name in names}
        self._lengths = dict.fromkeys(names, 0)
        self._num_full = dict.fromkeys(names, 0)
        self._count_C, self._sum2_C, self._sum4_C = np.zeros(NUM_CELLS), np.zeros(NUM_CELLS), np.zeros(NUM_CELLS)
        self._k3 = 0.0
        self._kept: list[tuple[U64, Kept]] = []
        self._rate = 0
        """One row in 2**rate is kept for the bootstrap."""
        self._waiting: list[_Rows] = []
        self._num_waiting = 0

    def add(self, total_N: F64, engine_N: F32 | F64, position_N: I64, offsets_S1: I64, group_S: I64) -> None:
        """Adds whole rows: [N] finite totals, the engine's logprobs, places in the response; [S] keys of prompt groups.

        Masked positions are left out of all of them. Raises ShapeError when lengths disagree.
        """
        check_offsets(offsets_S1, len(total_N), "StaleRows.add")
        if len(engine_N) != len(total_N) or len(position_N) != len(total_N) or len(group_S) != len(offsets_S1) - 1:
            raise ShapeError(
                f"StaleRows.add: {len(engine_N)} engine logprobs and {len(position_N)} positions for {len(total_N)} "
                f"tokens, {len(group_S)} group keys for {len(offsets_S1) - 1} rows; give one each"
            )
        length_S = np.diff(offsets_S1)
        filled_S = length_S > 0
        if not filled_S.all():
            length_S, group_S = length_S[filled_S], group_S[filled_S]
        if not len(length_S):
            return
        self.num_rows += len(length_S)
        self.num_tokens += len(total_N)
        rows = _Rows(total_N, engine_N.astype(np.float64, copy=False), position_N, length_S, group_S)
        if len(total_N) >= DIRECT_TOKENS:
            starts = np.concatenate(([0], np.cumsum(length_S)))
            for first, last in row_chunks(starts, CHUNK_TOKENS):
                self._add_rows(rows.cut(first, last, starts))
            return
        if self._num_waiting + len(total_N) > CHUNK_TOKENS:
            self._fold()
        self._waiting.append(rows.copy())
        self._num_waiting += len(total_N)

    def _fold(self) -> Self:
        if self._waiting:
            rows = _Rows(*(np.concatenate(parts) for parts in zip(*self._waiting, strict=True)))
            self._waiting, self._num_waiting = [], 0
            self._add_rows(rows)
        return self

    def _add_rows(self, rows: _Rows) -> None:
        total_N, length_S = rows.total_N, rows.length_S
        square_N = total_N * total_N
        cell_N = cell_index(rows.engine_N, rows.position_N)
        self._count_C += binned(cell_N, None, NUM_CELLS)
        self._sum2_C += binned(cell_N, square_N, NUM_CELLS)
        self._sum4_C += binned(cell_N, square_N * square_N, NUM_CELLS)
        with np.errstate(over="ignore"):
            self._k3 += float(np.add.reduce(np.expm1(total_N) - total_N))
        starts = np.concatenate(([0], np.cumsum(length_S)))
        sums = {"1": total_N}
        for horizon in sorted({*HORIZONS, self.action_horizon} - {1}):
            sums[rung_name(horizon)] = sum_blocks(total_N, blocks(starts, [horizon]))
        sums["inf"] = np.add.reduceat(total_N, starts[:-1])
        for name, sums_B in sums.items():
            self._sketches[name].add(sums_B)
            self._measure(name, length_S)
        self._keep(rows, square_N, starts, sums[rung_name(self.action_horizon)])

    def _measure(self, name: str, length_S: I64) -> None:
        """Counts full blocks and the tokens of all blocks of a rung, those of overlaps twice."""
        if name == "inf":
            self._lengths[name] += int(length_S.sum())
            self._num_full[name] += len(length_S)
            return
        horizon = int(name)
        num_S, full_S = -(-length_S // horizon), length_S >= horizon
        self._lengths[name] += int(np.where(full_S, num_S * horizon, length_S).sum())
        self._num_full[name] += int(num_S[full_S].sum())

    def _keep(self, rows: _Rows, square_N: F64, starts: I64, sums_B: F64) -> None:
        num_S = -(-rows.length_S // self.action_horizon)
        sum_sq_S = np.add.reduceat(square_N, starts[:-1])
        kept = Kept(rows.group_S, rows.length_S, num_S, sum_sq_S, sums_B.astype(np.float32))
        draw_S = mixed(sum_sq_S.view(np.uint64) ^ mixed(rows.group_S.view(np.uint64)))
        self._kept.append((draw_S, kept))
        if len(self._kept) > MAX_PENDING:
            self._kept = [self._joined()]

    def _joined(self) -> tuple[U64, Kept]:
        """(draw, rows) of everything kept, thinned to MAX_BLOCKS by halves."""
        draw_S = np.concatenate([draw for draw, _ in self._kept])
        kept = Kept(*(np.concatenate(parts) for parts in zip(*(piece for _, piece in self._kept), strict=True)))
        while True:
            take_S = draw_S >> np.uint64(64 - self._rate) == 0 if self._rate else np.ones(len(draw_S), np.bool_)
            few = np.count_nonzero(take_S) < 2 * MIN_ROWS or self._rate == MAX_RATE
            if few or kept.num_blocks_S[take_S].sum() <= MAX_BLOCKS:
                break
            self._rate += 1
        if take_S.all():
            return draw_S, kept
        return draw_S[take_S], kept.taken(take_S, kept.block_B[np.repeat(take_S, kept.num_blocks_S)])

    def merge(self, other: StaleRows) -> Self:
        """Self, which now also holds what `other` holds; `other` keeps its values.

        Raises ValueError when the two have different action horizons.
        """
        if other.action_horizon != self.action_horizon:
            raise ValueError(
                f"StaleRows.merge: horizons {self.action_horizon} and {other.action_horizon} differ; "
                f"was the configuration changed between two windows of one run?"
            )
        other._fold()
        self.num_rows += other.num_rows
        self.num_tokens += other.num_tokens
        self._count_C += other._count_C
        self._sum2_C += other._sum2_C
        self._sum4_C += other._sum4_C
        self._k3 += other._k3
        for name, sketch in self._sketches.items():
            sketch.merge(other._sketches[name])
            self._lengths[name] += other._lengths[name]
            self._num_full[name] += other._num_full[name]
        self._rate = max(self._rate, other._rate)
        self._kept += other._kept
        return self

    @property
    def second_moment(self) -> float:
        """Mean of total^2 over all tokens, nats^2; nan when empty."""
        return float(self._fold()._sum2_C.sum() / self.num_tokens) if self.num_tokens else math.nan

    @property
    def k3(self) -> float:
        """Mean of exp(total) - 1 - total over all tokens, nats; nan when empty."""
        return self._fold()._k3 / self.num_tokens if self.num_tokens else math.nan

    def cell_sums(self) -> tuple[F64, F64, F64]:
        """([C] tokens, sum of total^2, sum of total^4) of each cell."""
        self._fold()
        return self._count_C, self._sum2_C, self._sum4_C

    def sketch(self, rung: str) -> SignedSketch:
        """Block sums of total at a rung, nats."""
        return self._fold()._sketches[rung]

    def block_length(self, rung: str) -> float:
        """Mean number of tokens in a block of a rung; nan when empty."""
        num = self.sketch(rung).num
        return self._lengths[rung] / num if num else math.nan

    def num_blocks(self) -> dict[str, int]:
        """Number of blocks by rung."""
        return {name: self.sketch(name).num for name in RUNGS}

    def coverage(self) -> dict[str, float]:
        """Share (0..1) of blocks as long as their rung asks; "inf" = 1; nan when empty."""
        return {name: self._num_full[name] / n if n else math.nan for name, n in self.num_blocks().items()}

    def total_ess(self) -> dict[str, float]:
        """ESS (0..1) of the total ratio by rung, to the sketch's precision: a nearly safe lower bound of the lag's."""
        return {name: self.sketch(name).ess(1.0) for name in RUNGS}

    def kept(self) -> Kept:
        """The rows of the bootstrap, ordered by group, and by content within one."""
        self._fold()
        if not self._kept:
            none = np.zeros(0, np.int64)
            return Kept(none, none, none, np.zeros(0), np.zeros(0, np.float32))
        draw_S, rows = self._joined()
        self._kept = [(draw_S, rows)]
        order_S = np.lexsort((draw_S, rows.group_S))
        starts_S = (np.cumsum(rows.num_blocks_S) - rows.num_blocks_S)[order_S]
        num_S = rows.num_blocks_S[order_S]
        shift_S = starts_S - (np.cumsum(num_S) - num_S)
        block_B = rows.block_B[np.arange(len(rows.block_B)) + np.repeat(shift_S, num_S)]
        return rows.taken(order_S, block_B)
