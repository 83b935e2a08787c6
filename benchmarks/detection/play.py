"""One labelled run through a monitor: what it was called, when, and whether its fault was large enough to ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlc_sentinel.config import Act, Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.records import Ack, Event, Heartbeat, Hello, Json, Record, Scalars, Source, StepEnd, Synced

MOVES = {"lr": 1e-6, "grad_norm": 0.7}
RUN = "r1"


class Job:
    """A monitor with one trainer. Numbers frames, passes time, answers commands."""

    def __init__(self, dtype: str = "bfloat16", mode: str = "resync") -> None:
        self.monitor = Monitor(Config(act=Act(mode=mode)))  # type: ignore[arg-type]  # one of the literals
        self.source = Source(RUN, "trainer", "p0")
        self.engine = Source(RUN, "engine", "e0")
        self.events: list[Event] = []
        self.obey: Callable[[int], None] | None = None
        """What a RESYNC does to the job; None = it is never answered."""
        self._frame_no: dict[str, int] = {}
        self._now_s = 1000.0
        self.feed(Hello(self.source, "model", dtypes={"engine": dtype, "trainer": dtype}))

    def feed(self, record: Record) -> list[Event]:
        if isinstance(record, (Ack, Heartbeat)):  # of the control socket, which is not numbered
            return self._keep(self.monitor.feed(record, -1, self._now_s))
        at = self._frame_no.get(record.source.producer, 0)
        self._frame_no[record.source.producer] = at + 1
        return self._keep(self.monitor.feed(record, at, self._now_s))

    def tick(self, seconds: float = 1.0) -> None:
        self._now_s += seconds
        self._keep(self.monitor.tick(self._now_s))

    def step(
        self, step: int, records: Sequence[Record], scalars: Mapping[str, float] = MOVES, checksum: str | None = None
    ) -> None:
        """Trains one step, then delivers weights where a checksum is given."""
        self._now_s += 1.0
        events = [event for record in records for event in self.feed(record)]
        events += self.feed(Scalars(self.source, step, dict(scalars)))
        events += self.feed(StepEnd(self.source, step))
        if checksum is not None:
            events += self.feed(Synced(self.engine, step + 1, step, checksum=checksum))
        for event in events:
            if event.kind == "command" and event.data["kind"] == "RESYNC" and event.data["sent"] and self.obey:
                self.obey(step)
                self.feed(Ack(self.source, event.data["id"], "applied", step, step + 1))

    def report(self) -> dict[str, Json]:
        return self.monitor.report(RUN)

    def _keep(self, events: list[Event]) -> list[Event]:
        self.events += events
        return events


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one labelled run."""

    verdict: str
    """Of the report at the end."""
    kinds: tuple[str, ...]
    """verdict/kind of all findings, in the order they opened."""
    delay: int | None
    """Steps from the fault's first step to the first finding of a right verdict; None = never."""
    early: int
    """Findings opened before the fault began."""
    visible: bool
    """Large enough to be asked for."""
    catastrophic: bool = False
    commands: tuple[str, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict)


def outcome(job: Job, start: int, right: tuple[str, ...], *, visible: bool, catastrophic: bool) -> Outcome:
    """Reads the job's events. `right`: verdicts, or VERDICT/kind, that name the fault."""
    opened = [
        (event.step, f"{event.data['verdict']}/{event.data['kind']}")
        for event in job.events
        if event.kind == "finding" and event.data["state"] in ("suspected", "confirmed")
    ]
    hits = [step for step, name in opened if step >= start and (name in right or name.split("/")[0] in right)]
    report = job.report()
    return Outcome(
        verdict=str(report["verdict"]),
        kinds=tuple(dict.fromkeys(name for _, name in opened)),
        delay=min(hits) - start if hits else None,
        early=sum(step < start for step, _ in opened),
        visible=visible,
        catastrophic=catastrophic,
        commands=tuple(f"{c['kind']}@{c['step']}" for c in report["commands"]),
    )
