"""Writes a tape: the ring of token frames and the kept state.

Order on disk: the frames that made a state are written before it. So what a killed sentinel left behind always
replays to the state it resumes from. Frames newer than the last write (at most 1 MiB or one second) are lost with it.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from dlc_sentinel.errors import TapeError
from dlc_sentinel.records import Event, Json
from dlc_sentinel.tape.compact import compact
from dlc_sentinel.tape.schema import STATE, STATE_FILE, STATE_KIND, TOKENS, TapeFrame, part_name, part_paths
from dlc_sentinel.tape.stream import Opener, StreamWriter, open_raw

BATCH_BYTES = 2**20
BATCH_S = 1.0
COMPACT_BYTES = 64 * 2**20
"""Old states that may pile up in state.arrows before it is rewritten without them."""
MAX_PENDING_ROWS = 4096
"""State rows kept in memory while the disk refuses them; beyond that the oldest are lost, and counted."""

_encoder = msgspec.json.Encoder()


class Recorder:
    """One tape folder, one writer. `token_bytes` = size of the ring, 0 = no frames; `part_bytes` = of a part.

    Every call returns notes: events of kind "note" that say what went wrong with the tape. No call raises for a disk
    that is full or gone. Raises at construction: OSError if the folder cannot be made, TapeError if another sentinel
    writes there or it holds a state.arrows that is none.
    """

    def __init__(
        self,
        directory: str | Path,
        token_bytes: int,
        part_bytes: int,
        *,
        opener: Opener = open_raw,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = _take_lock(self.directory)
        self.num_lost_frames = 0
        """Frames that are not on the tape because the disk was full."""
        self.num_lost_bytes = 0
        self.num_lost_rows = 0
        """State rows that are not on the tape because the disk stayed full."""
        self._opener = opener
        self._part_bytes = min(part_bytes, max(token_bytes // 4, 1))
        self._token_bytes = token_bytes
        self._parts = deque((path, path.stat().st_size) for _, path in part_paths(self.directory))
        self._number = max((number for number, _ in part_paths(self.directory)), default=0)
        self._tokens: StreamWriter | None = None
        self._recording = token_bytes > 0
        self._frames: list[TapeFrame] = []
        self._frame_bytes = 0
        self._rows: deque[tuple[float, str, int, str, bytes]] = deque()
        self._state: StreamWriter | None = None
        self._state_ok = True
        self._old_bytes = 0
        self._compact_bytes = compact_bytes
        self._notes: list[Event] = []
        self._open_state(0.0)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def frame(self, frame: TapeFrame) -> list[Event]:
        """Notes, usually none. Takes one frame or tick; it is written at the latest with the second after it."""
        if self._recording:
            self._frames.append(frame)
            self._frame_bytes += len(frame.frame)
            if self._frame_bytes >= BATCH_BYTES or frame.t_s - self._frames[0].t_s >= BATCH_S:
                self._write_tokens(frame.t_s)
        elif self._token_bytes:
            self._lose([frame])
        return self._take_notes()

    def _write_tokens(self, t_s: float) -> None:
        frames, self._frames, self._frame_bytes = self._frames, [], 0
        if not frames:
            return
        try:
            if self._tokens is None:
                self._number += 1
                self._tokens = StreamWriter(self.directory / part_name(self._number), TOKENS, self._opener)
            self._tokens.append(_token_batch(frames))
            if self._tokens.num_bytes >= self._part_bytes:
                self._close_part()
        except OSError as error:
            self._recording = False
            self._lose(frames)
            self._close_part()
            self._note(t_s, f"tape {self.directory}: token frames stop ({error.strerror or error}); state goes on")
        self._trim()

    def _close_part(self) -> None:
        if self._tokens is not None:
            self._tokens.close()
            self._parts.append((self._tokens.path, self._tokens.num_bytes))
            self._tokens = None

    def _trim(self) -> None:
        """Deletes the oldest parts until the ring is within its size."""
        used = sum(size for _, size in self._parts) + (self._tokens.num_bytes if self._tokens else 0)
        while used > self._token_bytes and self._parts:
            used -= self._drop_oldest()

    def _drop_oldest(self) -> int:
        path, size = self._parts.popleft()
        path.unlink(missing_ok=True)
        return size

    def _lose(self, frames: list[TapeFrame]) -> None:
        self.num_lost_frames += len(frames)
        self.num_lost_bytes += sum(len(frame.frame) for frame in frames)

    # -- state -------------------------------------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Takes one event for the next `write`."""
        payload = {"level": event.level, "text": event.text, "data": event.data}
        self.row(event.t_s, event.run, event.step, event.kind, payload)

    def row(self, t_s: float, run: str, step: int, kind: str, payload: Json) -> None:
        """Takes one state row (kind "state" = what to resume from) for the next `write`."""
        encoded = _encoder.encode(payload)
        self._rows.append((t_s, run, step, kind, encoded))
        self._old_bytes += len(encoded) if kind == STATE_KIND else 0
        while len(self._rows) > MAX_PENDING_ROWS:
            self._rows.popleft()
            self.num_lost_rows += 1

    def write(self, t_s: float) -> list[Event]:
        """Notes, usually none. After it everything taken so far outlives kill -9 of this process."""
        self._write_tokens(t_s)
        if self._rows and not self._write_state(t_s):
            # Our own ring is what fills the disk: its oldest part makes room for the state.
            while self._parts and not self._write_state(t_s):
                self._drop_oldest()
        return self._take_notes()

    def sync(self, t_s: float) -> list[Event]:
        """Notes, usually none. After it the state outlives a loss of power, too."""
        if self._state is not None:
            try:
                self._state.sync()
                if self._old_bytes > self._compact_bytes:
                    self._compact(t_s)
            except OSError as error:
                self._state_failed(t_s, error)
        return self._take_notes()

    def _compact(self, t_s: float) -> None:
        assert self._state is not None
        self._old_bytes = 0
        compact(self.directory, self._opener)
        pa.default_memory_pool().release_unused()
        self._state.close()
        self._state = None
        self._open_state(t_s)

    def _open_state(self, t_s: float) -> None:
        try:
            self._state = StreamWriter(self.directory / STATE_FILE, STATE, self._opener)
        except OSError as error:
            self._state_failed(t_s, error)
            return
        if self._state.dropped is not None:
            self._note(t_s, f"tape {self._state.dropped}")

    def _write_state(self, t_s: float) -> bool:
        if self._state is None:
            self._open_state(t_s)
        if self._state is None:
            return False
        try:
            self._state.append(_state_batch(list(self._rows)))
        except OSError as error:
            self._state_failed(t_s, error)
            return False
        if not self._state_ok:
            self._state_ok = True
            self._note(t_s, f"tape {self.directory}: state is written again ({self.num_lost_rows} rows lost)")
        self._rows.clear()
        return True

    def _state_failed(self, t_s: float, error: OSError) -> None:
        if self._state_ok:
            self._note(t_s, f"tape {self.directory}: state cannot be written ({error.strerror or error}); tried again")
        self._state_ok = False

    # -- both --------------------------------------------------------------------------------------------------------

    def close(self, t_s: float) -> list[Event]:
        """Notes. Writes and syncs what is left; a second call does nothing."""
        if self._lock is None:
            return []
        notes = self.write(t_s) + self.sync(t_s)
        self._close_part()
        if self._state is not None:
            self._state.close()
            self._state = None
        self._recording = False
        self._token_bytes = 0
        os.close(self._lock)
        self._lock = None
        return notes

    def lost(self) -> Mapping[str, int]:
        """What full disks cost so far: {"frames", "bytes", "rows"}."""
        return {"frames": self.num_lost_frames, "bytes": self.num_lost_bytes, "rows": self.num_lost_rows}

    def _note(self, t_s: float, text: str) -> None:
        self._notes.append(Event("note", "", -1, t_s, "WARN", text, {"tape": str(self.directory), "lost": self.lost()}))

    def _take_notes(self) -> list[Event]:
        notes, self._notes = self._notes, []
        return notes


