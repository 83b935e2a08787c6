"""Where tokens lead: a full tree of prefixes, or a Markov chain. Both are states and a deterministic next state.

Exact numbers of a policy p and of a ratio under a generator, for S runs at once.
Axes: S runs, B rows, T tokens, n states, V actions, H horizons. Probabilities are [S, n, V].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dlc_sentinel.records import F64, I64


class Geometry(Protocol):
    """What a testbed needs of its states."""

    @property
    def num_states(self) -> int: ...

    @property
    def num_actions(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of a response."""

    def sample(self, p_SnV: F64, uniform_SBT: F64) -> tuple[I64, I64]:
        """([S, B, T] states, [S, B, T] actions) of responses drawn from p, one uniform number a token."""

    def visits(self, p_SnV: F64) -> F64:
        """[S, n] expected number of tokens chosen at each state in a response."""

    def ess(self, mu_SnV: F64, ratio_SnV: F64, horizons: Sequence[float]) -> F64:
        """[S, H] population ESS of block weights, blocks as in dlc_sentinel.maths.ess, samples from mu."""


def choose(p_nV: F64, uniform_N: F64) -> I64:
    """[N] action of each row of [N, V] probabilities, by the inverse of their sums."""
    edges = np.cumsum(p_nV, axis=-1)
    out: I64 = np.minimum((uniform_N[..., None] > edges).sum(-1), p_nV.shape[-1] - 1)
    return out


def _block_starts(length: int, horizon: float) -> list[tuple[int, int]]:
    """(first token, tokens) of each block: cut from the start, the last one ending at the end."""
    size = length if math.isinf(horizon) else min(int(horizon), length)
    starts = list(range(0, length - size + 1, size))
    if starts[-1] + size < length:
        starts.append(length - size)
    return [(start, size) for start in starts]


