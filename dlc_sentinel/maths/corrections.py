"""What each correction would have done to a run, from its recorded log ratios, and which one it needs.

Per correction, over the tokens given, with w the weight it would have put on each token:
    ess_ratio      (sum w)^2 / (n sum w^2): what clipping left of the sample; its inverse is the noise it adds
    clipped_share  tokens whose weight the correction cut or set to 0
    bias_left      1/2 sum |w / sum w - w* / sum w*|, 0..1: total variation distance between what the weighted sample
                   stands for and what it should stand for; w* is the exact weight over blocks of h tokens
w* is the product of total ratios for corrections that weigh the total (they aim at the trainer's policy), and the
product of lag ratios for DLC, which centres the discrepancy and aims at the engine's policy at the trainer's weights:
what centring leaves of the discrepancy is second order and not counted. Block rule: ess. Where the ESS of w* is low the
sample no longer shows its own bias: bias_left is then a lower bound, and the rule below does not read it.

Rule, in this order: (1) without any token, or without lag where it matters: unknown. (2) bias_left of no correction is
at most 0.1: none. (3) ESS of the lag over h-token blocks is below 1/2: resync, no weight mends that. (4) the lag alone
moves at most 0.1: dlc_token, that is centring with weights near 1. (5) else, of the corrections with ESS of at least
1/2 and at most 10 % clipped, the least bias, and among those within 0.02 of it the least noise; if none is: resync.
Axes: S rows, N packed tokens, B blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths.arrays import F64, I64, Bool, check_offsets
from dlc_sentinel.maths.ess import EssSums, block_sums

__all__ = ["CORRECTIONS", "Comparison", "Effect", "Recommendation", "compare_corrections", "recommend"]

CORRECTIONS: Final = ("none", "tis", "sequence_mis", "icepop", "decoupled_ppo", "dlc_token", "dlc_block")
"""Names, in the order of the result; those that `correction.LOSSES` has are spelled alike."""

LARGEST: Final = 2.0
"""Truncation of TIS, sequence MIS and DLC."""
DECOUPLED_LARGEST: Final = 5.0
ICEPOP_BAND: Final = (0.5, 5.0)
PPO_BAND: Final = (0.8, 1.2)
SMALL_BIAS: Final = 0.1
LEAST_ESS: Final = 0.5
MOST_CLIPPED: Final = 0.1
ALIKE: Final = 0.02
"""Biases this close are decided by noise."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one correction would have done; nan throughout where the streams do not allow to say."""

    name: str
    ess_ratio: float
    """Of the weights as used, 0..1; 0 if every token is masked."""
    raw_ess_ratio: float
    """Of the same weights before any clip: how concentrated they are by nature."""
    clipped_share: float
    bias_left: float

    @property
    def variance_factor(self) -> float:
        """How many times the noise of a mean over these weights exceeds that over equal ones, >= 1: 1 / ess_ratio."""
        return 1.0 / self.ess_ratio if self.ess_ratio > 0.0 else (math.inf if self.ess_ratio == 0.0 else math.nan)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every correction on the same tokens, and what the rule reads beside them."""

    effects: tuple[Effect, ...]
    horizon: float
    num_tokens: int
    lag_ess_ratio: float
    """Block ESS of the lag at the horizon; nan without lag."""
    lag_bias: float
    """bias_left of the lag alone if nothing is done about it; nan without lag."""

    def __getitem__(self, name: str) -> Effect:
        """The effect of one correction; KeyError for an unknown name."""
        return {effect.name: effect for effect in self.effects}[name]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A correction's name, or `resync`, or `unknown`, and why in one sentence with the numbers."""

    name: str
    reason: str


