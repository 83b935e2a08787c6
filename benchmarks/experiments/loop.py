"""The training loop of testbeds A, B, D: S runs of one arm at once, each with random numbers of its own.

A step: sample from the generator, measure, update, perhaps sync.
Axes: S runs, B rows, T tokens, n states, V actions, K features, H horizons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.experiments.arms import FRONTIER_HORIZONS, Arm, gradient
from benchmarks.experiments.job import spread
from benchmarks.experiments.reference import Moment
from benchmarks.experiments.store import Row, rounded
from benchmarks.experiments.worlds import World, log_softmax
from dlc_sentinel.maths.ess import EssSums, block_sums, rung_name
from dlc_sentinel.records import F64, I64

BETAS, EPSILON = (0.9, 0.999), 1e-8
HALF = 0.5


@dataclass
class Adam:
    """Adam that goes uphill."""

    rate: float
    first: F64 | None = None
    second: F64 | None = None
    num: int = 0

    def step(self, weights: F64, gradient: F64) -> F64:
        """The weights after one step."""
        self.num += 1
        first = np.zeros_like(weights) if self.first is None else self.first
        second = np.zeros_like(weights) if self.second is None else self.second
        self.first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        first, second = self.first / (1 - BETAS[0] ** self.num), self.second / (1 - BETAS[1] ** self.num)
        out: F64 = weights + self.rate * first / (np.sqrt(second) + EPSILON)
        return out


@dataclass(frozen=True, slots=True)
class Ascent:
    """Plain gradient ascent."""

    rate: float

    def step(self, weights: F64, gradient: F64) -> F64:
        """The weights after one step."""
        return weights + self.rate * gradient


@dataclass(slots=True)
class Course:
    """What S runs leave: arrays [S] a step."""

    full: list[F64] = field(default_factory=list)
    reverse: list[F64] = field(default_factory=list)
    prefix: list[F64] = field(default_factory=list)
    mean_return: list[F64] = field(default_factory=list)
    seen_return: list[F64] = field(default_factory=list)
    ess: list[F64] = field(default_factory=list)
    """[S, H]"""


class Runs:
    """S runs of an arm."""

    def __init__(self, world: World, arm: Arm, seeds: Sequence[int], num_syncs_S: Sequence[int] = ()) -> None:
        self.world, self.arm, self.seeds = world, arm, seeds
        self.weights = np.repeat(world.start_KV[None], len(seeds), axis=0)
        self._gen_weights = self.weights.copy()
        self._optimizer = Adam(world.learning_rate) if world.optimizer == "adam" else Ascent(world.learning_rate)
        self._rngs = [np.random.default_rng([7, seed]) for seed in seeds]
        self._syncs_at = [spread(num, world.num_steps) for num in num_syncs_S]
        self.syncs: list[list[int]] = [[] for _ in seeds]
        self.course = Course()
        self.weights_before: list[F64] = []
        """At the start of each step."""

    def run(self, references: F64 | None = None) -> None:
        """All steps; references: weights [steps, R, K, V] to measure against."""
        for step in range(self.world.num_steps):
            self.weights_before.append(self.weights)
            now_SnV, gen_SnV, mu_SnV = self._policies(is_reference=references is None)
            if references is not None:
                self._measure(Moment(self.world, references[step]), now_SnV, gen_SnV, mu_SnV)
            state_SBT, action_SBT = self.world.geometry.sample(np.exp(mu_SnV), self._uniform())
            good, bad = self._sums(state_SBT, action_SBT, self._advantages(state_SBT, action_SBT))
            upwards = gradient(self.arm, good, bad, now_SnV, gen_SnV, mu_SnV)
            self.weights = self._optimizer.step(self.weights, self.world.features_nK.T @ upwards)
            lag_SnV = now_SnV - gen_SnV
            for number in range(len(self.seeds)):
                if self._is_due(number, step, lag_SnV[number], state_SBT[number], action_SBT[number]):
                    self._gen_weights[number] = self.weights[number]
                    self.syncs[number].append(step)

    def _policies(self, is_reference: bool) -> tuple[F64, F64, F64]:
        """Log probabilities of the trainer now, the trainer at the generator's weights, the engine."""
        gen_logits = self.world.logits(self._gen_weights)
        gen_SnV = log_softmax(gen_logits)
        mu_SnV = gen_SnV if is_reference else log_softmax(gen_logits + self.world.xi_nV)
        return log_softmax(self.world.logits(self.weights)), gen_SnV, mu_SnV

    def _uniform(self) -> F64:
        geometry = self.world.geometry
        # one more than a response has tokens: a chain's start, the trap's prompt
        shape = (self.world.num_rows, geometry.length + 1)
        return np.stack([rng.random(shape) for rng in self._rngs])

    def _advantages(self, state_SBT: I64, action_SBT: I64) -> F64:
        """[S, B] rewards minus their group's mean, over its standard deviation; 0 where all are equal."""
        reward_SB = self.world.reward.of(state_SBT, action_SBT)
        out_SB = np.zeros_like(reward_SB)
        group_SB = state_SBT[..., 0] if self.world.num_groups > 1 else np.zeros(reward_SB.shape, dtype=np.int64)
        for group in np.unique(group_SB):
            is_in = (group_SB == group).astype(np.float64)
            num_S1 = np.maximum(is_in.sum(1, keepdims=True), 1.0)
            centred = (reward_SB - (reward_SB * is_in).sum(1, keepdims=True) / num_S1) * is_in
            spread_S1 = np.sqrt((centred**2).sum(1, keepdims=True) / num_S1)
            out_SB += np.divide(centred, spread_S1, out=np.zeros_like(centred), where=spread_S1 > 1e-12)
        return out_SB

    def _sums(self, state_SBT: I64, action_SBT: I64, advantage_SB: F64) -> tuple[F64, F64]:
        """Sums of positive and of negative advantages by state and action, each [S, n, V], a mean over rows."""
        num_states, num_actions = self.world.base_nV.shape
        size = num_states * num_actions
        num_runs, num_rows, length = state_SBT.shape
        cell = state_SBT * num_actions + action_SBT + size * np.arange(num_runs)[:, None, None]
        both = []
        for part_SB in (np.maximum(advantage_SB, 0.0), np.minimum(advantage_SB, 0.0)):
            each = np.repeat(part_SB.ravel(), length)
            sums = np.bincount(cell.ravel(), weights=each, minlength=num_runs * size)
            both.append(sums.reshape(num_runs, num_states, num_actions) / num_rows)
        return both[0], both[1]

    def _is_due(self, number: int, step: int, lag_nV: F64, state_BT: I64, action_BT: I64) -> bool:
        if self.arm.every_step or (self._syncs_at and step in self._syncs_at[number]):
            return True
        if self.arm.horizon == 0.0:
            return False
        num_rows, length = state_BT.shape
        offsets = np.arange(num_rows + 1, dtype=np.int64) * length
        sums_B, _, _ = block_sums(lag_nV[state_BT, action_BT].ravel(), offsets, self.arm.horizon)
        return EssSums.of(sums_B).ratio < HALF

    def _measure(self, moment: Moment, now_SnV: F64, gen_SnV: F64, mu_SnV: F64) -> None:
        course, world = self.course, self.world
        found = moment.distances(now_SnV, mu_SnV)
        course.full.append(found.full_S)
        course.reverse.append(found.reverse_S)
        course.prefix.append(found.prefix_S)
        mu = np.exp(mu_SnV)
        course.mean_return.append(world.reward.mean(np.exp(now_SnV)))
        course.seen_return.append(world.reward.mean(mu))
        with np.errstate(over="ignore"):
            ratio_SnV = np.exp(now_SnV - gen_SnV)
        course.ess.append(world.geometry.ess(mu, ratio_SnV, horizons_of(world)))

    def rows(self) -> list[Row]:
        """One for each run."""
        course, horizons = self.course, horizons_of(self.world)
        series = {
            "ratio": course.full, "reverse": course.reverse, "prefix": course.prefix, "return": course.mean_return,
            "seen_return": course.seen_return,
        }  # fmt: skip
        ess = np.array(course.ess)
        return [
            {
                "name": name_of(self.world, self.arm, seed), "world": self.world.name,
                "length": self.world.geometry.length, "arm": self.arm.name, "seed": seed, "every": 1,
                "num_steps": self.world.num_steps, "syncs": self.syncs[number],
                **{key: rounded(np.array(values)[:, number]) for key, values in series.items()},
                "ess": {rung_name(h): rounded(ess[:, number, column]) for column, h in enumerate(horizons)},
            }
            for number, seed in enumerate(self.seeds)
        ]  # fmt: skip


def horizons_of(world: World) -> list[float]:
    """Horizons whose ESS is worked out: those within the response, and inf."""
    return [h for h in FRONTIER_HORIZONS if math.isinf(h) or h < world.geometry.length]


def name_of(world: World, arm: Arm, seed: int) -> str:
    """A row's name."""
    return f"{world.name}/{arm.name}/{seed}"


def reference_weights(world: World, arm: Arm, seeds: Sequence[int]) -> F64:
    """[steps, R, K, V] weights of on-policy runs at the start of each step."""
    runs = Runs(world, arm, seeds)
    runs.run()
    return np.array(runs.weights_before)
