"""A run that is over, told to sinks as it was: events and snapshots, at the times they happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import TapeError
from dlc_sentinel.evidence import Evidence
from dlc_sentinel.offline import sources
from dlc_sentinel.records import Event, Snapshot
from dlc_sentinel.runtime import Runtime
from dlc_sentinel.sinks.base import Sink
from dlc_sentinel.tape.replay import TapeSource, last_states, read_tape
from dlc_sentinel.tape.schema import BOOT

STEP_S = 60.0
"""What is no tape has no clock: its steps are this far apart."""


def play(path: str | Path, config: Config, sink: Sink, *, step_s: float = STEP_S) -> None:
    """Judges the run anew and tells the sink; all runs of a tape.

    Times are those of the tape; of any other recording, step x `step_s` from 0.
    Raises: TapeError if `path` is nothing that is read here, or holds no tokens.
    """
    kind = sources.kind_of(path)
    if kind == "tape":
        _play_tape(Path(path), config, sink)
    elif kind in ("metrics", "trainer_state"):
        raise TapeError(f"{path}: holds a stack's own numbers and no tokens to replay; `analyze` reads it")
    else:
        _play_tokens(sources.token_source(path, kind, on_policy=False), config, sink, step_s)


def _play_tape(folder: Path, config: Config, sink: Sink) -> None:
    frames = read_tape(folder)
    first = next(frames, None)
    source = TapeSource(frames if first is None else chain([first], frames))
    runtime = Runtime(config, source, Monitor(config, replaying=True), None, [sink], evidence=Evidence(keep=1))
    if first is not None and first.header != BOOT:
        runtime.resume(last_states(folder, first.t_s))
    runtime.run()
    for event in runtime.finish():
        sink.handle(event)
    sink.publish(runtime.snapshot())


def _play_tokens(source: sources.TokenSource, config: Config, sink: Sink, step_s: float) -> None:
    monitor, evidence = Monitor(config, replaying=True), Evidence(keep=1)
    now_s = 0.0

    def tell(events: Sequence[Event]) -> None:
        for event in events:
            sink.handle(event)
        if any(event.kind == "step" for event in events):
            sink.publish(_with_scalars(monitor.snapshot(now_s), evidence))

    for frame_no, record in enumerate(source.records()):
        now_s = max(now_s, getattr(record, "step", 0) * step_s)
        evidence.feed(record)
        tell(monitor.feed(record, frame_no, now_s))
    tell(monitor.finish(now_s))


def _with_scalars(snapshot: Snapshot, evidence: Evidence) -> Snapshot:
    kept = [(run, evidence.of(run.run)) for run in snapshot.runs]
    return replace(snapshot, runs=tuple(replace(run, scalars=e.scalars, synced=e.synced) for run, e in kept))
