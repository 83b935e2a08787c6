"""Token streams that look like those of a language model, and their faults, for tests.

Axes: S sequences, T tokens of each (all of one length here), V vocabulary entries. Logprobs in nats, float64 until
sent. Most tokens are near certain, and numerics hurt rare tokens most, as in real dumps (mean |x| about rms / 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from factories import make_source

from dlc_sentinel.records import Rollout, Train

CERTAIN_SHARE = 0.62
"""Share of tokens that the policy is all but sure of."""


@dataclass
class Streams:
    """The three streams of one step as [S, T] arrays, ready to be damaged; `train` and `rollout` send them."""

    step: int
    engine: np.ndarray
    old: np.ndarray
    cur: np.ndarray
    rng: np.random.Generator
    mask: np.ndarray | None = None
    tokens: np.ndarray | None = None
    fields: dict = field(default_factory=dict)
    """Changes to the Train record."""

    @property
    def shape(self):
        return self.engine.shape

    def rows(self, share):
        """A random choice of that share of the rows, sorted."""
        num = round(share * len(self.engine))
        return np.sort(self.rng.choice(len(self.engine), num, replace=False))

    def train(self, *, version=None, gen_version=None, source=None, with_engine=True, **changes):
        """The Train record; `gen_version` a number, or one per row."""
        num_rows, length = self.shape
        version = self.step if version is None else version
        gen = np.broadcast_to(np.asarray(version if gen_version is None else gen_version, np.int64), num_rows)
        offsets = np.arange(num_rows + 1, dtype=np.int64) * length
        fields = {
            "source": source or make_source(),
            "step": self.step,
            "version": version,
            "ids": tuple(f"s{self.step}-{i}" for i in range(num_rows)),
            "offsets_S1": offsets,
            "cur_N": flat(self.cur),
            "old_N": flat(self.old),
            "engine_N": flat(self.engine) if with_engine else None,
            "mask_N": None if self.mask is None else self.mask.reshape(-1),
            "tokens_N": None if self.tokens is None else self.tokens.reshape(-1).astype(np.int32),
            "span_start_K": offsets[:-1],
            "span_version_K": gen.copy(),
            "old_is": "generator",
            "groups": tuple(f"g{self.step}-{i // 8}" for i in range(num_rows)),
        }
        return Train(**(fields | self.fields | changes))

    def rollout(self, *, version=None, ids=None, length=None, finish="", tokens=None, source=None):
        """The engine's own record of the same sequences, cut to (or padded with copies to) `length` tokens."""
        engine = self.engine if length is None else np.resize(self.engine, (len(self.engine), length))
        num_rows, length = engine.shape
        offsets = np.arange(num_rows + 1, dtype=np.int64) * length
        return Rollout(
            source=source or make_source(role="engine", producer="e0"),
            ids=tuple(ids or (f"s{self.step}-{i}" for i in range(num_rows))),
            offsets_S1=offsets,
            token_offset_S=np.zeros(num_rows, np.int64),
            final_S=np.ones(num_rows, np.bool_),
            logprobs_N=flat(engine),
            span_start_K=offsets[:-1],
            span_version_K=np.full(num_rows, self.step if version is None else version, np.int64),
            finish=(finish,) * num_rows if finish else (),
            tokens_N=None if tokens is None else tokens.reshape(-1).astype(np.int32),
        )


def flat(stream):
    return stream.reshape(-1).astype(np.float32)


def make_policy(shape, rng, certain=CERTAIN_SHARE):
    """Logprobs of sampled tokens under the policy: near certain, or exponential with mean 1.2 nats."""
    sure = rng.random(shape) < certain
    return np.where(sure, -rng.exponential(0.01, shape), -rng.exponential(1.2, shape) - 0.02)


def make_noise(logp, rms, rng):
    """Normal noise of that rms over all tokens, larger on rarer tokens: none to speak of where p is near 1."""
    if not rms or not logp.size:
        return np.zeros_like(logp)
    weight = -np.expm1(logp) * (1 - logp / 2)
    sigma = rms * weight / np.sqrt(np.mean(weight**2))
    return rng.normal(size=logp.shape) * sigma - sigma**2 / 2


def make_streams(step=0, *, rows=32, length=96, disc=0.02, lag=0.0, certain=CERTAIN_SHARE, seed=0):
    """A clean step: engine = old + numerics of rms `disc`, cur = old + movement of rms `lag` (nats)."""
    rng = np.random.default_rng([seed, step])
    old = make_policy((rows, length), rng, certain)
    engine = np.minimum(old - make_noise(old, disc, rng), 0.0)
    cur = np.minimum(old + make_noise(old, lag, rng), 0.0)
    return Streams(step, engine, old, cur, rng)


def shifted(stream, by, rng):
    """Each value `by` places later (earlier if negative); the places left over hold values of other tokens."""
    out = np.roll(stream, by, axis=1)
    edge = slice(None, by) if by > 0 else slice(by, None)
    out[:, edge] = make_policy(out[:, edge].shape, rng)
    return out


# -- sampling transforms need whole distributions ---------------------------------------------------------------------


def make_logits(num, rng, vocabulary=48):
    """[num, V] logits of mixed sharpness: some positions all but decided, some wide open."""
    sharpness = np.where(rng.random(num) < CERTAIN_SHARE, 8.0, 1.6)[:, None]
    return rng.gumbel(size=(num, vocabulary)) * sharpness


def log_softmax(logits_NV):
    top = logits_NV.max(axis=1, keepdims=True)
    return logits_NV - top - np.log(np.exp(logits_NV - top).sum(axis=1, keepdims=True))


def kept(logp_NV, *, top_p=1.0, top_k=0):
    """The distribution renormalised over the smallest set of mass >= top_p, and over the top_k entries."""
    order = np.argsort(-logp_NV, axis=1)
    ranked = np.take_along_axis(logp_NV, order, axis=1)
    before = np.cumsum(np.exp(ranked), axis=1) - np.exp(ranked)
    out = before >= top_p
    if top_k:
        out[:, top_k:] = True
    ranked = log_softmax(np.where(out, -np.inf, ranked))
    cut = np.empty_like(ranked)
    np.put_along_axis(cut, order, ranked, axis=1)
    return cut


def make_sampled(step, engine_of, trainer_of, *, sampled_of=None, rows=32, length=96, disc=0.01, seed=0):
    """A step whose sides see the same logits through `engine_of` and `trainer_of` ([N, V] logits -> logprobs).

    Tokens are drawn from `sampled_of` (default: what the engine reports).
    """
    rng = np.random.default_rng([seed, step])
    logits = make_logits(rows * length, rng)
    drawn = (sampled_of or engine_of)(logits)
    token = np.argmax(drawn + rng.gumbel(size=drawn.shape), axis=1)[:, None]
    engine, trainer = (
        np.take_along_axis(side(logits), token, axis=1).reshape(rows, length) for side in (engine_of, trainer_of)
    )
    old = np.minimum(trainer + make_noise(np.minimum(trainer, 0.0), disc, rng), np.maximum(trainer, 0.0))
    return Streams(step, engine, old, old.copy(), rng)
