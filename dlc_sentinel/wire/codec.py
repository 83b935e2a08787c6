"""Records to frames and back. A record longer than a frame becomes several, numbered on from `frame_no`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlc_sentinel import records
from dlc_sentinel.errors import FrameError, ShapeError
from dlc_sentinel.records import Record, Rollout, Source, Train
from dlc_sentinel.wire import check, frame, schema, split

MAX_FRAME_BYTES = schema.MAX_FRAME_BYTES
UNNUMBERED = -1
"""frame_no of control frames (heartbeat, ack, a hello asked for): only data frames are counted for gaps."""

_HEADS: dict[type, type[schema.Head]] = {
    records.Hello: schema.HelloHead,
    records.Bye: schema.ByeHead,
    records.Heartbeat: schema.HeartbeatHead,
    records.Rollout: schema.RolloutHead,
    records.Train: schema.TrainHead,
    records.Synced: schema.SyncedHead,
    records.Scalars: schema.ScalarsHead,
    records.StepEnd: schema.StepEndHead,
    records.Ack: schema.AckHead,
}
_RECORDS: dict[type[schema.Head], type] = {head: record for record, head in _HEADS.items()}
_PLAIN_FIELDS: dict[type, tuple[str, ...]] = {
    record: tuple(f.name for f in fields(record) if f.name not in schema.BUFFERS and f.name != "source")
    for record in _HEADS
}
_ARRAY_FIELDS: dict[type, dict[str, str]] = {
    record: {f.name: schema.BUFFERS[f.name] for f in fields(record) if f.name in schema.BUFFERS} for record in _HEADS
}
_REQUIRED = {
    records.Rollout: ("offsets_S1", "token_offset_S", "final_S", "logprobs_N", "span_start_K", "span_version_K"),
    records.Train: ("offsets_S1",),
}
_decoder = msgspec.msgpack.Decoder(schema.AnyHead)


def plain_value(value: object) -> object:
    """A numpy scalar as Python's own, for msgspec. Raises: TypeError for what no header may hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot travel in a header")


_encoder = msgspec.msgpack.Encoder(enc_hook=plain_value)


def encode(record: Record, frame_no: int, *, max_bytes: int = MAX_FRAME_BYTES) -> list[memoryview]:
    """Frames of at most `max_bytes`; the i-th carries number frame_no + i (all -1 when frame_no is UNNUMBERED).

    Raises: ShapeError where the record's arrays disagree; FrameError(cause "oversize") where one token with its texts
    is longer than a frame.
    """
    if not isinstance(record, (Rollout, Train)):
        single = _one(record, frame_no)
        if len(single) > max_bytes:
            raise FrameError(f"{type(record).__name__} of {len(single)} bytes; a frame holds {max_bytes}", "oversize")
        return [single]
    check.check(record)
    todo = split.plan(record, max_bytes)[::-1]
    frames: list[memoryview] = []
    while todo:
        part = todo.pop()
        built = _one(split.cut(record, part), frame_no + len(frames) if frame_no >= 0 else frame_no)
        if len(built) <= max_bytes:
            frames.append(built)
            continue
        halves = split.halve(part, record)
        if not halves:
            raise FrameError(
                f"sequence {record.ids[part[0]][:80]!r} needs {len(built)} bytes for one token; "
                f"a frame holds {max_bytes}; shorten its id, group or segments",
                "oversize",
            )
        todo.extend(halves[::-1])
    return frames


def decode(buffer: frame.Buffer) -> tuple[Record, int]:
    """(record, frame number); arrays are views of `buffer`, only bits are unpacked.

    Raises: FrameError with the cause to count it under, whatever the bytes are.
    """
    view, header = frame.open_header(buffer)
    head = decode_header(_decoder, header)
    kind = _RECORDS[type(head)]
    arrays = frame.open_buffers(view, len(header), head.buffers, _ARRAY_FIELDS[kind])
    missing = [name for name in _REQUIRED.get(kind, ()) if name not in arrays]
    if missing:
        raise FrameError(f"{kind.__name__} frame without {', '.join(missing)}")
    values: dict[str, Any] = {name: getattr(head, name) for name in _PLAIN_FIELDS[kind]}
    record: Record = kind(source=Source(**msgspec.structs.asdict(head.source)), **values, **arrays)
    if isinstance(record, (Rollout, Train)):
        try:
            check.check(record)
        except ShapeError as error:
            raise FrameError(f"{kind.__name__} frame of {record.source.run!r}: {error}") from error
    return record, head.frame_no


def decode_header(decoder: msgspec.msgpack.Decoder[Any], header: memoryview) -> Any:
    """The header struct. Raises: FrameError for anything that is not one."""
    try:
        head = decoder.decode(header)
        _check_plain(getattr(head, "sampling", None), 16)
        _check_plain(getattr(head, "evidence", None), 16)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise FrameError(f"header cannot be read: {error}") from error
    return head


def _check_plain(value: object, depth: int) -> None:
    """Only what JSON knows may reach core: no bytes, dates or extension types, not nested deeper than `depth`."""
    if depth == 0:
        raise FrameError("a header value is nested too deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise FrameError(f"a header key is {type(key).__name__}, wanted text")
            _check_plain(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item, depth - 1)
    elif not (value is None or isinstance(value, (str, int, float))):
        raise FrameError(f"a header value is {type(value).__name__}; only JSON types travel")


def _one(record: Record, frame_no: int) -> memoryview:
    kind = type(record)
    arrays: list[tuple[str, NDArray[Any]]] = []
    table: list[schema.BufferHead] = []
    for name, code in _ARRAY_FIELDS[kind].items():
        array = getattr(record, name)
        if array is not None:
            arrays.append((code, array))
            table.append(schema.BufferHead(name, code, array.size))  # type: ignore[arg-type]  # code is from BUFFERS
    source = record.source
    head = _HEADS[kind](
        source=schema.SourceHead(source.run, source.role, source.producer, source.rank, source.replica),
        frame_no=frame_no,
        buffers=tuple(table),
        **{name: _owned(getattr(record, name)) for name in _PLAIN_FIELDS[kind]},
    )
    return frame.build(_encoder.encode(head), arrays)


def _owned(value: Any) -> Any:
    return dict(value) if hasattr(value, "keys") else value
