"""What a post-mortem tells, as plain rows: derived from the report object, the events and the evidence of one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from dlc_sentinel import missing
from dlc_sentinel.catalog import OPEN_STATES, number
from dlc_sentinel.config import Window
from dlc_sentinel.evidence import RunEvidence
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json
from dlc_sentinel.verdicts import VerdictText, text_of

AFTER_STEPS = 5
"""Steps over which a command's effect is read: after it was applied, or else after it was sent."""
_TOLD = ("finding", "command", "ack", "producer", "breaker", "note")


@dataclass(frozen=True, slots=True)
class Story:
    """One run and all that is known of it. `report` is the object of the file format; times are event times."""

    source: str
    """What was read, as the reader named it."""
    run: str
    report: Mapping[str, Json]
    events: Sequence[Event]
    evidence: RunEvidence
    settings: Sequence[tuple[str, str, str]]
    """(key, value, origin), secrets hidden."""
    version: str
    horizon: int = 32
    has_clock: bool = True
    """False for a file of steps: its events have no time of day."""
    notes: Sequence[str] = field(default=())
    window: Window | None = None
    """The settings that say how many tokens a verdict needs; None: the defaults."""

    @property
    def steps(self) -> Sequence[Mapping[str, Json]]:
        return list(self.report["steps"])

    @property
    def verdict(self) -> VerdictText:
        return text_of(plain(self.report["verdict"], 24))

    @property
    def line(self) -> str:
        """The verdict in one line, with what is missing where that is a number."""
        return missing.line(self.verdict.name, self.steps, self.window, len(self.report["unparsed_lines"]))

    @property
    def model_name(self) -> str:
        return next((str(who["model_name"]) for who in self.evidence.about if who["model_name"]), "model unknown")


class Span(NamedTuple):
    """One finding over the steps it was open; `last` is None where it never closed."""

    verdict: str
    kind: str
    first: int
    last: int | None


class Sent(NamedTuple):
    """One command and what it did."""

    step: int
    kind: str
    action: str
    reason: str
    outcome: str
    answer: str
    ess_before: float
    ess_after: float


def sent(story: Story) -> list[Sent]:
    """Commands in order, each with its answer and the ESS of the action horizon before and at best soon after."""
    ess = {int(step["step"]): number(step, "lag_ess", str(story.horizon)) for step in story.steps}
    found = []
    for event, answer, outcome in outcomes(story.events, hypothetical=not story.has_clock):
        data = event.data
        done = answer.step if answer is not None and answer.data.get("outcome") == "applied" else event.step
        after = [ess.get(max(done, event.step) + i, math.nan) for i in range(1, AFTER_STEPS + 1)]
        found.append(
            Sent(
                event.step,
                plain(data.get("kind"), 20),
                plain(data.get("action") or "", 20) + (", cache reset" if data.get("reset_cache") else ""),
                plain(data.get("reason") or event.text, 300),
                outcome,
                plain(answer.text, 300) if answer else "",
                ess.get(event.step, math.nan),
                max((value for value in after if not math.isnan(value)), default=math.nan),
            )
        )
    return found


def outcomes(events: Sequence[Event], *, hypothetical: bool) -> Iterator[tuple[Event, Event | None, str]]:
    """(command, its answer, what came of it) in order; `hypothetical`: nobody was there to act on one."""
    answers = {str(event.data.get("id")): event for event in events if event.kind == "ack"}
    for event in events:
        if event.kind != "command":
            continue
        answer = None if hypothetical else answers.get(str(event.data.get("id")))
        if answer is not None:
            yield event, answer, plain(answer.data.get("outcome") or "answered", 20)
        elif event.data.get("sent") is False:
            yield event, None, "not sent (mode)"
        else:
            yield event, None, "hypothetical" if hypothetical else "no answer"


def spans(story: Story) -> list[Span]:
    """Findings over the steps they were open, in order of the first."""
    closed: dict[tuple[str, str, int], int] = {}
    for event in story.events:
        if event.kind == "finding" and event.data.get("state") not in OPEN_STATES:
            closed[_key(event.data)] = event.step
    found = []
    for finding in story.report["findings"]:
        key = _key(finding)
        last = None if finding["state"] in OPEN_STATES else closed.get(key, key[2])
        found.append(Span(*key, last))
    return sorted(set(found), key=lambda span: span.first)


def _key(finding: Mapping[str, Json]) -> tuple[str, str, int]:
    since = number(finding, "since_step")
    at = int(since) if math.isfinite(since) else -1
    return plain(finding.get("verdict"), 24), plain(finding.get("kind") or "", 40), at


def alike(story: Story) -> list[list[Mapping[str, Json]]]:
    """Findings of one verdict and kind together, in the report's order; the first of each stands for the rest."""
    groups: dict[tuple[str, str], list[Mapping[str, Json]]] = {}
    for finding in story.report["findings"]:
        groups.setdefault(_key(finding)[:2], []).append(finding)
    return list(groups.values())


