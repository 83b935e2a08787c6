"""A run that is over, judged: the JSON object of the file format, from whatever was kept of it (see `sources`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dlc_sentinel import runtime
from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.core.run import Tap
from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline import metrics_judge, sources
from dlc_sentinel.offline.corrections import Corrections
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json, Record
from dlc_sentinel.tape.schema import TapeFrame, part_paths

TOLD_LINES = 10
EXIT_HEALTHY, EXIT_BLIND, EXIT_FINDING, EXIT_ABORT = 0, 1, 10, 20

NO_TOKENS = (
    "{path} holds numbers per step, no tokens: --corrections has nothing to compare; "
    "give it a tape, a .jsonl or a dump with per-token log-probabilities"
)
ONE_RUN = "{path} holds one run, so --run {run} chose nothing (a tape can hold several)"

Watch = Callable[[int, int], bool]
"""watch(bytes read, bytes in all) -> False to stop here; what was read until then is judged."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Judged:
    """A run that is over."""

    report: dict[str, Json]
    """The object of the file format."""
    events: list[Event] = field(default_factory=list)
    commands: list[Mapping[str, Json]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What cannot be known from this recording, in sentences."""
    partial: bool = False
    """True when it was stopped before the end."""
    hypothetical: bool = True
    """False for a tape, whose job may have been there to act on commands."""


def judge(
    path: str | Path,
    config: Config | None = None,
    run: str | None = None,
    *,
    on_policy: bool = False,
    corrections: bool = False,
    watch: Watch | None = None,
) -> Judged:
    """What the recording at `path` tells; its kind is found by `sources.kind_of`.

    Commands of anything but a tape are hypothetical: nobody was there to act on them. `on_policy`: where the recording
    does not say which weights generated a row, they were those it was trained on. `corrections`: see `analyze`.
    `run`: of a tape; what else is read here holds one run, and a note says that nothing was chosen.
    Raises: TapeError if `path` is nothing that is read here.
    """
    settings, kind = config or Config(), sources.kind_of(path)
    one_run = [ONE_RUN.format(path=path, run=plain(run, 60))] if run and kind != "tape" else []
    if kind in ("metrics", "trainer_state"):
        log = sources.metric_log(path)
        report = metrics_judge.judge(log, settings, on_policy=on_policy)
        notes = one_run + metrics_judge.notes(log, on_policy=on_policy)
        beside = sources.tokens_beside(path)
        notes += [NO_TOKENS.format(path=path)] if corrections else []
        notes += [f"{path} also holds tokens ({beside}): name that folder for what they tell"] if beside else []
        return Judged(_whole(report, _told(path, log.problems)), notes=notes)
    watching = _Watching(watch)
    compared = Corrections(settings.ess.horizon) if corrections else None
    tap = None if compared is None else compared.take
    if kind == "tape":
        watching.total = sum(part.stat().st_size for _, part in part_paths(Path(path)))
        try:
            done = runtime.replayed(path, settings, run, watched=watching.frames, tap=tap)
        except TapeError:
            if run is None or not watching.stopped:
                raise
            note = f"no run {plain(run, 60)!r} came before the reading was stopped"
            return Judged(_whole(None, [], run=run), notes=[note], partial=True, hypothetical=False)
        report = _whole(done.report, [], compared, done.run, done.verdicts)
        return Judged(report, done.events, done.commands, partial=watching.stopped, hypothetical=False)
    source = sources.token_source(path, kind, on_policy=on_policy)
    events, monitor = _played(source, settings, watching, tap)
    commands = [event.data for event in events if event.kind == "command"]
    report = _whole(monitor.report(source.run), _told(path, source.problems), compared, source.run)
    return Judged(report, events, commands, [*one_run, *source.notes], watching.stopped)


class _Watching:
    """Tells the watcher how far the reading is, and ends it where the watcher says so."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self.total = 0
        self.stopped = False

    def frames(self, frames: Iterator[TapeFrame]) -> Iterator[TapeFrame]:
        done = 0
        for frame in frames:
            done += len(frame.frame)
            if self.stop(done):
                return
            yield frame

    def records(self, source: sources.TokenSource) -> Iterator[Record]:
        self.total = source.total
        for record in source.records():
            if self.stop(source.done):
                return
            yield record

    def stop(self, done: int) -> bool:
        if self._watch is not None and not self._watch(min(done, self.total), self.total):
            self.stopped = True
        return self.stopped


def _played(
    source: sources.TokenSource, config: Config, watching: _Watching, tap: Tap | None
) -> tuple[list[Event], Monitor]:
    monitor = Monitor(config, replaying=True, keep_steps=None, tap=tap)
    events: list[Event] = []
    now_s = 0.0
    for frame_no, record in enumerate(watching.records(source)):
        # A file has no clock: the step stands in for it, so that the same file always gives the same events.
        now_s = max(now_s, float(getattr(record, "step", 0)))
        events += monitor.feed(record, frame_no, now_s)
    return events + monitor.finish(now_s), monitor


def _told(path: str | Path, problems: list[tuple[int, str]]) -> list[int]:
    """Line numbers of what was not used; why is logged for the first few."""
    for number, why in problems[:TOLD_LINES]:
        _log.warning("%s line %d is not used: %s", path, number, why)
    if len(problems) > TOLD_LINES:
        _log.warning("%s: %d lines more are not used", path, len(problems) - TOLD_LINES)
    return [number for number, _ in problems]


def replay(
    path: str | Path, config: Config | None = None, run: str | None = None
) -> tuple[list[Event], list[Mapping[str, Json]], dict[str, Json]]:
    """(events, commands, report) of a recording, as `judge` gives them."""
    judged = judge(path, config, run)
    return judged.events, judged.commands, judged.report


def analyze(
    path: str | Path,
    config: Config | None = None,
    run: str | None = None,
    *,
    on_policy: bool = False,
    corrections: bool = False,
) -> dict[str, Json]:
    """The object of the file format (schema 1) for a recording of any kind that `sources` knows.

    Every key is always there; unknown = None, never NaN or infinity; nats. `unparsed_lines` holds the numbers, from 1,
    of lines that were not used; why is logged. `run` names the run that it is about (default: of several in one tape
    the one with the most severe verdict; None: a log of numbers names none), `other_runs` the others, with verdicts.
    `corrections`: the key of that name says what each correction would have
    done, and which one the run needs; it is None without, and where no tokens were kept.
    Raises: TapeError if `path` cannot be read as any of them.
    """
    return judge(path, config, run, on_policy=on_policy, corrections=corrections).report


def exit_code(report: Mapping[str, Json]) -> int:
    """0 healthy, 1 blind, 20 if a finding makes ABORT due (design of the decisions: README, "Exit codes"), else 10."""
    counted = [
        finding
        for finding in report["findings"]
        if finding["state"] != "superseded" and (finding["state"] != "closed" or finding["acted"])
    ]
    if any(_is_fatal(finding) for finding in counted):
        return EXIT_ABORT
    return {"HEALTHY": EXIT_HEALTHY, "BLIND": EXIT_BLIND}.get(report["verdict"], EXIT_FINDING)


def _is_fatal(finding: Mapping[str, Json]) -> bool:
    if finding["verdict"] == "STALE_ENGINE":
        return bool(finding["state"] == "confirmed")
    return finding["verdict"] in ("DATA", "ENGINE") and bool(finding["catastrophic"])


def _whole(
    report: Json,
    unparsed: list[int],
    compared: Corrections | None = None,
    run: str = "",
    verdicts: Mapping[str, str] | None = None,
) -> dict[str, Json]:
    """The report with all its keys, clean of what JSON cannot say; `verdicts`: of every run of the recording."""
    empty: dict[str, Json] = {"schema": 1, "verdict": "BLIND", "findings": [], "steps": [], "commands": []}
    clean = _clean(empty | (report or {}))
    assert isinstance(clean, dict)
    corrections = None if compared is None else compared.report(run)
    others = [{"run": name, "verdict": verdict} for name, verdict in (verdicts or {}).items() if name != run]
    return clean | {"unparsed_lines": unparsed, "corrections": corrections, "run": run or None, "other_runs": others}


def _clean(value: Json) -> Json:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
