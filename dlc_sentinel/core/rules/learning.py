"""The policy collapses or stands still though engine and trainer agree: from the scalars the trainer reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.learning import LEVELS, LONG_STEPS
from dlc_sentinel.core.rules.base import Candidate, View
from dlc_sentinel.records import Json

ENTROPY_SHARE, ENTROPY_TIMES = 0.1, 5.0
AT_PEAK, LEARNT_TIMES = 0.9, 1.5
TRUNCATED, TRUNCATED_RISE = 0.5, 0.25
LENGTH_TIMES = 3.0
REWARD_LOST, REWARD_WORSE, MIN_SCALE = 0.5, 0.25, 0.05
SURE: Mapping[str, float] = {"reward": 5.0, f"reward_{LONG_STEPS}": 7.0}
"""A fall counts from so many times its noise on: the peak is the largest of many means, noise and all."""
GRADIENT_STEPS, FROZEN_NORM = 3, 1e-8
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
            ("truncation", _truncation(now)),
            ("length", _length(now)),
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
    """The reward has risen and is at its peak: a policy that has solved its task is sure of itself."""
    mean, peak = now.learning.get("reward_mean", math.nan), now.learning.get("reward_peak", math.nan)
    start = now.learning.get("reward_start", math.nan)
    return mean >= AT_PEAK * peak and mean >= LEARNT_TIMES * start and peak > 0.0


def _truncation(now: StepFacts) -> dict[str, Json]:
    value, start = _of(now, "truncated_ratio")
    if not value >= TRUNCATED or not value - start >= TRUNCATED_RISE:
        return {}
    return {"truncated_ratio": value, "truncated_ratio_start": start}


def _length(now: StepFacts) -> dict[str, Json]:
    value, start = _of(now, "response_length")
    return {"response_length": value, "response_length_start": start} if value > LENGTH_TIMES * start > 0 else {}


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
    """No gradient though the learning rate is not 0."""
    recent = _with_norm(history)[-GRADIENT_STEPS:]
    still = all(s["grad_norm"] <= FROZEN_NORM and s.get("lr", 1.0) != 0.0 for s in recent)
    if len(recent) < GRADIENT_STEPS or not still:
        return {}
    return {"grad_norm": recent[-1]["grad_norm"], "steps": GRADIENT_STEPS}


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
