"""Engines whose numerics are off, and weights that never arrive: courses of many steps, a player per kind."""

from __future__ import annotations

import numpy as np

from benchmarks.detection.faults import (
    FLOOR_LEARNED,
    NUM_STEPS,
    Truth,
    is_catastrophic,
    is_visible,
    louder,
    streams_of,
)  # fmt: skip
from benchmarks.detection.grid import Plan
from benchmarks.detection.play import MOVES, Job
from benchmarks.detection.streams import FLOORS, moved
from dlc_sentinel.config import Floor

UNDELIVERED_STEPS, DELIVERED_UNTIL = 52, 10
DRIFT_STEPS, DRIFT_FROM, DRIFT_UNTIL = 56, 4, 42
TABLE = {"fp16": Floor().float16, "bf16": Floor().bfloat16, "moe": Floor().moe, "fp8": Floor().float8}


def level(plan: Plan, job: Job) -> Truth:
    """Numerics too large from the first step on: only the table of precisions says what is usual (twice its value)."""
    visible = catastrophic = False
    usual = 2.0 * TABLE[plan.floor] / FLOORS[plan.floor][0]
    for step in range(NUM_STEPS):
        s = louder(plan, plan.severity, plan.seed, step)
        s.healthy_N *= usual
        visible = is_visible(s)
        catastrophic = visible and is_catastrophic(s, plan.floor)
        job.step(step, [s.train(job.source)], checksum=f"c{step}")
    return Truth(0, ("ENGINE",), visible, catastrophic)


def changed(plan: Plan, job: Job) -> Truth:
    """Numerics that become too large between two steps."""
    start, visible, catastrophic = FLOOR_LEARNED, False, False
    for step in range(start + 7):
        s = louder(plan, plan.severity if step >= start else 1.0, plan.seed, step)
        visible, catastrophic = is_visible(s), is_catastrophic(s, plan.floor)
        job.step(step, [s.train(job.source)], checksum=f"c{step}")
    return Truth(start, ("ENGINE",), visible, catastrophic)


def _drifted(step: int) -> float:
    """How much of the way a drift has made: it ends before the run does, so that a RESYNC can be judged."""
    return min(max(step - DRIFT_FROM, 0) / (DRIFT_UNTIL - DRIFT_FROM), 1.0)


def drift(plan: Plan, job: Job) -> Truth:
    """Numerics that grow step by step; weights do arrive, and a RESYNC changes nothing."""
    job.obey = lambda step: None
    visible = False
    for step in range(DRIFT_STEPS):
        part = _drifted(step)
        s = louder(plan, plan.severity**part, plan.seed, step)
        visible = is_visible(s)
        job.step(step, [s.train(job.source)], checksum=f"c{step}")
    return Truth(DRIFT_FROM, ("ENGINE",), visible)


def tail(plan: Plan, job: Job) -> Truth:
    """More and more unsure tokens are off by a lot, as with other experts chosen; the median stays."""
    job.obey = lambda step: None
    visible, floor = False, FLOORS[plan.floor][0]
    # a share p of tokens off by about 1.4 nats gives an rms of 1.4 sqrt(p)
    last = min((plan.severity * floor / 1.4) ** 2, 0.2)
    for step in range(DRIFT_STEPS):
        s = streams_of(plan, step)
        share = last * _drifted(step)
        hit_N = (s.rng.random(len(s.old_N)) < share / 0.38) & (s.old_N < -0.1)
        jump_N = s.rng.choice([-1.0, 1.0], len(s.old_N)) * s.rng.uniform(0.8, 2.0, len(s.old_N))
        s.engine_N = np.where(hit_N, moved(s.old_N, jump_N), s.engine_N)
        s.affected_N |= hit_N
        visible = is_visible(s) and plan.severity >= 5.0
        job.step(step, [s.train(job.source)], checksum=f"c{step}")
    return Truth(DRIFT_FROM, ("ENGINE",), visible)


def never_delivered(plan: Plan, job: Job) -> Truth:
    """Weights stop arriving though every label says they do: the trainer walks away from the engine."""
    proven = plan.kind != "never_delivered_unproven"
    job.obey = lambda step: None
    visible, floor, rng = False, FLOORS[plan.floor][0], np.random.default_rng([plan.seed, 5])
    # a walk with a drift: the mean movement, and steps of their own size
    strides = np.abs(1.0 + 0.6 * rng.standard_normal(UNDELIVERED_STEPS))
    strides[:DELIVERED_UNTIL] = 0.0
    apart = np.cumsum(strides)
    apart *= plan.severity * floor / apart[-1]
    for step in range(UNDELIVERED_STEPS):
        s = louder(plan, float(np.hypot(floor, apart[step])) / floor, plan.seed, step)
        visible = is_visible(s)
        repeats = plan.kind == "never_delivered" and step >= DELIVERED_UNTIL
        scalars = dict(MOVES)
        if plan.kind == "never_delivered_measured":
            scalars["displacement_nats"] = float(apart[step] - apart[max(step - 1, 0)])
        checksum = "none" if plan.kind == "never_delivered_measured" else f"c{DELIVERED_UNTIL if repeats else step}"
        job.step(step, [s.train(job.source)], scalars, f"{checksum}{step}" if checksum == "none" else checksum)
    right = ("STALE_ENGINE",) if proven else ("STALE_ENGINE", "ENGINE/drift_or_undelivered")
    return Truth(DELIVERED_UNTIL, right, visible)
