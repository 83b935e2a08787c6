"""Faults in token streams: each plays one labelled run and says what is true of it.

Axes: S rows, N packed tokens. Faults of data and transforms are `Damage`s of a step's streams; runs whose fault is in
time (weights, labels, scalars, losses) have a player each, in `courses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.grid import Plan
from benchmarks.detection.play import Job
from benchmarks.detection.streams import FLOORS, Streams, make_noise, make_policy, make_streams, moved, transformed_pool
from dlc_sentinel.records import F64, Bool, Record

NUM_STEPS, LATE_START, FLOOR_LEARNED = 11, 4, 11
VISIBLE_FLOORS, VISIBLE_SHARE, VISIBLE_TOKENS = 5.0, 0.01, 64
ENGINE_NATS = 0.02
"""Below this rms the design calls no engine off."""
CATASTROPHE_TOKENS, CATASTROPHE_NATS, CATASTROPHE_FLOORS, APART = 1000, 0.2, 5.0, 0.9
SPAN = 24
EDGE = 64

Damage = Callable[[Streams, float], None]


@dataclass(slots=True)
class Truth:
    """What is true of a run; `visible` and `catastrophic` as the issue and the design define them."""

    start: int
    right: tuple[str, ...]
    visible: bool
    catastrophic: bool = False


def start_of(plan: Plan) -> int:
    """Step 0, or one while the floor is still being learned; noisy rare tokens need a floor to be seen against."""
    if plan.kind == "low_probability":
        return FLOOR_LEARNED
    return 0 if plan.seed % 2 else LATE_START


def streams_of(plan: Plan, step: int, **changes: float) -> Streams:
    return make_streams(
        step, rows=plan.rows, length=plan.length, floor=plan.floor, seed=plan.seed, **changes  # type: ignore[arg-type]
    )  # fmt: skip  # each is a number that make_streams takes


def is_visible(s: Streams) -> bool:
    """Mean |x| of the affected tokens >= 5 floors, and 1 % of the step or 64 tokens of one class of rows or places.

    The floor is that of all tokens, or of these where they are by nature noisier (rare ones).
    """
    num = int(s.affected_N.sum())
    x_N = np.abs(s.old_N - s.engine_N)[s.affected_N]
    if not num or float(np.mean(np.square(s.old_N - s.engine_N))) < ENGINE_NATS**2:
        return False
    floor = max(float(s.healthy_N.mean()), float(s.healthy_N[s.affected_N].mean()))
    far = not np.isfinite(x_N).all() or float(x_N.mean()) >= VISIBLE_FLOORS * floor
    return far and (num >= VISIBLE_SHARE * len(s.old_N) or (num >= VISIBLE_TOKENS and not s.scattered))


def is_catastrophic(s: Streams, floor: str) -> bool:
    """The design's words: streams uncorrelated on unsure tokens, > 1 % non-finite, or rms > 5 floors and 0.2 nats."""
    fine_N = np.isfinite(s.engine_N) & np.isfinite(s.old_N)
    if fine_N.sum() < CATASTROPHE_TOKENS:
        return False
    engine_N, old_N = s.engine_N[fine_N], s.old_N[fine_N]
    x_N = old_N - engine_N
    rms = float(np.sqrt(np.mean(x_N**2)))
    wild = rms > max(CATASTROPHE_FLOORS * FLOORS[floor][0], CATASTROPHE_NATS)
    unsure_N = engine_N < -0.05
    apart = float(np.corrcoef(engine_N[unsure_N], old_N[unsure_N])[0, 1]) < APART
    return bool(wild or apart or (~fine_N).mean() > VISIBLE_SHARE)


def play_damage(plan: Plan, job: Job, damage: Damage) -> Truth:
    """Steps of clean streams, damaged from the start on."""
    start, visible, catastrophic = start_of(plan), False, False
    for step in range(NUM_STEPS + start - min(start, LATE_START)):
        s = streams_of(plan, step)
        if step >= start:
            damage(s, plan.severity)
            visible, catastrophic = is_visible(s), is_catastrophic(s, plan.floor)
        job.step(step, _records(s, job), checksum=f"c{step}")
    return Truth(start, (plan.verdict,), visible, catastrophic)


def _records(s: Streams, job: Job) -> list[Record]:
    return [s.train(job.source)]


# -- data -----------------------------------------------------------------------------------------------------------


def _replace_trainer(s: Streams, which_N: Bool, values_N: F64) -> None:
    s.old_N = np.where(which_N, values_N, s.old_N)
    s.cur_N = s.old_N.copy()
    s.affected_N |= which_N


def offset(s: Streams, share: float) -> None:
    """The trainer's stream stands some places later or earlier in its rows."""
    by = int(s.rng.choice([-3, -2, -1, 1, 2, 3]))
    which_N = s.tokens_of(s.some_rows(share))
    place_N, last_N = s.place_N - by, np.repeat(s.lengths_S, s.lengths_S)
    inside_N = (place_N >= 0) & (place_N < last_N)
    moved_N = s.old_N[np.clip(np.arange(len(s.old_N)) - by, 0, len(s.old_N) - 1)]
    _replace_trainer(s, which_N, np.where(inside_N, moved_N, make_policy(len(moved_N), s.rng)))


