"""One line a human can act on per thing that matters: what, since when, evidence, next move.

    02:31:33Z [!!] r1 step 33: LAG opened (queue), since step 31: the rows come from old weights ...;
    lag_ess 0.43, version_age 3.1 | next: sync weights now                                          (all on one line)

A finding speaks when it opens, gets worse or closes, not at every step. Words and the mark carry the meaning
([!!] critical, [! ] warning, [ok] closed, [->] command, [<-] answer); colour only repeats it.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json, Snapshot
from dlc_sentinel.verdicts import text_of

_MAX_REMEMBERED = 4096
_STYLES = {"[!!]": "\x1b[1;7m", "[! ]": "\x1b[1;33m", "[ok]": "\x1b[36m", "[->]": "\x1b[1m", "[<-]": "\x1b[1m"}
_RESET = "\x1b[0m"
_RANK = {"suspected": 1, "confirmed": 2}


@dataclass(frozen=True, slots=True)
class Line:
    """One piece of news in words."""

    key: tuple[str, ...]
    """What the rate limit counts under."""
    mark: str
    text: str


class Wording:
    """Which events are news, and in what words. A finding is news when it opens, gets worse or closes."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, ...], int] = OrderedDict()

    def line(self, event: Event) -> Line | None:
        """The event's line, None where it is no news."""
        match event.kind:
            case "finding":
                return self._finding(event)
            case "command":
                return _command(event)
            case "ack":
                return _ack(event)
            case "producer":
                return _producer(event)
            case "breaker":
                move = f" | next: {_BREAKER_MOVE}" if event.level != "INFO" else ""
                return Line((event.run, "breaker", event.level), _mark(event), f"breaker: {plain(event.text)}{move}")
            case "note" if event.level != "INFO":
                return Line((event.run, "note", event.text[:80]), _mark(event), plain(event.text, 300))
            case _:
                return None

    def _finding(self, event: Event) -> Line | None:
        data = event.data
        verdict, kind, state = (plain(data.get(name) or "", 40) for name in ("verdict", "kind", "state"))
        if verdict == "HEALTHY":
            return None
        key = (event.run, verdict, kind)
        before = self._open.pop(key, 0)
        rank = 2 * _RANK.get(state, 0) + (event.level == "CRITICAL" or data.get("catastrophic") is True)
        if state in _RANK:
            remember(self._open, key, max(rank, before))
            if rank <= before:
                return None
            word = "escalated" if before else "opened"
            return Line((*key, word), _mark(event), _finding_text(data, verdict, kind, f"{word} ({state})"))
        return Line((*key, "closed"), "[ok]", _closed_text(data, verdict, kind, state or "closed"))


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said last under one key, and what has been held back since."""

    t_s: float
    num_held: int = 0
    mark: str = ""
    text: str = ""
    """The newest line held back."""


class AlertLines:
    """Writes alert lines to a stream, at most one per key in `min_interval_s` of event time.

    What was held back is counted and said in the next line of that key, and the last of it at close. A stream that
    breaks loses lines only (`num_lost`). Bell and colour appear on a tty only, and not where no_color is set (the
    caller reads NO_COLOR).
    """

    def __init__(self, stream: TextIO | None = None, *, no_color: bool = False, min_interval_s: float = 60.0) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._min_interval_s = min_interval_s
        self._decorated = not no_color and self._stream.isatty()
        self._wording = Wording()
        self._last: OrderedDict[tuple[str, ...], _Said] = OrderedDict()
        self.num_lost = 0

    def handle(self, event: Event) -> None:
        line = self._wording.line(event)
        if line is None:
            return
        text = f"{_clock(event.t_s)} {line.mark} {where(event)}: {line.text}"
        said = self._last.pop(line.key, _Said(-math.inf))
        if said.t_s <= event.t_s < said.t_s + self._min_interval_s:
            remember(self._last, line.key, _Said(said.t_s, said.num_held + 1, line.mark, text))
            return
        remember(self._last, line.key, _Said(event.t_s))
        more = f" (+{said.num_held} like it held back)" if said.num_held else ""
        self._write(line.mark, text + more, event.level == "CRITICAL")

    def publish(self, snapshot: Snapshot) -> None:
        """Nothing: lines are about changes."""

    def close(self) -> None:
        """Says the last of what is held back under each key; the stream is the caller's. A second call says nothing."""
        for said in self._last.values():
            if said.num_held:
                more = f"the last of {said.num_held} like it held back" if said.num_held > 1 else "held back until now"
                self._write(said.mark, f"{said.text} ({more})", False)
        self._last.clear()

    def _write(self, mark: str, line: str, is_critical: bool) -> None:
        line = _folded(line, self._stream)
        if self._decorated:
            line = f"{_STYLES[mark]}{line}{_RESET}" + ("\a" if is_critical and mark == "[!!]" else "")
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # A closed terminal or a full disk under the stream: the sentinel goes on.
            self.num_lost += 1


