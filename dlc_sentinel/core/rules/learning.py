"""The policy collapses or stands still though engine and trainer agree: from the scalars the trainer reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import Candidate, View
from dlc_sentinel.records import Json

ENTROPY_SHARE = 0.1
AT_PEAK, LEARNT_TIMES = 0.9, 1.5
TRUNCATED, TRUNCATED_RISE = 0.5, 0.25
LENGTH_TIMES = 3.0
REWARD_SHARE, MIN_PEAK = 0.5, 0.05
FROZEN_STEPS, FROZEN_NORM = 3, 1e-8


def learning(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """One finding for each dial that has left its range."""
    now = history[-1]
    return [
        Candidate("LEARNING", kind, 0.9, ADVICE["LEARNING", kind], evidence)
        for kind, evidence in (
            ("entropy", _entropy(now)),
            ("truncation", _truncation(now)),
            ("length", _length(now)),
            ("reward", _reward(now)),
            ("frozen", _frozen(history)),
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


def _reward(now: StepFacts) -> dict[str, Json]:
    mean, peak = now.learning.get("reward_mean", math.nan), now.learning.get("reward_peak", math.nan)
    if not peak >= MIN_PEAK or not mean < REWARD_SHARE * peak:
        return {}
    return {"reward_mean": mean, "reward_peak": peak}


def _frozen(history: Sequence[StepFacts]) -> dict[str, Json]:
    """No gradient though the learning rate is not 0."""
    recent = [f.scalars for f in history if "grad_norm" in f.scalars][-FROZEN_STEPS:]
    if len(recent) < FROZEN_STEPS or any(s["grad_norm"] > FROZEN_NORM or s.get("lr", 1.0) == 0.0 for s in recent):
        return {}
    return {"grad_norm": recent[-1]["grad_norm"], "steps": FROZEN_STEPS}


def _of(now: StepFacts, name: str) -> tuple[float, float]:
    return now.scalars.get(name, math.nan), now.learning.get(f"{name}_start", math.nan)