def opened(findings: Sequence[Mapping[str, Json]]) -> str:
    """ "opened 3 times more, since steps 12, 20, 31"; empty for none."""
    if not findings:
        return ""
    steps = sorted(_key(finding)[2] for finding in findings)
    shown = ", ".join(map(str, steps if len(steps) <= 16 else [*steps[:12], "...", *steps[-3:]]))
    times = "once" if len(steps) == 1 else f"{len(steps)} times"
    return f"opened {times} more, since step{'s' if len(steps) > 1 else ''} {shown}"


def timeline(story: Story, limit: int = 400) -> Iterator[tuple[str, str, str, str, str]]:
    """(time, step, level, kind, text), oldest first: what a person would want to have been told."""
    told = [event for event in story.events if event.kind in _TOLD and _is_news(event)]
    head, tail = (told, []) if len(told) <= limit else (told[: limit // 2], told[-limit // 2 :])
    yield from (_row(story, event) for event in head)
    if tail:
        yield "", "", "INFO", "...", f"{len(told) - limit} more events are left out here"
        yield from (_row(story, event) for event in tail)


def _is_news(event: Event) -> bool:
    return event.level != "INFO" or event.kind in ("command", "ack", "breaker", "producer", "finding")


def _row(story: Story, event: Event) -> tuple[str, str, str, str, str]:
    at = _clock(event.t_s) if story.has_clock else ""
    return at, str(event.step) if event.step >= 0 else "", event.level, event.kind, plain(event.text, 400)


def _clock(t_s: float) -> str:
    try:
        return datetime.fromtimestamp(t_s, UTC).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def when(story: Story) -> str:
    """First and last time of the events, UTC; empty where the recording has no clock."""
    times = [event.t_s for event in story.events] if story.has_clock else []
    if not times:
        return ""
    try:
        first, last = (datetime.fromtimestamp(t, UTC) for t in (min(times), max(times)))
    except (ValueError, OverflowError, OSError):
        return ""
    end = last.strftime("%H:%M:%S" if last.date() == first.date() else "%Y-%m-%d %H:%M:%S")
    return f"{first:%Y-%m-%d %H:%M:%S} to {end} UTC"


def least(story: Story, *keys: str) -> tuple[float, int]:
    """(smallest value of the steps, its step); (NaN, -1) without data."""
    return _best(story, keys, 1.0)


def most(story: Story, *keys: str) -> tuple[float, int]:
    """(largest value of the steps, its step); (NaN, -1) without data."""
    return _best(story, keys, -1.0)


def _best(story: Story, keys: tuple[str, ...], sign: float) -> tuple[float, int]:
    values = [(number(step, *keys), int(step["step"])) for step in story.steps]
    known = [(value, at) for value, at in values if math.isfinite(value)]
    return min(known, key=lambda pair: sign * pair[0], default=(math.nan, -1))


def curve(story: Story, *keys: str) -> list[tuple[float, float]]:
    """(step, value) of every step; NaN where nothing is known."""
    return [(float(step["step"]), number(step, *keys)) for step in story.steps]


def scalar_curve(story: Story, name: str) -> list[tuple[float, float]]:
    """(step, value) of one scalar that the stack reported."""
    return [(float(row["step"]), number(row, name)) for row in story.evidence.scalars if name in row]


def scalar_names(story: Story) -> list[str]:
    """Scalars worth a curve: the reward, then the entropy, where the stack names them so."""
    names = sorted({name for row in story.evidence.scalars for name in row if name != "step"}, key=len)
    found = []
    for wanted in ("true_reward", "reward", "entropy"):
        match = next((name for name in names if wanted in name.lower() and name not in found), None)
        if match is not None:
            found.append(match)
    return found[:2]


def dropped(story: Story) -> list[tuple[str, int]]:
    """(cause, tokens) over all steps, largest first; nothing for causes that took none."""
    totals: dict[str, int] = {}
    for step in story.steps:
        for cause, num in step["dropped"].items():
            totals[plain(cause, 40)] = totals.get(plain(cause, 40), 0) + int(num or 0)
    return sorted(((cause, num) for cause, num in totals.items() if num), key=lambda pair: -pair[1])


def bases(story: Story) -> str:
    """How many steps rest on which basis: "exact 140, mixed 3"."""
    counts: dict[str, int] = {}
    for step in story.steps:
        counts[plain(step["basis"], 20)] = counts.get(plain(step["basis"], 20), 0) + 1
    return ", ".join(f"{name} {num}" for name, num in sorted(counts.items(), key=lambda pair: -pair[1])) or "no step"


def word(value: Json) -> str:
    """Three significant digits; a dash where nothing is known; other things as inert text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "∞" if math.isinf(value) else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(word(item) for item in value[:12])
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(key, 40)} {word(item)}" for key, item in list(value.items())[:12])
    return f"{value:,}" if isinstance(value, int) else plain(value, 300)
