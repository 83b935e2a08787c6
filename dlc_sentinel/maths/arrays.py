"""Array types of the maths floor, and the one rule by which packed rows are cut into cache-sized chunks.

Axes: S sequences (rows), N tokens packed over them, K spans, B blocks. `offsets_S1` has S + 1 ascending entries from 0
to N: row i owns tokens offsets[i]:offsets[i+1].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import ShapeError

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
Bool: TypeAlias = NDArray[np.bool_]

CHUNK_TOKENS: Final = 65536
"""Tokens worked on at a time: few enough for the cache, enough to make the cost of a numpy call small."""

DIRECT_TOKENS: Final = CHUNK_TOKENS // 2
"""Pieces of at least this many tokens are worked on at once; smaller ones wait until they fill a chunk together."""

_PRIMER_BYTES: Final = 16 << 20
_DOT_PIECE: Final = 8192

UNKNOWN_AGE: Final = int(np.iinfo(np.int64).max)
"""Age of a token whose generator version is not known: older than any age, never published as one."""


def check_offsets(offsets_S1: I64, num_tokens: int, what: str) -> None:
    """Returns nothing; raises ShapeError unless the offsets ascend from 0 to `num_tokens`."""
    if len(offsets_S1) == 0 or offsets_S1[0] != 0 or offsets_S1[-1] != num_tokens or np.any(np.diff(offsets_S1) < 0):
        ends = (int(offsets_S1[0]), int(offsets_S1[-1])) if len(offsets_S1) else "no entry"
        raise ShapeError(
            f"{what}: offsets must ascend from 0 to the {num_tokens} tokens given, got ends {ends} "
            f"in {len(offsets_S1)} entries; were masked positions removed from the streams but not from the offsets?"
        )


def row_chunks(offsets_S1: I64, num_tokens: int = CHUNK_TOKENS) -> Iterator[tuple[int, int]]:
    """Yields (first row, row after the last) of runs of whole rows, each of about `num_tokens` tokens.

    A row longer than that is a chunk of its own.
    """
    row, num_rows = 0, len(offsets_S1) - 1
    while row < num_rows:
        end = int(np.searchsorted(offsets_S1, offsets_S1[row] + num_tokens, side="right")) - 1
        end = min(max(end, row + 1), num_rows)
        yield row, end
        row = end


def prime_allocator() -> None:
    """Returns nothing; makes glibc keep freed chunk arrays, which it would otherwise give back and fault in again.

    Freeing one large array raises malloc's own limits for good (mallopt(3), M_MMAP_THRESHOLD). Called once by a process
    that adds for long; measured: 15 ns less per token. Other allocators are unaffected.
    """
    np.ones(_PRIMER_BYTES // 8)


def dot(x_N: F64, y_N: F64) -> float:
    """Sum of x y.

    In pieces short enough that BLAS stays on the calling thread: no CPU burnt by idle helpers, and the same rounding
    whatever the number of threads.
    """
    if len(x_N) <= _DOT_PIECE:
        return float(np.dot(x_N, y_N))
    ends = range(0, len(x_N), _DOT_PIECE)
    return float(sum(float(np.dot(x_N[a : a + _DOT_PIECE], y_N[a : a + _DOT_PIECE])) for a in ends))
