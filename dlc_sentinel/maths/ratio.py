"""Log ratios of aligned logprobs, their exact split into lag and discrepancy, and removal of masked positions.

    total = cur - engine = [cur - old] lag + [old - engine] discrepancy

`old` must be the trainer at the weights that generated the token; then the split is exact. Always trainer minus engine,
later minus earlier; nats. Axes: S rows, N packed tokens, M packed tokens that were kept, K spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import F32, F64, I64, Bool

__all__ = ["Split", "compress", "log_ratio", "remap", "split"]

ArrayT = TypeVar("ArrayT", bound=NDArray[Any])  # a generic element type: any dtype goes through unchanged

RUN_TOKENS = 512
"""Mean run of kept tokens from which copying slices beats gathering single tokens (measured)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The three log ratios of the same tokens, [N] float64, nats; lag + disc = total to rounding."""

    lag_N: F64
    disc_N: F64
    total_N: F64


def log_ratio(later_N: F32 | F64, earlier_N: F32 | F64) -> F64:
    """later - earlier in nats, [N] float64.

    Exact for float32 input whose values lie within 2**29 of each other. Raises ShapeError if the lengths differ.
    """
    _same_length("log_ratio", later_N, earlier_N)
    out_N: F64 = np.array(later_N, dtype=np.float64)
    out_N -= np.asarray(earlier_N, dtype=np.float64)
    return out_N


def split(cur_N: F32 | F64, old_N: F32 | F64, engine_N: F32 | F64) -> Split:
    """lag, discrepancy and total of each token, nats, float64.

    cur: trainer now; old: trainer at the generator's weights; engine: the engine when it generated; [N] logprobs of
    the sampled tokens, finite. Raises ShapeError if the lengths differ. Source: the identity in the module's docstring.
    """
    _same_length("split", cur_N, old_N, engine_N)
    cur64_N = np.asarray(cur_N, dtype=np.float64)
    old64_N = np.asarray(old_N, dtype=np.float64)
    engine64_N = np.asarray(engine_N, dtype=np.float64)
    return Split(lag_N=cur64_N - old64_N, disc_N=old64_N - engine64_N, total_N=cur64_N - engine64_N)


def compress(mask_N: Bool, offsets_S1: I64, *streams_N: ArrayT) -> tuple[I64, tuple[ArrayT, ...]]:
    """(offsets_S1, streams_M) without the positions where the mask is False; order kept, gaps closed.

    Every row stays, possibly with no token. With a mask that keeps everything the inputs themselves come back, not
    copies. Raises ShapeError if a stream's length is not the mask's.
    """
    _same_length("compress", mask_N, *streams_N)
    if bool(mask_N.all()):
        return offsets_S1, streams_N
    num_edges = int(np.count_nonzero(mask_N[1:] != mask_N[:-1]))
    if num_edges * RUN_TOKENS <= 2 * len(mask_N):
        starts_R, ends_R = _runs(mask_N)
        runs = list(zip(starts_R.tolist(), ends_R.tolist(), strict=True))
        return _kept_before(starts_R, ends_R, offsets_S1), tuple(_join_runs(stream_N, runs) for stream_N in streams_N)
    index_M = np.flatnonzero(mask_N)
    kept_S1 = np.searchsorted(index_M, offsets_S1).astype(np.int64, copy=False)
    return kept_S1, tuple(stream_N.take(index_M) for stream_N in streams_N)  # type: ignore[misc]  # take keeps the type


def remap(mask_N: Bool, starts_K: I64) -> I64:
    """Span starts [K] in the packing that `compress` leaves: the number of kept tokens before each start.

    A span that lost all its tokens gets the start of the next one; readers take the last of equal starts.
    """
    starts_R, ends_R = _runs(mask_N)
    return _kept_before(starts_R, ends_R, starts_K)


def _runs(mask_N: Bool) -> tuple[I64, I64]:
    """First and past-the-end positions of the runs of True."""
    edges = np.flatnonzero(mask_N[1:] != mask_N[:-1]) + 1
    if len(mask_N) and mask_N[0]:
        edges = np.concatenate(([0], edges))
    if len(mask_N) and mask_N[-1]:
        edges = np.concatenate((edges, [len(mask_N)]))
    return edges[0::2].astype(np.int64, copy=False), edges[1::2].astype(np.int64, copy=False)


def _kept_before(starts_R: I64, ends_R: I64, index_K: I64) -> I64:
    """Number of True positions before each index, from the runs."""
    if not len(starts_R):
        return np.zeros(len(index_K), dtype=np.int64)
    before_R1 = np.concatenate(([0], np.cumsum(ends_R - starts_R)))
    run_K = np.searchsorted(starts_R, index_K, side="right") - 1
    inside_K = np.minimum(index_K, ends_R[run_K]) - starts_R[run_K]
    out_K: I64 = np.where(run_K < 0, 0, before_R1[run_K] + inside_K)
    return out_K


def _join_runs(stream_N: ArrayT, runs: list[tuple[int, int]]) -> ArrayT:
    if not runs:
        return stream_N[:0]  # type: ignore[return-value]  # a slice keeps dtype
    out_M: ArrayT = np.concatenate([stream_N[start:end] for start, end in runs])
    return out_M


def _same_length(where: str, *arrays: NDArray[Any]) -> None:
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise ShapeError(f"{where}: all arrays must have one length, got {lengths}; pass packed streams of one record")
