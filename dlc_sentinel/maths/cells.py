"""The discrepancy's second moment by cell of (engine logprob, position in the response), from tokens without lag.

The cell's key is the engine's logprob and never the trainer's: the engine's is the same at every age, the trainer's
current one contains the lag. Rows keep their own sums, because a row is what varies as a whole: the bootstrap resamples
rows and the drift test compares them. Axes: S rows, N packed tokens, C = 36 cells (9 logp bins x 4 position bins),
R kept rows, D bootstrap draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import CHUNK_TOKENS, F32, F64, I64, check_offsets, row_chunks

__all__ = [
    "NUM_CELLS",
    "DiscrepancyCells",
    "by_logp",
    "cell_index",
    "drifted",
    "logp_bin",
    "moment_ratio",
    "row_positions",
    "second_moments",
]

LOGP_EDGES: Final = (-7.0, -5.0, -4.0, -3.0, -2.0, -1.0, -0.3, -0.05)
POSITION_EDGES: Final = (32, 96, 160)
NUM_LOGP: Final = len(LOGP_EDGES) + 1
NUM_POSITION: Final = len(POSITION_EDGES) + 1
NUM_CELLS: Final = NUM_LOGP * NUM_POSITION
PRIOR_TOKENS: Final = 50.0
"""Weight, in tokens, of its logp bin in a cell's moment, and of all tokens in a logp bin's."""

MAX_ROWS: Final = 4096
"""Rows kept apart; when there are more, they are added up in LOTS lots, so that a large step stays small."""
LOTS: Final = 1024

DRIFT_Z: Final = 3.0
DRIFT_RATIO: Final = 1.3
"""Both must be passed: with many rows a difference of no consequence is significant."""
_TINY: Final = 1e-300

Places: TypeAlias = NDArray[np.intp]
_Piece: TypeAlias = tuple[NDArray[np.uint64], F64, F64]


def mixed(bits_R: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same 64 bits stirred, so that any few of them are as good as a draw.

    Source: the finaliser of splitmix64, Steele, Lea and Flood 2014.
    """
    out_R: NDArray[np.uint64] = bits_R ^ (bits_R >> np.uint64(30))
    out_R *= np.uint64(0xBF58476D1CE4E5B9)
    out_R ^= out_R >> np.uint64(27)
    out_R *= np.uint64(0x94D049BB133111EB)
    out_R ^= out_R >> np.uint64(31)
    return out_R


def binned(place_N: Places, weight_N: F64 | None, size: int) -> F64:
    """Sum of the weights (1 each where there are none) at each place, [size] float64."""
    # numpy's stubs say int for weighted counts too
    return np.bincount(place_N, weight_N, size).astype(np.float64, copy=False)


def row_positions(offsets_S1: I64) -> I64:
    """Place of each packed token in its row, [N], from 0."""
    return np.arange(offsets_S1[-1], dtype=np.int64) - np.repeat(offsets_S1[:-1], np.diff(offsets_S1))


def logp_bin(logp_N: F32 | F64) -> Places:
    """Bin of each logprob by LOGP_EDGES, [N], 0..NUM_LOGP-1."""
    return np.searchsorted(np.asarray(LOGP_EDGES, logp_N.dtype), logp_N, side="right")


def cell_index(engine_N: F32 | F64, position_N: I64) -> Places:
    """Cell of each token, [N], 0..NUM_CELLS-1: logp bin x NUM_POSITION + position bin."""
    cell_N = np.zeros(len(engine_N), dtype=np.uint8)
    for edge in LOGP_EDGES:
        cell_N += engine_N >= edge
    cell_N *= NUM_POSITION
    for edge in POSITION_EDGES:
        cell_N += position_N >= edge
    return cell_N.astype(np.intp)


def by_logp(sum_C: F64) -> F64:
    """[NUM_LOGP] the same sums by logp bin alone, over all places."""
    sum_B: F64 = sum_C.reshape(NUM_LOGP, NUM_POSITION).sum(1)
    return sum_B


