"""One append-only Arrow IPC stream: survives kill -9 and a full disk without a torn middle.

Batches are serialised first and written with plain writes, so that a write that fails half way can be cut back to the
last whole batch; the schema is written once, no end mark ever, so that a file can be opened again and appended to.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from dlc_sentinel.errors import TapeError
from dlc_sentinel.tape.schema import Dropped


class Writable(Protocol):
    """What a stream needs of a file: unbuffered, positioned at its end."""

    def write(self, data: memoryview, /) -> int | None: ...
    def truncate(self, size: int, /) -> int: ...
    def seek(self, offset: int, /) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


Opener = Callable[[Path], Writable]


def open_raw(path: Path) -> Writable:
    """The file, opened for unbuffered writing and created if missing; never truncated."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)


class StreamWriter:
    """Appends record batches to one file.  Raises: OSError from `append`, after which the file ends as before it."""

    def __init__(self, path: Path, schema: pa.Schema, opener: Opener = open_raw) -> None:
        self.path = path
        self.dropped: Dropped | None = None
        """What was cut off the end of a file that was there already."""
        self._file = opener(path)
        try:
            self.num_bytes = self._resume(schema)
            self._cut()
            if not self.num_bytes:
                self._put(schema.serialize())
        except OSError:
            self._file.close()
            raise

    def _resume(self, schema: pa.Schema) -> int:
        if not self.path.exists() or not self.path.stat().st_size:
            return 0
        reader = StreamReader(self.path, schema)
        for _ in reader:
            pass
        self.dropped = reader.dropped
        return reader.num_bytes

    def _cut(self) -> None:
        self._file.truncate(self.num_bytes)
        self._file.seek(self.num_bytes)

    def append(self, batch: pa.RecordBatch) -> int:
        """Bytes written for the batch.  Raises: OSError (full disk ...); nothing of the batch is left then."""
        return self._put(batch.serialize())

    def _put(self, buffer: pa.Buffer) -> int:
        view = memoryview(buffer)
        try:
            sent = 0
            while sent < len(view):
                sent += self._file.write(view[sent:]) or 0
        except OSError:
            self._cut()
            raise
        self.num_bytes += len(view)
        return len(view)

    def sync(self) -> None:
        """Returns when the disk has it.  Raises: OSError."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class StreamReader:
    """Iterates over the whole batches of one file, also while it is being written.

    After the iteration `num_bytes` is where the last whole batch ends, and `dropped` tells of a torn one after it.
    Raises: TapeError if the file is no stream of this schema.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.num_bytes = 0
        self.dropped: Dropped | None = None
        self._schema = schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise TapeError(f"{self.path}: cannot be read ({error.strerror})") from error
        with file:
            if not self._read_schema(file):
                return
            messages = pa.ipc.MessageReader.open_stream(file)
            while True:
                try:
                    message = messages.read_next_message()
                    batch = pa.ipc.read_record_batch(message, self._schema)
                except StopIteration:
                    break
                except (pa.ArrowInvalid, OSError):
                    self._tell_dropped(file)
                    return
                self.num_bytes = file.tell()
                yield batch
            self._tell_dropped(file)

    def _read_schema(self, file: io.BufferedReader) -> bool:
        try:
            found = pa.ipc.read_schema(file)
        except (pa.ArrowInvalid, OSError) as error:
            if os.fstat(file.fileno()).st_size < self._schema.serialize().size:
                self._tell_dropped(file)
                return False
            raise TapeError(f"{self.path}: not an Arrow stream ({error}); was it written by dlc-sentinel?") from error
        if not found.equals(self._schema):
            raise TapeError(
                f"{self.path}: columns {found.names}, wanted {self._schema.names}; made by another version?"
            )
        self.num_bytes = file.tell()
        return True

    def _tell_dropped(self, file: io.BufferedReader) -> None:
        file.seek(self.num_bytes)
        rest = file.read()
        if rest:
            self.dropped = Dropped(self.path, _num_rows(rest, self._schema), len(rest))


def _num_rows(torn: bytes, schema: pa.Schema) -> int | None:
    """Rows announced by the metadata of a torn batch; None if the metadata itself is torn."""
    if len(torn) < 8 or len(torn) < 8 + int.from_bytes(torn[4:8], "little"):
        return None
    try:
        message = pa.ipc.read_message(pa.BufferReader(torn + bytes(_MAX_BATCH_BYTES)))
        return int(pa.ipc.read_record_batch(message, schema).num_rows)
    except (pa.ArrowInvalid, OSError):
        return None


_MAX_BATCH_BYTES = 16 * 2**20
"""Zeros that stand in for a torn body while its rows are counted; a batch is a few MiB."""
