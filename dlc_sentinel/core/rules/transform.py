"""A sampling transform stands on one side only: then trainer - engine is a function of the logprob."""

from __future__ import annotations

from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import UNREPORTED, Candidate, View
from dlc_sentinel.core.rules.data import DATA_SHARE
from dlc_sentinel.records import Json

MIN_NATS = 0.01
ALL_BUT_EXPLAINED = 0.9


def transform(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Logits, a cut distribution, or a temperature on one side; else one that the settings alone give away."""
    found = _shown(history[-1])
    if found or not view.unreported or not history[-1].num_tokens:
        return found
    advice = ADVICE["TRANSFORM", UNREPORTED]
    return [Candidate("TRANSFORM", UNREPORTED, 0.9, advice, dict(view.unreported))]


def _shown(now: StepFacts) -> list[Candidate]:
    share = now.dropped.get("positive", 0) / now.offered_tokens
    if share >= DATA_SHARE:
        evidence: dict[str, Json] = {"tokens_above_0": now.dropped["positive"], "share": share}
        return [Candidate("TRANSFORM", "logits", min(0.6 + share, 0.99), ADVICE["TRANSFORM", "logits"], evidence)]
    f, values = now.profile.function, now.discrepancy
    shows = f.is_transform
    if not values.num:
        # lag and discrepancy are one number: a policy that has become surer looks like a temperature, but not as well
        values, shows = now.total, f.is_tempered and f.explained >= ALL_BUT_EXPLAINED
    if not shows or not values.rms >= MIN_NATS:
        return []
    evidence = {"correlation": f.correlation, "rms_nats": values.rms}
    if f.is_cut:
        evidence |= {"kept_mass": f.kept_mass, "z": f.kept_z, "share_below_0": f.below}
        return [Candidate("TRANSFORM", "kept_mass", 0.95, ADVICE["TRANSFORM", "kept_mass"], evidence)]
    evidence |= {"temperature": f.slope, "explained": f.explained, "kept_mass": f.kept_mass}
    evidence["tempered_side"] = "engine" if f.slope < 1.0 else "trainer"
    return [Candidate("TRANSFORM", "temperature", 0.9, ADVICE["TRANSFORM", "temperature"], evidence)]
