"""Gathers what a post-mortem tells: the run judged anew, then its records once more for the worst tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dlc_sentinel import config as tree
from dlc_sentinel.catalog import OPEN_STATES, number
from dlc_sentinel.config import Config
from dlc_sentinel.errors import FrameError
from dlc_sentinel.evidence import Evidence, RunEvidence
from dlc_sentinel.offline import analyze
from dlc_sentinel.offline.interchange import Interchange
from dlc_sentinel.records import Event, Json, Record
from dlc_sentinel.report.story import Story
from dlc_sentinel.tape.replay import read_tape
from dlc_sentinel.tape.schema import is_tape
from dlc_sentinel.version import __version__
from dlc_sentinel.wire.codec import decode

WORST = 6
BEFORE_STEPS = 5
"""Steps before the first finding that are searched for the worst tokens, too."""


def gather(
    path: str | Path, config: Config | None = None, origins: Mapping[str, str] | None = None, run: str | None = None
) -> Story:
    """The story of one run of a tape folder or a .jsonl file (default: the one with the most severe verdict).

    The worst tokens are those of the steps around the findings, else of the whole run.
    Raises: TapeError if `path` cannot be read as either.
    """
    settings = config or Config()
    events, _, report = analyze.replay(path, settings, run)
    name = str(report["run"] or "")
    own = [event for event in events if event.run == name] if name else list(events)
    evidence = _evidence(path, name, _where(report, own))
    return Story(
        source=str(path),
        run=name or Path(path).name,
        report=report,
        events=own,
        evidence=evidence,
        settings=_rows(settings, origins or {}),
        version=__version__,
        horizon=settings.ess.horizon,
        has_clock=is_tape(path),
        window=settings.window,
    )


def _where(report: Mapping[str, Json], events: Sequence[Event]) -> tuple[int, int] | None:
    """Steps (first, last) in which something was wrong; None where nothing was."""
    since = [number(finding, "since_step") for finding in report["findings"]]
    known = [int(step) for step in since if step == step]
    if not known:
        return None
    is_open = any(finding["state"] in OPEN_STATES for finding in report["findings"])
    ends = [event.step for event in events if event.kind == "finding" and event.data.get("state") not in OPEN_STATES]
    last = max((int(step["step"]) for step in report["steps"]), default=max(known))
    return min(known) - BEFORE_STEPS, last if is_open or not ends else max(ends)


def _evidence(path: str | Path, run: str, steps: tuple[int, int] | None) -> RunEvidence:
    kept = Evidence(keep=WORST, last_steps=None, steps=steps)
    name = run
    for record in _records(path):
        if run in ("", record.source.run):
            name = record.source.run
            kept.feed(record)
    return kept.of(name)


def _records(path: str | Path) -> Iterator[Record]:
    if not is_tape(path):
        yield from Interchange(path).records()
        return
    for frame in read_tape(path):
        if frame.channel != "tick":
            try:
                yield decode(frame.frame)[0]
            except FrameError:
                continue


def _rows(config: Config, origins: Mapping[str, str]) -> list[tuple[str, str, str]]:
    rows = []
    for key in tree.known_keys():
        section, leaf = key.split(".")
        value = getattr(getattr(config, section), leaf)
        rows.append((key, tree.shown(key, value), origins.get(key, "default")))
    return rows
