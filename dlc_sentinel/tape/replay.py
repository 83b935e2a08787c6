"""Reads a tape back, also one that was killed or is still being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from dlc_sentinel.records import Command, Json, Level
from dlc_sentinel.tape.schema import (
    STATE,
    STATE_FILE,
    STATE_KIND,
    TOKENS,
    Dropped,
    TapeFrame,
    part_paths,
    require_tape,
)  # fmt: skip
from dlc_sentinel.tape.stream import StreamReader

REPLAY_BATCH = 256

OnDrop = Callable[[Dropped], None]


@dataclass(frozen=True, slots=True)
class StateRow:
    """One row of state.arrows; `payload` is JSON bytes."""

    t_s: float
    run: str
    step: int
    kind: str
    payload: bytes

    def json(self) -> Json:
        """The payload, decoded."""
        return msgspec.json.decode(self.payload)


def read_tape(directory: str | Path, on_drop: OnDrop | None = None) -> Iterator[TapeFrame]:
    """Frames and ticks in recorded order, over all parts that are left of the ring.

    A torn batch at the end of a part is skipped and told to `on_drop`. Raises: TapeError if there is no tape.
    """
    for _, path in part_paths(require_tape(directory)):
        reader = StreamReader(path, TOKENS)
        for batch in reader:
            yield from _frames(batch.to_pydict())
        if reader.dropped is not None and on_drop is not None:
            on_drop(reader.dropped)


def _frames(columns: dict[str, list[Json]]) -> Iterator[TapeFrame]:
    for t_s, channel, producer, frame_no, header, payload in zip(*columns.values(), strict=True):
        yield TapeFrame(t_s, channel, producer, frame_no, header + payload, len(header))


def read_state(directory: str | Path, on_drop: OnDrop | None = None) -> Iterator[StateRow]:
    """Rows of state.arrows in recorded order; none if the file is not there.  Raises: TapeError if there is no tape."""
    path = require_tape(directory) / STATE_FILE
    if not path.exists():
        return
    reader = StreamReader(path, STATE)
    for batch in reader:
        for values in zip(*batch.to_pydict().values(), strict=True):
            yield StateRow(*values)
    if reader.dropped is not None and on_drop is not None:
        on_drop(reader.dropped)


def last_states(directory: str | Path, before_s: float = float("inf")) -> dict[str, Json]:
    """{run: newest state recorded before `before_s`}, to resume from; empty if none."""
    newest: dict[str, StateRow] = {}
    for row in read_state(directory):
        if row.kind == STATE_KIND and row.t_s < before_s:
            newest[row.run] = row
    return {run: row.json() for run, row in newest.items()}


def last_state(directory: str | Path, run: str) -> Json:
    """The newest state of `run`, to resume from; None if there is none."""
    return last_states(directory).get(run)


class TapeSource:
    """What a tape holds, or any other frames, at their recorded times; sends nothing."""

    replaying = True

    def __init__(self, frames: Iterable[TapeFrame]) -> None:
        self._frames: Iterator[TapeFrame] = iter(frames)
        self._now_s = 0.0

    def poll(self, timeout_ms: int) -> Sequence[TapeFrame] | None:
        taken = list(islice(self._frames, REPLAY_BATCH))
        if not taken:
            return None
        self._now_s = taken[-1].t_s
        return taken

    def now_s(self) -> float:
        return self._now_s

    def send_command(self, command: Command) -> int:
        return 0

    def send_notice(self, run: str, level: Level, text: str) -> int:
        return 0

    def close(self) -> None:
        return None
