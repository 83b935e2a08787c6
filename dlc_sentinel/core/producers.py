"""Who sends: last signs of life, frame gaps, the senders' own counts, and which steps each has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlc_sentinel.records import Bye, Heartbeat, Hello, Json, Record, Source, StepEnd, Synced, Train

HEARTBEAT_S = 2.0
SILENT_S = 3 * HEARTBEAT_S
GONE_S = 60.0


@dataclass(slots=True)
class Producer:
    source: Source
    host: str = ""
    pid: int = 0
    last_seen_s: float = 0.0
    last_step: int = -1
    """Newest step of any record."""
    ended_step: int = -1
    """Newest step it said it was done with."""
    beats: bool = False
    """True once a heartbeat came: only such a producer can be called silent."""
    state: Literal["alive", "silent", "gone"] = "alive"
    next_frame: int = 0
    offered_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def is_done_with(self, step: int) -> bool:
        return self.ended_step >= step or self.last_step > step

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
        elif producer.state != "alive":
            news = "back"
        producer.state = "alive"
        producer.last_seen_s = now_s
        if frame_no >= 0:
            self.gaps += max(frame_no - producer.next_frame, 0)
            producer.next_frame = max(producer.next_frame, frame_no + 1)
        if isinstance(record, (Train, StepEnd, Synced)):
            producer.last_step = max(producer.last_step, record.step)
        if isinstance(record, StepEnd):
            producer.ended_step = max(producer.ended_step, record.step)
        elif isinstance(record, Hello):
            producer.host, producer.pid = record.host, record.pid
        elif isinstance(record, Heartbeat):
            producer.beats = True
        elif isinstance(record, Bye):
            producer.state, news = "gone", "left"
        return producer, news

    def newly_dropped(self, record: Heartbeat | Bye) -> dict[str, int]:
        """Tokens the sender dropped since it last said so, by cause."""
        producer = self._by_id[record.source.producer]
        new = {cause: n - producer.dropped.get(cause, 0) for cause, n in record.dropped_tokens.items()}
        producer.dropped = dict(record.dropped_tokens)
        return {cause: n for cause, n in new.items() if n > 0}

    def silenced(self, now_s: float) -> list[tuple[Producer, str]]:
        """Producers that became silent (3 heartbeats) or gone (60 s) by now."""
        changed: list[tuple[Producer, str]] = []
        for producer in self._by_id.values():
            quiet_s = now_s - producer.last_seen_s
            if producer.state == "alive" and producer.beats and quiet_s > SILENT_S:
                producer.state = "silent"
                changed.append((producer, "silent"))
            elif producer.state == "silent" and quiet_s > GONE_S:
                producer.state = "gone"
                changed.append((producer, "gone"))
        return changed

    def trainers(self) -> list[Producer]:
        return [p for p in self._by_id.values() if p.source.role == "trainer"]

    def all_silent(self) -> bool:
        """True when there are trainers, and each that has not said bye has fallen silent."""
        trainers = [p for p in self.trainers() if p.beats]
        return any(p.state == "silent" for p in trainers) and all(p.state != "alive" for p in trainers)

    def waits_for(self, step: int, since_step: int) -> bool:
        """True while a trainer that took part in the last closed step, or in this one, is not done with `step`."""
        return any(
            p.state == "alive" and p.last_step >= min(since_step, step) and not p.is_done_with(step)
            for p in self.trainers()
        )

    def predecessor(self, source: Source) -> Producer | None:
        """Another trainer of the same rank that was here before: the run was restarted under its old name."""
        others = [
            p
            for p in self.trainers()
            if p.source.rank == source.rank and p.source.producer != source.producer and p.last_step >= 0
        ]
        return max(others, key=lambda p: p.last_seen_s, default=None)

    def retire(self, producer: Producer) -> None:
        """The producer's process is over: nothing waits for it any more."""
        producer.state = "gone"

    def to_json(self) -> Json:
        return [
            {
                "source": _source_json(p.source),
                "host": p.host,
                "pid": p.pid,
                "last_step": p.last_step,
                "next_frame": p.next_frame,
            }
            for p in self._by_id.values()
            if p.state != "gone"
        ]

    def load(self, tree: list[Mapping[str, Json]], now_s: float) -> None:
        for item in tree:
            source = Source(**item["source"])
            self._by_id[source.producer] = Producer(
                source, item["host"], item["pid"], now_s, item["last_step"], next_frame=item["next_frame"]
            )


def _source_json(source: Source) -> dict[str, Json]:
    return {
        "run": source.run,
        "role": source.role,
        "producer": source.producer,
        "rank": source.rank,
        "replica": source.replica,
    }
