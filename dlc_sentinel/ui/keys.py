"""Keys of a terminal, one at a time, without waiting for a whole line."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any

NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1bOA": "up", "\x1bOB": "down",
    "\x1bOC": "right", "\x1bOD": "left", "\x1b[5~": "pageup", "\x1b[6~": "pagedown", "\x1b": "esc", "\r": "enter",
    "\n": "enter", "\t": "n", " ": "pagedown", "\x7f": "backspace", "\b": "backspace",
}  # fmt: skip


class Keyboard:
    """Call it for the next key: its name, "" where none came in time, None where none ever will.

    Inside the `with` the terminal hands over keys at once and echoes nothing; Ctrl-C works as ever. The terminal is
    given back as it was found.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._before: list[Any] | None = None

    def __enter__(self) -> Keyboard:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None

    def __call__(self, timeout_s: float) -> str | None:
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return ""
        try:
            text = os.read(self._fd, 32).decode(errors="replace")
        except OSError:
            return None
        return named(text) if text else None


def named(text: str) -> str:
    """The key's name: "up", "enter", or the character itself; "" for what is none of ours."""
    if text in NAMES:
        return NAMES[text]
    return text[0] if text[0].isprintable() else ""
