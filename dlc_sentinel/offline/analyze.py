"""A run that is over, judged: the JSON object of the file format, from a tape or from JSON lines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from dlc_sentinel import runtime
from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.interchange import Interchange
from dlc_sentinel.records import Event, Json
from dlc_sentinel.tape.schema import is_tape

EXIT_HEALTHY, EXIT_BLIND, EXIT_FINDING, EXIT_ABORT = 0, 1, 10, 20

_log = logging.getLogger(__name__)


def replay(
    path: str | Path, config: Config | None = None, run: str | None = None
) -> tuple[list[Event], list[Mapping[str, Json]], dict[str, Json]]:
    """(events, commands, report) of a tape folder or of a .jsonl or .jsonl.gz file; the report as `analyze` gives it.

    The commands of a file are hypothetical: nobody was there to act on them.  Raises: TapeError if `path` is neither.
    """
    settings = config or Config()
    if is_tape(path):
        events, commands, report = runtime.replay(path, settings, run)
        return events, commands, _whole(report, [])
    if Path(path).is_dir():
        raise TapeError(f"{path}: no tape in this folder; wanted a folder with state.arrows, or a .jsonl file")
    return _replay_file(path, settings)


def _replay_file(path: str | Path, config: Config) -> tuple[list[Event], list[Mapping[str, Json]], dict[str, Json]]:
    file = Interchange(path)
    monitor = Monitor(config, replaying=True, keep_steps=None)
    events: list[Event] = []
    now_s = 0.0
    for frame_no, record in enumerate(file.records()):
        # A file has no clock: the step stands in for it, so that the same file always gives the same events.
        now_s = max(now_s, float(getattr(record, "step", 0)))
        events += monitor.feed(record, frame_no, now_s)
    events += monitor.finish(now_s)
    for number, why in file.problems:
        _log.warning("%s line %d is not used: %s", path, number, why)
    commands = [event.data for event in events if event.kind == "command"]
    return events, commands, _whole(monitor.report(file.run), [number for number, _ in file.problems])


def analyze(path: str | Path, config: Config | None = None, run: str | None = None) -> dict[str, Json]:
    """The object of the file format (schema 1) for a tape folder, a .jsonl or a .jsonl.gz file.

    Every key is always there; unknown = None, never NaN or infinity; nats. `unparsed_lines` holds the numbers, from 1,
    of lines that were not used; why is logged.  Raises: TapeError if `path` cannot be read as either.
    """
    return replay(path, config, run)[2]


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


def _whole(report: Json, unparsed: list[int]) -> dict[str, Json]:
    """The report with all its keys, clean of what JSON cannot say."""
    empty: dict[str, Json] = {"schema": 1, "verdict": "BLIND", "findings": [], "steps": [], "commands": []}
    clean = _clean(empty | (report or {}))
    assert isinstance(clean, dict)
    return clean | {"unparsed_lines": unparsed}


def _clean(value: Json) -> Json:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
