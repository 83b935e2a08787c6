"""A bar for readings that take long, and Ctrl-C that ends the reading and keeps what was read."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from dlc_sentinel.cli import screen
from dlc_sentinel.offline.analyze import Watch


@contextmanager
def reading(name: str) -> Iterator[Watch]:
    """A watcher for `offline.analyze.judge`: draws on stderr where that is a terminal, and stops at the first Ctrl-C.

    The second Ctrl-C interrupts as usual.
    """
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    before = signal.signal(signal.SIGINT, stop)
    console = Console(file=sys.stderr, no_color=screen.no_color() or None)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task(name, total=None)

            def watch(done: int, total: int) -> bool:
                bar.update(task, completed=done, total=total)
                return not stopped

            yield watch
    finally:
        signal.signal(signal.SIGINT, before)
