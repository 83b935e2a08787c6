"""What must hold inside a rollout or train record before anyone may compute with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.records import I64, Rollout, Train

_PER_SEQUENCE = ("token_offset_S", "final_S", "cached_tokens_S", "old_version_S", "advantage_S")
_PER_TOKEN = ("logprobs_N", "cur_N", "old_N", "engine_N", "mask_N", "tokens_N")
_TEXTS = ("finish", "sampling", "groups", "segments")


def check(record: Rollout | Train) -> None:
    """Nothing, or ShapeError with the numbers: offsets ascend, all fields have one length, spans tile the tokens."""
    num_sequences = len(record.ids)
    num_tokens = check_offsets(record.offsets_S1, num_sequences)
    for name in _PER_SEQUENCE:
        _size(record, name, num_sequences, "sequences")
    for name in _PER_TOKEN:
        _size(record, name, num_tokens, "tokens")
    for name in _TEXTS:
        values = getattr(record, name, ())
        if values and len(values) != num_sequences:
            raise ShapeError(f"{name} has {len(values)} entries for {num_sequences} sequences")
    offset_S = record.token_offset_S
    if offset_S is not None and num_sequences and int(offset_S.min()) < 0:
        raise ShapeError(f"token_offset_S holds {int(offset_S.min())}; a position is never negative")
    _check_spans(record, num_tokens)


def check_offsets(offsets_S1: I64, num_sequences: int) -> int:
    """Number of tokens. Raises: ShapeError unless the S + 1 offsets start at 0 and never fall."""
    if offsets_S1.shape != (num_sequences + 1,):
        raise ShapeError(f"{offsets_S1.size} offsets for {num_sequences} sequences; wanted {num_sequences + 1}")
    if offsets_S1[0] != 0:
        raise ShapeError(f"offsets start at {int(offsets_S1[0])}, not 0")
    if bool((offsets_S1[1:] < offsets_S1[:-1]).any()):
        raise ShapeError("offsets fall somewhere; they must ascend")
    return int(offsets_S1[-1])


def _size(record: Rollout | Train, name: str, wanted: int, of: str) -> None:
    array: NDArray[Any] | None = getattr(record, name, None)
    if array is not None and array.shape != (wanted,):
        raise ShapeError(f"{name} has shape {array.shape} for {wanted} {of}")


def _check_spans(record: Rollout | Train, num_tokens: int) -> None:
    start_K, version_K = record.span_start_K, record.span_version_K
    if start_K is None or version_K is None:
        if start_K is not version_K:
            raise ShapeError("span_start_K and span_version_K come together or not at all")
        return
    if start_K.shape != version_K.shape or start_K.ndim != 1:
        raise ShapeError(f"{start_K.size} span starts for {version_K.size} span versions")
    if version_K.size and int(version_K.min()) < -1:
        raise ShapeError(f"a span has version {int(version_K.min())}; -1 is the only negative one (unknown)")
    if num_tokens == 0:
        if start_K.size:
            raise ShapeError(f"{start_K.size} spans over no tokens")
        return
    if start_K.size == 0 or start_K[0] != 0 or int(start_K[-1]) >= num_tokens:
        raise ShapeError(f"spans must start at token 0 and end before token {num_tokens}")
    if bool((start_K[1:] <= start_K[:-1]).any()):
        raise ShapeError("span starts must ascend strictly")
    first_S = record.offsets_S1[:-1][record.offsets_S1[1:] > record.offsets_S1[:-1]]
    if not np.array_equal(start_K[np.searchsorted(start_K, first_S).clip(max=start_K.size - 1)], first_S):
        raise ShapeError("a sequence does not start a span; a span never crosses sequences")
