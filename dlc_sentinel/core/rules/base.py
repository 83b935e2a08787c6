"""What every rule works with: its view, what it returns, and the few measures that several rules share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import StepFacts, Values
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.records import Json

SEVERITY = (
    "STALE_ENGINE", "DATA", "TRANSFORM", "LABEL", "ENGINE", "LAG", "LEARNING", "UNWIRED", "BLIND", "HEALTHY",
)  # fmt: skip

UNREPORTED = "unreported"
"""Kind of TRANSFORM that is known from settings alone: it lifts no floor and explains nothing that the rows show."""
ABOVE_FLOOR = 3.0
MIN_ENGINE_NATS = 0.02
NOISE_SHARE = 0.9
"""Of the lag's rms; four fifths of its square."""
CACHE_FLOORS = 2.0
GROWS = 2.5
"""Of the last quarter of places to the first."""
CATASTROPHE_NATS = 0.2
"""Of the rms and of the largest hundredth: one wild token in a step is a spike, not a catastrophe."""
CATASTROPHE_TOKENS = 1000
CATASTROPHE_CORRELATION = 0.9
AGREEING = 0.95
SAME_TEXT = 0.5
"""Correlation below which no weights of this run, however old, have made both streams."""
RISING_STEPS = 5
RISING_PAIRS = 0.8
RISING_RATIO = 1.1
JUMP_SHARE = 0.6
BACK_FLOORS, TIMES_BACK, SKIPPING_PAIRS = 1.5, 2, 4
RISE_BEGUN = 1.5
LEFT_RATIO, LEFT_TIMES = 2.0, 3.0
WINDOWS, WINDOW_STEPS, WINDOWS_RATIO = 4, 5, 1.4
"""Where single steps are too noisy to be in order, medians of five are."""
FIRST_STEP = 1
"""Of a run that is new: some stacks count from 0, others from 1."""
RESUMED_STEPS = 3
TAIL_GROWN, TAIL_POWER = 1.4, 1.0 / 3.0
"""The tail alone has grown where the middle token has by less than the cube root of it."""


@dataclass(frozen=True, slots=True)
class View:
    """What a rule may know beside the facts: the config, and what the decider has tried so far."""

    config: Config
    resync_without_effect: bool = False
    """The last RESYNC of rule (a) was delivered and did not bring the total down."""
    resync_pending: bool = False
    """The effect of a RESYNC is not judged yet."""
    stale_refuted: bool = False
    """A RESYNC with cache reset changed nothing and nothing proves undelivered weights."""
    stale_untested: bool = False
    """One was asked for, but nobody answered, or nothing is sent: the suspicion stands."""
    stale_proven: bool = False
    """... and something does."""
    unreported: Mapping[str, Json] = field(default_factory=dict)
    """Settings under which the engine samples from another distribution than the one it reports."""
    rows_off_from_start: bool = False
    """Some of the rows have been off since the first step of the run, when there was but one version."""
    resumed_step: int = -1
    """First step of a process that went on where another one of its rank had stopped; -1 = there is none."""
    hopeless_queue: bool = False
    """Every drop_stale is due again within the queue's depth."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one step points at; `at_once` and `catastrophic` need no second step, `suspected` needs a proof."""

    verdict: str
    kind: str
    confidence: float
    advice: str
    evidence: Mapping[str, Json] = field(default_factory=dict)
    since_step: int = -1
    catastrophic: bool = False
    suspected: bool = False
    at_once: bool = False


Rule = Callable[[Sequence[StepFacts], View], list[Candidate]]


def is_noise(facts: StepFacts) -> bool:
    """True where what looks like lag is no more than the trainer's two passes differ by at equal weights."""
    return facts.noise_rms >= NOISE_SHARE * facts.lag.rms or facts.passes_apart


def passes_apart(facts: StepFacts, history: Sequence[StepFacts]) -> bool:
    """True where the trainer's own two passes are not of one text, from the start or at once: lag gets there by steps.

    `history`: the steps before.
    """
    p = facts.profile
    before = next((f for f in reversed(history) if not math.isnan(f.profile.own_correlation)), None)
    fresh = before is None and facts.age_max == 0
    at_once = fresh or (before is not None and (before.passes_apart or before.profile.own_correlation > AGREEING))
    return p.own_correlation < SAME_TEXT and p.correlation > AGREEING and at_once


