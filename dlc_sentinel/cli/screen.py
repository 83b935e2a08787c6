"""What is printed and where: data on stdout, everything said to a person on stderr, colour only where it is wanted."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json


def no_color() -> bool:
    """True where the user asked for none (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def console() -> Console:
    """Stdout, for renderables; colour and cursor movement only on a terminal."""
    return Console(file=sys.stdout, no_color=no_color() or None, highlight=False, markup=False, emoji=False)


@contextmanager
def keyboard() -> Iterator[Callable[[float], str | None] | None]:
    """Keys of the terminal while the `with` lasts; None where there is no terminal to read or to draw on."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield None
        return
    from dlc_sentinel.ui.keys import Keyboard

    with Keyboard() as keys:
        yield keys


def say(text: str) -> None:
    """One line for a person, on stderr."""
    print(f"dlc-sentinel: {text}", file=sys.stderr, flush=True)


def width() -> int:
    """Columns of the terminal that stdout is; 0 where it is none."""
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else 0


def wrapped(text: str, indent: str = "    ") -> None:
    """One paragraph on stdout: folded between words on a terminal, whole in a pipe, for grep."""
    columns = width()
    data(textwrap.fill(text, columns, subsequent_indent=indent, break_on_hyphens=False) if columns else text)


def data(text: str) -> None:
    """Text on stdout as it is."""
    print(text, flush=True)


def data_json(value: Json) -> None:
    """One JSON object on one line of stdout; raises where a NaN would get into it."""
    data(json.dumps(value, allow_nan=False, separators=(",", ":")))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A plain table on stdout; text from outside is made inert."""
    grid = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for name in columns:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(plain(cell, 200)) for cell in row))
    shown = console()
    if not shown.is_terminal:
        # A pipe has no width: rows stay whole, for grep.
        shown.width = 400
    shown.print(grid)


def log_to_stderr(level: int) -> None:
    """Log records of this package go to stderr, one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("dlc-sentinel: %(message)s"))
    log = logging.getLogger("dlc_sentinel")
    log.handlers = [handler]
    log.setLevel(level)
