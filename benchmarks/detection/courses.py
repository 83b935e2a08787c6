"""Rows that come short, twice, not at all, or without what tells lag from numerics; and the table of all courses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.detection import policies, weights
from benchmarks.detection.faults import NUM_STEPS, Truth, start_of, streams_of
from benchmarks.detection.grid import Plan
from benchmarks.detection.play import Job
from benchmarks.detection.streams import Streams
from dlc_sentinel.records import Bool, Heartbeat, Json, Record, Train


def mis_sized(plan: Plan, job: Job) -> Truth:
    """The trainer's rows are three tokens short of what the engine sent."""
    start = start_of(plan)
    bare: dict[str, Json] = {"engine_N": None, "span_start_K": None, "span_version_K": None}
    share = 0.0
    for step in range(NUM_STEPS):
        s = streams_of(plan, step)
        records = [s.rollout(job.engine)]
        wrong_S = s.some_rows(plan.severity) if step >= start else np.zeros(s.num_rows, np.bool_)
        keep_N = ~(s.tokens_of(wrong_S) & (s.place_N >= np.repeat(s.lengths_S - 3, s.lengths_S)))
        offsets = np.concatenate([[0], np.cumsum(s.lengths_S - 3 * wrong_S)]).astype(np.int64)
        train = s.train(
            job.source, **bare, offsets_S1=offsets, cur_N=s.cur_N[keep_N].astype(np.float32),
            old_N=s.old_N[keep_N].astype(np.float32),
        )  # fmt: skip
        job.step(step, [*records, train], checksum=f"c{step}")
        share = float(s.tokens_of(wrong_S).mean())
    return Truth(start, ("DATA",), share >= 0.01)


def duplicate(plan: Plan, job: Job) -> Truth:
    """Some rows come twice, in a later micro-batch."""
    start, share = start_of(plan), 0.0
    for step in range(NUM_STEPS):
        s = streams_of(plan, step)
        records = [s.train(job.source)]
        if step >= start:
            records.append(_only(s, s.some_rows(plan.severity), job, micro=1))
            share = int(records[1].offsets_S1[-1]) / len(s.cur_N)
        job.step(step, records, checksum=f"c{step}")
    return Truth(start, ("DATA",), share >= 0.01)


def _only(s: Streams, which_S: Bool, job: Job, **changes: int) -> Train:
    """The Train record of the rows chosen."""
    which_N = s.tokens_of(which_S)
    offsets = np.concatenate([[0], np.cumsum(s.lengths_S[which_S])]).astype(np.int64)
    rows = np.flatnonzero(which_S)
    return s.train(
        job.source, ids=tuple(f"s{s.step}-{i}" for i in rows), offsets_S1=offsets, groups=(),
        **{name: getattr(s, name)[which_N].astype(np.float32) for name in ("cur_N", "old_N", "engine_N")},
        span_start_K=offsets[:-1], span_version_K=np.full(len(rows), s.step, np.int64), **changes,
    )  # fmt: skip


def unusable(plan: Plan, job: Job) -> Truth:
    """The senders had to drop a share of what they offered."""
    start, lost = start_of(plan), 0
    for step in range(NUM_STEPS):
        s = streams_of(plan, step)
        records: list[Record] = [s.train(job.source)]
        if step >= start:
            gone_S = s.some_rows(plan.severity)
            lost += int(s.tokens_of(gone_S).sum())
            beat = Heartbeat(job.engine, step, step, 0, {"queue_full": lost})
            records = [_only(s, ~gone_S, job), beat] if not gone_S.all() else [beat]
        job.step(step, records, checksum=f"c{step}")
    return Truth(start, ("BLIND",), plan.severity > 0.5)


def mixed_basis(plan: Plan, job: Job) -> Truth:
    """No middle stream and no row without lag: nothing tells lag from numerics."""
    bound = 1.0
    for step in range(NUM_STEPS):
        s = streams_of(plan, step + 1, lag=plan.severity)
        s.fields = {"step": step, "version": step + 1, "ids": tuple(f"s{step}-{i}" for i in range(s.num_rows))}
        bound = policies.ess_of(policies.block_sums(s.cur_N - s.engine_N, s))
        job.step(step, [s.train(job.source, gen_version=step, old_is="absent", old_N=None)])
    return Truth(0, ("BLIND",), bound < 0.52)


def silent(plan: Plan, job: Job) -> Truth:
    """Everybody falls silent."""
    for step in range(4):
        job.step(step, [Heartbeat(job.source, step), streams_of(plan, step).train(job.source)], checksum=f"c{step}")
    for _ in range(12):
        job.tick()
    return Truth(3, ("BLIND",), True)


COURSES: dict[str, Callable[[Plan, Job], Truth]] = {
    "mis_sized": mis_sized,
    "duplicate": duplicate,
    "level": weights.level,
    "changed": weights.changed,
    "drift": weights.drift,
    "tail": weights.tail,
    "never_delivered": weights.never_delivered,
    "never_delivered_unproven": weights.never_delivered,
    "never_delivered_measured": weights.never_delivered,
    "other_version": policies.other_version,
    "some_rows": policies.some_rows,
    "future": policies.future,
    "old_weights": policies.lag,
    "queue": policies.lag,
    "epochs": policies.lag,
    "calibrated": policies.lag,
    "entropy": policies.learning,
    "reward": policies.learning,
    "truncation": policies.learning,
    "frozen": policies.learning,
    "lag_always_zero": policies.unwired,
    "unusable": unusable,
    "mixed_basis": mixed_basis,
    "silent": silent,
}