def lag_level(facts: StepFacts, config: Config) -> int:
    """2 = severe, 1 = below the threshold, 0 = not. A sample too small even when pooled counts only when severe.

    Severe is acted on at once, so it must not hang on a single wild block: its interval has to be low, too.
    """
    # Before any weight has moved there is no lag: what looks like it is the trainer's own noise.
    unmoved = facts.age_max == 0 and facts.last_update == 0 and facts.unmoved.num > 0
    ess = math.nan if unmoved or is_noise(facts) else facts.judged_ess
    if math.isnan(ess):
        return 0
    if ess < config.ess.severe and not (facts.action_enough and facts.action_interval[1] >= config.ess.threshold):
        return 2
    return 1 if ess < config.ess.threshold and facts.action_enough else 0


def at_floor(facts: StepFacts) -> bool:
    """True when the discrepancy of current rows (or of all, where none is current) is not above 3x its floor."""
    rms = level_values(facts).rms
    return not (rms > ABOVE_FLOOR * facts.floor_rms and rms > MIN_ENGINE_NATS)


def rest_at_floor(facts: StepFacts) -> bool:
    """True where the tokens that are neither far, nor wild, nor fill-ins, are at the floor; or where there are none."""
    return not facts.profile.rest_rms > max(ABOVE_FLOOR * facts.floor_rms, MIN_ENGINE_NATS)


def engine_values(facts: StepFacts) -> Values:
    """Discrepancy of rows labelled current, or of all where too few are; none where what holds the lag is unwired."""
    if facts.current.num >= MIN_TOKENS:
        return facts.current
    return Values() if facts.aged_tokens >= MIN_TOKENS and is_unwired(facts) else facts.discrepancy


def level_values(facts: StepFacts) -> Values:
    """The same, with the steps before where this one has too few tokens: enough for a level, not for a course."""
    own = engine_values(facts)
    return facts.pooled if 0 < own.num < MIN_TOKENS <= facts.pooled.num else own


def on_old_cache(facts: StepFacts) -> bool:
    """True where rows are off by what a kept cache leaves after a change of weights in flight: no kind of request."""
    return facts.stale_kv.num >= MIN_TOKENS and facts.stale_kv.rms > CACHE_FLOORS * facts.floor_rms


def is_unwired(facts: StepFacts) -> bool:
    """True where old rows have a lag of exactly 0 although the trainer moves: `old` is not the generator's policy."""
    return facts.aged_tokens > 0 and facts.aged_moved == 0 and moved([facts])


def wants_drop(facts: StepFacts, config: Config) -> bool:
    """True when fresh weights would not help: the engine has newer ones than the rows, or young rows are fine."""
    if facts.age_max == 0:
        return False
    youngest = max((int(version) for version in facts.by_version), default=-1)
    if youngest >= 0 and facts.engine_version > youngest:
        return True
    return len(facts.lag_ess_by_age) > 1 and facts.action_ess_youngest >= config.ess.threshold


def rising(history: Sequence[StepFacts]) -> tuple[int, float]:
    """(step since which the discrepancy (see `engine_values`) has been rising, ratio last/first), or (-1, nan).

    Rising: of all pairs among the last 6 steps with such rows, at least 80 % are in order, the ratio is > 1.1, and
    no single step makes most of the way: a jump between two levels is a change, not a rise. Or the same of 4 windows
    of 5 steps, all in order, the ratio > 1.4. Weights that stay behind move all tokens, and from the floor on: where
    the tail alone rises, or the engine was off before, nothing is rising.
    """
    seen = [f for f in history if engine_values(f).num >= MIN_TOKENS]
    if seen and not at_floor(history[-1]) and (tail_alone(history) or _was_off(seen)):
        return -1, math.nan
    steps, span = seen[-(RISING_STEPS + 1) :], seen[-WINDOWS * WINDOW_STEPS :]
    if len(steps) <= RISING_STEPS:
        return -1, math.nan
    values = [engine_values(f).rms for f in steps]
    if _rises(values, RISING_PAIRS, RISING_RATIO):
        return _since(steps, values[0]), values[-1] / max(values[0], 1e-12)
    if len(span) < WINDOWS * WINDOW_STEPS:
        return -1, math.nan
    levels = [
        median(engine_values(f).rms for f in span[i : i + WINDOW_STEPS]) for i in range(0, len(span), WINDOW_STEPS)
    ]
    if _rises(levels, 1.0, WINDOWS_RATIO):
        return _since(span, levels[0]), levels[-1] / max(levels[0], 1e-12)
    return -1, math.nan


def _was_off(seen: Sequence[StepFacts]) -> bool:
    """True where the steps that are off now began so, or left the floor by far more than they have risen by since."""
    at = next((i for i in range(len(seen), 0, -1) if at_floor(seen[i - 1])), 0)
    if at in (0, len(seen)):
        return at == 0
    values = [engine_values(f).rms for f in seen]
    since = (values[-1] - values[at]) / max(len(values) - 1 - at, 1)
    at_once = values[at] >= LEFT_RATIO * values[at - 1]
    return at_once and values[at] - values[at - 1] > LEFT_TIMES * max(since, 0.0)


