"""Parts of a record that fit a frame: whole sequences first, then pieces of one sequence.

Segments stay whole in every piece: they count from the first token of the response, as token_offset does.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from dlc_sentinel.records import F64, Rollout, Train
from dlc_sentinel.wire import schema

Ragged = TypeVar("Ragged", bound=Rollout | Train)

_HEADER_BYTES = 4096
_ROW_BYTES = 96
_TEXTS = ("ids", "finish", "sampling", "groups", "segments")


def plan(record: Rollout | Train, max_bytes: int) -> list[tuple[int, int, int, int]]:
    """Parts (first sequence, last sequence + 1, first token, last token + 1) that should each fit `max_bytes`.

    Text is estimated, so a part may still come out too long; `halve` then splits it further.
    """
    offsets_S1 = record.offsets_S1
    num_sequences = len(record.ids)
    cost_S1 = _costs(record)
    room = max(max_bytes - _HEADER_BYTES, 1024)
    if cost_S1[-1] <= room:
        return [(0, num_sequences, 0, int(offsets_S1[-1]))]
    parts: list[tuple[int, int, int, int]] = []
    first = 0
    while first < num_sequences:
        last = int(np.searchsorted(cost_S1, cost_S1[first] + room, side="right")) - 1
        start, stop = int(offsets_S1[first]), int(offsets_S1[min(max(last, first + 1), num_sequences)])
        if last > first:
            parts.append((first, last, start, stop))
            first = last
            continue
        per_token = (cost_S1[first + 1] - cost_S1[first] - _ROW_BYTES) / max(stop - start, 1)
        tokens = max(int((room - _ROW_BYTES) / max(per_token, 1e-9)), 1)
        pieces = range(start, max(stop, start + 1), tokens)
        parts.extend((first, first + 1, at, min(at + tokens, stop)) for at in pieces)
        first += 1
    return parts


def halve(part: tuple[int, int, int, int], record: Rollout | Train) -> list[tuple[int, int, int, int]]:
    """The part as two: by sequences, else by tokens; empty when it is one token and cannot be split."""
    first, last, start, stop = part
    if last - first > 1:
        middle = (first + last) // 2
        cut = int(record.offsets_S1[middle])
        return [(first, middle, start, cut), (middle, last, cut, stop)]
    if stop - start > 1:
        cut = (start + stop) // 2
        return [(first, last, start, cut), (first, last, cut, stop)]
    return []


def cut(record: Ragged, part: tuple[int, int, int, int]) -> Ragged:
    """The record of one part, offsets and spans counted from its own first token."""
    first, last, start, stop = part
    if (start, stop) == (0, record.offsets_S1[-1]) and (first, last) == (0, len(record.ids)):
        return record
    changes: dict[str, Any] = {}
    for item in fields(record):
        value = getattr(record, item.name)
        if item.name.endswith("_N") and value is not None:
            changes[item.name] = value[start:stop]
        elif value is not None and (item.name.endswith("_S") or (item.name in _TEXTS and value)):
            changes[item.name] = value[first:last]
    changes["offsets_S1"] = np.clip(record.offsets_S1[first : last + 1] - start, 0, stop - start)
    if record.span_start_K is not None and record.span_version_K is not None:
        begin = max(int(np.searchsorted(record.span_start_K, start, side="right")) - 1, 0)
        end = int(np.searchsorted(record.span_start_K, stop, side="left")) if stop > start else begin
        changes["span_start_K"] = np.maximum(record.span_start_K[begin:end] - start, 0)
        changes["span_version_K"] = record.span_version_K[begin:end]
    _continue(record, part, changes)
    return replace(record, **changes)


def _continue(record: Rollout | Train, part: tuple[int, int, int, int], changes: dict[str, Any]) -> None:
    """Set token_offset and final where the part begins or ends inside a sequence."""
    first, last, start, stop = part
    inside = start - int(record.offsets_S1[first])
    cut_short = stop < int(record.offsets_S1[last])
    if inside:
        offset_S = changes.get("token_offset_S")
        offset_S = np.zeros(last - first, np.int64) if offset_S is None else offset_S.copy()
        offset_S[0] += inside
        changes["token_offset_S"] = offset_S
    if cut_short:
        final_S = changes.get("final_S")
        final_S = np.ones(last - first, np.bool_) if final_S is None else final_S.copy()
        final_S[-1] = False
        changes["final_S"] = final_S


def _costs(record: Rollout | Train) -> F64:
    """Estimated bytes before each sequence, [S + 1]."""
    per_token = sum(
        0.125 if code == "bit" else np.dtype(schema.DTYPES[code]).itemsize
        for name, code in schema.BUFFERS.items()
        if name.endswith("_N") and getattr(record, name, None) is not None
    )
    num_spans_S1 = 0 if record.span_start_K is None else np.searchsorted(record.span_start_K, record.offsets_S1)
    text_S1 = np.zeros(len(record.ids) + 1)
    for column in (record.ids, getattr(record, "groups", ()), record.finish if isinstance(record, Rollout) else ()):
        if column:
            text_S1[1:] += [len(text) for text in column]
    for i, row in enumerate(getattr(record, "segments", ())):
        text_S1[i + 1] += sum(32 + len(engine_id) for engine_id, _, _ in row)
    cost_S1: F64 = record.offsets_S1 * per_token + 16.0 * num_spans_S1
    return cost_S1 + np.cumsum(text_S1) + _ROW_BYTES * np.arange(len(record.ids) + 1.0)
