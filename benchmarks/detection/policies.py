"""Labels that lie, lag, policies that collapse, numbers that cannot move: courses of many steps, a player per kind.

ESS is worked out here from the injected lag, block by block, apart from the sentinel's own maths.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.detection.faults import NUM_STEPS, Truth, start_of, streams_of
from benchmarks.detection.grid import Plan
from benchmarks.detection.play import MOVES, Job
from benchmarks.detection.streams import FLOORS, Streams, make_noise, make_streams, moved
from dlc_sentinel.records import F64, I64, Json, Record

HORIZON = 32
LOW_ESS, LOW_STEPS = 0.4, 5
APART_FLOORS, APART_NATS = 6.0, 0.2
LEARNING_STEPS = 40


def block_sums(x_N: F64, s: Streams) -> F64:
    """[B] sums of x over blocks of 32 tokens of each row; a row's last block may be shorter."""
    out: F64 = np.add.reduceat(x_N, np.flatnonzero(s.place_N % HORIZON == 0))
    return out


def ess_of(sums_B: F64) -> float:
    """(mean w)^2 / mean w^2 of w = exp(sums)."""
    w_B = np.exp(sums_B - sums_B.max())
    return float(w_B.mean() ** 2 / (w_B**2).mean())


def other_version(plan: Plan, job: Job) -> Truth:
    """Rows of today's weights with yesterday's tag: at the tag's weights they are apart."""
    return _labels(plan, job, lambda s: _scored_at_the_wrong_label(s, plan))


def some_rows(plan: Plan, job: Job) -> Truth:
    """Rows of other weights with today's tag."""
    return _labels(plan, job, lambda s: _of_other_weights(s, plan))


def future(plan: Plan, job: Job) -> Truth:
    """Tags newer than the trainer."""
    start = start_of(plan)
    for step in range(NUM_STEPS):
        s = streams_of(plan, step)
        made_S = np.full(s.num_rows, step)
        share = 0.0
        if step >= start:
            which_S = s.some_rows(plan.severity)
            made_S[which_S] += 3
            share = float(s.tokens_of(which_S).mean())
        job.step(step, [s.train(job.source, gen_version=made_S)], checksum=f"c{step}")
    return Truth(start, ("LABEL",), plan.severity >= 0.05 and share >= 0.01)


def _labels(plan: Plan, job: Job, damage: Callable[[Streams], I64]) -> Truth:
    start, visible = max(start_of(plan), 1), False
    for step in range(NUM_STEPS):
        s = streams_of(plan, step)
        made_S = damage(s) if step >= start else np.full(s.num_rows, step)
        if step >= start:
            x_N = np.abs(s.old_N - s.engine_N)[s.affected_N]
            visible = plan.severity >= 0.05 and float(x_N.mean()) >= 5.0 * float(s.healthy_N.mean())
        job.step(step, [s.train(job.source, gen_version=made_S)], checksum=f"c{step}")
    return Truth(start, ("LABEL",), visible)


def _apart(plan: Plan) -> float:
    return max(APART_FLOORS * FLOORS[plan.floor][0], APART_NATS)


def _scored_at_the_wrong_label(s: Streams, plan: Plan) -> I64:
    which_S = s.some_rows(plan.severity)
    which_N = s.tokens_of(which_S)
    s.old_N = np.where(which_N, moved(s.cur_N, -make_noise(s.cur_N, _apart(plan), s.rng)), s.old_N)
    s.affected_N |= which_N
    made_S: I64 = s.step - which_S.astype(np.int64)
    return made_S


def _of_other_weights(s: Streams, plan: Plan) -> I64:
    which_S = s.some_rows(plan.severity)
    which_N = s.tokens_of(which_S)
    moved_N = moved(s.old_N, -make_noise(s.old_N, _apart(plan), s.rng))
    s.engine_N = np.where(which_N, moved_N, s.engine_N)
    s.affected_N |= which_N
    return np.full(s.num_rows, s.step)


