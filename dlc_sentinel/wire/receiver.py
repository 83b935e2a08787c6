"""The sentinel's end of the wire: one PULL socket for data, one ROUTER for control. Used from one thread only."""

from __future__ import annotations

import fcntl
import logging
import os
import random
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import zmq
from zmq.auth.thread import ThreadAuthenticator

from dlc_sentinel.errors import AddressError, AddressInUse, FrameError
from dlc_sentinel.records import Bye, Command, Level, Source
from dlc_sentinel.wire import address as addresses
from dlc_sentinel.wire import codec, control, frame
from dlc_sentinel.wire import keys as keyring
from dlc_sentinel.wire.address import Address

Channel = Literal["data", "control"]

_COPY_BELOW_BYTES = 65536
_FRAMES_PER_POLL = 64
_BYTES_PER_POLL = 32 * 2**20
_MAX_PEERS = 65536
_PORT_TRIES = 64
_ZAP_DOMAIN = "sentinel"
_BYE = b"\xa3bye"
"""A header begins with its kind: what a goodbye holds within its first `_KIND_BYTES`, and hardly another frame."""
_KIND_BYTES = 24
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it came, whatever it holds: `codec.decode` tells, and what it refuses is counted by the caller."""

    channel: Channel
    payload: frame.Buffer


class Receiver:
    """Binds on construction; `address` then holds the real ports, and `str(receiver.address)` goes into DLC_SENTINEL.

    Memory is bounded: at most `peer_bytes` wait per connection, and a message above `max_frame_bytes` closes its
    connection. Raises: AddressInUse, AddressError, KeysError.
    """

    def __init__(
        self,
        address: Address | str,
        *,
        keys: str | Path | None = None,
        insecure: bool = False,
        max_frame_bytes: int = codec.MAX_FRAME_BYTES,
        peer_bytes: int = 16 * 2**20,
    ) -> None:
        wanted = addresses.parse(address) if isinstance(address, str) else address
        addresses.require_safe(wanted, keyed=bool(keys), insecure=insecure)
        held = keyring.load_sentinel(keys) if keys else None
        self.num_frames = 0
        self.num_bytes = 0
        self._room_frames = max(2, peer_bytes // max_frame_bytes)
        self._peers: dict[bytes, Source] = {}
        self._parted: dict[str, None] = {}
        """Producers whose goodbye was read before their control socket was heard."""
        self._bound: tuple[str, ...] = ()
        """ipc endpoints whose files are ours to remove."""
        self._lock: int | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._context = zmq.Context()
        self._data = self._context.socket(zmq.PULL)
        self._control = self._context.socket(zmq.ROUTER)
        self._control.router_mandatory = 1
        try:
            self._lock = _take_lock(wanted)
            self._authenticator = _start_authenticator(self._context, held)
            for socket in (self._data, self._control):
                _set_up(socket, wanted, held, max_frame_bytes, self._room_frames)
            self.address = self._bind(wanted)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._data, zmq.POLLIN)
        self._poller.register(self._control, zmq.POLLIN)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def poll(self, timeout_ms: int) -> list[Frame]:
        """What has arrived, control first, waiting at most `timeout_ms`; empty when nothing came. At most 32 MiB."""
        ready = dict(self._poller.poll(timeout_ms))
        frames: list[Frame] = []
        if self._control in ready:
            self._drain(self._control, "control", frames)
        if self._data in ready:
            self._drain(self._data, "data", frames)
        return frames

    def send_command(self, command: Command) -> int:
        """How many rank-0 trainers of the run it was handed to; 0 = nobody is there to act."""
        return self._send(command.run, command)

    def send_notice(self, run: str, level: Level, text: str) -> int:
        """How many rank-0 trainers of the run will print this line on their own stderr."""
        return self._send(run, control.Notice(run, level, " ".join(text.split())[:4096]))

    def close(self) -> None:
        """Frees sockets, authenticator and lock; what was not polled is lost. May be called twice."""
        self._data.close(linger=0)
        self._control.close(linger=200)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if not self._context.closed:
            self._context.term()
        if self._lock is not None:
            # The lock's own file stays: where it is removed, two processes can each hold "the" lock.
            for endpoint in self._bound:
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def _drain(self, socket: zmq.Socket[bytes], channel: Channel, frames: list[Frame]) -> None:
        num_bytes = 0
        for _ in range(_FRAMES_PER_POLL):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = parts.pop(0).bytes if channel == "control" else b""
            # One message is one frame. Several parts are none, and joined they fail the exact-length check.
            small = len(parts) != 1 or len(parts[0]) < _COPY_BELOW_BYTES
            payload: frame.Buffer = b"".join(part.bytes for part in parts) if small else parts[0].buffer
            frames.append(Frame(channel, payload))
            self.num_frames += 1
            self.num_bytes += len(payload)
            num_bytes += len(payload)
            if channel == "control":
                self._meet(identity, payload)
            elif small and _BYE in payload[:_KIND_BYTES]:
                self._part(payload)
            if num_bytes > _BYTES_PER_POLL:
                return

    def _meet(self, identity: bytes, payload: frame.Buffer) -> None:
        try:
            record, _ = codec.decode(payload)
        except FrameError:
            return
        known = identity in self._peers
        if not known and len(self._peers) >= _MAX_PEERS:
            self._peers.pop(next(iter(self._peers)))
        self._peers[identity] = record.source
        if not known:
            self._send_to(identity, control.encode_down(control.Welcome(self._room_frames)))
        if record.source.producer in self._parted:
            del self._parted[record.source.producer]
            self._send_to(identity, control.encode_down(control.Taken()))

    def _part(self, payload: frame.Buffer) -> None:
        """Tells a producer that its goodbye was read, so that it may hang up.

        ZeroMQ throws away what lies in the system's buffer of a connection that ends while its own queue is full.
        """
        with suppress(FrameError):
            record, _ = codec.decode(payload)
            if isinstance(record, Bye):
                producer = record.source.producer
                leaving = [peer for peer, source in self._peers.items() if source.producer == producer]
                if not leaving:
                    self._parted[producer] = None
                    if len(self._parted) > _MAX_PEERS:
                        del self._parted[next(iter(self._parted))]
                for identity in leaving:
                    self._send_to(identity, control.encode_down(control.Taken()))

    def _send(self, run: str, message: control.Down) -> int:
        payload = control.encode_down(message)
        leaders = [
            (identity, source.producer)
            for identity, source in self._peers.items()
            if source.run == run and source.role == "trainer" and source.rank == 0
        ]
        return len({producer for identity, producer in leaders if self._send_to(identity, payload)})

    def _send_to(self, identity: bytes, payload: bytes) -> bool:
        try:
            self._control.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._peers.pop(identity, None)
            return False
        return True

    def _bind(self, wanted: Address) -> Address:
        if wanted.ipc_path is not None:
            self._data.bind(wanted.data)
            self._control.bind(wanted.control)
            self._bound = (wanted.data, wanted.control)
            for endpoint in self._bound:
                os.chmod(endpoint.removeprefix("ipc://"), 0o600)
            return wanted
        if wanted.port:
            self._bind_pair(wanted)
            return wanted
        # Any free pair of neighbours: the data port alone must lead a hook to both.
        for _ in range(_PORT_TRIES):
            address = wanted.with_port(random.randrange(20000, 32000) & ~1)
            with suppress(AddressInUse):
                self._bind_pair(address)
                return address
        raise AddressInUse(f"no two free neighbouring ports at {wanted.host} after {_PORT_TRIES} tries; name a port")

    def _bind_pair(self, address: Address) -> None:
        _bind_tcp(self._data, address.data)
        try:
            _bind_tcp(self._control, address.control)
        except BaseException:
            self._data.unbind(address.data)
            raise


def _bind_tcp(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            port = endpoint.rpartition(":")[2]
            raise AddressInUse(
                f"{endpoint} is in use, perhaps by another sentinel; `ss -ltnp 'sport = :{port}'` names the process"
            ) from error
        raise AddressError(f"{endpoint} cannot be bound ({error.strerror}); is it on this machine?") from error


def _take_lock(address: Address) -> int | None:
    """An open lock file for ipc: ZeroMQ itself lets a second bind steal the traffic without a word."""
    if address.ipc_path is None:
        return None
    addresses.make_folder(address)
    path = address.ipc_path + ".lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise AddressError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise AddressInUse(f"{address} is held by the sentinel with pid {holder}; stop it or take another") from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


class _Door:
    """Lets in the keys that are held, and says once that another one has knocked: its job hears nothing."""

    def __init__(self, held: keyring.SentinelKeys) -> None:
        self._held = held
        self._said = False

    def callback(self, domain: str, key: bytes) -> bool:
        """The shape that pyzmq's authenticator calls."""
        known = self._held.callback(domain, key)
        if not known and not self._said:
            self._said = True
            _log.warning("a job was refused: its key is no producer*.public of this sentinel's keys (said once)")
        return known


def _start_authenticator(
    context: zmq.Context[zmq.Socket[bytes]], held: keyring.SentinelKeys | None
) -> ThreadAuthenticator | None:
    """Must run before any bind: a CURVE socket without an authenticator lets every key in."""
    if held is None:
        return None
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN, credentials_provider=_Door(held))
    return authenticator


def _set_up(
    socket: zmq.Socket[bytes], address: Address, held: keyring.SentinelKeys | None, max_bytes: int, max_frames: int
) -> None:
    socket.linger = 0
    socket.rcvhwm = max_frames
    socket.sndhwm = 64
    socket.maxmsgsize = max_bytes
    socket.ipv6 = ":" in address.host
    # No ZMTP heartbeats: with a receive limit and a slow reader they have made libzmq abort; producers send their own.
    if held is not None:
        socket.curve_server = True
        socket.curve_publickey = held.public
        socket.curve_secretkey = held.secret
        socket.zap_domain = _ZAP_DOMAIN.encode()
