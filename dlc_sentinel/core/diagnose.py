"""From a bounded history of step facts to what the newest step points at. Pure; hysteresis and actions come later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import SEVERITY, UNREPORTED, Candidate, Rule, View, rest_at_floor
from dlc_sentinel.core.rules.data import FAULT_CAUSES, MOST, TORN, finish_reason, hides_lag, refused, structure
from dlc_sentinel.core.rules.engine import (
    STALE_KV,
    drift,
    engine,
    engine_changed,
    stale_cache,
    stale_engine,
    trainer_noise,
)
from dlc_sentinel.core.rules.label import label
from dlc_sentinel.core.rules.lag import lag
from dlc_sentinel.core.rules.learning import learning
from dlc_sentinel.core.rules.transform import transform
from dlc_sentinel.core.rules.wiring import BOUND_SAFE, blind, unwired

RULES: tuple[Rule, ...] = (
    stale_engine, stale_cache, refused, structure, finish_reason, transform, label, engine, engine_changed, drift,
    trainer_noise, lag, learning, unwired, blind,
)  # fmt: skip
LIKE_STALE_KV = ("broken_prefix", "masked_span", "one_place")
"""What tokens after a change of weights in flight look like, to those who do not know of it."""
LIFTS_FLOOR = frozenset(("STALE_ENGINE", "DATA", "TRANSFORM", "LABEL", "ENGINE"))
"""Verdicts of faults that make the discrepancy larger: what a run shows under one of them is not its floor."""


def diagnose(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Candidates of the newest step, most severe first. `history` is oldest first, the newest step included."""
    if not history or not history[-1].offered_tokens:
        return []
    found = _explained([candidate for rule in RULES for candidate in rule(history, view)], history[-1])
    return sorted(found, key=lambda c: (not c.catastrophic, SEVERITY.index(c.verdict)))


def _explained(found: list[Candidate], now: StepFacts) -> list[Candidate]:
    """Without the candidates that another one explains: a shifted stream is also far from its floor."""
    if any((c.verdict, c.kind) == ("UNWIRED", "total_always_zero") for c in found):
        # bit for bit the trainer's own: nothing else can be read from the engine's side
        found = [c for c in found if c.verdict not in ("LABEL", "ENGINE", "STALE_ENGINE")]
    if any(c.kind == STALE_KV for c in found):
        found = [c for c in found if c.verdict != "DATA" or c.kind not in LIKE_STALE_KV]
    if any(c.verdict == "TRANSFORM" and c.kind != UNREPORTED for c in found):
        found = [c for c in found if c.verdict != "LABEL" or c.kind != "some_rows"]
    data = [c for c in found if c.verdict == "DATA" and c.kind not in FAULT_CAUSES]
    if hides_lag(found, now):
        found = [c for c in found if c.verdict != "LAG"]
    if data and rest_at_floor(now):
        # what is off in them has a name
        found = [c for c in found if c.verdict != "LABEL" or c.kind != "some_rows"]
    if any(c.kind == "finish_reason" for c in data):
        found = [c for c in found if (c.verdict, c.kind) != ("LEARNING", "truncation")]
    if any(c.verdict == "STALE_ENGINE" for c in found):
        found = [c for c in found if c.verdict != "ENGINE" or c.catastrophic]
    whole = [c for c in data if c.kind != "finish_reason" and not _others_off(c.kind, now)]
    if not [c for c in found if c in whole or (c.verdict in ("TRANSFORM", "LABEL") and c.kind != UNREPORTED)]:
        return found
    wild = any(c.verdict == "ENGINE" and c.catastrophic for c in found)
    kept = [c for c in found if c.verdict not in ("ENGINE", "STALE_ENGINE")]
    return [replace(c, catastrophic=True) if wild and c.verdict == "DATA" and c.kind in TORN else c for c in kept]


def _others_off(kind: str, now: StepFacts) -> bool:
    """True where rows or tokens that this kind of DATA does not touch are off as well: then that is a second fault."""
    p = now.profile
    if kind not in TORN:
        return not rest_at_floor(now)
    others = 1.0 - float(getattr(p, TORN[kind]))
    return others >= MOST and p.far_rows - (1.0 - others) >= MOST * others


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
