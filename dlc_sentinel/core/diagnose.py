"""From a bounded history of step facts to what the newest step points at. Pure; hysteresis and actions come later."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import SEVERITY, Candidate, Rule, View
from dlc_sentinel.core.rules.data import data
from dlc_sentinel.core.rules.engine import engine, engine_changed, stale_engine
from dlc_sentinel.core.rules.lag import lag
from dlc_sentinel.core.rules.wiring import BOUND_SAFE, blind, unwired

RULES: tuple[Rule, ...] = (stale_engine, data, engine, engine_changed, lag, unwired, blind)


def diagnose(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Candidates of the newest step, most severe first. `history` is oldest first, the newest step included."""
    if not history or not history[-1].offered_tokens:
        return []
    found = [candidate for rule in RULES for candidate in rule(history, view)]
    return sorted(found, key=lambda c: (not c.catastrophic, SEVERITY.index(c.verdict)))


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