def compare_corrections(
    total_N: F64,
    offsets_S1: I64,
    *,
    lag_N: F64 | None = None,
    within_N: F64 | None = None,
    advantage_N: F64 | None = None,
    horizon: float = 32,
) -> Comparison:
    """The effect of every correction over packed rows; log ratios in nats, [N] finite, trainer minus engine.

    total: now - engine; lag: now - generator's weights (None = unknown: the DLC rows are nan); within: now - start of
    the step's updates (None = 0: one update per batch); advantage: its sign decides PPO's clip (None: half bites).
    Raises ShapeError if lengths or offsets do not fit. Source: definitions in the module's docstring.
    """
    check_offsets(offsets_S1, len(total_N), "compare_corrections")
    for name, stream_N in (("lag_N", lag_N), ("within_N", within_N), ("advantage_N", advantage_N)):
        if stream_N is not None and len(stream_N) != len(total_N):
            raise ShapeError(
                f"compare_corrections: {name} has {len(stream_N)} tokens, total_N {len(total_N)}; "
                f"pass streams of the same tokens, packed alike"
            )
    if not len(total_N):
        return Comparison(tuple(_unknown(name) for name in CORRECTIONS), horizon, 0, math.nan, math.nan)
    exact_N = _block_logw(total_N, offsets_S1, horizon)
    zero_N = np.zeros(len(total_N))
    never_N = np.zeros(len(total_N), dtype=bool)
    row_N = _block_logw(total_N, offsets_S1, math.inf)
    out_N = (total_N < math.log(ICEPOP_BAND[0])) | (total_N > math.log(ICEPOP_BAND[1]))
    effects = [
        _effect("none", zero_N, zero_N, never_N, exact_N),
        _truncated("tis", total_N, LARGEST, exact_N),
        _effect("sequence_mis", row_N, _masked(row_N, row_N > math.log(LARGEST)), row_N > math.log(LARGEST), exact_N),
        _effect("icepop", total_N, _masked(total_N, out_N), out_N, exact_N),
        _decoupled(total_N, zero_N if within_N is None else within_N, advantage_N, exact_N),
    ]
    if lag_N is None:
        effects += [_unknown("dlc_token"), _unknown("dlc_block")]
        return Comparison(tuple(effects), horizon, len(total_N), math.nan, math.nan)
    block_N = _block_logw(lag_N, offsets_S1, horizon)
    effects += [_truncated("dlc_token", lag_N, LARGEST, block_N), _truncated("dlc_block", block_N, LARGEST, block_N)]
    lag_ess = EssSums.of(block_sums(lag_N, offsets_S1, horizon)[0]).ratio
    return Comparison(tuple(effects), horizon, len(total_N), lag_ess, _distance(zero_N, block_N))


def recommend(found: Comparison) -> Recommendation:
    """The correction this run needs, by the rule in the module's docstring."""
    if not found.num_tokens:
        return Recommendation("unknown", "no usable token was recorded")
    none, h = found["none"], f"{found.horizon:g}-token blocks"
    if none.bias_left <= SMALL_BIAS:
        return Recommendation(
            "none", f"over {h} the mismatch moves {none.bias_left:.2f} of the probability, at most {SMALL_BIAS}"
        )
    if math.isnan(found.lag_ess_ratio):
        return Recommendation(
            "unknown",
            f"over {h} the mismatch moves {none.bias_left:.2f} of the probability, but only the total ratio is known; "
            f"record the trainer's log-probabilities at the generator's weights to tell engine noise from lag",
        )
    if found.lag_ess_ratio < LEAST_ESS:
        return Recommendation(
            "resync",
            f"the lag's ESS over {h} is {found.lag_ess_ratio:.2f}, below one half: weights no longer mend it; "
            f"sync the generator more often, then correct what is left",
        )
    if found.lag_bias <= SMALL_BIAS:
        return Recommendation(
            "dlc_token",
            f"over {h} the lag moves {found.lag_bias:.2f} of the probability, both parts {none.bias_left:.2f}: "
            f"it is the engine's numerics, which centring removes with weights near 1",
        )
    return _best(found, none)


