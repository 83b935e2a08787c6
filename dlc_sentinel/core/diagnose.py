"""From a bounded history of step facts to what the newest step points at. Pure; hysteresis and actions come later.

Each rule is one function (history, view) -> candidates. The full set of verdicts has its place in `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from dlc_sentinel.config import Config
from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts, Values
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.core.trend import feeds_itself
from dlc_sentinel.records import Json

SEVERITY = (
    "STALE_ENGINE", "DATA", "TRANSFORM", "LABEL", "ENGINE", "LAG", "LEARNING", "UNWIRED", "BLIND", "HEALTHY",
)  # fmt: skip
FAULT_CAUSES = (
    "non_finite", "positive", "placeholder", "mis_sized", "duplicate", "out_of_order", "unmatched",
    "restarted_version",
)  # fmt: skip
"""Refusals that say the data is wrong; the others (queue_full, join_full, late, oversize) say it was lost."""

ABOVE_FLOOR = 3.0
MIN_ENGINE_NATS = 0.02
CHANGE_RATIO, CHANGE_NATS = 2.0, 5e-3
"""A change of the engine's law is a fault where its second moment doubles and is more than fp32 numerics."""
CATASTROPHE_FLOOR, CATASTROPHE_NATS = 5.0, 0.2
"""Of the rms and of the largest hundredth: one wild token in a step is a spike, not a catastrophe."""
CATASTROPHE_TOKENS = 1000
CATASTROPHE_CORRELATION = 0.9
AGREEING = 0.95
JUMP = 3.0
"""A catastrophe is there at once; what has grown step by step belongs to the rules for drift."""
RISING_STEPS = 5
RISING_PAIRS = 0.8
RISING_RATIO = 1.1
JUMP_PAIRS = 0.5
RISE_BEGUN = 1.5
BOUND_SAFE = 0.52
DATA_SHARE = 0.01
BLIND_SHARE = 0.5
UNWIRED_STEPS = 3


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
    stale_proven: bool = False
    """... and something does."""
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


