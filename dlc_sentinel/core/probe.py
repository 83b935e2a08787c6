"""A step's rows as diagnosis looks into them: numbers of every row, and a sample and the worst rows whole.

Which rows are kept, their own content says, so that order and chunking change nothing. Taken from first updates.
Axes: S rows, T tokens of one row, W rows kept whole.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, fields

import numpy as np

from dlc_sentinel.core.tokens import Tokens
from dlc_sentinel.maths.arrays import dot
from dlc_sentinel.maths.cells import mixed
from dlc_sentinel.records import F32, F64, I64, Bool, Json

SAMPLE_TOKENS, SAMPLE_ROWS = 1 << 14, 8
"""A step's sample, where there are many more: about so many tokens, or rows where these are long."""
MOST_TIMES = 8
"""More than so many times that is thinned at once: the first step of a run does not know how large it will be."""
WORST_ROWS = 16
MAX_ROW_TOKENS = 32768
"""Of a longer row its beginning is kept."""
STRIDE = 8
"""Long records are measured at every eighth token."""
STRIDE_TOKENS = 8192
MIN_STRIDED_ROW = 256
UNSURE_NATS = -0.05


@dataclass(frozen=True, slots=True)
class WholeRow:
    """One row kept whole: the three streams of its usable tokens, nats, and their places in the response."""

    engine_T: F32
    trainer_T: F32
    """At the generator's weights where the probe is of exact rows, else now."""
    current_T: F32
    place_T: I64
    age: int
    """Of its first span; UNKNOWN_AGE where no version was given."""
    replica: str
    cached: bool
    """Its prompt came from the engine's prefix cache."""

    @property
    def x_T(self) -> F64:
        """trainer - engine, nats."""
        return self.trainer_T.astype(np.float64) - self.engine_T

    @property
    def rms(self) -> float:
        """Of trainer - engine, nats."""
        return math.sqrt(float(np.mean(self.x_T**2)))


@dataclass(frozen=True, slots=True)
class RowTable:
    """Numbers of every row of the step, [S] each."""

    mean_sq_S: F64
    """Of trainer - engine, nats^2."""
    num_S: I64
    unsure_S: I64
    """Tokens of which the engine was not sure: numerics move hardly any other."""
    group_S: I64
    replica_S: I64
    """Index into `replicas`."""
    last_engine_S: F32
    last_trainer_S: F32
    first_engine_S: F32
    first_trainer_S: F32
    replicas: tuple[str, ...]


COLUMNS = tuple(entry.name for entry in fields(RowTable) if entry.name != "replicas")


