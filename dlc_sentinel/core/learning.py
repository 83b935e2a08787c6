"""Where the run's own scalars began and how high its reward has been: what a LEARNING finding is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, median

from dlc_sentinel.core.facts import no_nan
from dlc_sentinel.records import Json

START_STEPS = 5
REWARD_STEPS, LONG_STEPS = 5, 20
"""Steps of the running means of the reward: the short one is fast, the long one sees through noise."""
KEPT_REWARDS = 64
LARGEST_REWARD = 1e100
"""Its square is still a number."""
YOUNG_STEPS = 12
SPARE_DIFFERENCES = 4
"""So few differences tell nothing of the noise; little more than that make it look large rather than small."""
NUM_BLOCKS = 8
STARTS = ("entropy", "response_length", "reward", "truncated_ratio")
LEVELS: Mapping[str, int] = {"reward": REWARD_STEPS, f"reward_{LONG_STEPS}": LONG_STEPS}
SD_OF_MEDIAN_ABS = 1.0 / 0.6745
"""Of normal noise around 0."""


@dataclass(slots=True)
class Level:
    """A running mean of the reward: how high it has been."""

    peak: float
    peak_noise: float
    """What noise alone made two such means differ by (standard deviation) when the peak was reached."""

    def update(self, mean: float, noise: float, *, young: bool) -> None:
        """`young`: few values are known, so that their noise looks too large."""
        if mean >= self.peak:
            self.peak, self.peak_noise = mean, noise
        elif young:
            self.peak_noise = min(self.peak_noise, noise)


@dataclass(slots=True)
class Learning:
    """Bounded; plain, for the state file."""

    first: dict[str, list[float]] = field(default_factory=dict)
    """The first values of each scalar that is compared with its start."""
    rewards: list[float] = field(default_factory=list)
    """The newest."""
    levels: dict[str, Level] = field(default_factory=dict)
    low: float = math.nan
    """The smallest short mean so far ..."""
    trough: float = math.nan
    """... and before that mean's peak: what it rose from."""

    def update(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Medians at the start (`<name>_start`), and of the reward: `<level>_mean` and `<level>_peak`, the noise of
        their difference (`<level>_noise`, see `Level`; the larger of then and now), and `reward_trough`. This step's
        scalars are included; what is not finite is left out.
        """
        for name in STARTS:
            value = scalars.get(name, math.nan)
            if math.isfinite(value) and len(self.first.setdefault(name, [])) < START_STEPS:
                self.first[name].append(value)
        out = {f"{name}_start": median(seen) for name, seen in self.first.items() if len(seen) == START_STEPS}
        reward = scalars.get("reward", math.nan)
        if abs(reward) <= LARGEST_REWARD:
            self.rewards = [*self.rewards, reward][-KEPT_REWARDS:]
        for name, steps in LEVELS.items():
            if len(self.rewards) >= steps:
                out |= self._level(name, steps)
        return out | ({} if math.isnan(self.trough) else {"reward_trough": self.trough})

    def _level(self, name: str, steps: int) -> dict[str, float]:
        mean = fmean(self.rewards[-steps:])
        noise = unsteadiness(self.rewards) * math.sqrt(2.0 / steps)
        level = self.levels.setdefault(name, Level(mean, noise))
        level.update(mean, noise, young=len(self.rewards) <= YOUNG_STEPS)
        if steps == REWARD_STEPS:
            self.low = min(mean, self.low)
            self.trough = self.low if mean == level.peak else self.trough
        return {
            f"{name}_mean": mean, f"{name}_peak": level.peak, f"{name}_noise": max(noise, level.peak_noise)
        }  # fmt: skip

    def to_json(self) -> Json:
        levels = {name: asdict(level) for name, level in self.levels.items()}
        tree = {"first": self.first, "rewards": self.rewards, "levels": levels, "low": self.low, "trough": self.trough}
        return no_nan(tree)

    @classmethod
    def from_json(cls, tree: Mapping[str, Json]) -> Learning:
        # A state file written before there were levels holds none: the peak begins anew.
        levels = {name: Level(**level) for name, level in tree.get("levels", {}).items()}
        low, trough = (math.nan if tree.get(name) is None else tree[name] for name in ("low", "trough"))
        return cls(
            {name: list(seen) for name, seen in tree["first"].items()}, list(tree["rewards"]), levels, low, trough
        )


def unsteadiness(values: Sequence[float]) -> float:
    """Standard deviation of a single value's noise, from differences, so that a trend or a step adds little to it.

    The larger of two: from one value to the next; and, once there are blocks enough, from the bends of the course of
    their means, in which noise that lasts for some steps shows. At least 2 values.
    """
    squares = [(b - a) ** 2 for a, b in pairwise(values)]
    quick = math.sqrt(sum(squares) / 2.0 / max(len(squares) - SPARE_DIFFERENCES, 1))
    if len(values) < NUM_BLOCKS * REWARD_STEPS:
        return quick
    starts = range(len(values) % REWARD_STEPS, len(values), REWARD_STEPS)
    means = [fmean(values[i : i + REWARD_STEPS]) for i in starts]
    bends = [abs(a - 2.0 * b + c) for a, b, c in zip(means, means[1:], means[2:], strict=False)]
    # A bend adds up three means with weights 1, -2 and 1: six times the variance of one.
    return max(quick, median(bends) * SD_OF_MEDIAN_ABS / math.sqrt(6.0) * math.sqrt(REWARD_STEPS))
