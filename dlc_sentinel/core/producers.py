"""Who sends: last signs of life, frame gaps, the senders' own counts, and which steps each has ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from dlc_sentinel.records import Bye, Heartbeat, Hello, Json, Record, Source, StepEnd, Synced, Train

HEARTBEAT_S = 2.0
SILENT_S = 3 * HEARTBEAT_S
GONE_S = 60.0
MAX_KNOWN = 1024
"""Producers above which those that are gone are forgotten, the oldest first."""
AHEAD_STEPS = 2
"""Once trainers were heard at this many later steps nobody comes back for the older one. Their numbers may skip."""


@dataclass(slots=True)
class Producer:
    source: Source
    host: str = ""
    pid: int = 0
    last_seen_s: float = 0.0
    last_step: int = -1
    """Newest step of any record ..."""
    newest_steps: list[int] = field(default_factory=list)
    """... and the newest AHEAD_STEPS of them, in order."""
    ended_step: int = -1
    """Newest step it said it was done with."""
    beats: bool = False
    """True once a heartbeat came: only such a producer can be called silent."""
    state: Literal["alive", "silent", "gone"] = "alive"
    has_trained: bool = False
    """True once a train record of it was taken: not one that came late or went back."""
    left: bool = False
    """Said goodbye: it is not missed, and what its control socket still brings does not bring it back."""
    retired: bool = False
    """Belongs to a life of the run that is over: nothing waits for it, and what it trains is refused."""
    next_frame: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def is_done_with(self, step: int) -> bool:
        return self.ended_step >= step or self.last_step > step

    @property
    def ends_steps(self) -> bool:
        """True for one that says when it is done with a step: a step that it has not ended is worth waiting for."""
        return self.ended_step >= 0

    def note(self, record: Record) -> None:
        """Takes what the record says about its sender."""
        if isinstance(record, (Train, StepEnd, Synced)):
            self.last_step = max(self.last_step, record.step)
            if record.step not in self.newest_steps:
                self.newest_steps = sorted([*self.newest_steps, record.step])[-AHEAD_STEPS:]
        if isinstance(record, StepEnd):
            self.ended_step = max(self.ended_step, record.step)
        elif isinstance(record, Hello):
            self.host, self.pid = record.host, record.pid
        elif isinstance(record, Heartbeat):
            self.beats = True

    def to_public(self) -> dict[str, Json]:
        return {
            "producer": self.source.producer,
            "role": self.source.role,
            "rank": self.source.rank,
            "replica": self.source.replica,
            "host": self.host,
            "pid": self.pid,
            "last_seen_s": self.last_seen_s,
            "last_step": self.last_step,
            "state": self.state,
        }


class Producers:
    """All producers of one run."""

    def __init__(self) -> None:
        self._by_id: dict[str, Producer] = {}
        self.gaps = 0
        """Frames that were numbered and never arrived."""
        self._listening_s = math.inf
        """First look at the clock: nobody is silent for longer than somebody listens."""

    def __iter__(self) -> Iterator[Producer]:
        return iter(self._by_id.values())

    def see(self, record: Record, frame_no: int, now_s: float) -> tuple[Producer, str]:
        """(producer, news): news = "appeared", "back" (was silent), "left" (said bye) or ""."""
        source = record.source
        news = ""
        producer = self._by_id.get(source.producer)
        if producer is None:
            producer = self._by_id[source.producer] = Producer(source)
            news = "appeared"
            self._forget_gone()
        elif producer.state != "alive" and not producer.left and not producer.retired:
            news = "back"
        if frame_no >= 0:
            self.gaps += max(frame_no - producer.next_frame, 0)
            producer.next_frame = max(producer.next_frame, frame_no + 1)
        if producer.left or producer.retired:
            return producer, news
        producer.state = "alive"
        producer.last_seen_s = now_s
        producer.note(record)
        if isinstance(record, Bye):
            producer.state, producer.left, news = "gone", True, "left"
        return producer, news

    def _forget_gone(self) -> None:
        if len(self._by_id) > MAX_KNOWN:
            gone = next((name for name, p in self._by_id.items() if p.state == "gone"), None)
            if gone is not None:
                del self._by_id[gone]

    def newly_dropped(self, record: Heartbeat | Bye) -> dict[str, int]:
        """Tokens the sender dropped since it last said so, by cause."""
        producer = self._by_id[record.source.producer]
        new = {cause: n - producer.dropped.get(cause, 0) for cause, n in record.dropped_tokens.items()}
        new = {cause: num for cause, num in new.items() if num > 0}
        for cause, num in new.items():
            producer.dropped[cause] = producer.dropped.get(cause, 0) + num
        return new

    def silenced(self, now_s: float) -> list[tuple[Producer, str]]:
        """Producers that became silent (3 heartbeats) or gone (60 s) by now."""
        changed: list[tuple[Producer, str]] = []
        self._listening_s = min(self._listening_s, now_s)
        for producer in self._by_id.values():
            quiet_s = now_s - max(producer.last_seen_s, self._listening_s)
            if producer.state == "alive" and producer.beats and quiet_s > SILENT_S:
                producer.state = "silent"
                changed.append((producer, "silent"))
            elif producer.state == "silent" and quiet_s > GONE_S:
                producer.state = "gone"
                changed.append((producer, "gone"))
        return changed

    def trainers(self) -> list[Producer]:
        """Those of the run's present life."""
        return [p for p in self._by_id.values() if p.source.role == "trainer" and not p.retired]

    def all_silent(self) -> bool:
        """True when there are trainers that have not said goodbye, and all of those have fallen silent."""
        missed = [p for p in self.trainers() if not p.left]
        return bool(missed) and all(p.state != "alive" for p in missed)

    def all_left(self) -> bool:
        """True when there are trainers and all of them have said goodbye: no step gets more."""
        trainers = self.trainers()
        return bool(trainers) and all(p.left for p in trainers)

    def ended(self, step: int) -> bool:
        """True when a trainer is done with the step, or all have left."""
        return self.all_left() or any(p.is_done_with(step) for p in self.trainers())

    def ahead_of(self, step: int) -> bool:
        """True when trainers were heard at AHEAD_STEPS steps after this one."""
        later = {at for p in self.trainers() if p.last_step > step for at in p.newest_steps if at > step}
        return len(later) >= AHEAD_STEPS

    def awaited(self, step: int, since_step: int) -> list[Producer]:
        """Trainers that were there at `since_step` or at this one and are not done with `step`."""
        return [
            p
            for p in self.trainers()
            if p.state == "alive" and p.last_step >= min(since_step, step) and not p.is_done_with(step)
        ]

    def has_predecessor(self, source: Source) -> bool:
        """True before the first train record of a producer whose rank another one trained as: a restart, or a twin."""
        known = self._by_id.get(source.producer)
        return (known is None or not known.has_trained) and any(
            p.source.rank == source.rank and p.has_trained for p in self.trainers()
        )

    def retire_trained(self) -> None:
        """The present life of the run is over: everyone who trained in it is gone."""
        for producer in self.trainers():
            if producer.has_trained:
                producer.state, producer.retired = "gone", True

    def to_json(self) -> Json:
        return [
            {name: value for name, value in asdict(p).items() if name not in ("state", "left", "retired")}
            for p in self._by_id.values()
            if p.state != "gone"
        ]

    def load(self, tree: list[Mapping[str, Json]]) -> None:
        for item in tree:
            source = Source(**item["source"])
            self._by_id[source.producer] = Producer(**{**item, "source": source, "dropped": dict(item["dropped"])})