@dataclass(frozen=True, slots=True)
class Tree:
    """All prefixes of up to `depth` tokens; state 0 is empty. The first `given` tokens are the world's, not chosen."""

    num_actions: int
    depth: int
    given: int = 0

    @property
    def length(self) -> int:
        return self.depth - self.given

    @property
    def num_states(self) -> int:
        return self.first(self.depth)

    @property
    def num_leaves(self) -> int:
        return int(self.num_actions**self.depth)

    def first(self, level: int) -> int:
        """First state of a level; states of a level are ordered by their tokens."""
        return int((self.num_actions**level - 1) // (self.num_actions - 1))

    def sample(self, p_SnV: F64, uniform_SBT: F64) -> tuple[I64, I64]:
        """As in Geometry, with T = depth uniform numbers; the world's tokens are uniform and left out of the answer."""
        num_runs = len(p_SnV)
        run_S1 = np.arange(num_runs)[:, None]
        at_SB = np.zeros(uniform_SBT.shape[:2], dtype=np.int64)
        states, actions = [], []
        for level in range(self.depth):
            state_SB = self.first(level) + at_SB
            if level < self.given:
                action_SB = (uniform_SBT[..., level] * self.num_actions).astype(np.int64)
            else:
                action_SB = choose(p_SnV[run_S1, state_SB], uniform_SBT[..., level])
                states.append(state_SB)
                actions.append(action_SB)
            at_SB = at_SB * self.num_actions + action_SB
        return np.stack(states, -1), np.stack(actions, -1)

    def leaf(self, state_SBT: I64, action_SBT: I64) -> I64:
        """[S, B] number of the leaf that a response ends in."""
        return (state_SBT[..., -1] - self.first(self.depth - 1)) * self.num_actions + action_SBT[..., -1]

    def reach(self, p_SnV: F64) -> list[F64]:
        """Probability of each state of each level, depth + 1 arrays [S, V^level]; the last is that of the leaves."""
        levels = [np.ones((len(p_SnV), 1))]
        for level in range(self.depth):
            levels.append(self._down(levels[-1], p_SnV, level))
        return levels

    def visits(self, p_SnV: F64) -> F64:
        out_Sn = np.concatenate(self.reach(p_SnV)[:-1], axis=1)
        out_Sn[:, : self.first(self.given)] = 0.0
        return out_Sn

    def ess(self, mu_SnV: F64, ratio_SnV: F64, horizons: Sequence[float]) -> F64:
        reach = self.reach(mu_SnV)
        kernels = (mu_SnV * ratio_SnV, mu_SnV * ratio_SnV**2)
        out_SH = np.empty((len(mu_SnV), len(horizons)))
        for column, horizon in enumerate(horizons):
            blocks = _block_starts(self.length, horizon)
            sums = np.zeros((2, len(mu_SnV)))
            for start, size in blocks:
                for row, kernel_SnV in enumerate(kernels):
                    moment = reach[self.given + start]
                    for level in range(self.given + start, self.given + start + size):
                        moment = self._down(moment, kernel_SnV, level)
                    sums[row] += moment.sum(1)
            out_SH[:, column] = sums[0] ** 2 / (len(blocks) * sums[1])
        return out_SH

    def _down(self, mass_Sm: F64, kernel_SnV: F64, level: int) -> F64:
        """Mass at the states of the next level."""
        first, num_runs = self.first(level), len(kernel_SnV)
        if level < self.given:
            return np.repeat(mass_Sm / self.num_actions, self.num_actions, axis=1)
        below: F64 = mass_Sm[..., None] * kernel_SnV[:, first : first + mass_Sm.shape[1]]
        return below.reshape(num_runs, -1)


@dataclass(frozen=True, slots=True)
class Chain:
    """A Markov chain of policy choices: next_nV is the state after each action; every response starts as start_n."""

    next_nV: I64
    start_n: F64
    length: int

    @property
    def num_states(self) -> int:
        return len(self.next_nV)

    @property
    def num_actions(self) -> int:
        return int(self.next_nV.shape[1])

    def sample(self, p_SnV: F64, uniform_SBT: F64) -> tuple[I64, I64]:
        """As in Geometry, with T + 1 uniform numbers a row: the last one draws the start."""
        num_runs, num_rows, _ = uniform_SBT.shape
        num_states, num_actions = self.num_states, self.num_actions
        edges_mV = np.cumsum(p_SnV, axis=-1).reshape(-1, num_actions)[:, :-1].copy()
        run_N = np.repeat(np.arange(num_runs) * num_states, num_rows)
        uniform_TN = np.ascontiguousarray(uniform_SBT.reshape(-1, self.length + 1).T)
        state_N = choose(np.broadcast_to(self.start_n, (len(run_N), num_states)), uniform_TN[-1])
        state_TN, action_TN = np.empty((2, self.length, len(run_N)), dtype=np.int64)
        for place in range(self.length):
            action_N = (uniform_TN[place][:, None] > edges_mV[run_N + state_N]).sum(1)
            state_TN[place], action_TN[place] = state_N, action_N
            state_N = self.next_nV[state_N, action_N]
        shape = (num_runs, num_rows, self.length)
        return state_TN.T.reshape(shape), action_TN.T.reshape(shape)

    def visits(self, p_SnV: F64) -> F64:
        return self._summed(self._matrix(p_SnV), self.length)

    def ess(self, mu_SnV: F64, ratio_SnV: F64, horizons: Sequence[float]) -> F64:
        """As in Geometry; horizons must divide the length, or be as long."""
        out_SH = np.empty((len(mu_SnV), len(horizons)))
        plain = self._matrix(mu_SnV)
        kernels = [self._matrix(mu_SnV * ratio_SnV**power) for power in (1, 2)]
        for column, horizon in enumerate(horizons):
            size = int(min(horizon, self.length))
            assert self.length % size == 0
            num_blocks = self.length // size
            starts_Sn = self._summed(np.linalg.matrix_power(plain, size), num_blocks)
            with np.errstate(over="ignore", invalid="ignore"):
                moments = [
                    (starts_Sn[:, None] @ np.linalg.matrix_power(kernel, size)).sum((1, 2)) / num_blocks
                    for kernel in kernels
                ]
                out_SH[:, column] = np.nan_to_num(moments[0] ** 2 / moments[1], nan=0.0)
        return out_SH

    def _matrix(self, kernel_SnV: F64) -> F64:
        """[S, n, n] mass that goes from state to state."""
        target_nVm = np.eye(self.num_states)[self.next_nV]
        out: F64 = np.einsum("snv,nvm->snm", kernel_SnV, target_nVm)
        return out

    def _summed(self, step_Snn: F64, num: int) -> F64:
        """[S, n] start (1 + P + ... + P^(num - 1)), by doubling."""
        one = np.broadcast_to(np.eye(self.num_states), step_Snn.shape)
        total, power = np.zeros_like(step_Snn), one
        for bit in bin(num)[2:]:
            total, power = total + power @ total, power @ power
            if bit == "1":
                total, power = one + step_Snn @ total, step_Snn @ power
        out: F64 = np.einsum("n,snm->sm", self.start_n, total)
        return out
