"""A second, slow implementation to compare with: an exact tree of sequences, and losses of whole logits by autograd."""

from __future__ import annotations

import itertools
import math

import torch

F64 = torch.float64


class Tree:
    """All sequences of T tokens over V; a policy is a table of logits [P, V], one row per prefix."""

    def __init__(self, num_vocab=3, length=3):
        prefixes = [p for t in range(length) for p in itertools.product(range(num_vocab), repeat=t)]
        place = {prefix: row for row, prefix in enumerate(prefixes)}
        self.rows = list(itertools.product(range(num_vocab), repeat=length))
        self.shape = (len(prefixes), num_vocab)
        self.length = length
        self.prefix_N = torch.tensor([place[row[:t]] for row in self.rows for t in range(length)])
        self.token_N = torch.tensor([token for row in self.rows for token in row])
        self.offsets_S1 = torch.arange(len(self.rows) + 1) * length

    def table(self, seed, scale=1.0):
        return scale * torch.randn(self.shape, generator=torch.Generator().manual_seed(seed), dtype=F64)

    def logp_N(self, table):
        """Log-probability of each token of each sequence, in turn."""
        return table.log_softmax(1)[self.prefix_N, self.token_N]

    def row_logp_S(self, table):
        return self.logp_N(table).reshape(-1, self.length).sum(1)

    def value(self, table, reward_S):
        """Expected reward of a policy, by enumeration."""
        return (self.row_logp_S(table).exp() * reward_S).sum()

    def numeric_gradient(self, function, table, step=1e-6):
        """Central differences of function(table)."""
        out = torch.zeros_like(table)
        for place in itertools.product(*map(range, table.shape)):
            up, down = table.clone(), table.clone()
            up[place] += step
            down[place] -= step
            out[place] = (function(up) - function(down)) / (2 * step)
        return out


def weight_of(form, low, high, log_ratio, advantage):
    """One token's weight, in plain Python."""
    ratio = math.exp(log_ratio)
    if form == "one":
        return 1.0
    if form == "truncate":
        return min(ratio, high)
    if form == "mask":
        return ratio if low <= ratio <= high else 0.0
    if form == "ppo" and ((advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)):
        return 0.0
    return ratio


def list_q(logp_V, index_K, mu_K, gen_K, weight):
    """q over the vocabulary from a list and the tail model; weight(log_ratio) -> float; gen_K None: nu = mu."""
    listed = index_K.tolist()
    rest = [b for b in range(len(logp_V)) if b not in listed]
    pi_rest = sum(math.exp(logp_V[b]) for b in rest)
    w_tail = 1.0 if gen_K is None else weight(math.log(pi_rest) - math.log(1 - sum(math.exp(g) for g in gen_K)))
    nu = torch.zeros(len(logp_V), dtype=F64)
    for place, b in enumerate(listed):
        nu[b] = float(mu_K[place]) * (1.0 if gen_K is None else weight(float(logp_V[b] - gen_K[place])))
    for b in rest:
        nu[b] = (1 - float(mu_K.sum())) * w_tail * math.exp(logp_V[b]) / pi_rest
    return nu / nu.sum()


def surrogate(logits_NV, token_N, q_NV, pull_N, denominator):
    """- sum of pull * (log pi(a) + cross-entropy of pi against q) / denominator, everything held whole."""
    logp_NV = logits_NV.log_softmax(1)
    score_N = logp_NV.gather(1, token_N[:, None]).squeeze(1) - (q_NV * logp_NV).sum(1)
    return -(pull_N * score_N).sum() / denominator
