"""Messages between the trainer and its generator: over any two byte streams, for any Python and torch on either side.

One message = 4 bytes, little-endian: length of the header; the header, JSON with the message's kind, its fields and
name, dtype, shape of each array; then the arrays' raw little-endian bytes in that order. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import FrameError
from dlc_sentinel.records import Json

Array = NDArray[np.generic]

DTYPES = ("<f4", "<f8", "<i4", "<i8")
MAX_HEADER_BYTES = 2**20
MAX_ARRAY_BYTES = 2**32


def checksum(arrays: Mapping[str, Array]) -> str:
    """32 hex digits over names and bytes of all arrays; equal on both sides of the pipe for equal weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(_little(arrays[name]).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    fields: Mapping[str, Json] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Two byte streams as one: what comes from the peer, and what goes to it."""

    incoming: IO[bytes]
    outgoing: IO[bytes]

    def send(
        self, kind: str, fields: Mapping[str, Json] | None = None, arrays: Mapping[str, Array] | None = None
    ) -> None:
        """Writes one message and flushes. Raises: BrokenPipeError where the peer is gone."""
        packed = {name: _little(value) for name, value in (arrays or {}).items()}
        columns = [[name, value.dtype.str, list(value.shape)] for name, value in packed.items()]
        header = json.dumps({"kind": kind, "fields": dict(fields or {}), "arrays": columns}).encode()
        self.outgoing.write(struct.pack("<I", len(header)) + header)
        for value in packed.values():
            self.outgoing.write(value.tobytes())
        self.outgoing.flush()

    def receive(self) -> Message | None:
        """The next message, or None where the peer closed its end between two messages.

        Raises: FrameError for bytes that are no message, or a stream that ends within one.
        """
        start = self.incoming.read(4)
        if not start:
            return None
        size = struct.unpack("<I", start)[0] if len(start) == 4 else MAX_HEADER_BYTES + 1
        if size > MAX_HEADER_BYTES:
            raise FrameError(f"engine pipe: {start!r} is no message start; does something else print to it?")
        header = _header(_exactly(self.incoming, size))
        arrays = {name: _array(self.incoming, dtype, shape) for name, dtype, shape in header["arrays"]}
        return Message(str(header["kind"]), header["fields"], arrays)


def _little(value: Array) -> Array:
    array = np.ascontiguousarray(value)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in DTYPES:
        raise FrameError(f"engine pipe: array of {array.dtype}, wanted one of {', '.join(DTYPES)}")
    return array


def _header(raw: bytes) -> Json:
    try:
        header = json.loads(raw)
        if isinstance(header, dict) and {"kind", "fields", "arrays"} <= header.keys():
            return header
    except ValueError:
        pass
    raise FrameError(f"engine pipe: header {raw[:60]!r} is not a message's; does something else print to it?")


def _array(stream: IO[bytes], dtype: str, shape: list[int]) -> Array:
    count = int(np.prod(shape, dtype=np.int64))
    if dtype not in DTYPES or min([0, *shape]) < 0 or count * 8 > MAX_ARRAY_BYTES:
        raise FrameError(f"engine pipe: array of dtype {dtype!r} and shape {shape} is refused")
    kind = np.dtype(dtype)
    return np.frombuffer(_exactly(stream, count * kind.itemsize), kind).reshape(shape)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    raw = stream.read(size)
    if len(raw) != size:
        raise FrameError(f"engine pipe: closed after {len(raw)} of {size} bytes; did the process on the other end die?")
    return raw
