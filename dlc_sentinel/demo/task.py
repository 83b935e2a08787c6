"""What the demo's policy learns: to go on counting. Numpy only.

Axes: S responses, P prompt tokens, T response tokens. Tokens are int64 in 0 .. vocab_size - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlc_sentinel.records import F32, I64


@dataclass(frozen=True, slots=True)
class CountingTask:
    """Say the next number, modulo the vocabulary, `response_tokens` times, after a prompt of random numbers."""

    vocab_size: int = 16
    prompt_tokens: int = 4
    response_tokens: int = 96

    def prompts(self, rng: np.random.Generator, num_groups: int, rows_per_group: int) -> I64:
        """[S, P] prompts, S = num_groups * rows_per_group; the rows of a group are equal and adjacent."""
        each = rng.integers(0, self.vocab_size, (num_groups, self.prompt_tokens), dtype=np.int64)
        return np.repeat(each, rows_per_group, axis=0)

    def token_rewards(self, prompts_SP: I64, responses_ST: I64) -> F32:
        """[S, T] 1.0 where a token is its predecessor plus one (mod vocab_size), else 0.0; chance is 1 / vocab_size.

        >>> CountingTask(10).token_rewards(np.array([[7, 8]]), np.array([[9, 0, 0, 1]]))
        array([[1., 1., 0., 1.]], dtype=float32)
        """
        whole = np.concatenate([prompts_SP[:, -1:], responses_ST], axis=1)
        return np.asarray(np.diff(whole, axis=1) % self.vocab_size == 1, dtype=np.float32)

    def rewards(self, prompts_SP: I64, responses_ST: I64) -> F32:
        """[S] share of rewarded tokens, 0..1."""
        return np.asarray(self.token_rewards(prompts_SP, responses_ST).mean(axis=1), dtype=np.float32)


def group_advantages(rewards_S: F32, rows_per_group: int) -> F32:
    """[S] reward minus its group's mean, over the group's standard deviation; 0 where a group's rewards are equal."""
    rewards = rewards_S.reshape(-1, rows_per_group).astype(np.float64)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    spread = rewards.std(axis=1, ddof=1, keepdims=True)
    return np.asarray(centred / (spread + 1e-4), dtype=np.float32).reshape(-1)
