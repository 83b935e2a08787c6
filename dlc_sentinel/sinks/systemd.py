"""Tells systemd that the sentinel is ready, alive and stopping (sd_notify): for a unit of Type=notify.

Ready = the first snapshot is published. Each publish also feeds the watchdog: a loop that is stuck is restarted.
"""

from __future__ import annotations

import socket

from dlc_sentinel.records import Event, Snapshot


class SystemdNotify:
    """`address`: the value of NOTIFY_SOCKET, a path or @abstract name. What cannot be told is not told."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._is_ready = False
        self._is_closed = False

    def handle(self, event: Event) -> None:
        """Nothing: systemd hears of the process only."""

    def publish(self, snapshot: Snapshot) -> None:
        runs = f"{len(snapshot.runs)} runs, worst verdict {_worst(snapshot)}" if snapshot.runs else "no run yet"
        self._tell(("" if self._is_ready else "READY=1\n") + f"WATCHDOG=1\nSTATUS={runs}")
        self._is_ready = True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell("STOPPING=1")

    def _tell(self, state: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer:
                peer.sendto(state.encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            return  # systemd is not there any more: nobody waits for this


def _worst(snapshot: Snapshot) -> str:
    """The first of the verdicts that is not HEALTHY, in the order of the runs; else HEALTHY."""
    return next((run.verdict for run in snapshot.runs if run.verdict != "HEALTHY"), "HEALTHY")
