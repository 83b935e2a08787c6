"""A receiver read until what a test waits for has come, or a deadline has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from dlc_sentinel.errors import FrameError
from dlc_sentinel.hook import Hook, connect
from dlc_sentinel.records import Bye, Record, Rollout, Train
from dlc_sentinel.wire.codec import decode
from dlc_sentinel.wire.receiver import Receiver

R = TypeVar("R", bound=Record)

DEADLINE_S = 15.0


class Reader:
    """Everything a receiver has delivered, decoded."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.records: list[Record] = []
        self.numbers: list[int] = []
        """Frame numbers on the data channel."""
        self.refused: list[str] = []

    def __repr__(self) -> str:
        return f"got {[type(record).__name__ for record in self.records]}, refused {self.refused}"

    def of(self, kind: type[R]) -> list[R]:
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def num_tokens(self) -> int:
        return sum(int(record.offsets_S1[-1]) for record in self.records if isinstance(record, (Train, Rollout)))

    def until(self, done: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
        """Reads until `done()`; fails the test at the deadline."""
        end_s = time.monotonic() + deadline_s
        while not done():
            assert time.monotonic() < end_s, f"not seen in {deadline_s} s; {self!r}"
            for frame in self.receiver.poll(20):
                try:
                    record, number = decode(frame.payload)
                except FrameError as error:
                    self.refused.append(error.cause)
                    continue
                self.records.append(record)
                if frame.channel == "data":
                    self.numbers.append(number)

    def close(self, hook: Hook) -> None:
        """Closes the hook while reading: what is on its way needs a reader, or is given up after a second."""
        closing = threading.Thread(target=hook.close)
        closing.start()
        self.until(lambda: not closing.is_alive())
        self.until(lambda: any(bye.source == hook.source for bye in self.of(Bye)))

    def until_any(self, kind: type[R], count: int = 1) -> list[R]:
        self.until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)


def wait(done: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Until `done()`, yielding the processor between looks."""
    end_s = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < end_s, f"not seen in {deadline_s} s"
        time.sleep(0)


def hooked(monkeypatch: pytest.MonkeyPatch, address: object, **who: object) -> Hook:
    """A hook connected to `address`."""
    monkeypatch.setenv("DLC_SENTINEL", str(address))
    hook = connect(**({"run": "run"} | who))  # type: ignore[arg-type]
    assert isinstance(hook, Hook)
    return hook