def lag(plan: Plan, job: Job) -> Truth:
    """Old weights, rightly labelled: syncs stop, rows wait in a queue, or a step takes many updates."""
    steps, start = 20, 4
    newest: list[F64] = []
    for step in range(steps):
        part = max(step - start, 0) / (steps - 1 - start)
        records, sums_B = _lagged(plan, job, step, plan.severity * min(1.6 * part, 1.0), max(step - start, 0))
        newest = [*newest, sums_B][-LOW_STEPS:]
        job.step(step, records, checksum=f"c{step}" if plan.kind != "old_weights" or step < start else None)
    return Truth(start, ("LAG",), ess_of(np.concatenate(newest)) < LOW_ESS)


def _lagged(plan: Plan, job: Job, step: int, rms: float, behind: int) -> tuple[list[Record], F64]:
    """The step's records and the true block sums of the last update."""
    if plan.kind == "epochs":
        return _epochs(plan, job, step, rms)
    s = streams_of(plan, step, lag=rms)
    records: list[Record] = []
    sums_B = block_sums(s.cur_N - s.old_N, s)
    made = step - (behind if plan.kind == "old_weights" else min(behind, 4))
    if plan.kind == "calibrated":
        young = make_streams(step, rows=16, length=plan.length, floor=plan.floor, seed=plan.seed, part=1)
        ids = tuple(f"y{step}-{i}" for i in range(16))
        sums_B = np.concatenate([sums_B, block_sums(np.zeros(len(young.old_N)), young)])
        records = [young.train(job.source, ids=ids, groups=ids, micro=1, old_is="absent", old_N=None)]
    changes: dict[str, Json] = {"old_is": "absent", "old_N": None} if plan.kind == "calibrated" else {}
    return [*records, s.train(job.source, gen_version=made, **changes)], sums_B


def _epochs(plan: Plan, job: Job, step: int, rms: float) -> tuple[list[Record], F64]:
    records: list[Record] = []
    sums_B = np.zeros(1)
    for update in range(4):
        s = make_streams(
            step, rows=max(plan.rows // 4, 4), length=plan.length, floor=plan.floor, seed=plan.seed, part=update,
            lag=rms * update / 3,
        )  # fmt: skip
        ids = tuple(f"s{step}-{update}-{i}" for i in range(s.num_rows))
        records.append(s.train(job.source, update=update, ids=ids, groups=ids))
        sums_B = block_sums(s.cur_N - s.old_N, s)
    return records, sums_B


def learning(plan: Plan, job: Job) -> Truth:
    """Engine and trainer agree; a dial of the policy leaves its range, or not quite."""
    far = plan.severity
    for step in range(LEARNING_STEPS):
        s = streams_of(plan, step)
        part = min(max(step - 10, 0) / (LEARNING_STEPS - 20), 1.0)
        scalars = dict(MOVES) | {"reward": 0.3 + 0.2 * min(step / 10, 1.0), "entropy": 0.6, "truncated_ratio": 0.05}
        if plan.kind == "entropy":
            # of a policy that has learnt nothing: one that solves its task may be sure of itself
            scalars |= {"entropy": 0.6 * 10.0 ** (-far * part), "reward": 0.3}
        elif plan.kind == "reward":
            scalars["reward"] *= 1.0 - min(far * 0.52 * part, 1.0)
        elif plan.kind == "truncation":
            scalars["truncated_ratio"] = 0.05 + min(far * 0.5, 0.95) * part
        else:
            scalars["grad_norm"] = 1e-9
        job.step(step, [s.train(job.source)], scalars, f"c{step}")
    visible = {"entropy": far > 1.0, "reward": far >= 1.0, "truncation": False, "frozen": False}[plan.kind]
    return Truth(0, ("LEARNING",), visible)


def unwired(plan: Plan, job: Job) -> Truth:
    """Rows of age 2 whose `old` is the current stream."""
    tokens = 0
    for step in range(NUM_STEPS):
        s = streams_of(plan, step)
        tokens = int((s.old_N < -0.1).sum())
        job.step(step, [s.train(job.source, gen_version=max(step - 2, 0))], checksum=f"c{step}")
    return Truth(2, ("UNWIRED",), tokens >= 1000)
