"""Events of level WARN and above as JSON lines, appended: the log that a post-mortem starts from."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

from dlc_sentinel.records import Event, Snapshot
from dlc_sentinel.sinks.snapshot_json import strict

_LEVELS = ("WARN", "CRITICAL")


class EventLog:
    """Appends one line per event, each in one write, so that a killed process leaves whole lines.

    A full disk loses lines, never the process: they are counted in `num_lost`. Raises: OSError if it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.num_lost = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._is_torn = False

    def handle(self, event: Event) -> None:
        if event.level not in _LEVELS or self._fd < 0:
            return
        line = json.dumps(strict({field.name: getattr(event, field.name) for field in fields(event)}), allow_nan=False)
        self._append(("\n" if self._is_torn else "").encode() + line.encode() + b"\n")

    def publish(self, snapshot: Snapshot) -> None:
        """Nothing: snapshots are not logged."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: bytes) -> None:
        try:
            num_written = os.write(self._fd, line)
        except OSError:
            self.num_lost += 1
            return
        # A disk that fills up in mid-line leaves a torn one; the next line then starts on its own.
        self._is_torn = num_written < len(line)
        self.num_lost += self._is_torn