def wrong_pairing(s: Streams, share: float) -> None:
    """The trainer scored these responses after other prompts."""
    which_N = s.tokens_of(s.some_rows(share))
    _replace_trainer(s, which_N, make_policy(len(s.old_N), s.rng, certain=0.4))


def broken_prefix(s: Streams, share: float) -> None:
    """From one token on the trainer scored another text."""
    which_S = s.some_rows(share)
    at_S = (s.lengths_S * s.rng.uniform(0.15, 0.7, s.num_rows)).astype(np.int64)
    which_N = s.tokens_of(which_S) & (s.place_N >= np.repeat(at_S, s.lengths_S))
    _replace_trainer(s, which_N, make_policy(len(s.old_N), s.rng, certain=0.5))


def exact_zeros(s: Streams, share: float) -> None:
    """Some requests come back with all logprobs exactly 0."""
    which_N = s.tokens_of(s.some_rows(share))
    s.engine_N = np.where(which_N, 0.0, s.engine_N)
    s.affected_N |= which_N


def last_token(s: Streams, share: float) -> None:
    """The last logprob is a hand-made 0 where the trainer's is not near it."""
    at = s.offsets_S1[1:][s.some_rows(share)] - 1
    s.engine_N[at] = 0.0
    s.old_N[at] = s.cur_N[at] = -s.rng.exponential(0.8, len(at)) - 0.05
    s.affected_N[at] = True


def chunk_edge(s: Streams, share: float) -> None:
    """The engine's value at multiples of 64 (512 in long rows) is of another position."""
    edge = EDGE if s.lengths_S.max() <= 1024 else 8 * EDGE
    edge = min(edge, int(s.lengths_S.max()) // 2)
    edge = 1 << (edge.bit_length() - 1)
    which_N = (s.place_N % edge == 0) & (s.place_N > 0) & (s.rng.random(len(s.old_N)) < share)
    s.engine_N = np.where(which_N, make_policy(len(s.old_N), s.rng, certain=0.2), s.engine_N)
    s.affected_N |= which_N


def masked_span(s: Streams, share: float) -> None:
    """A tool's output, whose engine logprobs are 0, stands inside the mask."""
    which_S = s.some_rows(share)
    at_S = (s.rng.random(s.num_rows) * np.maximum(s.lengths_S - SPAN, 1)).astype(np.int64)
    since_N = s.place_N - np.repeat(at_S, s.lengths_S)
    which_N = s.tokens_of(which_S) & (since_N >= 0) & (since_N < SPAN)
    s.engine_N = np.where(which_N, 0.0, s.engine_N)
    _replace_trainer(s, which_N, -4.0 * s.rng.standard_exponential(len(s.old_N)))


def non_finite(s: Streams, share: float) -> None:
    which_N = s.rng.random(len(s.old_N)) < share
    s.engine_N = np.where(which_N, np.nan, s.engine_N)
    s.affected_N |= which_N
    s.scattered = True


# -- transforms -----------------------------------------------------------------------------------------------------


def transform(plan: Plan) -> Damage:
    """Tokens drawn from a pool of pairs, numerics on top."""
    engine_P, trainer_P = transformed_pool(plan.kind, plan.severity, plan.seed)

    def damage(s: Streams, amount: float) -> None:
        pick_N = s.rng.integers(0, len(engine_P), len(s.old_N))
        s.engine_N = engine_P[pick_N]
        old_N = trainer_P[pick_N]
        s.old_N = moved(old_N, make_noise(old_N, FLOORS[plan.floor][0], s.rng, plan.floor))
        s.cur_N = s.old_N.copy()
        s.affected_N[:] = True

    return damage


# -- the engine's numerics ------------------------------------------------------------------------------------------


def louder(plan: Plan, times: float, rows_seed: int, step: int) -> Streams:
    """A step whose numerics are so many times the healthy ones."""
    s = make_streams(
        step, rows=plan.rows, length=plan.length, floor=plan.floor, seed=rows_seed, rms=times * FLOORS[plan.floor][0]
    )
    s.affected_N[:] = times > 1.0
    return s


def low_probability(plan: Plan) -> Damage:
    """Only what the trainer finds unlikely is off, so much that these tokens are `severity` times the floor."""

    def damage(s: Streams, times: float) -> None:
        rare_N = s.old_N < -1.5
        usual = float(np.sqrt(np.mean((s.old_N - s.engine_N)[rare_N] ** 2)))
        x_N = s.rng.normal(0.0, times * usual, len(s.old_N))
        s.engine_N = np.where(rare_N, moved(s.old_N, -x_N), s.engine_N)
        s.affected_N |= rare_N

    return damage


DAMAGES: dict[str, Damage] = {
    "offset": offset,
    "wrong_pairing": wrong_pairing,
    "broken_prefix": broken_prefix,
    "exact_zeros": exact_zeros,
    "last_token": last_token,
    "chunk_edge": chunk_edge,
    "masked_span": masked_span,
    "non_finite": non_finite,
}
MADE: dict[str, Callable[[Plan], Damage]] = {
    "temperature": transform,
    "top_p": transform,
    "top_k": transform,
    "low_probability": low_probability,
}