_BREAKER_MOVE = "find out why RESYNC has no effect, then `dlc-sentinel actions reset`"


def remember(memory: OrderedDict[tuple[str, ...], Json], key: tuple[str, ...], value: Json) -> None:
    """Enters the value as the newest; the oldest is forgotten where there are too many."""
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)


def _folded(line: str, stream: TextIO) -> str:
    """The line folded between words on a terminal; whole in a file or a pipe, where it is searched for."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        columns = 0
    indent = " " * len("02:31:33Z ")
    return textwrap.fill(line, columns, subsequent_indent=indent, break_on_hyphens=False) if columns else line


def _mark(event: Event) -> str:
    return {"CRITICAL": "[!!]", "WARN": "[! ]"}.get(event.level, "[ok]")


def _clock(t_s: float) -> str:
    """UTC time of day."""
    try:
        return datetime.fromtimestamp(t_s, UTC).strftime("%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "--:--:--Z"


def where(event: Event) -> str:
    """Run and step of an event."""
    return f"{plain(event.run, 60)} step {event.step}" if event.step >= 0 else plain(event.run, 60)


def _kind(kind: str) -> str:
    return f" ({kind})" if kind else ""


def _finding_text(data: Mapping[str, Json], verdict: str, kind: str, what: str) -> str:
    text = text_of(verdict)
    since = data.get("since_step")
    evidence = _evidence(data.get("evidence"))
    catastrophic = "catastrophic " if data.get("catastrophic") is True else ""
    return (
        f"{catastrophic}{verdict}{_kind(kind)} {what}"
        + (f", since step {plain(since, 20)}" if since is not None else "")
        + f": {text.line}"
        + (f"; {evidence}" if evidence else "")
        + f" | next: {plain(data.get('advice') or text.do[0], 240)}"
        + f" | more: dlc-sentinel explain {verdict}"
    )


def _closed_text(data: Mapping[str, Json], verdict: str, kind: str, state: str) -> str:
    # The evidence is that of the opening: beside the word closed it would be taken for the value now.
    since = f", was open since step {plain(data['since_step'], 20)}" if data.get("since_step") is not None else ""
    return f"{verdict}{_kind(kind)} {state}{since}"


def _evidence(evidence: Json, limit: int = 5) -> str:
    """The first few numbers and words of the evidence: "lag_ess 0.43, version_age 3.1"."""
    if not isinstance(evidence, Mapping):
        return ""
    shown = [
        f"{plain(name, 40)} {f'{value:.3g}' if isinstance(value, float) else plain(value, 40)}"
        for name, value in evidence.items()
        if isinstance(value, (str, bool, int, float))
    ]
    return ", ".join(shown[:limit])


def _command(event: Event) -> Line:
    data = event.data
    kind, action = plain(data.get("kind") or "command", 20), plain(data.get("action") or "", 20)
    outcome = (
        "due, NOT SENT (the mode does not allow it)"
        if data.get("sent") is False
        else plain(data.get("outcome") or "sent", 20)
    )
    reset = " with cache reset" if data.get("reset_cache") is True else ""
    expires = data.get("expires_step")
    text = (
        f"{kind} {outcome}{_kind(action)}{reset}: {plain(data.get('reason') or event.text, 200)}"
        + (f"; {evidence}" if (evidence := _evidence(data.get("evidence"))) else "")
        + (
            f" | next: applied at a safe point by step {expires}"
            if isinstance(expires, int) and expires >= 0 and data.get("sent") is not False
            else ""
        )
        + (f" [{plain(data['id'], 24)}]" if data.get("id") else "")
    )
    return Line((event.run, "command", kind), "[->]" if event.level != "CRITICAL" else "[!!]", text)


def _ack(event: Event) -> Line:
    data = event.data
    outcome = plain(data.get("outcome") or "answered", 20)
    command_id = data.get("id") or data.get("command_id")
    version, reason = data.get("version"), plain(data.get("reason") or event.text, 200)
    at = f" at version {version}" if isinstance(version, int) and version >= 0 else ""
    move = "" if outcome == "applied" else " | next: see why the job did not do it; it goes on training as it was"
    text = f"command {outcome}{at}" + (f": {reason}" if reason else "") + move
    return Line(
        (event.run, "ack", outcome),
        "[<-]",
        text + (f" [{plain(command_id, 24)}]" if command_id else ""),
    )


def _producer(event: Event) -> Line | None:
    data = event.data
    state = plain(data.get("state") or "", 20)
    if event.level == "INFO":  # who came, and who left with a goodbye
        return None
    who = " ".join(
        plain(data[name], 40) for name in ("role", "rank", "replica", "host") if data.get(name) not in (None, "")
    )
    move = (
        ""
        if state not in ("silent", "gone")
        else " | next: is the job still running? without it the verdict will be BLIND"
    )
    text = f"producer{f' {state}' if state else ''}: {plain(event.text, 200) or who}{move}"
    return Line(
        (event.run, "producer", str(data.get("producer", who)), state),
        _mark(event),
        text,
    )
