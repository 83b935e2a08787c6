"""Which correction a run needs, from one comparison (see `corrections`) per step: a correction acts on one batch.

The run's need is the most demanding one that at least a tenth of its steps have, in the order none, unknown, a
correction, resync; of several corrections it is the most frequent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from dlc_sentinel.maths.corrections import CORRECTIONS, Comparison, Effect, Recommendation, recommend

__all__ = ["Needs", "over_steps"]

LEAST_SHARE: Final = 0.1
"""A need that fewer steps have is not the run's."""
_ORDER: Final = ("none", "unknown", *CORRECTIONS[1:], "resync")
_NOTHING: Final = tuple(Effect(name, math.nan, math.nan, math.nan, math.nan) for name in CORRECTIONS)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the steps of a run need."""

    run: Recommendation
    """The reason is that of the step of median bias among those that need it."""
    counts: dict[str, int]
    """Name -> steps that need it."""
    effects: tuple[Effect, ...]
    """Medians over the steps that decide; nan where no step knows."""
    lag_ess_ratio: float
    lag_bias: float


def over_steps(found: Sequence[Comparison]) -> Needs:
    """What a run needs, from one comparison per step; `unknown` without any step."""
    advice = [recommend(step) for step in found]
    counts = Counter(need.name for need in advice)
    enough = LEAST_SHARE * len(found)
    cures = {name: counts[name] for name in CORRECTIONS if name != "none" and counts[name]}
    if counts["resync"] and counts["resync"] >= enough:
        name = "resync"
    elif cures and sum(cures.values()) >= enough:
        name = max(cures, key=cures.__getitem__)
    else:
        name = "unknown" if not found or counts["unknown"] > enough else "none"
    chosen = [(step, need) for step, need in zip(found, advice, strict=True) if need.name == name]
    if not chosen:
        return over_steps([Comparison(_NOTHING, math.nan, 0, math.nan, math.nan)])
    chosen.sort(key=lambda pair: pair[0]["none"].bias_left)
    reason = chosen[(len(chosen) - 1) // 2][1].reason
    steps = [step for step, _ in chosen]
    return Needs(
        run=Recommendation(name, reason),
        counts={each: counts[each] for each in _ORDER if counts[each]},
        effects=tuple(_median_effect([step[each] for step in steps]) for each in CORRECTIONS),
        lag_ess_ratio=_median([step.lag_ess_ratio for step in steps]),
        lag_bias=_median([step.lag_bias for step in steps]),
    )


def _median_effect(effects: Sequence[Effect]) -> Effect:
    return Effect(
        effects[0].name,
        _median([effect.ess_ratio for effect in effects]),
        _median([effect.raw_ess_ratio for effect in effects]),
        _median([effect.clipped_share for effect in effects]),
        _median([effect.bias_left for effect in effects]),
    )


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan
