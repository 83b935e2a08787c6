"""Where the run's own scalars began and how high its reward has been: what a LEARNING finding is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from dlc_sentinel.records import Json

START_STEPS = 5
REWARD_STEPS = 5
"""Steps of the running mean of the reward."""
STARTS = ("entropy", "response_length", "reward", "truncated_ratio")


@dataclass(slots=True)
class Learning:
    """Bounded; plain, for the state file."""

    first: dict[str, list[float]] = field(default_factory=dict)
    """The first values of each scalar that is compared with its start."""
    rewards: list[float] = field(default_factory=list)
    peak: float = math.nan
    """Largest running mean of the reward so far."""

    def update(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Medians at the start (`<name>_start`), `reward_mean` and `reward_peak`, this step's scalars included."""
        for name in STARTS:
            value = scalars.get(name, math.nan)
            if math.isfinite(value) and len(self.first.setdefault(name, [])) < START_STEPS:
                self.first[name].append(value)
        out = {f"{name}_start": median(seen) for name, seen in self.first.items() if len(seen) == START_STEPS}
        reward = scalars.get("reward", math.nan)
        if math.isfinite(reward):
            self.rewards = [*self.rewards, reward][-REWARD_STEPS:]
        if len(self.rewards) == REWARD_STEPS:
            mean = sum(self.rewards) / REWARD_STEPS
            self.peak = mean if math.isnan(self.peak) else max(self.peak, mean)
            out |= {"reward_mean": mean, "reward_peak": self.peak}
        return out

    def to_json(self) -> Json:
        return {"first": self.first, "rewards": self.rewards, "peak": None if math.isnan(self.peak) else self.peak}

    @classmethod
    def from_json(cls, tree: Mapping[str, Json]) -> Learning:
        peak = math.nan if tree["peak"] is None else tree["peak"]
        return cls({name: list(seen) for name, seen in tree["first"].items()}, list(tree["rewards"]), peak)
