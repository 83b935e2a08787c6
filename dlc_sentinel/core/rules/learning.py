"""The policy collapses or stands still though engine and trainer agree: from the scalars the trainer reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.learning import LEVELS, LONG_STEPS, START_STEPS, unsteadiness
from dlc_sentinel.core.rules.base import Candidate, View
from dlc_sentinel.records import Json

ENTROPY_SHARE, ENTROPY_TIMES = 0.1, 5.0
LEARNT_GAIN, LEARNT_SURE = 0.25, 2.0
"""Of the reward's start; and of its noise."""
TRUNCATED, TRUNCATED_RISE = 0.5, 0.25
LENGTH_TIMES = 3.0
RISEN_STEPS, SURE_RISE = 5, 4.0
"""A dial of single rows jumps where a step has few of them: means are held against the start, beyond their noise."""
MEDIAN_NOISE = math.pi / 2.0
"""Of a median's variance to a mean's, for normal noise."""
REWARD_LOST, REWARD_WORSE, MIN_SCALE = 0.5, 0.25, 0.05
SURE: Mapping[str, float] = {"reward": 5.0, f"reward_{LONG_STEPS}": 7.0}
"""A fall counts from so many times its noise on: the peak is the largest of many means, noise and all."""
GRADIENT_STEPS, FROZEN_NORM = 3, 1e-8
FROZEN_CHANCE = 1e-5
"""Groups whose rewards are all equal have no gradient: so many such steps on end are no chance at this run's rate."""
NON_FINITE = 2
"""Of the last 3: mixed precision skips a step now and then, and lowers the loss scale."""
UNSCALED_STEPS = 8
"""At the start the loss scale is too high and is halved at each step until the first gradient is finite."""


def learning(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """One finding for each dial that has left its range."""
    now = history[-1]
    return [
        Candidate("LEARNING", kind, 0.9, ADVICE["LEARNING", kind], evidence)
        for kind, evidence in (
            ("entropy", _entropy(now)),
            ("entropy_surge", _entropy_surge(now)),
            ("truncation", _truncation(history)),
            ("length", _length(history)),
            ("length_collapse", _length_collapse(now)),
            ("reward", _fallen(now, REWARD_LOST)),
            ("frozen", _frozen(history)),
            ("non_finite_gradient", _non_finite_gradient(history)),
        )
        if evidence
    ]


def _entropy(now: StepFacts) -> dict[str, Json]:
    value, start = _of(now, "entropy")
    if not value < ENTROPY_SHARE * start or _has_learnt(now):
        return {}
    return {"entropy": value, "entropy_start": start}


def _has_learnt(now: StepFacts) -> bool:
    """The reward has risen and has not come down again: a policy that has learnt its task is sure of itself."""
    start, gained = now.learning.get("reward_start", math.nan), False
    for level in LEVELS:
        mean, noise = (now.learning.get(f"{level}_{key}", math.nan) for key in ("mean", "noise"))
        gained = gained or mean - start >= max(MIN_SCALE, LEARNT_GAIN * abs(start), LEARNT_SURE * noise)
    return gained and not _fallen(now, REWARD_WORSE)


def _truncation(history: Sequence[StepFacts]) -> dict[str, Json]:
    value, start, sure = _risen(history, "truncated_ratio")
    if not value >= TRUNCATED or not value - start >= max(TRUNCATED_RISE, sure):
        return {}
    return {"truncated_ratio": value, "truncated_ratio_start": start}


def _length(history: Sequence[StepFacts]) -> dict[str, Json]:
    """Responses grow and are none the better for it: one that learns to think for longer is."""
    value, start, sure = _risen(history, "response_length")
    if not value > LENGTH_TIMES * start > 0 or not value - start >= sure or _has_learnt(history[-1]):
        return {}
    return {"response_length": value, "response_length_start": start}


def _risen(history: Sequence[StepFacts], name: str) -> tuple[float, float, float]:
    """(mean of the newest steps, start, what noise alone puts between the two)."""
    values = [f.scalars[name] for f in history if math.isfinite(f.scalars.get(name, math.nan))]
    start = history[-1].learning.get(f"{name}_start", math.nan)
    if len(values) < RISEN_STEPS or name not in history[-1].scalars:
        return math.nan, start, math.nan
    share = math.sqrt(1.0 / RISEN_STEPS + MEDIAN_NOISE / START_STEPS)
    return fmean(values[-RISEN_STEPS:]), start, SURE_RISE * share * unsteadiness(values)


def _entropy_surge(now: StepFacts) -> dict[str, Json]:
    """The policy talks at random, and is the worse for it: one that explores is not."""
    value, start = _of(now, "entropy")
    fallen = _fallen(now, REWARD_WORSE) if value > ENTROPY_TIMES * start > 0 else {}
    return {"entropy": value, "entropy_start": start} | fallen if fallen else {}


def _length_collapse(now: StepFacts) -> dict[str, Json]:
    """Responses have become short, and worse: one that has learnt to come to the point is not."""
    value, start = _of(now, "response_length")
    fallen = _fallen(now, REWARD_WORSE) if LENGTH_TIMES * value < start else {}
    return {"response_length": value, "response_length_start": start} | fallen if fallen else {}


def _fallen(now: StepFacts, share: float) -> dict[str, Json]:
    """Evidence that the reward has lost `share` of its peak, by more than noise makes, in either running mean.

    A reward that was below 0 has no natural zero: there the share is of what it had gained, if that is more.
    """
    for level, steps in LEVELS.items():
        mean, peak, noise = (now.learning.get(f"{level}_{key}", math.nan) for key in ("mean", "peak", "noise"))
        gained, sure = peak - now.learning.get("reward_trough", math.nan), SURE[level] * noise
        risen = gained >= MIN_SCALE and gained > sure
        if peak - mean > max(share * max(gained, abs(peak)), sure) and (peak >= MIN_SCALE or risen):
            return {"reward_mean": mean, "reward_peak": peak, "reward_noise": noise, "steps": steps}
    return {}


def _frozen(history: Sequence[StepFacts]) -> dict[str, Json]:
    """No gradient though the learning rate is not 0, for longer than steps without one come by chance."""
    known = _with_norm(history)
    still = [s["grad_norm"] <= FROZEN_NORM and s.get("lr", 1.0) != 0.0 for s in known]
    runs = [(value, len(list(run))) for value, run in groupby(still)]
    if not runs or not runs[-1][0]:
        return {}
    length = runs[-1][1]
    usual = (sum(still) - length + 1.0) / (len(still) - length + 2.0)
    if usual**length > FROZEN_CHANCE:
        return {}
    return {"grad_norm": known[-1]["grad_norm"], "steps": length}


def _non_finite_gradient(history: Sequence[StepFacts]) -> dict[str, Json]:
    """The newest norm, and more of them, is NaN or infinite: such steps are skipped, or they spoil the weights."""
    wrong = [not math.isfinite(scalars["grad_norm"]) for scalars in _with_norm(history)]
    if not wrong or not wrong[-1]:
        return {}
    enough = len(wrong) >= UNSCALED_STEPS if all(wrong) else sum(wrong[-GRADIENT_STEPS:]) >= NON_FINITE
    return {"non_finite_steps": sum(wrong), "steps": len(wrong)} if enough else {}


def _with_norm(history: Sequence[StepFacts]) -> list[Mapping[str, float]]:
    """Scalars of the steps with a gradient norm; none once it has stayed away for longer than it ever did."""
    at = [i for i, f in enumerate(history) if "grad_norm" in f.scalars]
    usual = max((b - a for a, b in pairwise(at)), default=1)
    is_new = bool(at) and len(history) - 1 - at[-1] <= usual
    return [history[i].scalars for i in at] if is_new else []


def _of(now: StepFacts, name: str) -> tuple[float, float]:
    return now.scalars.get(name, math.nan), now.learning.get(f"{name}_start", math.nan)
