"""Records and whole runs made of numbers, for tests: every argument has a default, so a test names what matters."""

from __future__ import annotations

import numpy as np

from dlc_sentinel.config import Act, Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.records import (
    Ack,
    Event,
    Hello,
    Rollout,
    Scalars,
    Source,
    StepEnd,
    Synced,
    Train,
)


def make_source(run="r1", role="trainer", producer="p0", rank=0, replica="0"):
    return Source(run, role, producer, rank, replica)


def make_logprobs(num, rng, mean=-1.5):
    return -rng.exponential(-mean, num).astype(np.float32)


def make_train(
    step=0,
    version=None,
    gen_version=None,
    *,
    lag=0.0,
    disc=1e-3,
    rows=32,
    length=96,
    update=0,
    rng=None,
    source=None,
    ids=None,
    groups=None,
    old_is="generator",
    old_version=None,
    with_engine=True,
    **changes,
):
    """One record of `rows` sequences: lag and disc are rms values in nats of normal noise, centred like real ratios."""
    rng = rng or np.random.default_rng(step * 1000 + update)
    version = step if version is None else version
    gen_version = version if gen_version is None else gen_version
    num = rows * length
    engine = make_logprobs(num, rng)
    old = (engine.astype(np.float64) + rng.normal(-disc * disc / 2, disc, num)).astype(np.float32)
    cur = (old.astype(np.float64) + rng.normal(-lag * lag / 2, lag, num)).astype(np.float32)
    engine, old, cur = (np.minimum(x, 0).astype(np.float32) for x in (engine, old, cur))
    if lag == 0.0:
        cur = old.copy()
    offsets = np.arange(rows + 1, dtype=np.int64) * length
    fields = {
        "source": source or make_source(),
        "step": step,
        "version": version,
        "update": update,
        "ids": tuple(ids or (f"s{step}-{update}-{i}" for i in range(rows))),
        "offsets_S1": offsets,
        "cur_N": cur,
        "old_N": old,
        "engine_N": engine if with_engine else None,
        "span_start_K": offsets[:-1],
        "span_version_K": np.full(rows, gen_version, np.int64),
        "old_is": old_is,
        "old_version_S": None if old_version is None else np.full(rows, old_version, np.int64),
        "groups": tuple(groups or (f"g{step}-{i // 8}" for i in range(rows))),
    }
    return Train(**(fields | changes))


def make_rollout(ids, logprobs, version=0, *, final=True, at=0, source=None):
    """One record with one sequence per id; `logprobs` a list of arrays."""
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in logprobs])]).astype(np.int64)
    return Rollout(
        source=source or make_source(role="engine", producer="e0"),
        ids=tuple(ids),
        offsets_S1=offsets,
        token_offset_S=np.full(len(ids), at, np.int64),
        final_S=np.full(len(ids), final),
        logprobs_N=np.concatenate(logprobs).astype(np.float32),
        span_start_K=offsets[:-1],
        span_version_K=np.full(len(ids), version, np.int64),
    )


class Job:
    """A monitor with one trainer: `step` sends a whole step and returns its events. Numbers frames, passes time."""

    def __init__(self, mode="resync", config=None, dtypes=None, **monitor):
        self.config = config or Config(act=Act(mode=mode))
        self.monitor = Monitor(self.config, **monitor)
        self.source = make_source()
        self.frame_no = 0
        self.now_s = 1000.0
        self.events: list[Event] = []
        self.feed(Hello(self.source, "tiny", dtypes=dtypes or {"engine": "float32", "trainer": "float32"}))

    def feed(self, record, numbered=True):
        events = self.monitor.feed(record, self.frame_no if numbered else -1, self.now_s)
        self.frame_no += numbered
        self.events += events
        return events

    def tick(self, seconds=1.0):
        self.now_s += seconds
        events = self.monitor.tick(self.now_s)
        self.events += events
        return events

    def step(self, step, *records, scalars=None, **train):
        records = records or (make_train(step, source=self.source, **train),)
        events = [event for record in records for event in self.feed(record)]
        if scalars:
            events += self.feed(Scalars(self.source, step, scalars))
        events += self.feed(StepEnd(self.source, step))
        return events

    def synced(self, version, step, **fields):
        return self.feed(Synced(self.source, version, step, **fields))

    def ack(self, command, outcome="applied", version=-1, step=-1, reason=""):
        return self.feed(Ack(self.source, command["id"], outcome, step, version, reason), numbered=False)

    def report(self):
        return self.monitor.report("r1")


def of_kind(events, kind):
    return [event for event in events if event.kind == kind]


def commands(events):
    return [event.data for event in of_kind(events, "command")]
