"""Where a reader is in the picture, and where a key takes them: pure, so that every way is a test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Sight = Literal["run", "finding", "history", "worst", "help"]

KEYS: tuple[tuple[str, str], ...] = (
    ("1 to 9, enter", "open a finding: evidence, worst tokens, what to check first"),
    ("w", "worst sequences of the newest steps, token by token"),
    ("h", "history: what happened, newest first"),
    ("n, p", "next and previous run"),
    ("j k, arrows", "scroll; left and right: the finding before and after"),
    ("esc, backspace", "back to the run"),
    ("?", "this help, and again: back"),
    ("q", "quit; the sentinel and the job go on"),
)
"""What the help shows: (keys, what they do)."""
FOOTER = "? keys  1-9 finding  w worst tokens  h history  n next run  q quit"
_UP, _DOWN = ("k", "up", "pageup"), ("j", "down", "pagedown")
_PAGE = 10


@dataclass(frozen=True, slots=True)
class Place:
    """What is looked at. `index`: which finding, from 0; `scroll`: lines above the first one shown."""

    sight: Sight = "run"
    index: int = 0
    scroll: int = 0
    run: str | None = None
    """A run chosen by key; None = the caller's choice."""


START = Place()


def press(place: Place, key: str, *, num_findings: int, runs: tuple[str, ...], shown: str) -> Place | None:
    """Where `key` leads; None = quit. A key that means nothing here leads nowhere.

    num_findings, shown: findings of the run that is shown, and its name; runs: all of them, in order.
    """
    if key == "q":
        return None
    if key in ("esc", "backspace"):
        return Place(run=place.run)
    if key == "?":
        return Place("run" if place.sight == "help" else "help", run=place.run)
    if key in ("w", "h"):
        return Place("worst" if key == "w" else "history", run=place.run)
    if key in ("n", "p") and runs:
        at = runs.index(shown) if shown in runs else 0
        return Place(run=runs[(at + (1 if key == "n" else -1)) % len(runs)])
    if key in _UP or key in _DOWN:
        by = _PAGE if key.startswith("page") else 1
        return replace(place, scroll=max(place.scroll + (by if key in _DOWN else -by), 0))
    return _finding(place, key, num_findings)


def _finding(place: Place, key: str, num_findings: int) -> Place:
    index = None
    if len(key) == 1 and key in "123456789":
        index = int(key) - 1
    elif key == "enter" and place.sight == "run":
        index = 0
    elif key in ("left", "right") and place.sight == "finding":
        index = place.index + (1 if key == "right" else -1)
    if index is None or not 0 <= index < num_findings:
        return place
    return Place("finding", index, run=place.run)
