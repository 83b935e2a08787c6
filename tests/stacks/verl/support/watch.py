"""A sentinel in a thread of the test: what it heard, and commands that are sent when a step closes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.records import Command, Event, Snapshot, Train
from dlc_sentinel.runtime import LiveSource, Runtime
from dlc_sentinel.sinks.prometheus import PrometheusSink
from dlc_sentinel.wire.codec import decode
from dlc_sentinel.wire.receiver import Receiver

RUN = "verl-test"
Rule = Callable[[Mapping[str, Any]], Command | None]
"""Step object -> the command to send now, or None."""


class Watch:
    """Listens on ports of its own. `trains` are the trainer's records as they came; arrays are copies."""

    def __init__(self, config: Config, rule: Rule | None = None) -> None:
        self.events: list[Event] = []
        self.trains: list[Train] = []
        self.snapshot: Snapshot | None = None
        self.heard_s: dict[str, float] = {}
        """Command id -> when its answer came, by the monotonic clock ..."""
        self.trains_heard: dict[str, int] = {}
        """... and how many train records had come by then."""
        self._rule = rule
        self._news = threading.Condition()
        receiver = Receiver("tcp://127.0.0.1:0")
        self._address = receiver.address
        self._source = _Tee(receiver, self.trains)
        self._http = PrometheusSink()
        self._runtime = Runtime(config, self._source, Monitor(config), None, (self, self._http))
        self._thread = threading.Thread(target=self._runtime.run)
        self._thread.start()

    @property
    def env(self) -> dict[str, str]:
        """What a job needs to find this sentinel."""
        return {"DLC_SENTINEL": str(self._address), "DLC_SENTINEL_METRICS": self._http.url, "DLC_SENTINEL_RUN": RUN}

    def handle(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            if event.kind == "ack":
                command_id = str(event.data.get("command_id", event.data.get("id", "")))
                self.heard_s[command_id] = time.monotonic()
                self.trains_heard[command_id] = len(self.trains)
            self._news.notify_all()
        if event.kind == "step" and self._rule is not None:
            command = self._rule(event.data)
            if command is not None:
                self._source.send_command(command)

    def publish(self, snapshot: Snapshot) -> None:
        with self._news:
            self.snapshot = snapshot
            self._news.notify_all()

    def close(self) -> None:
        """Part of being a sink; `stop` ends the sentinel."""

    def stop(self) -> None:
        self._runtime.stop()
        self._thread.join(20)

    def until(self, what: Callable[[], Any], timeout_s: float) -> Any:
        """The first true value of `what()`. Raises: AssertionError at the deadline."""
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while not (value := what()):
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"not within {timeout_s:.0f} s; heard {[e.text for e in self.events[-8:]]}"
                self._news.wait(min(left_s, 1.0))
        return value

    # -- what was heard ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> dict[int, Mapping[str, Any]]:
        return {event.step: event.data for event in self.events if event.kind == "step"}

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    def rows(self, step: int, update: int | None = None) -> Sequence[Train]:
        """The micro-batches of a step, or of one update of it."""
        return [t for t in self.trains if t.step == step and update in (None, t.update)]


class _Tee(LiveSource):
    """A live source that also keeps the trainer's records."""

    def __init__(self, receiver: Receiver, trains: list[Train]) -> None:
        super().__init__(receiver)
        self._trains = trains

    def poll(self, timeout_ms: int) -> Any:
        frames = super().poll(timeout_ms)
        for frame in frames or ():
            if frame.channel == "data":
                record, _ = decode(bytes(frame.frame))
                if isinstance(record, Train):
                    self._trains.append(record)
        return frames


def is_slow_machine() -> bool:
    """True where other work holds the cores: deadlines are then no statement about the code."""
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
