"""Tells people: the same news as the alert lines, to chat, pager, e-mail, webhook or desktop, and no more than helps.

De-duplicated (a finding is told when it opens, gets worse or closes), with a cool-down per news, a limit per hour that
critical news passes, and an escalation of what stays open. Sending is done by a thread of its own: a slow or dead
service costs news, never the watch.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlc_sentinel.catalog import OPEN_STATES
from dlc_sentinel.plaintext import plain, unlinked
from dlc_sentinel.records import Event, Level, Snapshot
from dlc_sentinel.sinks.alert_lines import Line, Wording, remember, where

HOUR_S = 3600.0
QUEUE = 256
RETRIES = 1
RETRY_S = 2.0
CLOSE_S = 10.0

_log = logging.getLogger(__name__)


class Target(Protocol):
    """One receiver."""

    @property
    def name(self) -> str:
        """What may be shown of it."""

    @property
    def only_critical(self) -> bool:
        """True where it is to hear only what is critical or was escalated."""

    def send(self, title: str, body: str, level: Level) -> bool:
        """Whether it was delivered. May take seconds; raises NotTaken with why not, and whatever a plug-in raises."""


class NotTaken(Exception):
    """Why a target did not take it, in words that hold no secret."""


@dataclass(frozen=True, slots=True)
class _News:
    title: str
    body: str
    level: Level
    for_all: bool
    """True where the targets that hear only critical news are told, too."""


@dataclass(slots=True)
class _Open:
    """A finding that is open, since when people know, and whether it was escalated."""

    told_s: float
    escalated: bool = False


class Notifier:
    """Sends news to the targets. `num_sent` counts deliveries, `num_lost` news that a target never got.

    Times are those of the events, so that a replay would tell the same; only the sending takes real time.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        cooldown_s: float = 600.0,
        escalate_s: float = 1800.0,
        max_per_hour: int = 30,
        retry_s: float = RETRY_S,
    ) -> None:
        self.num_sent = 0
        self.num_lost = 0
        self._targets = tuple(targets)
        self._cooldown_s = cooldown_s
        self._escalate_s = escalate_s
        self._max_per_hour = max_per_hour
        self._retry_s = retry_s
        self._wording = Wording()
        self._last: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        self._told: set[tuple[str, ...]] = set()
        """Findings whose opening was told: only of these is the end told."""
        self._open: dict[tuple[str, ...], _Open] = {}
        self._sent_s: deque[float] = deque()
        self._num_over = 0
        self._queue: queue.Queue[_News | None] = queue.Queue(QUEUE)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="dlc-sentinel-notify", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        line = self._wording.line(event)
        if line is None or not self._is_wanted(event, line):
            return
        num_held = self._held(line.key, event.t_s)
        if num_held is None:
            return
        if event.kind == "finding":
            (self._told.discard if line.key[-1] == "closed" else self._told.add)(line.key[:-1])
        more = f" (+{num_held} like it held back)" if num_held else ""
        self._tell(event.run, event.level, f"{line.mark} {where(event)}: {line.text}{more}", event.t_s)

    def publish(self, snapshot: Snapshot) -> None:
        """Escalates what has been open for too long."""
        now: dict[tuple[str, ...], _Open] = {}
        for run in snapshot.runs:
            for finding in run.findings:
                verdict, kind = plain(finding.get("verdict"), 40), plain(finding.get("kind") or "", 40)
                if finding.get("state") not in OPEN_STATES or verdict == "HEALTHY":
                    continue
                key = (run.run, verdict, kind)
                now[key] = held = self._open.get(key) or _Open(snapshot.t_s)
                age_s = snapshot.t_s - held.told_s
                if self._escalate_s and not held.escalated and age_s >= self._escalate_s:
                    held.escalated = True
                    kinds = f" ({kind})" if kind else ""
                    body = (
                        f"[!!] {plain(run.run, 60)}: {verdict}{kinds} still open after {age_s / 60:.0f} min, since "
                        f"step {plain(finding.get('since_step'), 20)} | next: {plain(finding.get('advice') or '', 240)}"
                    )
                    self._tell(run.run, "CRITICAL", body, snapshot.t_s)
        self._open = now

    def close(self) -> None:
        """Sends what is waiting, for at most CLOSE_S; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    # -- what is told ------------------------------------------------------------------------------------------------

    def _is_wanted(self, event: Event, line: Line) -> bool:
        """News for people: warnings, and the end of what they were told of. A command that was applied is none."""
        if event.kind != "finding":
            return event.level != "INFO"
        return line.key[-1] != "closed" or line.key[:-1] in self._told

    def _held(self, key: tuple[str, ...], t_s: float) -> int | None:
        """Number of news held back before this one, or None where this one is held back too."""
        last_s, num_held = self._last.pop(key, (-math.inf, 0))
        if last_s <= t_s < last_s + self._cooldown_s:
            remember(self._last, key, (last_s, num_held + 1))
            return None
        remember(self._last, key, (t_s, 0))
        return num_held

    def _tell(self, run: str, level: Level, body: str, t_s: float) -> None:
        while self._sent_s and not t_s - HOUR_S < self._sent_s[0] <= t_s:
            self._sent_s.popleft()
        if level != "CRITICAL" and len(self._sent_s) >= self._max_per_hour:
            self._num_over += 1
            return
        self._sent_s.append(t_s)
        over, self._num_over = self._num_over, 0
        body += f" ({over} news before this one held back: more than {self._max_per_hour} an hour)" if over else ""
        title = f"dlc-sentinel {level.lower()}: {plain(run, 60) or 'sentinel'}"
        news = _News(unlinked(title), unlinked(body), level, level == "CRITICAL")
        try:
            self._queue.put_nowait(news)
        except queue.Full:
            self.num_lost += len(self._receivers(news))

    # -- sending -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (news := self._queue.get()) is not None:
            for target in self._receivers(news):
                self._send(target, news)

    def _receivers(self, news: _News) -> list[Target]:
        return [target for target in self._targets if news.for_all or not target.only_critical]

    def _send(self, target: Target, news: _News) -> None:
        for attempt in range(RETRIES + 1):
            if attempt:
                self._closing.wait(self._retry_s)
            why = trouble(target, news.title, news.body, news.level)
            if not why:
                self.num_sent += 1
                return
        self.num_lost += 1
        _log.warning("%s did not take a notification (%s)", target.name, why)


def trouble(target: Target, title: str, body: str, level: Level) -> str:
    """ "" where the target took it, else why not, without anything that may hold a secret."""
    try:
        return "" if target.send(title, body, level) else "refused, or not reached"
    except NotTaken as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # a plug-in's fault must not end the thread that wakes people
        return type(error).__name__
