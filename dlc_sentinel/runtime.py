"""The one loop and the one clock: source -> tape -> codec -> monitor -> tape, job, sinks.

A live run and its replay differ in the source object only: `LiveSource` stamps what the sockets bring and adds a tick
a second; `TapeSource` yields what was recorded, with the recorded times, and sends nothing.

Longer than 300 lines: the loop, its live source and its replay are one idea and are read together.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.core.run import Tap
from dlc_sentinel.errors import FrameError, TapeError
from dlc_sentinel.evidence import Evidence, RunEvidence
from dlc_sentinel.maths.arrays import prime_allocator
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Command, Event, Json, Level, RunSnapshot, Snapshot
from dlc_sentinel.sinks.base import Sink
from dlc_sentinel.tape import schema
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.replay import TapeSource, last_states, read_state, read_tape
from dlc_sentinel.tape.schema import TapeFrame
from dlc_sentinel.verdicts import VERDICTS
from dlc_sentinel.wire.codec import decode
from dlc_sentinel.wire.frame import open_header
from dlc_sentinel.wire.receiver import Receiver

TICK_S = 1.0
PUBLISH_S = 0.5
POLL_MS = 200
DRAIN_S = 2.0
"""After `stop`, how long what had arrived by then is still taken: a job that goes on sending must not hold us."""
DRAIN_POLL_MS = 100
HEADER_AT = 8
"""Where a frame's header begins; the tape's `header` column ends with it."""
KEPT_KINDS = frozenset({"step", "command", "ack", "breaker"})
"""Events after which the state to resume from is kept."""
COMMAND_FIELDS = frozenset(field.name for field in fields(Command))


_SEVERITY = {verdict.name: rank for rank, verdict in enumerate(VERDICTS)}
_log = logging.getLogger(__name__)


class Source(Protocol):
    """Where frames and ticks come from, and where commands go."""

    replaying: bool

    def poll(self, timeout_ms: int) -> Sequence[TapeFrame] | None:
        """What came, in order, each with its time; empty if nothing came in time, None when nothing ever will."""

    def now_s(self) -> float:
        """The clock the frames are stamped with, seconds since the epoch, never going back."""

    def send_command(self, command: Command) -> int:
        """Number of peers the command went to."""

    def send_notice(self, run: str, level: Level, text: str) -> int:
        """Number of peers that may print the line on the job's stderr."""

    def close(self) -> None:
        """Releases the sockets; a second call does nothing."""


