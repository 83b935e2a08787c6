"""Showing snapshots: once, or again and again. Where a snapshot comes from is the caller's affair."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dlc_sentinel.errors import SentinelError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import RunSnapshot, Snapshot
from dlc_sentinel.ui import browse
from dlc_sentinel.ui.browse import START, Place
from dlc_sentinel.ui.view import RunView, view
from dlc_sentinel.verdicts import VERDICTS, text_of

SnapshotSource = Callable[[], Snapshot]
"""Returns the newest snapshot; raises OSError or SentinelError where it cannot."""

Keys = Callable[[float], str | None]
"""Waits at most so many seconds for a key; its name, "" for none, None where none will ever come."""

SHOWN_RUNS = 10
_SEVERITY = {verdict.name: rank for rank, verdict in enumerate(VERDICTS)}


def choose(snapshot: Snapshot, run: str | None = None) -> RunSnapshot | None:
    """The run of that name, else the one with the most severe verdict (the newest of equals); None if there is none."""
    named = [candidate for candidate in snapshot.runs if run is None or candidate.run == run]
    return min(reversed(named), key=lambda candidate: _SEVERITY.get(candidate.verdict, 0), default=None)


def once(
    source: SnapshotSource,
    console: Console,
    *,
    run: str | None = None,
    as_json: Callable[[Snapshot], str] | None = None,
) -> int:
    """Prints one picture as text, or one JSON object where `as_json` is given; works without a tty.

    Returns: 0, or 1 where health is not known (BLIND, UNWIRED, no such run).
    Raises: what `source` raises: without a picture there is nothing to print.
    """
    snapshot = source()
    chosen = choose(snapshot, run)
    if as_json is not None:
        console.file.write(as_json(snapshot) + "\n")
        console.file.flush()
    elif chosen is None:
        console.print(_nothing(snapshot, run))
    else:
        console.print(_view(snapshot, chosen, ""))
    return 0 if chosen is not None and text_of(chosen.verdict).is_known else 1


def watch(
    source: SnapshotSource,
    console: Console,
    *,
    run: str | None = None,
    period_s: float = 1.0,
    stop: threading.Event | None = None,
    keys: Keys | None = None,
) -> int:
    """Shows the newest snapshot until `stop` is set, `q` or Ctrl-C. Returns 0.

    On a terminal: a full screen, redrawn every `period_s` and, where there are `keys`, at each of them (browse.KEYS).
    Else: one picture whenever step or verdict change.
    A source that fails leaves the last picture on screen, marked as old; it is asked again.
    """
    watcher = _Watcher(source, run, console.is_terminal, keys if console.is_terminal else None)
    stop = stop or threading.Event()
    try:
        if console.is_terminal:
            with Live(watcher.picture(), console=console, screen=True, auto_refresh=False) as live:
                while not watcher.wait(period_s, stop):
                    live.update(watcher.picture(), refresh=True)
        else:
            _print_changes(watcher, console, period_s, stop)
    except KeyboardInterrupt:
        pass
    return 0


def _print_changes(watcher: _Watcher, console: Console, period_s: float, stop: threading.Event) -> None:
    shown: object = None
    while True:
        picture = watcher.picture()
        if watcher.what_changes != shown:
            console.print(picture)
            shown = watcher.what_changes
        if stop.wait(period_s):
            return


@dataclass(slots=True)
class _Watcher:
    source: SnapshotSource
    run: str | None
    fills_screen: bool
    keys: Keys | None = None
    place: Place = START
    last: Snapshot | None = None
    heard_s: float = 0.0
    trouble: str = ""

    def wait(self, period_s: float, stop: threading.Event) -> bool:
        """True when it is over: told to stop, or `q`. Returns at each key, else after `period_s`."""
        key = self.keys(period_s) if self.keys is not None and not stop.is_set() else None
        if key is None:
            self.keys = None
            return stop.wait(period_s)
        if key:
            chosen = self._chosen()
            place = browse.press(
                self.place,
                key,
                num_findings=len(chosen.findings) if chosen else 0,
                runs=tuple(run.run for run in self.last.runs) if self.last else (),
                shown=chosen.run if chosen else "",
            )
            if place is None:
                return True
            self.place = place
        return stop.is_set()

    def _chosen(self) -> RunSnapshot | None:
        if self.last is None:
            return None
        by_key = choose(self.last, self.place.run) if self.place.run is not None else None
        return by_key or choose(self.last, self.run)

    def picture(self) -> RunView | Text:
        """Asks the source once and says what is to be shown now."""
        try:
            self.last = self.source()
            self.heard_s, self.trouble = time.monotonic(), ""
        except (OSError, SentinelError) as error:
            self.trouble = plain(error) or type(error).__name__
        if self.last is None:
            return Text(f"waiting for the sentinel: {self.trouble}")
        chosen = self._chosen()
        if chosen is None:
            return _nothing(self.last, self.run)
        stale = f"{time.monotonic() - self.heard_s:.0f} s without an answer: {self.trouble}" if self.trouble else ""
        shown = _view(self.last, chosen, stale, fills_screen=self.fills_screen)
        return replace(shown, place=self.place, has_keys=self.keys is not None)

    @property
    def what_changes(self) -> tuple[object, ...]:
        chosen = self._chosen()
        return (bool(self.trouble), chosen and chosen.run, chosen and chosen.last_step, chosen and chosen.verdict)


def _view(snapshot: Snapshot, chosen: RunSnapshot, stale: str, *, fills_screen: bool = False) -> RunView:
    rest = [f"{plain(other.run, 24)} {plain(other.verdict, 24)}" for other in snapshot.runs if other is not chosen]
    more = f" and {len(rest) - 6} more" if len(rest) > 6 else ""
    others = f"other runs (--run NAME): {', '.join(rest[:6])}{more}" if rest else ""
    return view(chosen, now_s=snapshot.t_s, stale=stale, others=others, fills_screen=fills_screen)


def _nothing(snapshot: Snapshot, run: str | None) -> Text:
    known = ", ".join(plain(other.run, 40) for other in snapshot.runs[:SHOWN_RUNS]) or "none"
    known += f" and {len(snapshot.runs) - SHOWN_RUNS} more" if len(snapshot.runs) > SHOWN_RUNS else ""
    if run is None:
        return Text("[??] BLIND: the sentinel is up and no run has reported yet; is DLC_SENTINEL set in the job?")
    return Text(f"[??] BLIND: no run {plain(run, 60)!r} here; runs known: {known}")
