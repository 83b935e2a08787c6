"""The one loop: what comes in is recorded, judged, told to the sinks and answered to the job."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from factories_job import CONFIG, MIB, TRAINER, Ears, Script, stale_job, train

import dlc_sentinel
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.evidence import Evidence
from dlc_sentinel.records import Scalars, StepEnd
from dlc_sentinel.runtime import LiveSource, Runtime, replay
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.replay import read_state, read_tape
from dlc_sentinel.wire.receiver import Frame, Receiver

DEADLINE_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.s = 50.0

    def __call__(self) -> float:
        return self.s


class Box:
    """A receiver without sockets: hands out what was put in, and the clock moves on by what was waited for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.inbox: list[Frame] = []
        self.waits: list[int] = []
        self.closed = 0

    def poll(self, timeout_ms: int) -> list[Frame]:
        self.waits.append(timeout_ms)
        frames, self.inbox = self.inbox, []
        self._clock.s += 0.0 if frames else timeout_ms / 1e3
        return frames

    def close(self) -> None:
        self.closed += 1


class WaitingEars(Ears):
    """A sink another thread can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()

    def handle(self, event):
        with self._news:
            super().handle(event)
            self._news.notify_all()

    def wait_for(self, wanted):
        with self._news:
            assert self._news.wait_for(lambda: any(wanted(e) for e in self.events), DEADLINE_S), self.events


def wait_until(condition):
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "nothing came before the deadline"
        threading.Event().wait(0.01)


def drive(records, *, recorder=None, ears=None, **settings):
    source, ears = Script(records), ears or Ears()
    runtime = Runtime(CONFIG, source, Monitor(CONFIG), recorder, [ears], **settings)
    runtime.run()
    return runtime, source, ears


def test_a_live_source_stamps_frames_and_ticks_once_a_second():
    clock = Clock()
    box = Box(clock)
    source = LiveSource(box, {"r": {"n": 1}}, clock)

    (boot,) = source.poll(200)
    start_s = boot.t_s
    box.inbox.append(Frame("control", b"x"))
    (frame,) = source.poll(200)
    ticks = [t.t_s - start_s for _ in range(16) for t in source.poll(200)]

    assert (boot.header, boot.payload) == (b"boot", b'{"r":{"n":1}}')
    assert (frame.channel, frame.frame, frame.t_s) == ("control", b"x", start_s)
    assert ticks == pytest.approx([1.0, 2.0, 3.0], abs=1e-6)
    assert max(box.waits) == 200


def test_a_live_source_does_not_sleep_past_its_tick():
    clock = Clock()
    box = Box(clock)
    source = LiveSource(box, None, clock)
    source.poll(10_000)

    (tick,) = source.poll(10_000)

    assert tick.channel == "tick" and box.waits == [1000]


def test_sinks_hear_every_event_in_order_and_are_closed_once():
    runtime, _, ears = drive(stale_job(14))
    runtime.close()

    assert [e.step for e in ears.events if e.kind == "step"] == list(range(14))
    assert [e.t_s for e in ears.events] == sorted(e.t_s for e in ears.events)
    assert ears.closed == 1


def test_a_snapshot_is_published_at_each_closed_step_and_else_twice_a_second():
    quiet = [b"no frame"] * 40
    _, _, ears = drive([*stale_job(3), *quiet])

    times = [s.t_s for s in ears.snapshots]
    at_steps = {e.t_s for e in ears.events if e.kind == "step"}

    assert at_steps <= set(times) and [s.runs[0].last_step for s in ears.snapshots if s.runs][-1] == 2
    quiet_times = [t for t in times if t > max(at_steps)]
    assert len(quiet_times) in (19, 20) and min(np.diff(quiet_times)) >= 0.5


def test_the_evidence_of_the_records_is_in_every_snapshot():
    ears = Ears()
    records = (train(0), Scalars(TRAINER, 0, {"reward": 0.5}), StepEnd(TRAINER, 0))
    runtime = Runtime(CONFIG, Script(records), Monitor(CONFIG), None, [ears], evidence=Evidence(keep=3))
    runtime.run()
    run = ears.snapshots[-1].runs[0]

    assert [strip["step"] for strip in run.worst] == [0, 0, 0]
    assert run.scalars == ({"step": 0, "reward": 0.5},)


def test_without_snapshots_sinks_hear_events_only():
    _, _, ears = drive(stale_job(3), snapshots=False)

    assert ears.snapshots == [] and ears.events


def test_the_verdict_latency_is_the_time_from_the_closing_frame_to_the_published_event():
    class Slow(Script):
        """A clock that stands while frames are handed out and moves on by 30 ms whenever a sink hears something."""

        late_s = 0.0

        def now_s(self) -> float:
            return super().now_s() + self.late_s

    source = Slow([train(0), StepEnd(TRAINER, 0)])

    class Sluggish(Ears):
        def handle(self, event):
            super().handle(event)
            source.late_s += 0.03

    runtime = Runtime(CONFIG, source, Monitor(CONFIG), None, [Sluggish()])
    while runtime.step(0):
        pass
    (run,) = runtime.snapshot().runs

    # "appeared" comes with the train record, then the step's own events
    heard = len(runtime._sinks[0].events)  # type: ignore[attr-defined]  # the sink above
    assert run.verdict_latency_s == pytest.approx(0.03 * heard)
    runtime.close()


def test_notices_of_warn_and_above_go_to_the_job_and_info_does_not():
    _, source, ears = drive(stale_job(14))

    assert source.notices == [e.text for e in ears.events if e.level != "INFO"] != []


def test_a_sent_command_is_the_events_command():
    _, source, ears = drive(stale_job(14))

    (event,) = [e for e in ears.events if e.kind == "command"]
    (command,) = source.commands
    assert (command.id, command.kind, command.run, command.action) == (
        event.data["id"], "RESYNC", "r1", event.data["action"],
    )  # fmt: skip
    assert command.evidence == event.data["evidence"]


def nobody_there(monkeypatch, until):
    """[(command id, when tried)]; from the `until`-th try on somebody takes it."""
    tried = []

    def send_command(self, command):
        tried.append((command.id, self.now_s()))
        return int(len(tried) >= until)

    monkeypatch.setattr(Script, "send_command", send_command)
    return tried


def test_a_command_that_nobody_was_there_to_take_is_sent_again_until_somebody_is(monkeypatch):
    tried = nobody_there(monkeypatch, 3)

    drive(stale_job(60, every=60))

    first = [at_s for name, at_s in tried if name == "r1-RESYNC-0001"]
    assert len(first) == 3 and first[2] - first[1] >= 0.9


def test_a_command_that_lapsed_before_anybody_came_is_not_sent_any_more(monkeypatch):
    tried = nobody_there(monkeypatch, 10**6)

    _, _, ears = drive(stale_job(60, every=60))

    (lapsed_s,) = [e.t_s for e in ears.events if e.kind == "ack" and e.data["id"] == "r1-RESYNC-0001"]
    first = [at_s for name, at_s in tried if name == "r1-RESYNC-0001"]
    assert len(first) > 3 and max(first) <= lapsed_s


def test_a_command_that_a_sync_made_needless_is_not_sent_any_more(monkeypatch):
    tried = nobody_there(monkeypatch, 10**6)

    _, source, _ = drive(stale_job(24, every=12))

    first = [at_s for name, at_s in tried if name == "r1-RESYNC-0001"]
    assert len(first) > 1 and max(first) < source.now_s() - 2.0, "the job synced by itself at step 11"


def test_a_command_is_on_the_tape_before_it_is_sent(tmp_path):
    recorder = Recorder(tmp_path, MIB, MIB)
    seen = []

    class Looking(Script):
        def send_command(self, command):
            seen.append([row.json()["data"]["id"] for row in read_state(tmp_path) if row.kind == "command"])
            return super().send_command(command)

    Runtime(CONFIG, Looking(stale_job(14)), Monitor(CONFIG), recorder, []).run()

    assert seen == [["r1-RESYNC-0001"]]


def test_the_header_column_ends_where_the_frames_header_ends(tmp_path):
    drive([train(0), StepEnd(TRAINER, 0)], recorder=Recorder(tmp_path, MIB, MIB))

    data = [f for f in read_tape(tmp_path) if f.channel == "data"]

    assert [f.frame_no for f in data] == [0, 1] and {f.producer for f in data} == {TRAINER.producer}
    assert all(f.num_header == 8 + int.from_bytes(f.frame[4:8], "little") for f in data)


def test_notes_of_the_tape_reach_the_sinks_and_no_replay(tmp_path):
    recorder = Recorder(tmp_path, MIB, MIB)
    recorder.close(0.0)
    with (tmp_path / "state.arrows").open("ab") as file:
        file.write(b"\xff\xff\xff\xff")
    _, _, ears = drive(stale_job(3), recorder=Recorder(tmp_path, MIB, MIB))

    notes = [e for e in ears.events if e.kind == "note" and e.run == ""]

    assert len(notes) == 1 and "4 bytes dropped" in notes[0].text
    assert [e for e in replay(tmp_path, CONFIG)[0] if e.run == ""] == []
    assert "note" in {row.kind for row in read_state(tmp_path)}


def test_stop_ends_a_run_that_waits_for_frames():
    with Receiver("tcp://127.0.0.1:0") as receiver:
        ears = Ears()
        runtime = Runtime(CONFIG, LiveSource(receiver), Monitor(CONFIG), None, [ears])
        thread = threading.Thread(target=runtime.run)
        thread.start()
        runtime.stop()
        thread.join(DEADLINE_S)

    assert not thread.is_alive() and ears.closed == 1


def test_a_job_is_watched_resynced_and_replayed_over_real_sockets(tmp_path, monkeypatch):
    receiver = Receiver("tcp://127.0.0.1:0")
    monkeypatch.setenv("DLC_SENTINEL", str(receiver.address))
    ears = WaitingEars()
    runtime = Runtime(CONFIG, LiveSource(receiver), Monitor(CONFIG), Recorder(tmp_path, 64 * MIB, 64 * MIB), [ears])
    thread = threading.Thread(target=runtime.run)
    thread.start()
    hook = dlc_sentinel.connect(run="r1", role="trainer", model_name="tiny")
    commands = []

    for step in range(12):
        job = train(step, gen=0, lag=0.01 + 0.03 * step)
        hook.train(
            step, step, seq_id=list(job.ids), group=list(job.groups), cur=job.cur_N, old=job.old_N, engine=job.engine_N,
            old_is="generator", versions=0, lengths=np.diff(job.offsets_S1),
        )  # fmt: skip
        hook.poll(step)
        ears.wait_for(lambda e, step=step: e.kind == "step" and e.step == step)
        if any(e.kind == "command" for e in ears.events):
            wait_until(lambda step=step: commands.append(hook.poll(step)) or commands[-1] is not None)
            hook.ack(commands[-1], "applied", version=step + 1)
            break
    ears.wait_for(lambda e: e.kind == "ack")
    hook.close()
    runtime.stop()
    thread.join(DEADLINE_S)

    events, sent, report = replay(tmp_path, CONFIG)
    assert commands[-1].kind == "RESYNC" and [c["id"] for c in sent] == [commands[-1].id]
    assert [(e.kind, e.step, e.text, repr(e.data), e.t_s) for e in events] == [
        (e.kind, e.step, e.text, repr(e.data), e.t_s) for e in ears.events
    ]
    assert report == runtime.monitor.report("r1")
    assert 0.0 <= ears.snapshots[-1].runs[0].verdict_latency_s < 1.0
