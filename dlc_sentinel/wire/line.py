"""The sending half of one process: its thread, its two sockets, its accounts. `sender.Sender` is the face."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import zmq

from dlc_sentinel.errors import FrameError, ShapeError
from dlc_sentinel.records import Ack, Bye, Command, Heartbeat, Hello, Record
from dlc_sentinel.wire import codec, control
from dlc_sentinel.wire.address import Address
from dlc_sentinel.wire.control import Inbox, Notice, Taken
from dlc_sentinel.wire.keys import ProducerKeys
from dlc_sentinel.wire.outbox import Blocks, Outbox, Parcel

HEARTBEAT_S = 2.0
EXIT_S = 1.0
_IDLE_S = 0.1
"""Longest wait between looks at the control socket: what a command may be late by."""
ALONE_S = 10.0
"""A job that nobody has answered for so long says that it is not watched."""
ALONE_EVERY_S = 60.0
"""How often a job may say that the sentinel went away."""
_BLOCKED_S = 0.001
_HWM_FRAMES = 32
_log = logging.getLogger("dlc_sentinel.hook")


class Line:
    """The sockets, thread and accounts of one process."""

    def __init__(
        self,
        address: Address,
        hello: Hello,
        keys: ProducerKeys | None,
        queue_bytes: int,
        on_notice: Callable[[Notice], None] | None,
    ) -> None:
        self.source = replace(hello.source, producer=secrets.token_hex(8))
        self.inbox = Inbox(self.source.run)
        self.outbox = Outbox(queue_bytes)
        self.blocks = Blocks()
        self.acks: deque[Ack] = deque()
        self.last_step = -1
        self.closing = False
        self._hello = replace(hello, source=self.source, pid=os.getpid())
        self._address = address
        self._keys = keys
        self._on_notice = on_notice
        self._frames_sent = 0
        self._num_handed = 0
        self._ready: deque[memoryview] = deque()
        self._ready_bytes = 0
        self._ready_tokens = 0
        self._timeout_s = EXIT_S
        self._deadline_s = float("inf")
        self._heartbeat_due_s = 0.0
        self._alone_due_s = time.monotonic() + ALONE_S
        self._is_heard = False
        """A sentinel was there at some time."""
        self._said_alone = False
        self._said_bye = False
        self._room_frames = 0
        """Frames that the sentinel's socket holds unread, 0 = not known: who sent more hangs up once all is taken."""
        self._is_taken = False
        self._bell = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="dlc-sentinel-sender", daemon=True)

    def start(self) -> None:
        self.outbox.offer(Parcel(self._hello))
        self._thread.start()

    def wake(self) -> None:
        # Released twice at once it raises: then it rings already.
        with suppress(RuntimeError):
            self._bell.release()

    def close(self, timeout_s: float) -> None:
        if not self.closing:
            self._timeout_s = timeout_s
            self._deadline_s = time.monotonic() + timeout_s
            self.closing = True
            self.wake()
        # ZeroMQ may linger past its own limit in rare cases; the job does not wait for it.
        self._thread.join(timeout_s + 0.25)

    def _run(self) -> None:
        context = zmq.Context()
        data, control_socket = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
        try:
            self._connect(data, control_socket)
            self._serve(data, control_socket)
        except Exception as error:  # noqa: BLE001  whatever it is, it must not show in the job as a traceback
            _log.error("dlc-sentinel: sending to %s ended: %r; training goes on without it", self._address, error)
            self.closing = True
        finally:
            now_s = time.monotonic()
            end_s = max(min(self._deadline_s, now_s + EXIT_S), now_s)
            left_ms = int(1000 * (end_s - now_s))
            data.close(linger=left_ms)
            control_socket.close(linger=left_ms)
            num_waited = self._drop_waiting()
            context.term()
            # What was sent in time lets `term` return before the end; its timers count in milliseconds.
            if self._awaits_taken() or (time.monotonic() >= end_s - 0.01 and not self._is_taken):
                self._say_unsent(num_waited)

    def _connect(self, data: zmq.Socket[bytes], control_socket: zmq.Socket[bytes]) -> None:
        for socket, endpoint in ((data, self._address.data), (control_socket, self._address.control)):
            socket.linger = 0
            socket.sndhwm = _HWM_FRAMES
            socket.maxmsgsize = codec.MAX_FRAME_BYTES
            socket.ipv6 = ":" in self._address.host
            socket.reconnect_ivl = 100
            socket.reconnect_ivl_max = 2000
            if self._keys is not None:
                socket.curve_serverkey = self._keys.sentinel_public
                socket.curve_publickey = self._keys.public
                socket.curve_secretkey = self._keys.secret
            # Old heartbeats are worth nothing to a sentinel that comes later; old data is.
            socket.immediate = int(socket is control_socket)
            socket.connect(endpoint)

    def _serve(self, data: zmq.Socket[bytes], control_socket: zmq.Socket[bytes]) -> None:
        blocked_s = _BLOCKED_S
        while True:
            self._receive(control_socket)
            self._send_control(control_socket)
            before = self._num_handed
            emptied = self._send_data(data)
            if self.closing and (self._all_sent(emptied) or time.monotonic() >= self._deadline_s):
                return
            self.blocks.warm()
            if emptied and (len(self.outbox) or (self.acks and self.closing)):
                continue
            blocked_s = _BLOCKED_S if emptied or self._num_handed > before else min(2 * blocked_s, _IDLE_S)
            # A lock and not a pipe: its release, unlike a write, never hands the interpreter lock to this thread in
            # the middle of the job's call.
            self._bell.acquire(timeout=_IDLE_S if emptied and not self.closing else blocked_s)

    def _all_sent(self, emptied: bool) -> bool:
        """Say goodbye once all is out; True when that is out as well, and taken where that is waited for."""
        if not emptied or len(self.outbox):
            return False
        if not self._said_bye:
            self._said_bye = True
            # The sentinel answers a goodbye to whom it knows, and one that took over may not have met us yet.
            self._heartbeat_due_s = 0.0
            _, dropped, _ = self.outbox.account()
            self.outbox.offer(Parcel(Bye(self.source, self._frames_sent + 1, dropped)))
            return False
        return not self.acks and not self._awaits_taken()

    def _awaits_taken(self) -> bool:
        return 0 < self._room_frames < self._frames_sent and not self._is_taken

    def _drop_waiting(self) -> int:
        """Count as dropped what ZeroMQ was not handed whole; the number of its tokens."""
        num_tokens = self._ready_tokens
        if num_tokens:
            self.outbox.refuse("queue_full", num_tokens, offered=True)
        self.outbox.done(self._ready_bytes)
        return num_tokens + self.outbox.drop_all()

    def _say_unsent(self, num_waited: int) -> None:
        """The last word of a job whose sentinel did not take all. How much of what was sent is lost nobody knows."""
        offered, _, _ = self.outbox.account()
        if offered and not self._is_heard and self.source.rank == 0:
            _log.warning(
                "dlc-sentinel: none of the %s tokens of run %s were taken: nobody answered at %s; %s",
                f"{offered:,}", self.source.run, self._address, self._what_to_start,
            )  # fmt: skip
        elif offered and self._is_heard:
            _log.warning(
                "dlc-sentinel: %s of %s tokens of run %s were not sent, and the last of the others may be lost: the "
                "sentinel at %s did not take them within %g s at the end; is it stopped, gone or overloaded? "
                "`dlc-sentinel doctor` tests the chain",
                f"{num_waited:,}", f"{offered:,}", self.source.run, self._address, self._timeout_s,
            )  # fmt: skip

    def _send_data(self, data: zmq.Socket[bytes]) -> bool:
        """True when nothing is left to send, False when the socket takes no more now."""
        while True:
            while self._ready:
                try:
                    data.send(self._ready[0], zmq.NOBLOCK, copy=len(self._ready[0]) < zmq.COPY_THRESHOLD)
                except zmq.Again:
                    return False
                self._ready.popleft()
                self._num_handed += 1
            self.outbox.done(self._ready_bytes)
            self._ready_bytes = self._ready_tokens = 0
            parcel = self.outbox.take()
            if parcel is None:
                return True
            self._ready_bytes = parcel.num_bytes
            self._frame(parcel)

    def _frame(self, parcel: Parcel) -> None:
        """The parcel as frames in `_ready`; what cannot be framed is counted."""
        packed: Parcel | None = parcel
        if parcel.pack is not None:
            packed = parcel.pack()
            self.outbox.recount((packed.num_tokens if packed else 0) - parcel.num_tokens)
        if packed is None or packed.record is None:
            if parcel.block is not None:
                self.blocks.give(parcel.block)
            return
        try:
            frames = codec.encode(packed.record, self._frames_sent)
            self._ready.extend(frames)
            self._frames_sent += len(frames)
            self._ready_tokens = packed.num_tokens
        except (FrameError, ShapeError) as error:
            cause = "oversize" if isinstance(error, FrameError) else "mis_sized"
            self.outbox.refuse(cause, packed.num_tokens, offered=True)
            _log.warning("dlc-sentinel: %d tokens not sent: %s", packed.num_tokens, error)
        finally:
            if packed.block is not None:
                self.blocks.give(packed.block)

    def _send_control(self, control_socket: zmq.Socket[bytes]) -> None:
        """Acks and heartbeat, as soon as a sentinel is there; that none is there, or is back, is said now and then."""
        try:
            while self.acks:
                self._say(control_socket, self.acks[0])
                self.acks.popleft()
            if time.monotonic() < self._heartbeat_due_s:
                return
            offered, dropped, waiting = self.outbox.account()
            beat = Heartbeat(self.source, self.last_step, self._frames_sent, offered, dropped, waiting)
            self._say(control_socket, beat)
        except zmq.Again:
            self._note_alone()
            return
        self._heartbeat_due_s = time.monotonic() + HEARTBEAT_S
        if not self._is_heard:
            self._is_heard, self._alone_due_s = True, 0.0
        if self._said_alone:
            self._said_alone = False
            _log.warning("dlc-sentinel: a sentinel answers at %s: run %s is watched", self._address, self.source.run)

    @property
    def _what_to_start(self) -> str:
        """Over tcp a sentinel with other keys is as silent as none."""
        start = "start `dlc-sentinel serve`"
        if self._keys is not None:
            return f"{start}, with the keys that DLC_SENTINEL_KEYS holds here"
        return f"{start}; if it has keys, set DLC_SENTINEL_KEYS" if self._address.ipc_path is None else start

    def _note_alone(self) -> None:
        """Said on rank 0, once each time, and not again within a minute where the sentinel comes and goes."""
        now_s = time.monotonic()
        if self.source.rank == 0 and not self._said_alone and now_s >= self._alone_due_s:
            self._said_alone = True
            self._alone_due_s = now_s + ALONE_EVERY_S
            what = "the sentinel no longer answers at" if self._is_heard else "nobody answers at"
            _log.warning(
                "dlc-sentinel: %s %s: run %s is not watched, and goes on; %s",
                what, self._address, self.source.run, self._what_to_start,
            )  # fmt: skip

    def _receive(self, control_socket: zmq.Socket[bytes]) -> None:
        # Asking first is cheaper than an exception at every idle look.
        while int(control_socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                payload = control_socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = control.decode_down(payload)
            except FrameError as error:
                _log.debug("dlc-sentinel: unreadable control message: %s", error)
                continue
            if isinstance(message, Command):
                self.inbox.put(message)
            elif isinstance(message, Notice):
                if self._on_notice is not None:
                    self._on_notice(message)
            elif isinstance(message, Taken):
                self._is_taken = True
            else:
                self._room_frames = message.room_frames
                with suppress(zmq.Again):
                    self._say(control_socket, self._hello)

    @staticmethod
    def _say(control_socket: zmq.Socket[bytes], record: Record) -> None:
        for part in codec.encode(record, codec.UNNUMBERED):
            control_socket.send(part, zmq.NOBLOCK, copy=True)
