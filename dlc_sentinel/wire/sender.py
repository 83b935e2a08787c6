"""A producer's end of the wire: one daemon thread owns a PUSH socket for data and a DEALER socket for control.

Nothing here blocks the caller or raises into it. After a fork the child starts afresh, with a producer id of its own,
at its first use; the parent's sockets and what waited in them stay the parent's.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

# What keeps zero-copy frames alive until they are out stops at exit, and exits run last in, first out: it has to be
# loaded before `close` is registered, or the last step would be lost.
import zmq.utils.garbage  # noqa: F401

from dlc_sentinel.records import Ack, Hello, Source
from dlc_sentinel.wire.address import Address
from dlc_sentinel.wire.control import Inbox, Notice
from dlc_sentinel.wire.keys import ProducerKeys
from dlc_sentinel.wire.line import EXIT_S, Line
from dlc_sentinel.wire.outbox import Blocks, Outbox, Parcel


class Sender:
    """Takes parcels, sends frames, keeps commands. One per hook; `hello.source.producer` is filled in here."""

    def __init__(
        self,
        address: Address,
        hello: Hello,
        *,
        keys: ProducerKeys | None = None,
        queue_bytes: int = 256 * 2**20,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self._address = address
        self._hello = hello
        self._keys = keys
        self._queue_bytes = queue_bytes
        self._on_notice = on_notice
        self._lines: dict[int, Line] = {}
        self._line().wake()

    @property
    def source(self) -> Source:
        """This process's name on every record."""
        return self._line().source

    @property
    def inbox(self) -> Inbox:
        return self._line().inbox

    @property
    def blocks(self) -> Blocks:
        return self._line().blocks

    @property
    def outbox(self) -> Outbox:
        return self._line().outbox

    def offer(self, parcel: Parcel) -> bool:
        """False when it was dropped (counted). Never waits."""
        line = self._line()
        if line.closing:
            line.outbox.refuse("queue_full", parcel.num_tokens)
            return False
        taken = line.outbox.offer(parcel)
        line.wake()
        return taken

    def ack(self, ack: Ack) -> None:
        """Sent on the control channel as soon as a sentinel is there."""
        line = self._line()
        line.acks.append(ack)
        line.wake()

    @property
    def last_step(self) -> int:
        """The highest step seen, -1 before any."""
        return self._line().last_step

    def saw_step(self, step: int) -> None:
        """The step that heartbeats report."""
        line = self._line()
        line.last_step = max(line.last_step, step)

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Send what waits for at most `timeout_s`, say goodbye, free the sockets. May be called twice."""
        line = self._lines.get(os.getpid())
        if line is not None:
            line.close(timeout_s)
            atexit.unregister(self.close)

    def _line(self) -> Line:
        pid = os.getpid()
        line = self._lines.get(pid)
        if line is None:
            # setdefault is atomic: two threads of a fresh child agree on one line.
            made = Line(self._address, self._hello, self._keys, self._queue_bytes, self._on_notice)
            line = self._lines.setdefault(pid, made)
            if line is made:
                self._at_exit()
                line.start()
        return line

    def _at_exit(self) -> None:
        atexit.register(self.close)
        forked = sys.modules.get("multiprocessing.util")
        if forked is not None:
            # Children of multiprocessing leave through os._exit, past atexit.
            forked.Finalize(None, self.close, exitpriority=10)
