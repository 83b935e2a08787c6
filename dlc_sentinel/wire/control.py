"""What travels from the sentinel to a trainer, and the box in which a hook keeps commands until their step comes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from typing import TypeAlias

import msgspec

from dlc_sentinel.errors import FrameError
from dlc_sentinel.records import Command, Level, Outcome
from dlc_sentinel.wire import codec, frame, schema


@dataclass(frozen=True, slots=True)
class Notice:
    """One line for the job's own stderr."""

    run: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The sentinel has not met this connection before; the producer answers with its hello."""

    room_frames: int = 0
    """Frames of one connection that its socket holds unread; it answers a goodbye with `Taken`. 0 = it does not."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The goodbye was read, and with it all that went before: the producer may hang up."""


Down: TypeAlias = Command | Notice | Welcome | Taken

_encoder = msgspec.msgpack.Encoder(enc_hook=codec.plain_value)
_decoder = msgspec.msgpack.Decoder(schema.AnyDown)
_HEADS: dict[type, type[msgspec.Struct]] = {
    Command: schema.CommandHead,
    Notice: schema.NoticeHead,
    Welcome: schema.WelcomeHead,
    Taken: schema.TakenHead,
}
_MESSAGES: dict[type, type] = {head: message for message, head in _HEADS.items()}


def encode_down(message: Down) -> bytes:
    """One frame without buffers. Raises: FrameError(cause "oversize") past the frame limit."""
    values = {item.name: getattr(message, item.name) for item in fields(message)}
    if isinstance(message, Command):
        values["evidence"] = dict(message.evidence)
    encoded = bytes(frame.build(_encoder.encode(_HEADS[type(message)](**values)), []))
    if len(encoded) > schema.MAX_FRAME_BYTES:
        raise FrameError(f"{type(message).__name__} of {len(encoded)} bytes; shorten its evidence", "oversize")
    return encoded


def decode_down(buffer: frame.Buffer) -> Down:
    """Command, Notice, Welcome or Taken. Raises: FrameError, whatever the bytes are."""
    view, header = frame.open_header(buffer)
    head = codec.decode_header(_decoder, header)
    frame.open_buffers(view, len(header), [], {})
    message: Down = _MESSAGES[type(head)](**msgspec.structs.asdict(head))
    return message


@dataclass(frozen=True, slots=True)
class Settled:
    """A command the box answers itself."""

    command: Command
    outcome: Outcome
    reason: str


class Inbox:
    """Commands of one run: `put` from the sender thread, `take` from the training thread.

    An id is handed out at most once for the life of the process: a repeated or replayed command does nothing.
    """

    def __init__(self, run: str) -> None:
        self.num_replayed = 0
        self._run = run
        self._arrived: deque[Command] = deque()
        self._waiting: list[Command] = []
        self._known: set[str] = set()

    def put(self, command: Command) -> None:
        if command.run == self._run:
            self._arrived.append(command)

    def take(self, step: int) -> tuple[Command | None, list[Settled]]:
        """The command to apply at `step` or None, and those that expired or were replaced by a newer one.

        ABORT goes before RESYNC; of one kind the newest wins. A command whose first step has not come stays.
        """
        while self._arrived:
            command = self._arrived.popleft()
            if command.id in self._known:
                self.num_replayed += 1
                continue
            self._known.add(command.id)
            self._waiting.append(command)
        if not self._waiting:
            return None, []
        settled = [
            Settled(command, "expired", f"step {step} is after its last step {command.expires_step}")
            for command in self._waiting
            if 0 <= command.expires_step < step
        ]
        gone = {done.command.id for done in settled}
        ready = [c for c in self._waiting if c.id not in gone and c.not_before_step <= step]
        chosen = max(reversed(ready), key=lambda c: c.kind == "ABORT", default=None)
        if chosen is not None:
            settled += [
                Settled(c, "refused", f"replaced by the newer command {chosen.id}")
                for c in ready
                if c.kind == chosen.kind and c is not chosen
            ]
            gone.update(c.id for c in ready if c.kind == chosen.kind)
        self._waiting = [c for c in self._waiting if c.id not in gone]
        return chosen, settled
