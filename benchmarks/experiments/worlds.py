"""Testbeds A, B, D: what is rewarded, how parameters make logits, and how the engine is off.

    logits = base + F W,   mu = softmax(logits at the generator's weights + xi)

F [n, K] are features of a state, shared between states in A and B, so that what is learnt at one prefix moves others.
Axes: S runs, B rows, T tokens, n states, V actions, K features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from benchmarks.experiments.geometry import Chain, Geometry, Tree
from dlc_sentinel.records import F64, I64


class Reward(Protocol):
    """What a response earns."""

    def of(self, state_SBT: I64, action_SBT: I64) -> F64:
        """[S, B] of sampled responses."""

    def mean(self, p_SnV: F64) -> F64:
        """[S] exact mean under a policy."""


@dataclass(frozen=True, slots=True)
class World:
    """One testbed's world; the same for the runs and the references that are compared."""

    name: str
    geometry: Geometry
    features_nK: F64
    base_nV: F64
    reward: Reward
    xi_nV: F64
    """The engine's logits minus the trainer's."""
    num_rows: int
    num_steps: int
    learning_rate: float
    num_groups: int = 1
    """Prompts of a batch that have a baseline each: groups are told apart by the first token's state."""
    optimizer: Literal["adam", "ascent"] = "adam"

    def logits(self, weights_SKV: F64) -> F64:
        """[S, n, V]."""
        out: F64 = self.base_nV + self.features_nK @ weights_SKV
        return out

    @property
    def start_KV(self) -> F64:
        """Weights that every run starts from."""
        return np.zeros((self.features_nK.shape[1], self.base_nV.shape[1]))


def log_softmax(logits: F64) -> F64:
    """Over the last axis, nats."""
    shifted = logits - logits.max(-1, keepdims=True)
    out: F64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out


@dataclass(frozen=True, slots=True)
class LeafReward:
    """A tree's: a number for each whole response."""

    tree: Tree
    reward_L: F64
    of_group: int = -1
    """>= 0: the mean is over responses whose first, given token is this one."""

    def of(self, state_SBT: I64, action_SBT: I64) -> F64:
        out: F64 = self.reward_L[self.tree.leaf(state_SBT, action_SBT)]
        return out

    def mean(self, p_SnV: F64) -> F64:
        reach_SL = self.tree.reach(p_SnV)[-1]
        if self.of_group < 0:
            every: F64 = reach_SL @ self.reward_L
            return every
        each = reach_SL.reshape(len(reach_SL), self.tree.num_actions, -1)[:, self.of_group]
        reward = self.reward_L.reshape(self.tree.num_actions, -1)[self.of_group]
        out: F64 = each @ reward / each.sum(1)
        return out


@dataclass(frozen=True, slots=True)
class StepReward:
    """A chain's: the mean of what each choice earns."""

    chain: Chain
    reward_nV: F64

    def of(self, state_SBT: I64, action_SBT: I64) -> F64:
        out: F64 = self.reward_nV[state_SBT, action_SBT].mean(-1)
        return out

    def mean(self, p_SnV: F64) -> F64:
        each_Sn = (p_SnV * self.reward_nV).sum(-1)
        out: F64 = (self.chain.visits(p_SnV) * each_Sn).sum(-1) / self.chain.length
        return out


TREES = {"A V=4 T=5": (4, 5), "A V=4 T=6": (4, 6), "A V=2 T=9": (2, 9), "A V=2 T=13": (2, 13)}
CHAINS = {"D T=64": 64, "D T=256": 256, "D T=1024": 1024}
SIGMA, LOUD = 0.1, 0.3
REWARDED = 0.12


def tree_world(kind: str, draw: int, sigma: float = SIGMA) -> World:
    """Testbed A: `draw` chooses rewarded leaves and the engine's noise; sigma = that noise, nats a logit."""
    num_actions, depth = TREES[kind]
    rng = np.random.default_rng([1, draw, num_actions, depth])
    tree = Tree(num_actions, depth)
    tokens_LT = np.stack(np.unravel_index(np.arange(tree.num_leaves), (num_actions,) * depth), -1)
    place, pair = rng.normal(size=(depth, num_actions)), rng.normal(size=(num_actions, num_actions))
    score_L = place[np.arange(depth), tokens_LT].sum(1) + pair[tokens_LT[:, :-1], tokens_LT[:, 1:]].sum(1)
    score_L = score_L + 0.5 * score_L.std() * rng.normal(size=len(score_L))
    reward_L = (score_L > np.quantile(score_L, 1.0 - REWARDED)).astype(np.float64)
    return World(
        name=f"{kind}, world {draw}" + ("" if sigma == SIGMA else f", noise {sigma:g}"),
        geometry=tree,
        features_nK=tree_features(tree),
        base_nV=np.zeros((tree.num_states, num_actions)),
        reward=LeafReward(tree, reward_L),
        xi_nV=sigma * rng.normal(size=(tree.num_states, num_actions)),
        num_rows=128,
        num_steps=150,
        learning_rate=0.01,
    )


