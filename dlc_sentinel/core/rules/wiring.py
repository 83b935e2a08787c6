"""Numbers that cannot move, and data that is missing."""

from __future__ import annotations

from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import Candidate, View, copied, is_unwired, moved
from dlc_sentinel.records import Json

BOUND_SAFE = 0.52
"""ESS_h* of the total above which the lag's is above one half whatever the discrepancy is."""
BLIND_SHARE = 0.5
UNWIRED_STEPS, BLIND_STEPS = 3, 3


def unwired(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Numbers of rows of old weights that never move although the weights do."""
    recent, least = [f for f in history if f.num_tokens][-UNWIRED_STEPS:], view.config.window.min_tokens
    if len(recent) < UNWIRED_STEPS:
        return []
    now = recent[-1]
    evidence: dict[str, Json] = {"age_mean": now.age_mean, "steps": UNWIRED_STEPS}
    if all(f.aged_any >= least and f.aged_apart == 0 and moved([f]) for f in recent):
        kind, tokens = "total_always_zero", now.aged_any
    elif all(f.aged_tokens >= least and is_unwired(f) for f in recent):
        kind, tokens = "lag_always_zero", now.aged_tokens
        evidence |= copied(now)
    else:
        return []
    advice = ADVICE["UNWIRED", kind]
    return [Candidate("UNWIRED", kind, 0.95, advice, evidence | {"tokens": tokens}, recent[0].step)]


def blind(history: Sequence[StepFacts], view: View) -> list[Candidate]:
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
    # a step between two that could be split leaves nobody blind
    recent = [f for f in history if f.num_tokens][-BLIND_STEPS:]
    if now.num_tokens and all(f.basis == "mixed" and not f.bound_ess >= BOUND_SAFE for f in recent):
        evidence = {"total_ess": now.bound_ess, "age_mean": now.age_mean, "basis": now.basis, **copied(now)}
        evidence |= {"not_calibrated": now.unsplit} if now.unsplit else {}
        found.append(Candidate("BLIND", "mixed_basis", 0.8, ADVICE["BLIND", "mixed_basis"], evidence))
    return found
