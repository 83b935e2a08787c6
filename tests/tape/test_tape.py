"""A tape gives back what it was given, whatever happened to the process or the disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.errors import TapeError
from dlc_sentinel.records import Event
from dlc_sentinel.tape.recorder import BATCH_BYTES, MAX_PENDING_ROWS, Recorder
from dlc_sentinel.tape.replay import last_state, last_states, read_state, read_tape
from dlc_sentinel.tape.schema import (
    STATE_FILE,
    STATE_KIND,
    Dropped,
    TapeFrame,
    boot_frame,
    boot_states,
    end_frame,
    part_paths,
    tick_frame,
)
from dlc_sentinel.tape.stream import Writable, open_raw

MIB = 2**20
RING = 64 * MIB


def mk(t_s=1.0, frame=b"headpayload", *, channel="data", producer="aa", frame_no=0, num_header=4):
    return TapeFrame(t_s, channel, producer, frame_no, frame, num_header)


def keys(frames):
    return [(f.t_s, f.channel, f.producer, f.frame_no, bytes(f.frame), f.num_header) for f in frames]


def recorder(folder, token_bytes=RING, part_bytes=RING, **kwargs):
    return Recorder(folder, token_bytes, part_bytes, **kwargs)


class SmallDisk:
    """Files that share `free` bytes, as on one full disk; deleting a file gives its bytes back."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.files: dict[Path, int] = {}

    def __call__(self, path: Path) -> Writable:
        return _SmallFile(self, path, open_raw(path))

    def left(self) -> int:
        self.files = {path: size for path, size in self.files.items() if path.exists()}
        return self.free - sum(self.files.values())


