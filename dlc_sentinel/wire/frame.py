"""The bytes of one frame: prelude, header, buffers. Knows no record.

    byte 0       protocol version          bytes 8..8+H   header, msgspec msgpack
    bytes 1..3   zero                      zero padding to a multiple of 8
    bytes 4..7   H, uint32 little-endian   buffers in the header's order, each padded with zeros to a multiple of 8

The length is exact: a frame with a byte more or less than its header says is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import FrameError
from dlc_sentinel.wire import schema

Buffer: TypeAlias = bytes | bytearray | memoryview

_PRELUDE = struct.Struct("<B3sI")


def padded(num_bytes: int) -> int:
    """The next multiple of 8, in bytes."""
    return (num_bytes + 7) & ~7


def buffer_bytes(code: str, count: int) -> int:
    """Bytes of one buffer without its padding."""
    return (count + 7) // 8 if code == "bit" else count * np.dtype(schema.DTYPES[code]).itemsize


def build(header: bytes, arrays: Sequence[tuple[str, NDArray[Any]]]) -> memoryview:
    """One frame as a byte view of fresh memory. `arrays` holds (dtype code, array [count]) in the header's order."""
    start = padded(_PRELUDE.size + len(header))
    end = start + sum(padded(buffer_bytes(code, array.size)) for code, array in arrays)
    # np.empty and not a bytearray: the latter writes zeros over a megabyte while it holds the interpreter lock.
    frame: NDArray[np.uint8] = np.empty(end, np.uint8)
    view = memoryview(frame)  # type: ignore[arg-type]  # arrays are buffers; the stub of 3.11 cannot say so
    _PRELUDE.pack_into(view, 0, schema.PROTOCOL_VERSION, bytes(3), len(header))
    view[_PRELUDE.size : _PRELUDE.size + len(header)] = header
    frame[_PRELUDE.size + len(header) : start] = 0
    for code, array in arrays:
        size = buffer_bytes(code, array.size)
        if code == "bit":
            frame[start : start + size] = np.packbits(array, bitorder="little")
        else:
            frame[start : start + size].view(schema.DTYPES[code])[:] = array
        frame[start + size : start + padded(size)] = 0
        start += padded(size)
    return view


def open_header(buffer: Buffer) -> tuple[memoryview, memoryview]:
    """(whole frame, header bytes) after the prelude is checked. Raises: FrameError, unknown_protocol or unparsable."""
    view = memoryview(buffer).cast("B")
    if len(view) < _PRELUDE.size:
        raise FrameError(f"{len(view)} bytes are no frame; at least {_PRELUDE.size} are needed")
    version, zeros, header_bytes = _PRELUDE.unpack_from(view)
    if version not in schema.READABLE_VERSIONS:
        readable = ", ".join(map(str, schema.READABLE_VERSIONS))
        raise FrameError(
            f"protocol version {version} is not read here (readable: {readable}); upgrade the older side",
            "unknown_protocol",
        )
    if zeros != bytes(3):
        raise FrameError(f"bytes 1..3 are {zeros.hex()} and not zero; this is no frame")
    if _PRELUDE.size + header_bytes > len(view):
        raise FrameError(f"header of {header_bytes} bytes in a frame of {len(view)}; the frame is cut short")
    return view, view[_PRELUDE.size : _PRELUDE.size + header_bytes]


def open_buffers(
    view: memoryview, header_bytes: int, table: Sequence[schema.BufferHead], dtypes: Mapping[str, str]
) -> dict[str, NDArray[Any]]:
    """{field name: array}, views of the frame (bits are unpacked). Names not in `dtypes` are skipped.

    Raises: FrameError for a repeated name, a wrong dtype, or a length that differs from the frame's.
    """
    arrays: dict[str, NDArray[Any]] = {}
    start = padded(_PRELUDE.size + header_bytes)
    for entry in table:
        size = buffer_bytes(entry.dtype, entry.count)
        if start + padded(size) > len(view):
            raise FrameError(f"buffer {entry.name!r} ends at byte {start + padded(size)} of {len(view)}")
        if entry.name in arrays:
            raise FrameError(f"buffer {entry.name!r} comes twice")
        if entry.name in dtypes:
            if dtypes[entry.name] != entry.dtype:
                raise FrameError(f"buffer {entry.name!r} has dtype {entry.dtype!r}, wanted {dtypes[entry.name]!r}")
            arrays[entry.name] = _open_one(view, start, entry)
        start += padded(size)
    if start != len(view):
        raise FrameError(f"frame of {len(view)} bytes where its header describes {start}")
    return arrays


def _open_one(view: memoryview, start: int, entry: schema.BufferHead) -> NDArray[Any]:
    if entry.dtype == "bit":
        packed: NDArray[np.uint8] = np.frombuffer(view, np.uint8, (entry.count + 7) // 8, start)
        return np.unpackbits(packed, count=entry.count, bitorder="little").view(np.bool_)
    return np.frombuffer(view, schema.DTYPES[entry.dtype], entry.count, start)