def second_moments(count_C: F64, sum2_C: F64) -> F64:
    """Shrunk second moment of each cell, nats^2, [..., C]; nan where there is no token at all.

    A cell is drawn to its logp bin and that to the mean of all tokens, each with the weight of PRIOR_TOKENS.
    """
    shape = (*count_C.shape[:-1], NUM_LOGP, NUM_POSITION)
    count, sum2 = count_C.reshape(shape), sum2_C.reshape(shape)
    row_count, row_sum2 = count.sum(-1, keepdims=True), sum2.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        mean = row_sum2.sum(-2, keepdims=True) / row_count.sum(-2, keepdims=True)
    row = (row_sum2 + PRIOR_TOKENS * mean) / (row_count + PRIOR_TOKENS)
    cells: F64 = (sum2 + PRIOR_TOKENS * row) / (count + PRIOR_TOKENS)
    return cells.reshape(count_C.shape)


@dataclass(slots=True)
class DiscrepancyCells:
    """Mergeable sums of d = trainer - engine at equal weights (nats), by cell and by row; merge = concatenation.

    Order-free: past MAX_ROWS rows, rows are added up in lots told by the rows' own content. Empty: moments are nan.
    """

    num_rows: int = 0
    """Rows added that have a token, in lots or not."""
    _sum4_C: F64 = field(default_factory=lambda: np.zeros(NUM_CELLS))
    _pieces: list[_Piece] = field(default_factory=list)
    _num_kept: int = 0

    def add(self, engine_N: F32 | F64, position_N: I64, d_N: F64, offsets_S1: I64) -> None:
        """Adds whole rows of lag-0 tokens: [N] the engine's logprobs, places in the response, d; all finite.

        Raises ShapeError when lengths disagree.
        """
        check_offsets(offsets_S1, len(d_N), "DiscrepancyCells.add")
        if len(engine_N) != len(d_N) or len(position_N) != len(d_N):
            raise ShapeError(
                f"DiscrepancyCells.add: {len(engine_N)} engine logprobs and {len(position_N)} positions for "
                f"{len(d_N)} tokens; give one each"
            )
        for first, last in row_chunks(offsets_S1, CHUNK_TOKENS):
            start, end = int(offsets_S1[first]), int(offsets_S1[last])
            if end > start:
                cell_N = cell_index(engine_N[start:end], position_N[start:end])
                self._add_rows(cell_N, d_N[start:end], np.diff(offsets_S1[first : last + 1]))

    def _add_rows(self, cell_N: Places, d_N: F64, length_S: I64) -> None:
        length_R = length_S[length_S > 0]
        num = len(length_R)
        square_N = d_N * d_N
        self._sum4_C += binned(cell_N, square_N * square_N, NUM_CELLS)
        place_N = np.repeat(np.arange(num) * NUM_CELLS, length_R) + cell_N
        size = num * NUM_CELLS
        count_RC = binned(place_N, None, size).reshape(num, NUM_CELLS)
        sum2_RC = binned(place_N, square_N, size).reshape(num, NUM_CELLS)
        self._keep(num, (mixed(sum2_RC.sum(1).view(np.uint64)) % LOTS, count_RC, sum2_RC))

    def _keep(self, num_rows: int, piece: _Piece) -> None:
        self.num_rows += num_rows
        self._num_kept += len(piece[0])
        self._pieces.append(piece)
        if len(self._pieces) > 64 or self._num_kept > 2 * MAX_ROWS:
            self._rows()

    def merge(self, other: DiscrepancyCells) -> Self:
        """Self, which now also holds what `other` holds; `other` is unchanged."""
        if other.num_rows:
            self._sum4_C = self._sum4_C + other._sum4_C
            self._keep(other.num_rows, other._rows())
        return self

    def _rows(self) -> _Piece:
        """(lot, tokens by cell, sums of squares by cell) of the rows, or of the lots once there are many rows."""
        if not self._pieces:
            return np.zeros(0, np.uint64), np.zeros((0, NUM_CELLS)), np.zeros((0, NUM_CELLS))
        if len(self._pieces) > 1 or (self.num_rows > MAX_ROWS and self._num_kept > LOTS):
            lot_R, count_RC, sum2_RC = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
            if self.num_rows > MAX_ROWS:
                lot_R, place_R = np.unique(lot_R, return_inverse=True)
                count_RC, sum2_RC = _added(count_RC, place_R), _added(sum2_RC, place_R)
            self._pieces, self._num_kept = [(lot_R, count_RC, sum2_RC)], len(lot_R)
        return self._pieces[0]

    @property
    def count_RC(self) -> F64:
        """Tokens of each row (or lot of rows) in each cell."""
        return self._rows()[1]

    @property
    def sum2_RC(self) -> F64:
        """Sum of d^2 of each row (or lot of rows) in each cell, nats^2."""
        return self._rows()[2]

    @property
    def count_C(self) -> F64:
        """Tokens in each cell."""
        count_C: F64 = self.count_RC.sum(0)
        return count_C

    @property
    def sum4_C(self) -> F64:
        """Sum of d^4 in each cell, nats^4."""
        return self._sum4_C

    @property
    def num_tokens(self) -> int:
        """Tokens added."""
        return int(self.count_C.sum())

    def second_moments(self) -> F64:
        """Shrunk second moment of each cell, nats^2, [C]; nan when empty."""
        return second_moments(self.count_C, self.sum2_RC.sum(0))

    def kurtosis(self) -> float:
        """Fourth moment of d / sqrt(moment of its cell), of which 3 is normal; nan when empty."""
        v_C, num = self.second_moments(), self.num_tokens
        return float((self._sum4_C / np.maximum(v_C * v_C, _TINY)).sum() / num) if num else math.nan


