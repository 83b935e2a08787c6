"""Token streams of a made-up but lifelike policy, ragged and packed, ready to be damaged.

Axes: S rows (sequences), N tokens packed over them. Logprobs in nats, float64 until they are sent.
x = trainer - engine at the generator's weights: the numerics, larger on rare tokens, next to none where p is near 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dlc_sentinel.records import F32, F64, I64, Bool, Json, Rollout, Source, Train

FLOORS: dict[str, tuple[float, str]] = {
    "fp16": (0.004, "float16"),
    "bf16": (0.03, "bfloat16"),
    "moe": (0.06, "moe"),
    "fp8": (0.15, "float8_e4m3"),
}
"""Precision -> (rms of healthy numerics in nats, dtype as a producer says it)."""
WILD_SHARE, WILD_TIMES = 0.02, 5.0
"""MoE-like: so many tokens, where another expert was chosen, are off by that much more."""
MAX_NUMERICS = 4.0
GROUP = 4
SHORTEST = 0.6
"""Of the longest response."""


@dataclass
class Streams:
    """The three streams of one step, and which tokens were damaged."""

    step: int
    offsets_S1: I64
    engine_N: F64
    old_N: F64
    cur_N: F64
    rng: np.random.Generator
    healthy_N: F64
    """|x| of healthy numerics on each token, before any damage, nats."""
    affected_N: Bool
    scattered: bool = False
    """The affected tokens are of no one class of rows or places."""
    mask_N: Bool | None = None
    fields: dict[str, Json] = field(default_factory=dict)
    """Changes to the Train record."""

    @property
    def num_rows(self) -> int:
        return len(self.offsets_S1) - 1

    @property
    def lengths_S(self) -> I64:
        return np.diff(self.offsets_S1)

    @property
    def row_N(self) -> I64:
        return np.repeat(np.arange(self.num_rows), self.lengths_S)

    @property
    def place_N(self) -> I64:
        return np.arange(len(self.old_N)) - np.repeat(self.offsets_S1[:-1], self.lengths_S)

    def some_rows(self, share: float) -> Bool:
        """[S] True on a random choice of that share of the rows, at least one."""
        which_S = np.zeros(self.num_rows, np.bool_)
        num = max(round(share * self.num_rows), 1)
        which_S[self.rng.choice(self.num_rows, num, replace=False)] = True
        return which_S

    def tokens_of(self, which_S: Bool) -> Bool:
        """[N] True on the tokens of the rows chosen."""
        return np.repeat(which_S, self.lengths_S)

    def train(self, source: Source, *, gen_version: int | I64 | None = None, **changes: Json) -> Train:
        """The Train record; `gen_version` a number, or one per row; default = the trainer's, the step's number."""
        made = np.broadcast_to(np.asarray(self.step if gen_version is None else gen_version, np.int64), self.num_rows)
        fields: dict[str, Json] = {
            "source": source,
            "step": self.step,
            "version": self.step,
            "ids": tuple(f"s{self.step}-{i}" for i in range(self.num_rows)),
            "offsets_S1": self.offsets_S1,
            "cur_N": _sent(self.cur_N),
            "old_N": _sent(self.old_N),
            "engine_N": _sent(self.engine_N),
            "mask_N": self.mask_N,
            "span_start_K": self.offsets_S1[:-1],
            "span_version_K": made.copy(),
            "old_is": "generator",
            "groups": tuple(f"g{self.step}-{i // GROUP}" for i in range(self.num_rows)),
        }
        return Train(**(fields | self.fields | changes))

    def rollout(self, source: Source, *, which_S: Bool | None = None) -> Rollout:
        """The engine's own record of the rows (chosen)."""
        chosen = np.flatnonzero(np.ones(self.num_rows, np.bool_) if which_S is None else which_S)
        lengths = self.lengths_S[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        engine_N = self.engine_N if which_S is None else self.engine_N[self.tokens_of(which_S)]
        return Rollout(
            source=source,
            ids=tuple(f"s{self.step}-{i}" for i in chosen),
            offsets_S1=offsets,
            token_offset_S=np.zeros(len(chosen), np.int64),
            final_S=np.ones(len(chosen), np.bool_),
            logprobs_N=_sent(engine_N),
            span_start_K=offsets[:-1],
            span_version_K=np.full(len(chosen), self.step, np.int64),
        )


def _sent(x_N: F64) -> F32:
    return x_N.astype(np.float32)


def make_policy(num: int, rng: np.random.Generator, certain: float | F64 = 0.62) -> F64:
    """Logprobs of sampled tokens: a share near certain, the others exponential with mean 1.2 nats."""
    sure_N = rng.random(num) < certain
    size_N = rng.standard_exponential(num)
    out: F64 = np.where(sure_N, -0.01 * size_N, -1.2 * size_N - 0.02)
    return out


def make_noise(logp_N: F64, rms: float, rng: np.random.Generator, floor: str = "bf16") -> F64:
    """trainer - engine of that rms in nats, heavy-tailed for `moe`; its exponential has mean 1, as ratios have."""
    if not rms or not len(logp_N):
        return np.zeros_like(logp_N)
    weight_N = -np.expm1(logp_N) * (1.0 - logp_N / 2.0)
    wild_N = np.where(rng.random(len(logp_N)) < WILD_SHARE, WILD_TIMES, 1.0) if floor == "moe" else 1.0
    sigma_N = rms * weight_N * wild_N / np.sqrt(np.mean((weight_N * wild_N) ** 2))
    out: F64 = np.clip(rng.standard_normal(len(logp_N)) * sigma_N - sigma_N**2 / 2.0, -MAX_NUMERICS, MAX_NUMERICS)
    return out


def moved(logp_N: F64, x_N: F64) -> F64:
    """logp + x where that is still a logprob; else as near to 0 as x is large: numerics make no exact zeros."""
    out: F64 = np.where(logp_N + x_N < 0.0, logp_N + x_N, logp_N * np.exp(-np.abs(x_N)))
    return out


def make_streams(
    step: int, *, rows: int, length: int, floor: str, seed: int, rms: float | None = None, certain: float = 0.62,
    lag: float = 0.0, part: int = 0,
) -> Streams:  # fmt: skip
    """A clean step: engine = old - numerics, cur = old + movement of rms `lag` (nats). `part`: of several a step."""
    rng = np.random.default_rng([seed, step, part])
    lengths_S = rng.integers(max(int(SHORTEST * length), 1), length + 1, rows)
    offsets_S1 = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int64)
    sure_S = np.clip(certain + rng.normal(0.0, 0.05, rows), 0.02, 0.98)
    old_N = make_policy(int(offsets_S1[-1]), rng, np.repeat(sure_S, lengths_S))
    x_N = make_noise(old_N, FLOORS[floor][0] if rms is None else rms, rng, floor)
    engine_N = moved(old_N, -x_N)
    cur_N = moved(old_N, make_noise(old_N, lag, rng)) if lag else old_N.copy()
    healthy_N = np.abs(x_N if rms is None else make_noise(old_N, FLOORS[floor][0], rng, floor))
    affected_N = np.zeros(len(old_N), np.bool_)
    return Streams(step, offsets_S1, engine_N, old_N, cur_N, rng, healthy_N, affected_N)


