"""The path: record -> producers -> join -> window -> (step closed) facts -> diagnose -> detect -> decide -> events.

`Monitor` routes by run; `RunMonitor` is the path of one run. Time is passed in; the same calls give the same events.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlc_sentinel.config import Config
from dlc_sentinel.core.run import RunMonitor, Tap
from dlc_sentinel.errors import RecordError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Command, Event, Json, Record, Snapshot
from dlc_sentinel.version import __version__

SCHEMA = 1


class Monitor:
    """Everything the sentinel knows, over all runs it hears of.

    `replaying` only changes how commands are called that nobody could have obeyed: hypothetical.
    `keep_steps`: closed steps kept for `report` and the snapshot; None = all. `tap` is shown all tokens that count.
    """

    def __init__(
        self, config: Config, *, replaying: bool = False, keep_steps: int | None = 512, tap: Tap | None = None
    ) -> None:
        self._config = config
        self._tap = tap
        self._replaying = replaying
        self._keep_steps = keep_steps
        self._runs: dict[str, RunMonitor] = {}
        self._refused: dict[str, int] = {}
        self._started_s = -1.0

    def feed(self, record: Record, frame_no: int, now_s: float) -> list[Event]:
        """Events that this record causes, in order. `frame_no` < 0 = not numbered."""
        self._start(now_s)
        return self._run(record.source.run).feed(record, frame_no, now_s)

    def tick(self, now_s: float) -> list[Event]:
        """Events that the passing of time causes; call once a second."""
        self._start(now_s)
        return [event for run in self._runs.values() for event in run.tick(now_s)]

    def refuse(self, cause: str, now_s: float) -> list[Event]:
        """Counts a frame that was no record."""
        self._start(now_s)
        self._refused[cause] = self._refused.get(cause, 0) + 1
        return []

    def finish(self, now_s: float) -> list[Event]:
        """Closes what is still open: the end of a file, a tape or an orderly stop."""
        return [event for run in self._runs.values() for event in run.finish(now_s)]

    def awaits(self, command: Command) -> bool:
        """True while an answer to the command, which nobody took yet, would still do good."""
        run = self._runs.get(command.run)
        return run is not None and run.awaits(command)

    def runs(self) -> list[str]:
        return list(self._runs)

    def report(self, run: str) -> dict[str, Json]:
        """The object that `analyze --json` prints, without `unparsed_lines`. Raises: KeyError for an unknown run."""
        return {"schema": SCHEMA, **self._runs[run].report()}

    def reset_breaker(self, run: str, now_s: float) -> list[Event]:
        """Closes the action breaker of a run by hand."""
        return self._run(run).reset_breaker(now_s)

    def snapshot(self, now_s: float) -> Snapshot:
        runs = tuple(run.snapshot() for run in self._runs.values())
        return Snapshot(now_s, self._started_s, __version__, runs, dict(self._refused))

    def dump_state(self, run: str) -> Json:
        """What `load_state` needs to go on after a restart; JSON."""
        return self._runs[run].to_json()

    def load_state(self, run: str, state: Mapping[str, Json]) -> None:
        """Goes on from what `dump_state` gave. Raises: RecordError for a state of another version."""
        try:
            self._run(run).load(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"{type(error).__name__}: {plain(error)}"
            raise RecordError(f"the state of run {plain(run, 60)!r} is of another version ({cause})") from error

    def _run(self, name: str) -> RunMonitor:
        if name not in self._runs:
            self._runs[name] = RunMonitor(name, self._config, self._keep_steps, self._replaying, self._tap)
        return self._runs[name]

    def _start(self, now_s: float) -> None:
        if self._started_s < 0:
            self._started_s = now_s
