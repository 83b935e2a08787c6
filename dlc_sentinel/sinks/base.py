"""What a sink is: something that hears every event and sees every snapshot, and never answers."""

from __future__ import annotations

from typing import Protocol

from dlc_sentinel.records import Event, Snapshot


class Sink(Protocol):
    """Called from the runtime's one thread. A sink never raises for a reason outside the process (disk, peer, tty)."""

    def handle(self, event: Event) -> None:
        """Takes one event, in order."""

    def publish(self, snapshot: Snapshot) -> None:
        """Takes the newest picture; older ones are forgotten."""

    def close(self) -> None:
        """Releases what the sink holds; a second call does nothing."""