def _best(found: Comparison, none: Effect) -> Recommendation:
    fit = [
        effect
        for effect in found.effects
        if effect.name != "none" and effect.ess_ratio >= LEAST_ESS and effect.clipped_share <= MOST_CLIPPED
    ]
    if not fit:
        return Recommendation(
            "resync",
            f"every correction keeps less than {LEAST_ESS} of its sample or clips more than {MOST_CLIPPED:.0%} of the "
            f"tokens; sync the generator more often",
        )
    least = min(effect.bias_left for effect in fit)
    best = min((e for e in fit if e.bias_left <= least + ALIKE), key=lambda e: e.variance_factor)
    return Recommendation(
        best.name,
        f"it leaves a bias of {best.bias_left:.2f} against {none.bias_left:.2f} without any, keeps "
        f"{best.ess_ratio:.0%} of the sample and clips {best.clipped_share:.1%} of the tokens",
    )


def _truncated(name: str, logw_N: F64, largest: float, exact_N: F64) -> Effect:
    return _effect(name, logw_N, np.minimum(logw_N, math.log(largest)), logw_N > math.log(largest), exact_N)


def _decoupled(total_N: F64, within_N: F64, advantage_N: F64 | None, exact_N: F64) -> Effect:
    """Proximal over engine capped at 5, times PPO's clipped ratio around the proximal policy."""
    behave_N = total_N - within_N
    above_N, below_N = within_N > math.log(PPO_BAND[1]), within_N < math.log(PPO_BAND[0])
    used_N = np.minimum(behave_N, math.log(DECOUPLED_LARGEST)) + within_N
    capped_N = behave_N > math.log(DECOUPLED_LARGEST)
    if advantage_N is None:
        used_N = np.where(above_N | below_N, used_N - math.log(2.0), used_N)
        share = float(np.mean(np.where(capped_N, 1.0, 0.5 * (above_N | below_N))))
        return _effect("decoupled_ppo", total_N, used_N, capped_N, exact_N, clipped_share=share)
    cut_N = (above_N & (advantage_N > 0.0)) | (below_N & (advantage_N < 0.0))
    return _effect("decoupled_ppo", total_N, _masked(used_N, cut_N), capped_N | cut_N, exact_N)


def _effect(
    name: str, raw_N: F64, used_N: F64, clipped_N: Bool, exact_N: F64, *, clipped_share: float | None = None
) -> Effect:
    return Effect(
        name=name,
        ess_ratio=EssSums.of(used_N).ratio if bool(np.isfinite(used_N).any()) else 0.0,
        raw_ess_ratio=EssSums.of(raw_N).ratio,
        clipped_share=float(clipped_N.mean()) if clipped_share is None else clipped_share,
        bias_left=_distance(used_N, exact_N),
    )


def _unknown(name: str) -> Effect:
    return Effect(name, math.nan, math.nan, math.nan, math.nan)


def _masked(logw_N: F64, out_N: Bool) -> F64:
    return np.where(out_N, -math.inf, logw_N)


def _distance(logw_N: F64, exact_N: F64) -> float:
    """Total variation distance, 0..1, of two weightings of the same tokens; 1 where the first keeps none."""
    if not bool(np.isfinite(logw_N).any()):
        return 1.0
    used_N, wanted_N = np.exp(logw_N - logw_N.max()), np.exp(exact_N - exact_N.max())
    return float(0.5 * np.abs(used_N / used_N.sum() - wanted_N / wanted_N.sum()).sum())


def _block_logw(x_N: F64, offsets_S1: I64, horizon: float) -> F64:
    """[N] sum of x over the first block that holds each token."""
    length_S = np.diff(offsets_S1)
    h = max(len(x_N), 1) if math.isinf(horizon) else int(horizon)
    num_S = -(-length_S // h)
    position_N = np.arange(len(x_N)) - np.repeat(offsets_S1[:-1], length_S)
    block_N = np.repeat(np.cumsum(num_S) - num_S, length_S) + position_N // h
    out_N: F64 = block_sums(x_N, offsets_S1, horizon)[0][block_N]
    return out_N