def diagnose(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Candidates of the newest step, most severe first. `history` is oldest first, the newest step included."""
    if not history or not history[-1].offered_tokens:
        return []
    found = [candidate for rule in RULES for candidate in rule(history, view)]
    return sorted(found, key=lambda c: (not c.catastrophic, SEVERITY.index(c.verdict)))


def lag_level(facts: StepFacts, config: Config) -> int:
    """2 = severe, 1 = below the threshold, 0 = not. A sample too small even when pooled counts only when severe."""
    ess = facts.judged_ess
    if math.isnan(ess):
        return 0
    if ess < config.ess.severe:
        return 2
    return 1 if ess < config.ess.threshold and facts.action_enough else 0


def healthy(history: Sequence[StepFacts], config: Config) -> bool:
    """True when the newest steps prove that the mismatch is at its floor (it says nothing about learning).

    The newest step decides on basis and lag; small steps may add up their tokens over `window.pool_steps` steps.
    """
    if not history or not history[-1].num_tokens:
        return False
    if sum(f.num_tokens for f in history[-config.window.pool_steps :]) < config.window.min_tokens:
        return False
    now = history[-1]
    return (now.basis != "mixed" and not math.isnan(now.action_ess)) or now.bound_ess >= BOUND_SAFE


def at_floor(facts: StepFacts) -> bool:
    """True when the discrepancy of current rows (or of all, where none is current) is not above 3x its floor."""
    rms = _engine_values(facts).rms
    return not (rms > ABOVE_FLOOR * facts.floor_rms and rms > MIN_ENGINE_NATS)


def _engine_values(facts: StepFacts) -> Values:
    return facts.current if facts.current.num >= MIN_TOKENS else facts.discrepancy


def _lag(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    if not lag_level(now, view.config):
        return []
    horizon, low_high = view.config.ess.horizon, now.action_interval
    queue = wants_drop(now, view.config)
    kind = "epochs" if now.age_max == 0 else "feedback" if feeds_itself(history) else "old_weights"
    kind = "queue" if queue else kind
    advice = ADVICE["LAG", "hopeless_queue" if view.hopeless_queue and queue else kind]
    evidence = {
        f"lag_ess_{horizon}": now.action_ess,
        "interval": list(low_high),
        "blocks": now.action_blocks,
        "lag_ess_1": now.lag_ess.get("1", math.nan),
        "lag_rms_nats": now.lag.rms,
        "discrepancy_rms_nats": now.discrepancy.rms,
        "age_mean": now.age_mean,
        "age_max": now.age_max,
    }
    sure = 0.97 if low_high[1] < view.config.ess.threshold else 0.8
    severe = lag_level(now, view.config) == 2 and now.action_enough
    return [Candidate("LAG", kind, sure, advice, evidence, at_once=severe)]


def wants_drop(facts: StepFacts, config: Config) -> bool:
    """True when fresh weights would not help: the engine has newer ones than the rows, or young rows are fine."""
    youngest = max((int(version) for version in facts.by_version), default=-1)
    if youngest >= 0 and facts.engine_version > youngest:
        return True
    return len(facts.lag_ess_by_age) > 1 and facts.action_ess_youngest >= config.ess.threshold


def rising(history: Sequence[StepFacts]) -> tuple[int, float]:
    """(step since which the current rows' discrepancy has been rising, ratio last/first), or (-1, nan).

    Rising: of all pairs among the last 6 steps with current rows, at least 80 % are in order, the ratio is > 1.1, and
    on either side of the largest jump it rises too: a jump between two levels is a change, not a rise.
    """
    seen = [f for f in history if f.current.num >= MIN_TOKENS][-(RISING_STEPS + 1) :]
    if len(seen) <= RISING_STEPS:
        return -1, math.nan
    values = [f.current.rms for f in seen]
    pairs = list(combinations(values, 2))
    ratio = values[-1] / max(values[0], 1e-12)
    if sum(b > a for a, b in pairs) < RISING_PAIRS * len(pairs) or ratio < RISING_RATIO or _is_jump(seen):
        return -1, math.nan
    since = next((f.step for f in seen if f.current.rms > RISE_BEGUN * values[0]), seen[0].step)
    return since, ratio


def _is_jump(seen: Sequence[StepFacts]) -> bool:
    """True when fewer than half of the pairs of steps before the largest jump, and after it, rise beyond chance."""
    values = [f.current.rms for f in seen]
    at = max(range(1, len(values)), key=lambda i: values[i] / max(values[i - 1], 1e-12))
    pairs = [*combinations(seen[:at], 2), *combinations(seen[at:], 2)]
    risen = sum(b.current.rms > a.current.rms * (1 + 1 / math.sqrt(b.current.num)) for a, b in pairs)
    return risen < JUMP_PAIRS * len(pairs)


def _stale_engine(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    if view.stale_refuted or now.current.num < MIN_TOKENS:
        return []
    since, ratio = rising(history)
    elevated = not at_floor(now)
    moved = _moved(history)
    reasons: dict[str, Json] = {}
    if elevated and since >= 0 and moved:
        reasons["rising_since_step"] = since
        reasons["rise_ratio"] = ratio
    if now.repeated_checksum and now.current.rms > 1.5 * now.floor_rms and moved:
        reasons["repeated_checksum"] = True
    if view.resync_without_effect and elevated:
        reasons["resync_without_effect"] = True
    if not reasons and not (view.stale_proven and elevated):
        return []
    kind = "never_delivered" if now.repeated_checksum else "stale_or_drift"
    reasons |= {"current_rms_nats": now.current.rms, "floor_rms_nats": now.floor_rms, "tokens": now.current.num}
    sure = 0.95 if view.stale_proven else 0.85 if now.repeated_checksum else 0.6
    since = since if since >= 0 else now.step
    advice = ADVICE["STALE_ENGINE", kind]
    return [Candidate("STALE_ENGINE", kind, sure, advice, reasons, since, suspected=not view.stale_proven)]


def _moved(history: Sequence[StepFacts]) -> bool:
    """True unless the learning rate or the gradient norm is known to be 0: then the trainer cannot have moved."""
    scalars = history[-1].scalars
    return all(scalars[name] != 0.0 for name in ("lr", "grad_norm") if name in scalars)


def _engine(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    values = _engine_values(now)
    if values.num < MIN_TOKENS or at_floor(now) or view.stale_proven:
        return []
    past = [f for f in history[:-1] if _engine_values(f).num]
    before = _engine_values(past[-1]).rms if past else 0.0
    at_once = not past or all(not at_floor(f) for f in past) or values.rms > JUMP * before
    catastrophic = (
        values.num >= CATASTROPHE_TOKENS
        and values.rms > max(CATASTROPHE_FLOOR * now.floor_rms, CATASTROPHE_NATS)
        and now.discrepancy.p99_abs > CATASTROPHE_NATS
        and at_once
        and not now.repeated_checksum
        and not view.stale_refuted
        and not view.resync_pending
        and rising(history)[0] < 0
    )
    if view.stale_refuted:
        kind = "drift_or_undelivered"
    elif rising(history)[0] >= 0 or now.repeated_checksum or view.resync_without_effect or view.resync_pending:
        return []  # the STALE_ENGINE rule has it until its one RESYNC is judged
    else:
        kind = "level"
    advice = ADVICE["ENGINE", kind]
    evidence = {
        "rms_nats": values.rms,
        "floor_rms_nats": now.floor_rms,
        "tokens": values.num,
        "p99_abs_nats": now.discrepancy.p99_abs,
    }
    return [Candidate("ENGINE", kind, 0.8, advice, evidence, catastrophic=catastrophic)]


def _engine_changed(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """The lag-0 rows of this step are of another law than those before, at once and not as a drift."""
    now = history[-1]
    past = [f.current.rms for f in history[:-1] if f.current.num]
    doubled = now.engine_change >= CHANGE_RATIO and now.current.rms >= CHANGE_NATS
    if not doubled or not past or now.current.rms**2 < CHANGE_RATIO * past[-1] ** 2:
        return []
    if rising(history)[0] >= 0 or now.repeated_checksum or view.resync_without_effect or view.resync_pending:
        return []  # as above
    evidence = {"second_moment_ratio": now.engine_change, "rms_nats": now.current.rms, "rms_before_nats": past[-1]}
    return [Candidate("ENGINE", "changed", 0.9, ADVICE["ENGINE", "changed"], evidence, at_once=True)]


def _data(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    found = []
    offered = now.offered_tokens
    for cause in FAULT_CAUSES:
        share = now.dropped.get(cause, 0) / offered
        if share < DATA_SHARE:
            continue
        catastrophic = cause == "non_finite" and share > DATA_SHARE and offered >= CATASTROPHE_TOKENS
        evidence = {"cause": cause, "tokens": now.dropped[cause], "share": share}
        found.append(
            Candidate("DATA", cause, min(0.6 + share, 0.99), ADVICE["DATA", cause], evidence, catastrophic=catastrophic)
        )
    past = [f.correlation for f in history[:-1] if f.correlation_tokens >= CATASTROPHE_TOKENS]
    low = now.correlation < CATASTROPHE_CORRELATION and now.correlation_tokens >= CATASTROPHE_TOKENS
    # Where all tokens are about as likely, noise at the floor alone decorrelates the streams.
    apart = not at_floor(now) and now.discrepancy.p99_abs > CATASTROPHE_NATS
    if low and apart and (not past or past[-1] > AGREEING or all(c < CATASTROPHE_CORRELATION for c in past)):
        evidence = {
            "correlation": now.correlation,
            "tokens": now.correlation_tokens,
            "rms_nats": now.discrepancy.rms,
        }
        advice = ADVICE["DATA", "streams_disagree"]
        found.append(Candidate("DATA", "streams_disagree", 0.9, advice, evidence, catastrophic=True))
    return found


def _unwired(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    recent = [f for f in history if f.num_tokens][-UNWIRED_STEPS:]
    if len(recent) < UNWIRED_STEPS or not all(
        f.aged_tokens >= view.config.window.min_tokens and f.aged_moved == 0 and _moved([f]) for f in recent
    ):
        return []
    now = recent[-1]
    evidence = {"tokens": now.aged_tokens, "age_mean": now.age_mean, "steps": UNWIRED_STEPS}
    evidence |= _copied(now)
    return [
        Candidate("UNWIRED", "lag_always_zero", 0.95, ADVICE["UNWIRED", "lag_always_zero"], evidence, recent[0].step)
    ]


def _blind(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    found = []
    if now.num_tokens < BLIND_SHARE * now.offered_tokens:
        evidence = {
            "usable": now.num_tokens,
            "sent": now.offered_tokens,
            "dropped": {k: v for k, v in now.dropped.items() if v},
        }
        advice = ADVICE["BLIND", "unusable_tokens"]
        found.append(Candidate("BLIND", "unusable_tokens", 0.95, advice, evidence))
    if now.basis == "mixed" and not now.bound_ess >= BOUND_SAFE:
        evidence = {"total_ess": now.bound_ess, "age_mean": now.age_mean, "basis": now.basis, **_copied(now)}
        evidence |= {"not_calibrated": now.unsplit} if now.unsplit else {}
        found.append(Candidate("BLIND", "mixed_basis", 0.8, ADVICE["BLIND", "mixed_basis"], evidence))
    return found


def _copied(facts: StepFacts) -> dict[str, Json]:
    return {"old_is_copy_of": facts.copied_from} if facts.copied_from else {}


RULES: tuple[Rule, ...] = (_stale_engine, _data, _engine, _engine_changed, _lag, _unwired, _blind)
