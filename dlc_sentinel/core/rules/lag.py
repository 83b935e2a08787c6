"""Old weights, rightly labelled."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import Candidate, View, lag_level, wants_drop
from dlc_sentinel.core.trend import feeds_itself


def lag(history: Sequence[StepFacts], view: View) -> list[Candidate]:
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