def tree_features(tree: Tree) -> F64:
    """[n, K] one-hots of a prefix's length, its last token and its last pair; zeros where it is too short."""
    v = tree.num_actions
    out = np.zeros((tree.num_states, tree.depth + v + v * v))
    for level in range(tree.depth):
        rows = tree.first(level) + np.arange(v**level)
        out[rows, level] = 1.0
        within = rows - tree.first(level)
        if level >= 1:
            out[rows, tree.depth + within % v] = 1.0
        if level >= 2:
            out[rows, tree.depth + v + within % (v * v)] = 1.0
    return out


def chain_world(kind: str, draw: int, sigma: float = SIGMA) -> World:
    """Testbed D: 24 states, 6 actions, random next states, a share of the choices rewarded."""
    rng = np.random.default_rng([2, draw, CHAINS[kind]])
    num_states, num_actions = 24, 6
    chain = Chain(rng.integers(0, num_states, (num_states, num_actions)), np.full(num_states, 1 / 24), CHAINS[kind])
    reward_nV = (rng.random((num_states, num_actions)) < REWARDED).astype(np.float64)
    return World(
        name=f"{kind}, world {draw}" + ("" if sigma == SIGMA else f", noise {sigma:g}"),
        geometry=chain,
        features_nK=np.eye(num_states),
        base_nV=np.zeros((num_states, num_actions)),
        reward=StepReward(chain, reward_nV),
        xi_nV=sigma * rng.normal(size=(num_states, num_actions)),
        num_rows=64,
        num_steps=150,
        learning_rate=0.02,
    )


def trap(draw: int = 0) -> World:
    """Testbed B: prompt A or B, a branch, four binary tokens; 63 states. Built so that a collapse can hide.

    A pays for three ones or more; B, branch 0, half of that; B, branch 1, for two ones at most. Features of the tokens
    (place, ones so far, a constant) are shared, B's branch 1 has one more of its own; the branch's features are ten
    times as large; the generator takes branch 1 with probability 0.1. Once the trainer lives there, the generator's
    rows still teach the shared features the opposite. Prompt A's branch pays nothing, so seeds differ in it.
    """
    tree = Tree(2, 6, given=1)
    features = np.zeros((tree.num_states, 2 + 4 + 4 + 1 + 1))
    base = np.zeros((tree.num_states, 2))
    base[1:3, 1] = np.log(0.1 / 0.9)
    features[1, 0] = features[2, 1] = 10.0
    for level in range(2, 6):
        within = np.arange(2**level)
        rows = tree.first(level) + within
        ones = np.array([bin(number % 2 ** (level - 2)).count("1") for number in within])
        features[rows, level] = features[rows, 6 + ones] = features[rows, 10] = 1.0
        features[rows[-(2 ** (level - 2)) :], 11] = 1.0
    tokens_LT = np.stack(np.unravel_index(np.arange(tree.num_leaves), (2,) * 6), -1)
    ones_L, is_b_L, is_one_L = tokens_LT[:, 2:].sum(1), tokens_LT[:, 0] == 1, tokens_LT[:, 1] == 1
    many_L = (ones_L >= 3).astype(np.float64)
    reward_L = np.where(is_b_L, np.where(is_one_L, 1.0 - many_L, 0.5 * many_L), many_L)
    rng = np.random.default_rng([3, draw])
    return World(
        name="B",
        geometry=tree,
        features_nK=features,
        base_nV=base,
        reward=LeafReward(tree, reward_L, of_group=1),
        xi_nV=SIGMA * rng.normal(size=(tree.num_states, 2)),
        num_rows=256,
        num_steps=120,
        learning_rate=0.5,
        num_groups=2,
        optimizer="ascent",
    )


def a_worlds() -> list[World]:
    """Every size twice (the largest once), and the loud engine twice."""
    small = [tree_world(kind, draw) for kind in TREES for draw in (0, 1) if kind != "A V=2 T=13" or draw == 0]
    return [*small, *(tree_world("A V=4 T=6", draw, LOUD) for draw in (0, 1))]


def d_worlds() -> list[World]:
    """T = 64 and 1024 once, T = 256 twice."""
    return [chain_world("D T=64", 0), chain_world("D T=256", 0), chain_world("D T=256", 1), chain_world("D T=1024", 0)]