class _SmallFile:
    def __init__(self, disk: SmallDisk, path: Path, file: Writable) -> None:
        self._disk, self._path, self._file = disk, path, file
        self.fileno, self.close, self.seek = file.fileno, file.close, file.seek

    def write(self, data: memoryview) -> int | None:
        left = self._disk.left()
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[:left]) or 0
        self._disk.files[self._path] = self._disk.files.get(self._path, 0) + written
        return written

    def truncate(self, size: int) -> int:
        self._disk.files[self._path] = size
        return self._file.truncate(size)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(max_size=300), st.sampled_from(["data", "control", "tick"]), st.integers(0, 400)),
        max_size=20,
    )
)
def test_every_frame_comes_back_bit_for_bit_and_in_order(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("tape")
    given_frames = [
        mk(float(i), frame, channel=channel, frame_no=i, num_header=min(cut, len(frame)))
        for i, (frame, channel, cut) in enumerate(rows)
    ]

    tape = recorder(folder)
    for frame in given_frames:
        tape.frame(frame)
    tape.close(99.0)

    assert keys(read_tape(folder)) == keys(given_frames)


def test_views_of_a_receive_buffer_are_written_as_they_are(tmp_path):
    tape = recorder(tmp_path)
    tape.frame(mk(frame=memoryview(b"xxheadpayload")[2:]))
    tape.close(1.0)

    assert [bytes(f.frame) for f in read_tape(tmp_path)] == [b"headpayload"]


def test_a_frame_is_let_go_of_once_it_is_written(tmp_path):
    buffer = np.zeros(1000, np.uint8)
    alive = weakref.ref(buffer)
    tape = recorder(tmp_path)
    tape.frame(mk(frame=memoryview(buffer)))
    del buffer
    before = alive() is not None
    tape.write(1.0)

    assert before and alive() is None
    tape.close(2.0)


def test_any_arrow_reader_opens_a_part(tmp_path):
    tape = recorder(tmp_path)
    tape.frame(mk())
    tape.close(1.0)

    table = pa.ipc.open_stream(tmp_path / "tokens-000001.arrows").read_all()

    assert table.column_names == ["t_s", "channel", "producer", "frame_no", "header", "payload"]
    assert table.to_pylist()[0] | {"t_s": 0} == {
        "t_s": 0, "channel": "data", "producer": "aa", "frame_no": 0, "header": b"head", "payload": b"payload",
    }  # fmt: skip


def test_parts_rotate_by_size_and_the_oldest_go_when_the_ring_is_full(tmp_path):
    frame = bytes(BATCH_BYTES)
    tape = recorder(tmp_path, token_bytes=8 * MIB, part_bytes=2 * MIB)
    for i in range(24):
        tape.frame(mk(float(i), frame, frame_no=i))
    tape.close(24.0)

    kept = [f.frame_no for f in read_tape(tmp_path)]
    size = sum(path.stat().st_size for _, path in part_paths(tmp_path))

    assert kept == list(range(24 - len(kept), 24)) and len(kept) >= 5
    assert 4 * MIB <= size <= 8 * MIB
    assert part_paths(tmp_path)[0][0] > 1


def test_a_ring_of_zero_bytes_records_no_frames_but_keeps_the_state(tmp_path):
    tape = recorder(tmp_path, token_bytes=0)
    tape.frame(mk())
    tape.row(1.0, "r", 3, STATE_KIND, {"a": 1})
    tape.close(1.0)

    assert list(read_tape(tmp_path)) == []
    assert last_state(tmp_path, "r") == {"a": 1}
    assert tape.num_lost_frames == 0


def test_a_write_waits_for_a_mebibyte_or_a_second_of_the_frames_clock(tmp_path):
    tape = recorder(tmp_path)

    def on_disk():
        return len(list(read_tape(tmp_path)))

    tape.frame(mk(10.0, frame_no=0))
    tape.frame(mk(10.5, frame_no=1))
    before = on_disk()
    tape.frame(mk(11.0, frame_no=2))
    after_a_second = on_disk()
    tape.frame(mk(11.1, bytes(BATCH_BYTES), frame_no=3))

    assert (before, after_a_second, on_disk()) == (0, 3, 4)
    tape.close(12.0)


def test_a_write_puts_frames_on_disk_before_the_state_they_made(tmp_path):
    tape = recorder(tmp_path)
    tape.frame(mk(10.0))
    tape.row(10.0, "r", 1, STATE_KIND, {"n": 1})
    tape.write(10.0)

    assert len(list(read_tape(tmp_path))) == 1 and last_state(tmp_path, "r") == {"n": 1}
    tape.close(11.0)


def test_state_rows_hold_events_and_the_newest_state_of_each_run(tmp_path):
    tape = recorder(tmp_path)
    tape.event(Event("note", "a", 4, 2.0, "WARN", "hello", {"x": float("nan")}))
    for step in (1, 2):
        tape.row(float(step), "a", step, STATE_KIND, {"step": step})
    tape.row(9.0, "b", 7, STATE_KIND, {"step": 7})
    tape.close(3.0)

    first = next(read_state(tmp_path))

    assert (first.t_s, first.run, first.step, first.kind) == (2.0, "a", 4, "note")
    assert first.json() == {"level": "WARN", "text": "hello", "data": {"x": None}}
    assert last_states(tmp_path) == {"a": {"step": 2}, "b": {"step": 7}}
    assert last_states(tmp_path, before_s=2.0) == {"a": {"step": 1}}
    assert last_state(tmp_path, "c") is None


@pytest.mark.parametrize(("cut", "rows"), [(1, 5), (40, 5)])
def test_a_torn_last_batch_is_dropped_and_said_with_its_rows_and_bytes(tmp_path, cut, rows):
    path = tmp_path / "tokens-000001.arrows"
    sizes = []
    tape = recorder(tmp_path)
    for t_s, count in ((1.0, 3), (2.0, 5)):
        for i in range(count):
            tape.frame(mk(t_s, bytes(1000), frame_no=i))
        tape.write(t_s)
        sizes.append(path.stat().st_size)
    tape.close(3.0)
    os.truncate(path, path.stat().st_size - cut)

    said: list[Dropped] = []
    kept = list(read_tape(tmp_path, said.append))

    assert [f.frame_no for f in kept] == [0, 1, 2]
    assert [(d.num_rows, d.num_bytes) for d in said] == [(rows, sizes[1] - cut - sizes[0])]
    assert "5 rows" in str(said[0]) and str(said[0].num_bytes) in str(said[0])


def test_a_tape_cut_at_any_byte_is_a_prefix_of_the_whole(tmp_path):
    tape = recorder(tmp_path)
    for i in range(4):
        tape.frame(mk(float(i), bytes([i]) * 20, frame_no=i))
        tape.write(float(i))
    tape.close(4.0)
    path = tmp_path / "tokens-000001.arrows"
    data = path.read_bytes()

    for cut in range(0, len(data), 23):
        path.write_bytes(data[:cut])
        said: list[Dropped] = []
        kept = [f.frame_no for f in read_tape(tmp_path, said.append)]
        assert kept == list(range(len(kept)))
        assert len(said) <= 1


def test_a_killed_writer_leaves_a_tape_that_is_read_and_gone_on_with(tmp_path):
    code = (
        "import sys; from dlc_sentinel.tape.recorder import Recorder; from dlc_sentinel.tape.schema import TapeFrame\n"
        "tape = Recorder(sys.argv[1], 2**26, 2**26)\n"
        "for i in range(10**9):\n"
        "    tape.frame(TapeFrame(i / 10, 'data', 'p', i, b'x' * 50000))\n"
        "    tape.row(i / 10, 'r', i, 'state', {'n': i}); tape.write(i / 10)\n"
        "    if i == 20: print('go', flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"go\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait(10)
    writer.stdout.close()

    with (tmp_path / STATE_FILE).open("ab") as file:
        file.write(b"\xff\xff\xff\xff\x00")
    state = last_state(tmp_path, "r")["n"]
    frames = [f.frame_no for f in read_tape(tmp_path)]
    again = recorder(tmp_path)
    notes = again.frame(mk(1e6, frame_no=-7))
    again.row(1e6, "r", 0, STATE_KIND, {"n": -7})
    again.close(1e6)

    assert state >= 20 and frames == list(range(frames[0], frames[-1] + 1)) and frames[-1] >= state
    assert "5 bytes dropped" in notes[0].text
    assert [f.frame_no for f in read_tape(tmp_path)] == [*frames, -7]
    assert [row.json()["n"] for row in read_state(tmp_path)][-2:] == [state, -7]


def test_a_full_disk_stops_the_frames_counts_them_and_lets_the_state_go_on(tmp_path):
    disk = SmallDisk(3 * MIB)
    tape = recorder(tmp_path, opener=disk)
    notes = []
    for i in range(6):
        notes += tape.frame(mk(float(i), bytes(MIB), frame_no=i))
    for i in range(6, 9):
        notes += tape.frame(mk(float(i), b"12345", frame_no=i))
        tape.row(float(i), "r", i, STATE_KIND, {"n": i})
        notes += tape.write(float(i))
    tape.close(9.0)

    kept = [f.frame_no for f in read_tape(tmp_path)]

    assert kept == [0, 1] and tape.num_lost_frames == 7 and tape.num_lost_bytes == 4 * MIB + 15
    assert [note.kind for note in notes] == ["note"] and "token frames stop" in notes[0].text
    assert notes[0].level == "WARN" and notes[0].data["lost"]["frames"] == 1
    assert [row.json()["n"] for row in read_state(tmp_path)] == [6, 7, 8]


def test_the_rings_oldest_part_makes_room_for_the_state_on_a_full_disk(tmp_path):
    disk = SmallDisk(4 * MIB)
    tape = recorder(tmp_path, part_bytes=MIB, opener=disk)
    for i in range(3):
        tape.frame(mk(float(i), bytes(MIB), frame_no=i))
    disk.free = disk.free - disk.left()

    tape.row(5.0, "r", 5, STATE_KIND, {"n": 5})
    tape.write(5.0)
    tape.close(6.0)

    assert last_state(tmp_path, "r") == {"n": 5}
    assert [f.frame_no for f in read_tape(tmp_path)] == [1, 2]


def test_state_that_cannot_be_written_is_tried_again_and_nothing_is_lost(tmp_path):
    disk = SmallDisk(2000)
    tape = recorder(tmp_path, token_bytes=0, opener=disk)
    notes = []
    for i in range(20):
        tape.row(float(i), "r", i, STATE_KIND, {"n": i})
        notes += tape.write(float(i))
    disk.free = 10 * MIB
    tape.row(20.0, "r", 20, STATE_KIND, {"n": 20})
    notes += tape.write(20.0)
    tape.close(21.0)

    assert [row.json()["n"] for row in read_state(tmp_path)] == list(range(21))
    assert ["cannot be written" in notes[0].text, "written again" in notes[1].text, len(notes)] == [True, True, 2]


def test_state_rows_kept_for_a_full_disk_are_bounded_and_the_loss_is_counted(tmp_path):
    tape = recorder(tmp_path, token_bytes=0, opener=SmallDisk(1))
    for i in range(MAX_PENDING_ROWS + 5):
        tape.row(float(i), "r", i, "note", {})
    tape.close(1.0)

    assert tape.num_lost_rows == 5


def test_old_states_are_cleared_away_but_for_those_a_part_of_the_ring_starts_after(tmp_path):
    tape = recorder(tmp_path, part_bytes=MIB, compact_bytes=60_000)
    for i in range(100):
        tape.frame(mk(i + 0.5, bytes(50_000), frame_no=i))
        tape.event(Event("note", "r", i, i + 0.5, "INFO", "n"))
        tape.row(i + 0.5, "r", i, STATE_KIND, {"n": i, "ballast": "x" * 1000})
        tape.write(i + 0.5)
        tape.sync(i + 0.5)
    tape.close(100.0)

    rows = list(read_state(tmp_path))
    states = [row.step for row in rows if row.kind == STATE_KIND]
    starts = [pa.ipc.open_stream(path).read_next_batch()["t_s"][0].as_py() for _, path in part_paths(tmp_path)]

    assert [row.step for row in rows if row.kind == "note"] == list(range(100))
    assert 99 in states and len(states) < 65 and len(starts) == 5
    assert [last_states(tmp_path, start)["r"]["n"] for start in starts[1:]] == [int(start) - 1 for start in starts[1:]]
    assert not (tmp_path / "state.arrows.new").exists()


def test_a_second_recorder_on_the_same_folder_is_refused(tmp_path):
    tape = recorder(tmp_path)

    with pytest.raises(TapeError, match="another sentinel records here"):
        recorder(tmp_path)
    tape.close(1.0)
    recorder(tmp_path).close(2.0)


def test_a_recorder_closed_twice_writes_once(tmp_path):
    tape = recorder(tmp_path)
    tape.frame(mk())
    tape.close(1.0)

    assert tape.close(2.0) == []
    assert len(list(read_tape(tmp_path))) == 1


def test_a_folder_without_a_tape_is_refused_by_name(tmp_path):
    with pytest.raises(TapeError, match="no tape here"):
        list(read_tape(tmp_path))


def test_a_file_that_is_no_arrow_stream_is_refused_by_name(tmp_path):
    (tmp_path / "tokens-000001.arrows").write_bytes(b"garbage " * 1000)

    with pytest.raises(TapeError, match="not an Arrow stream"):
        list(read_tape(tmp_path))


def test_a_stream_of_other_columns_is_refused_with_its_columns(tmp_path):
    table = pa.table({"a": [1]})
    with pa.ipc.new_stream(tmp_path / STATE_FILE, table.schema) as writer:
        writer.write_table(table)

    with pytest.raises(TapeError, match=r"\['a'\]"):
        list(read_state(tmp_path))


def test_boot_rows_carry_the_resumed_states_and_ticks_carry_nothing(tmp_path):
    tape = recorder(tmp_path)
    for frame in (boot_frame(1.0, {"r": {"n": 1}}), tick_frame(2.0), end_frame(3.0)):
        tape.frame(frame)
    tape.close(3.0)

    boot, tick, end = read_tape(tmp_path)

    assert boot_states(boot) == {"r": {"n": 1}}
    assert [f.channel for f in (boot, tick, end)] == ["tick"] * 3
    assert [f.header for f in (boot, tick, end)] == [b"boot", b"", b"end"]