def _take_lock(directory: Path) -> int:
    """An open lock file: two writers would cut each other's batches."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise TapeError(f"{directory}: another sentinel records here; give this one a tape.dir of its own") from error
    return lock


def _token_batch(frames: list[TapeFrame]) -> pa.RecordBatch:
    columns = [
        _numbers(pa.float64(), [f.t_s for f in frames]),
        _bytes(pa.string(), [f.channel.encode() for f in frames]),
        _bytes(pa.string(), [f.producer.encode() for f in frames]),
        _numbers(pa.int64(), [f.frame_no for f in frames]),
        _bytes(pa.binary(), [memoryview(f.frame)[: f.num_header] for f in frames]),
        _bytes(pa.binary(), [memoryview(f.frame)[f.num_header :] for f in frames]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TOKENS)


def _state_batch(rows: list[tuple[float, str, int, str, bytes]]) -> pa.RecordBatch:
    times_s, runs, steps, kinds, payloads = zip(*rows, strict=True)
    columns = [
        _numbers(pa.float64(), times_s),
        _bytes(pa.string(), [run.encode() for run in runs]),
        _numbers(pa.int64(), steps),
        _bytes(pa.string(), [kind.encode() for kind in kinds]),
        _bytes(pa.binary(), payloads),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=STATE)


# Columns are built by hand: pyarrow 26's `pa.array` never lets go of a memoryview it was given, and its first call
# imports pandas where that is installed, half a second in the middle of a run.


def _numbers(kind: pa.DataType, values: Sequence[float]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.array(values, kind.to_pandas_dtype()))])


def _bytes(kind: pa.DataType, parts: Sequence[bytes | memoryview]) -> pa.Array:
    offsets_B1 = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=offsets_B1[1:])
    return pa.Array.from_buffers(kind, len(parts), [None, pa.py_buffer(offsets_B1), pa.py_buffer(b"".join(parts))])