class Probe:
    """Collects rows of one step, all exact or all not; `thin`: of the rows one in 2**thin is sampled."""

    def __init__(self, thin: int, *, exact: bool) -> None:
        self.exact = exact
        self._thin = thin
        self._sample: list[tuple[int, WholeRow]] = []
        self._is_sorted = True
        self._worst: list[tuple[float, int, int, WholeRow]] = []
        self._pieces: list[tuple[F64 | F32 | I64 | Bool, ...]] = []
        self._replicas: dict[str, int] = {}
        self._num_sampled = 0
        self._serial = 0

    def add(self, tokens: Tokens, x_N: F64, trainer_N: F32, which_S: Bool) -> None:
        """Takes the chosen rows; x = trainer - engine, nats, of all tokens."""
        assert tokens.cur_N is not None
        offsets_S1 = tokens.offsets_S1
        first_S, last_S = offsets_S1[:-1], offsets_S1[1:] - 1
        mean_sq_S = _mean_squares(x_N, offsets_S1)
        replica = self._replicas.setdefault(tokens.replica, len(self._replicas))
        ends = (tokens.engine_N[last_S], trainer_N[last_S], tokens.engine_N[first_S], trainer_N[first_S])
        unsure_S = np.add.reduceat(tokens.engine_N < UNSURE_NATS, first_S, dtype=np.int64)
        columns = (
            mean_sq_S, np.diff(offsets_S1), unsure_S, tokens.group_S,
            np.full(len(which_S), replica), *ends,
        )  # fmt: skip
        self._pieces.append(tuple(column[which_S] for column in columns))
        draw_S = mixed(tokens.group_S.view(np.uint64))
        for end_S in ends:
            # of all four: a hand-made last token is the same in every row
            draw_S = mixed(end_S.view(np.uint32).astype(np.uint64) ^ draw_S)
        take_S = which_S & (draw_S >> np.uint64(64 - self._thin) == 0) if self._thin else which_S
        least = self._worst[0][0] if len(self._worst) >= WORST_ROWS else -1.0
        age_S = _ages(tokens)
        for row in np.flatnonzero(which_S & (take_S | (mean_sq_S >= least))).tolist():
            kept = _whole(tokens, trainer_N, row, int(age_S[row]))
            if take_S[row] and int(draw_S[row]) >> (64 - self._thin) == 0:
                self._sample.append((int(draw_S[row]), kept))
                self._is_sorted = False
                self._num_sampled += len(kept.engine_T)
                self._thin_out()
            self._serial += 1
            entry = (float(mean_sq_S[row]), int(draw_S[row]), self._serial, kept)
            if len(self._worst) < WORST_ROWS:
                heapq.heappush(self._worst, entry)
            else:
                heapq.heappushpop(self._worst, entry)

    def _thin_out(self) -> None:
        """Halves a sample that is far too large. What is left is the same in any order of the rows."""
        while self._num_sampled > MOST_TIMES * SAMPLE_TOKENS and len(self._sample) > MOST_TIMES * SAMPLE_ROWS:
            self._thin += 1
            self._sample = [entry for entry in self._sample if entry[0] >> (64 - self._thin) == 0]
            self._num_sampled = sum(len(row.engine_T) for _, row in self._sample)

    def __bool__(self) -> bool:
        """True once it has a row."""
        return bool(self._pieces)

    @property
    def thin_next(self) -> int:
        """`thin` with which a step like this one gives about SAMPLE_TOKENS."""
        return min(
            thinned(self._num_sampled << self._thin, SAMPLE_TOKENS),
            thinned(len(self._sample) << self._thin, SAMPLE_ROWS),
        )

    def sample(self) -> list[WholeRow]:
        """The sampled rows, in an order of their content."""
        if not self._is_sorted:
            self._sample.sort(key=lambda pair: (pair[0], len(pair[1].engine_T)))
            self._is_sorted = True
        return [row for _, row in self._sample]

    def worst(self) -> list[WholeRow]:
        """The rows with the largest mean square, worst first."""
        return [entry[3] for entry in sorted(self._worst, key=lambda entry: (-entry[0], entry[1]))]

    def table(self) -> RowTable:
        """Numbers of all rows."""
        parts = zip(*self._pieces, strict=True)
        columns: dict[str, Json] = {name: np.concatenate(of) for name, of in zip(COLUMNS, parts, strict=False)}
        self._pieces = [tuple(columns.values())] if columns else []
        if not columns:
            none, zero = np.zeros(0, np.float32), np.zeros(0, np.int64)
            return RowTable(np.zeros(0), zero, zero, zero, zero, none, none, none, none, ())
        return RowTable(**columns, replicas=tuple(self._replicas))


def thinned(num: int, wanted: int) -> int:
    """How often to halve a number so that about the wanted one is left."""
    return max(math.ceil(math.log2(max(num, 1) / wanted)), 0)


def _mean_squares(x_N: F64, offsets_S1: I64) -> F64:
    """Mean of x^2 of each row; of long records at every STRIDE-th token."""
    num_rows, num = len(offsets_S1) - 1, len(x_N)
    if num_rows == 1:
        x_M = x_N[:: STRIDE if num > STRIDE_TOKENS else 1]
        return np.array([dot(x_M, x_M) / len(x_M)])
    long_rows = num > STRIDE_TOKENS and int((offsets_S1[1:] - offsets_S1[:-1]).min()) >= MIN_STRIDED_ROW
    stride = STRIDE if long_rows else 1
    start_S = -(-offsets_S1[:-1] // stride)
    x_M = x_N[::stride]
    mean_S: F64 = np.add.reduceat(x_M * x_M, start_S) / (np.append(start_S[1:], len(x_M)) - start_S)
    return mean_S


def _ages(tokens: Tokens) -> I64:
    """Age of each row's first span."""
    first_S = np.searchsorted(tokens.span_row_K, np.arange(len(tokens.group_S)))
    return tokens.span_age_K[first_S]


def _whole(tokens: Tokens, trainer_N: F32, row: int, age: int) -> WholeRow:
    assert tokens.cur_N is not None
    start, end = int(tokens.offsets_S1[row]), int(tokens.offsets_S1[row + 1])
    part = slice(start, min(end, start + MAX_ROW_TOKENS))
    place_T = tokens.places(row)[: part.stop - part.start]
    streams = (tokens.engine_N[part].copy(), trainer_N[part].copy(), tokens.cur_N[part].copy())
    return WholeRow(*streams, place_T, age, tokens.replica, tokens.cached)
