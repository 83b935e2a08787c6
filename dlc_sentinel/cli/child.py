"""The job that `run -- CMD` owns: started, told of signals, asked and then made to end.

On a terminal the job stays in our process group: Ctrl-C and Ctrl-Z reach it as they would alone, and it may read keys.
Without one it gets a group of its own, and signals go to the whole group: workers that it started, too.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from dlc_sentinel.cli import screen

ABORT = "abort"
_ENDED = "ended"
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_SIGNALLED = 128


class Child:
    """A running job. `news` is where ABORT comes in; its end is told there, too. Raises: OSError if it cannot start."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], news: queue.SimpleQueue[str]) -> None:
        self._news = news
        self._shares_terminal = _in_foreground()
        self._process = subprocess.Popen(
            list(command), env=dict(environment), process_group=None if self._shares_terminal else 0
        )
        threading.Thread(target=self._watch, name="dlc-sentinel-child", daemon=True).start()

    def wait(self, grace_s: float) -> int:
        """The job's exit code, 128 + n where signal n ended it.

        After ABORT it has `grace_s` seconds to end by itself, then gets SIGTERM, and after as long again SIGKILL.
        """
        last_resorts: list[signal.Signals] | None = None
        while True:
            try:
                word = self._news.get(timeout=grace_s if last_resorts else None)
            except queue.Empty:
                assert last_resorts
                number = last_resorts.pop(0)
                screen.say(f"the job has not ended {grace_s:g} s later: {number.name} to pid {self._process.pid}")
                self.send(number)
                continue
            if word == _ENDED:
                code = self._process.returncode
                return code if code >= 0 else _SIGNALLED - code
            if last_resorts is None:
                screen.say(f"ABORT was sent; the job has {grace_s:g} s to end by itself")
                last_resorts = [signal.SIGTERM, signal.SIGKILL]

    def send(self, number: int) -> None:
        """The signal, to the job; to its whole group where it has one."""
        with suppress(ProcessLookupError):
            if self._shares_terminal:
                self._process.send_signal(number)
            else:
                os.killpg(self._process.pid, number)

    @contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Within it, signals for this process go to the job; its end ends us."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if not (self._shares_terminal and number in _FROM_TERMINAL):
                self.send(number)

        before = {number: signal.signal(number, on_signal) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> None:
        self._process.wait()
        self._news.put(_ENDED)


def _in_foreground() -> bool:
    """Whether a person at a terminal talks to our process group."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
