"""What the closed steps before this one say of it: where the lag is heading, and small steps together.

A forecast needs ages that grow between two syncs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import NAN, StepFacts, Values
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.maths.forecast import LoopGain, forecast_steps, is_feedback, loop_gain
from dlc_sentinel.records import F64

MAX_AGE = 1e6
"""A version that far off is a wrong label, not an age."""
MOST = 0.5
"""Of a step that is not small but has few rows whose discrepancy is known, these prove nothing of the others."""
AGE_DIGITS = 6
"""Mean ages that differ by rounding only are one age: a curve cannot be laid through them."""


def with_trend(facts: StepFacts, history: Sequence[StepFacts], config: Config) -> StepFacts:
    """The facts with forecast (steps to ESS_h* < threshold) and loop gain; nan where ages do not grow."""
    *_, before, now = [[], *_windows([*history, facts])]
    if len(now) < 2:
        return facts
    changed = replace(facts, forecast=_forecast(now, config.ess.threshold))
    if not before:
        return changed
    gain = loop_gain(
        _ages(before),
        np.array([f.lag.rms for f in before]),
        _ages(now),
        np.array([f.lag.rms for f in now]),
    )
    return replace(changed, loop_gain=gain.value, loop_gain_low=gain.low)


def with_pooled(facts: StepFacts, history: Sequence[StepFacts], config: Config) -> StepFacts:
    """The facts of a step of few tokens with the discrepancy of the newest steps that make enough together."""
    own = facts.discrepancy.num
    if own >= MIN_TOKENS or own < MOST * max(facts.num_tokens, 1):
        return facts
    num, square = 0, 0.0
    for f in [facts, *reversed(history)][: config.window.pool_steps]:
        if f.discrepancy.num:
            num, square = num + f.discrepancy.num, square + f.discrepancy.num * f.discrepancy.rms**2
        if num >= MIN_TOKENS:
            break
    return replace(facts, pooled=Values(rms=math.sqrt(square / num), num=num))


def _forecast(window: Sequence[StepFacts], threshold: float) -> tuple[float, float, float]:
    """(low, mid, high) steps from the newest stretch in which every step added age: a queue that is full adds none."""
    ages = _ages(window)
    stalled = np.nonzero(np.diff(ages) <= 0.0)[0]
    first = int(stalled[-1]) + 1 if len(stalled) else 0
    num_steps = window[-1].step - window[first].step
    if num_steps <= 0:
        return NAN, NAN, NAN
    pace = float(ages[-1] - ages[first]) / num_steps
    ess = np.array([f.action_ess for f in window[first:]])
    course = forecast_steps(ages[first:], ess, age_per_step=pace, threshold=threshold)
    return course.low, course.mid, course.high


def _ages(window: Sequence[StepFacts]) -> F64:
    return np.array([f.age_mean for f in window]).round(AGE_DIGITS)


def feeds_itself(history: Sequence[StepFacts]) -> bool:
    """True where the lower limit of the loop gain was above 1 at the end of each of the last 3 sync windows."""
    ends = [LoopGain(window[-1].loop_gain, window[-1].loop_gain_low) for window in _windows(history) if window]
    return is_feedback(ends)


def _windows(history: Sequence[StepFacts]) -> list[list[StepFacts]]:
    """Steps from one sync to the next, the newest window last: a window ends where the mean age drops."""
    windows: list[list[StepFacts]] = [[]]
    for facts in history:
        if facts.basis not in ("exact", "calibrated") or not abs(facts.age_mean) <= MAX_AGE:
            continue
        if windows[-1] and facts.age_mean < windows[-1][-1].age_mean:
            windows.append([])
        windows[-1].append(facts)
    return windows