class LiveSource:
    """Frames of a receiver, stamped at receipt, and one tick a second. `states` are what the first row resumes from."""

    replaying = False

    def __init__(
        self, receiver: Receiver, states: Mapping[str, Json] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._receiver = receiver
        self._clock = clock
        # The wall clock is read once: a step of it must neither turn time back nor silence a producer.
        self._offset_s = time.time() - clock()
        self._boot: TapeFrame | None = schema.boot_frame(self.now_s(), states or {})
        self._next_tick_s = self.now_s() + TICK_S

    def poll(self, timeout_ms: int) -> Sequence[TapeFrame] | None:
        if self._boot is not None:
            boot, self._boot = self._boot, None
            return [boot]
        until_tick_ms = max(math.ceil((self._next_tick_s - self.now_s()) * 1e3), 0)
        frames = self._receiver.poll(min(timeout_ms, until_tick_ms))
        now_s = self.now_s()
        taken = [TapeFrame(now_s, frame.channel, "", -1, frame.payload) for frame in frames]
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            taken.append(schema.tick_frame(now_s))
        return taken

    def now_s(self) -> float:
        return self._clock() + self._offset_s

    def send_command(self, command: Command) -> int:
        return self._receiver.send_command(command)

    def send_notice(self, run: str, level: Level, text: str) -> int:
        return self._receiver.send_notice(run, level, text)

    def close(self) -> None:
        self._receiver.close()


class Runtime:
    """Drives one monitor. One thread calls `run` (or `step` and `close`); any other may call `stop`, `reset_breaker`.

    Sinks hear every event in order and, unless `snapshots` is False, get a snapshot at each closed step and at most
    twice a second besides. `evidence` hears every record; what it keeps is put into the snapshots.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        monitor: Monitor,
        recorder: Recorder | None,
        sinks: Sequence[Sink],
        *,
        snapshots: bool = True,
        evidence: Evidence | None = None,
    ) -> None:
        self.monitor = monitor
        self._evidence = evidence
        self._config = config
        self._source = source
        self._recorder = recorder
        self._sinks = tuple(sinks)
        self._snapshots = snapshots and bool(sinks)
        self._stopped = threading.Event()
        self._resets: deque[str] = deque()
        self._undelivered: dict[str, Command] = {}
        """Commands that nobody was there to take: a sentinel that was started again decides before the job is back."""
        self._latency_s: dict[str, float] = {}
        self._published_s = float("-inf")
        self._num_taken = 0
        self._closed = False

    def run(self) -> None:
        """Returns after `stop`, or when the source is over; everything is closed then."""
        prime_allocator()
        try:
            while not self._stopped.is_set() and self.step(POLL_MS):
                pass
            if not self._source.replaying:
                self._drain()
        finally:
            self.close()

    def _drain(self) -> None:
        end_s = time.monotonic() + DRAIN_S
        while time.monotonic() < end_s:
            frames = self._source.poll(DRAIN_POLL_MS)
            if not frames:
                return
            for frame in frames:
                self._take(frame)

    def stop(self) -> None:
        """Makes `run` return within one poll and what had arrived by then."""
        self._stopped.set()

    def reset_breaker(self, run: str) -> None:
        """Closes the action breaker of a run by hand, within one poll; on the tape, so that a replay does it, too."""
        self._resets.append(run)

    def step(self, timeout_ms: int) -> bool:
        """False when the source is over. Takes what came within `timeout_ms`."""
        frames = self._source.poll(timeout_ms)
        if frames is None:
            return False
        for frame in frames:
            self._take(frame)
        now_s = self._source.now_s()
        while self._resets:
            self._take(schema.reset_frame(now_s, self._resets.popleft()))
        if now_s - self._published_s >= PUBLISH_S:
            self._publish(now_s)
        return True

    def close(self) -> None:
        """Closes open steps, the tape, the sinks and the source; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._source.replaying:
                self._take(schema.end_frame(self._source.now_s()))
            if self._recorder is not None:
                self._recorder.close(self._source.now_s())
        finally:
            for sink in self._sinks:
                sink.close()
            self._source.close()

    def finish(self) -> list[Event]:
        """Events of the steps that are still open: at the end of a tape without an orderly stop."""
        return self.monitor.finish(self._source.now_s())

    def resume(self, states: Mapping[str, Json]) -> None:
        """Hands the monitor the states {run: state} it goes on from."""
        for run, state in states.items():
            self.monitor.load_state(run, state)

    def snapshot(self) -> Snapshot:
        """The monitor's picture, with the latencies measured here."""
        snapshot = self.monitor.snapshot(self._source.now_s())
        runs = tuple(
            replace(run, verdict_latency_s=self._latency_s.get(run.run, run.verdict_latency_s)) for run in snapshot.runs
        )
        if self._evidence is not None:
            runs = tuple(_with_evidence(run, self._evidence.of(run.run)) for run in runs)
        return replace(snapshot, runs=runs)

    # -- one frame ---------------------------------------------------------------------------------------------------

    def _take(self, frame: TapeFrame) -> None:
        self._num_taken += 1
        if frame.channel == "tick":
            self._record(frame)
            self._deliver()
            events = self._tick(frame)
        else:
            events = self._feed(frame)
        if events:
            self._tell(events, frame.t_s)

    def _tick(self, frame: TapeFrame) -> list[Event]:
        header = frame.header
        if not header:
            return self.monitor.tick(frame.t_s)
        if header == schema.BOOT:
            if self._num_taken > 1:
                self.monitor = Monitor(self._config, replaying=self._source.replaying)
            self.resume(schema.boot_states(frame))
        elif header == schema.END:
            return self.monitor.finish(frame.t_s)
        elif header == schema.RESET:
            return self.monitor.reset_breaker(frame.payload.decode(), frame.t_s)
        return []

    def _feed(self, frame: TapeFrame) -> list[Event]:
        try:
            record, frame_no = decode(frame.frame)
        except FrameError as error:
            self._record(frame)
            return self.monitor.refuse(error.cause, frame.t_s)
        num_header = HEADER_AT + len(open_header(frame.frame)[1])
        self._record(TapeFrame(frame.t_s, frame.channel, record.source.producer, frame_no, frame.frame, num_header))
        if self._evidence is not None:
            self._evidence.feed(record)
        return self.monitor.feed(record, frame_no, frame.t_s)

    def _record(self, frame: TapeFrame) -> None:
        if self._recorder is not None:
            self._note(self._recorder.frame(frame))

    # -- what came of it ---------------------------------------------------------------------------------------------

    def _tell(self, events: Sequence[Event], received_s: float) -> None:
        closed = {event.run for event in events if event.kind == "step"}
        if self._recorder is not None:
            # On the tape first: a command that was sent is known to whoever resumes.
            for event in events:
                self._recorder.event(event)
            changed = {event.run: event.step for event in events if event.kind in KEPT_KINDS}
            for run, step in changed.items():
                self._recorder.row(received_s, run, step, schema.STATE_KIND, self.monitor.dump_state(run))
            self._note(self._recorder.write(received_s))
        for event in events:
            self._send(event)
            for sink in self._sinks:
                sink.handle(event)
        if closed:
            now_s = self._source.now_s()
            self._latency_s.update(dict.fromkeys(closed, max(now_s - received_s, 0.0)))
            self._publish(now_s)
            if self._recorder is not None:
                self._note(self._recorder.sync(now_s))

    def _send(self, event: Event) -> None:
        if event.kind == "command" and event.data.get("sent"):
            wanted = {key: value for key, value in event.data.items() if key in COMMAND_FIELDS}
            self._undelivered[event.data["id"]] = Command(**wanted)
            self._deliver()
        if event.level != "INFO":
            self._source.send_notice(event.run, event.level, event.text)

    def _deliver(self) -> None:
        """Hooks take a command once, however often it comes."""
        for name, command in list(self._undelivered.items()):
            if not self.monitor.awaits(command) or self._source.send_command(command):
                del self._undelivered[name]

    def _note(self, notes: Sequence[Event]) -> None:
        """Notes of the tape about itself: told and kept, but no part of what a replay repeats (their run is empty)."""
        for note in notes:
            for sink in self._sinks:
                sink.handle(note)
            if self._recorder is not None:
                self._recorder.event(note)

    def _publish(self, now_s: float) -> None:
        self._published_s = now_s
        if self._snapshots:
            snapshot = self.snapshot()
            for sink in self._sinks:
                sink.publish(snapshot)


def _with_evidence(run: RunSnapshot, kept: RunEvidence) -> RunSnapshot:
    return replace(run, worst=kept.worst, scalars=kept.scalars, synced=kept.synced, about=kept.about)


class _Heard:
    """A sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def publish(self, snapshot: Snapshot) -> None:
        return None

    def close(self) -> None:
        return None


def replay(
    directory: str | Path,
    config: Config,
    run: str | None = None,
    *,
    watched: Callable[[Iterator[TapeFrame]], Iterator[TapeFrame]] = iter,
    tap: Tap | None = None,
) -> tuple[list[Event], list[Mapping[str, Json]], Json]:
    """(events, commands, report) of a recorded run, as `replayed` gives them."""
    done = replayed(directory, config, run, watched=watched, tap=tap)
    return done.events, done.commands, done.report


class Replayed(NamedTuple):
    """What a tape tells."""

    events: list[Event]
    commands: list[Mapping[str, Json]]
    report: Json
    run: str
    """Whose report it is; "" if the tape holds no run."""
    verdicts: Mapping[str, str]
    """Of every run of the tape by its name, in the order they came."""


def replayed(
    directory: str | Path,
    config: Config,
    run: str | None = None,
    *,
    watched: Callable[[Iterator[TapeFrame]], Iterator[TapeFrame]] = iter,
    tap: Tap | None = None,
) -> Replayed:
    """The events and commands that the live runs had, in order, and the report of one of them.

    The report is the object of the file format without `unparsed_lines`, of `run` (default: of those that closed a step
    the one with the most severe verdict, the newest of equals); None if the tape holds no run. Steps that were open
    when the sentinel was killed are in the report only. Steps older than the ring of token frames are taken from the
    state tape as they were judged then. `watched` hands the frames on, and may end them early; `tap`: see Monitor.
    Raises: TapeError if there is no tape, or no such run in it.
    """
    heard = _Heard()
    frames = watched(read_tape(directory, lambda dropped: _log.warning("%s", dropped)))
    first = next(frames, None)
    source = TapeSource(frames if first is None else chain([first], frames))
    runtime = Runtime(config, source, Monitor(config, replaying=True, tap=tap), None, [heard], snapshots=False)
    if first is not None and first.header != schema.BOOT:
        runtime.resume(last_states(directory, first.t_s))
    runtime.run()
    runtime.finish()
    commands = [event.data for event in heard.events if event.kind == "command"]
    reports = {shown.run: runtime.monitor.report(shown.run) for shown in runtime.snapshot().runs}
    if run is not None and run not in reports:
        raise TapeError(f"{directory}: no run {plain(run, 60)!r}; it holds {', '.join(map(plain, reports)) or 'none'}")
    closed = [event.run for event in reversed(heard.events) if event.kind == "step" and event.run in reports]
    name = run or min(closed or reports, key=lambda each: _SEVERITY[reports[each]["verdict"]], default=None)
    if name is None:
        return Replayed(heard.events, commands, None, "", {})
    report = reports[name]
    steps = [event.data for event in heard.events if event.kind == "step" and event.run == name]
    _add_steps(report, steps)
    if first is None or first.header != schema.BOOT:
        _add_judged(report, directory, name, min((step["step"] for step in steps), default=None))
    return Replayed(heard.events, commands, report, name, {each: reports[each]["verdict"] for each in reports})


def _add_steps(report: Json, steps: Sequence[Mapping[str, Json]]) -> None:
    """Puts steps in that the report lacks: those of the sentinel's earlier lives."""
    known = {step["step"] for step in report["steps"]}
    missing = {step["step"]: step for step in steps if step["step"] not in known}
    report["steps"] = sorted([*missing.values(), *report["steps"]], key=lambda step: int(step["step"]))


def _add_judged(report: Json, directory: str | Path, run: str, first: int | None) -> None:
    """Where the ring lost its beginning: steps up to `first`, in which it was cut, as they were judged then."""
    kept = {row.step: row.json()["data"] for row in read_state(directory) if row.kind == "step" and row.run == run}
    before = {step: data for step, data in kept.items() if first is None or step <= first}
    replayed = {step["step"]: step for step in report["steps"]}
    report["steps"] = [step for _, step in sorted((replayed | before).items())]