# -- sampling transforms need whole distributions ---------------------------------------------------------------------

VOCABULARY = 48
POOL_TOKENS = 16_000


def transformed_pool(name: str, amount: float, seed: int) -> tuple[F64, F64]:
    """(engine, trainer) logprobs of tokens that the engine sampled under a transform that the trainer knows nothing of.

    `temperature`: the engine divides its logits by `amount`; `top_p`: it keeps that mass; `top_k`: that many entries.
    """
    rng = np.random.default_rng([seed, 77])
    sharp_N = np.where(rng.random(POOL_TOKENS) < 0.62, 8.0, 1.6)[:, None]
    logits_NV = rng.gumbel(size=(POOL_TOKENS, VOCABULARY)) * sharp_N
    trainer_NV = _log_softmax(logits_NV)
    engine_NV = _log_softmax(logits_NV / amount) if name == "temperature" else _kept(trainer_NV, name, amount)
    token_N = np.argmax(engine_NV + rng.gumbel(size=engine_NV.shape), axis=1)
    at = np.arange(POOL_TOKENS)
    return engine_NV[at, token_N], trainer_NV[at, token_N]


def _log_softmax(logits_NV: F64) -> F64:
    top_N = logits_NV.max(axis=1, keepdims=True)
    out: F64 = logits_NV - top_N - np.log(np.exp(logits_NV - top_N).sum(axis=1, keepdims=True))
    return out


def _kept(logp_NV: F64, name: str, amount: float) -> F64:
    ranked_NV = -np.sort(-logp_NV, axis=1)
    if name == "top_k":
        least_N = ranked_NV[:, int(amount) - 1]
    else:
        before_NV = np.cumsum(np.exp(ranked_NV), axis=1) - np.exp(ranked_NV)
        num_N = (before_NV < amount).sum(axis=1)
        least_N = ranked_NV[np.arange(len(logp_NV)), num_N - 1]
    return _log_softmax(np.where(logp_NV >= least_N[:, None], logp_NV, -np.inf))