def _rises(values: Sequence[float], in_order: float, ratio: float) -> bool:
    pairs = list(combinations(values, 2))
    ordered = sum(b > a for a, b in pairs) >= in_order * len(pairs)
    return ordered and values[-1] >= ratio * max(values[0], 1e-12) and not is_jump(values)


def skipping(history: Sequence[StepFacts]) -> int:
    """Step since which the engine leaves its floor, gets worse, and is back at once, again and again; -1 = it does not.

    So do weights of which some syncs are missed, whatever the labels say: numerics that come and go do not grow.
    """
    seen = [(f.step, engine_values(f).rms, not at_floor(f)) for f in history if engine_values(f).num >= MIN_TOKENS]
    back = [i for i in range(1, len(seen)) if seen[i - 1][2] and seen[i][1] <= BACK_FLOORS * history[-1].floor_rms]
    if len(back) < TIMES_BACK:
        return -1
    grows = [b > RISING_RATIO * a for (_, a, was_off), (_, b, is_off) in pairwise(seen) if was_off and is_off]
    if len(grows) < SKIPPING_PAIRS or sum(grows) < RISING_PAIRS * len(grows):
        return -1
    return next(step for step, _, is_off in seen if is_off)


def _since(seen: Sequence[StepFacts], first: float) -> int:
    return next((f.step for f in seen if engine_values(f).rms > RISE_BEGUN * first), seen[0].step)


def is_jump(values: Sequence[float]) -> bool:
    """True when one step makes most of the way from the first value to the last."""
    steps = [b - a for a, b in pairwise(values)]
    return max(steps) > JUMP_SHARE * (values[-1] - values[0])


def tail_alone(history: Sequence[StepFacts]) -> bool:
    """True where the rms has grown since the oldest steps remembered, and the middle token all but stayed."""
    old, now = [f for f in history if engine_values(f).num][:WINDOW_STEPS], history[-1]
    if not old:
        return False
    rms = median(engine_values(f).rms for f in old)
    middle = median(f.discrepancy.p50_abs for f in old)
    grown = engine_values(now).rms / max(rms, 1e-12)
    return grown >= TAIL_GROWN and now.discrepancy.p50_abs <= grown**TAIL_POWER * middle


def resumed(history: Sequence[StepFacts], view: View) -> bool:
    """True in the first steps of a process that starts neither at 0 nor at 1 and was never at its floor."""
    own = [f for f in history if f.step >= view.resumed_step and engine_values(f).num]
    return bool(own) and own[0].step > FIRST_STEP and len(own) <= RESUMED_STEPS and not any(map(at_floor, own))


def moved(history: Sequence[StepFacts]) -> bool:
    """True unless the learning rate or the gradient norm is known to be 0, or not finite: such a step is skipped."""
    scalars = history[-1].scalars
    still = any(scalars.get(name, 1.0) == 0.0 for name in ("lr", "grad_norm"))
    return not still and math.isfinite(scalars.get("grad_norm", 1.0))


def has_moved(history: Sequence[StepFacts]) -> bool:
    """True where it is known that the trainer has moved: it said so, or rows of old weights differ from its own."""
    return any(f.aged_moved > 0 or ({"lr", "grad_norm"} & f.scalars.keys() and moved([f])) for f in history)


def copied(facts: StepFacts) -> dict[str, Json]:
    """Evidence that `old` is a copy, where it is."""
    return {"old_is_copy_of": facts.copied_from} if facts.copied_from else {}


def apart(facts: StepFacts, tokens: int = CATASTROPHE_TOKENS) -> bool:
    """The two streams are all but unrelated on tokens the engine was not sure of, of which there are so many."""
    if not facts.discrepancy.num:
        # lag and discrepancy are one number: old weights decorrelate the streams, too, but not as far
        return facts.profile.correlation < SAME_TEXT and facts.profile.correlation_tokens >= tokens
    low = facts.profile.correlation < CATASTROPHE_CORRELATION
    # Where all tokens are about as likely, noise at the floor alone decorrelates the streams.
    off = not at_floor(facts) and facts.discrepancy.p99_abs > CATASTROPHE_NATS
    return low and off and facts.profile.correlation_tokens >= tokens


def disagree(history: Sequence[StepFacts], tokens: int = CATASTROPHE_TOKENS) -> bool:
    """They are apart, and were so from the start or became so at once, however long ago that is."""
    seen = [f.profile.correlation for f in history[:-1] if f.profile.correlation_tokens >= tokens]
    while seen and seen[-1] < CATASTROPHE_CORRELATION:
        seen.pop()
    return apart(history[-1], tokens) and (not seen or seen[-1] > AGREEING)