def moment_ratio(pool: DiscrepancyCells, current: DiscrepancyCells) -> float:
    """Second moment of the current rows over the pool's, cell by cell; nan when either has no row."""
    if not pool.num_rows or not current.num_rows:
        return math.nan
    v_C = pool.second_moments()
    return _mean_score(current, v_C) / max(_mean_score(pool, v_C), _TINY)


def drifted(pool: DiscrepancyCells, current: DiscrepancyCells) -> bool:
    """True when the current lag-0 rows are of another law than the pool's: another engine, or the engine changed.

    Compares the rows' log mean of d^2 / (the pool's moment of the cell): a normal test, and a ratio outside 1.3 of the
    moments themselves and of the middle rows, since one wild token makes no law. The spread of a row is never taken
    below what its number of tokens and the law's kurtosis make of it: three rows may lie close by luck. False when
    either has no row.
    """
    ratio = moment_ratio(pool, current)
    if math.isnan(ratio) or 1.0 / DRIFT_RATIO <= ratio <= DRIFT_RATIO:
        return False
    v_C = pool.second_moments()
    before_R, now_R = _row_scores(pool, v_C), _row_scores(current, v_C)
    per_row = pool.num_tokens / len(before_R)
    spread = math.sqrt(max(pool.kurtosis() - 1.0, 0.0) / per_row)
    if len(before_R) > 1:
        spread = max(spread, float(before_R.std(ddof=1)))
    error = spread * math.sqrt(1.0 / len(now_R) + 1.0 / len(before_R))
    middle = float(np.median(now_R) - np.median(before_R))
    if abs(middle) < math.log(DRIFT_RATIO):
        return False
    return abs(float(now_R.mean() - before_R.mean())) > DRIFT_Z * error


def _row_scores(cells: DiscrepancyCells, v_C: F64) -> F64:
    count_RC, sum2_RC = cells.count_RC, cells.sum2_RC
    mean_R = (sum2_RC / np.maximum(v_C, _TINY)).sum(1) / count_RC.sum(1)
    score_R: F64 = np.log(np.maximum(mean_R, _TINY))
    return score_R


def _mean_score(cells: DiscrepancyCells, v_C: F64) -> float:
    return float((cells.sum2_RC.sum(0) / np.maximum(v_C, _TINY)).sum() / cells.num_tokens)


def _added(x_RC: F64, place_R: Places) -> F64:
    """Rows with the same place added up."""
    out_LC = np.zeros((int(place_R.max()) + 1, NUM_CELLS))
    np.add.at(out_LC, place_R, x_RC)
    return out_LC
