"""What a tape holds: the row of each of its two files, and the names of its parts.

    DIR/tokens-000001.arrows ...   every frame and tick, in the order the monitor saw them (a ring)
    DIR/state.arrows               every event and, per closed step, the state to resume from (kept)

Both are plain Arrow IPC streams without an end mark: any Arrow reader opens them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import pyarrow as pa

from dlc_sentinel.errors import TapeError
from dlc_sentinel.records import Json

Channel: TypeAlias = Literal["data", "control", "tick"]

TOKENS = pa.schema(
    [
        ("t_s", pa.float64()),
        ("channel", pa.string()),
        ("producer", pa.string()),
        ("frame_no", pa.int64()),
        ("header", pa.binary()),
        ("payload", pa.binary()),
    ]
)
STATE = pa.schema(
    [("t_s", pa.float64()), ("run", pa.string()), ("step", pa.int64()), ("kind", pa.string()), ("payload", pa.binary())]
)

STATE_FILE = "state.arrows"
STATE_KIND = "state"
"""`kind` of the rows of state.arrows that hold what to resume from; every other kind is an event's."""

BOOT = b"boot"
"""Header of the tick row a sentinel starts with; its payload is {run: resumed state} as JSON."""
END = b"end"
"""Header of the tick row of an orderly stop."""
RESET = b"reset"
"""Header of the tick row of a breaker closed by hand; its payload is the run's name."""


@dataclass(frozen=True, slots=True)
class TapeFrame:
    """One frame as it came, or one tick of the clock.

    `frame` is header + payload, bit for bit; its first `num_header` bytes are the header. `frame_no` is -1 and
    `producer` empty where the bytes could not be read.
    """

    t_s: float
    """Seconds since the epoch, from the one clock of the sentinel that recorded it."""
    channel: Channel
    producer: str
    frame_no: int
    frame: bytes | bytearray | memoryview
    num_header: int = 0

    @property
    def header(self) -> bytes:
        return bytes(self.frame[: self.num_header])

    @property
    def payload(self) -> bytes:
        return bytes(self.frame[self.num_header :])


def tick_frame(t_s: float) -> TapeFrame:
    """One tick of the clock."""
    return TapeFrame(t_s, "tick", "", -1, b"")


def boot_frame(t_s: float, states: Mapping[str, Json]) -> TapeFrame:
    """The row a sentinel starts with: the states it resumes from, by run."""
    return TapeFrame(t_s, "tick", "", -1, BOOT + msgspec.json.encode(states), len(BOOT))


def boot_states(frame: TapeFrame) -> dict[str, Json]:
    """{run: state} of a boot row."""
    return msgspec.json.decode(frame.payload, type=dict[str, Json])


def end_frame(t_s: float) -> TapeFrame:
    """The row of an orderly stop."""
    return TapeFrame(t_s, "tick", "", -1, END, len(END))


def reset_frame(t_s: float, run: str) -> TapeFrame:
    """The row of a breaker that a person closed."""
    return TapeFrame(t_s, "tick", "", -1, RESET + run.encode(), len(RESET))


@dataclass(frozen=True, slots=True)
class Dropped:
    """The end of a file that was cut off (kill -9, full disk) and is not used."""

    path: Path
    num_rows: int | None
    """None where even the row count is cut off."""
    num_bytes: int

    def __str__(self) -> str:
        rows = "an unknown number of rows" if self.num_rows is None else f"{self.num_rows} rows"
        return f"{self.path}: the last batch is cut off: {rows}, {self.num_bytes} bytes dropped; the rest is used"


def part_name(number: int) -> str:
    """File name of a part of the token ring; numbers start at 1."""
    return f"tokens-{number:06d}.arrows"


def part_paths(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of every part of the token ring, oldest first."""
    found = []
    for path in directory.glob("tokens-*.arrows"):
        digits = path.stem.removeprefix("tokens-")
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def is_tape(path: str | Path) -> bool:
    """Whether the folder holds a tape."""
    directory = Path(path)
    return directory.is_dir() and ((directory / STATE_FILE).exists() or bool(part_paths(directory)))


def require_tape(path: str | Path) -> Path:
    """The folder as a Path.  Raises: TapeError if it holds no tape."""
    if not is_tape(path):
        raise TapeError(f"{path}: no tape here (wanted {STATE_FILE} or {part_name(1)}); is it the tape.dir?")
    return Path(path)
