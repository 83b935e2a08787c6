"""The DLC loss: score centred per prefix, weighted by the lag ratio, which is clipped relative to the generator.

    loss = - sum_t stopgrad(w_t A_t) score_t / denominator,    d score / d logits = e_a - q

w: block weight of lag = log pi_now - log pi_gen, both in the trainer's numerics (weights); q: the centre (centring).
Its gradient is that of an off-policy policy gradient for the return of the engine's policy at the trainer's weights;
the loss's value is no return. Resyncing the generator when the lag's ESS is below one half is the third part of the
method: read `metrics.weight_ess_ratio`, or run the sentinel.

Axes: M kept tokens, S rows; see batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dlc_sentinel.correction.batch import Batch, EngineFull, EngineList
from dlc_sentinel.correction.centring import (
    Listed,
    ListTarget,
    Target,
    dense_target,
    list_target,
    listed_tokens,
    plain_target,
)
from dlc_sentinel.correction.fused import Facts, read_facts, score
from dlc_sentinel.correction.metrics import Metrics, measure
from dlc_sentinel.correction.source import Source, inner_dtype
from dlc_sentinel.correction.weights import Weight, block_log_weight
from dlc_sentinel.errors import ConfigError, RecordError

__all__ = ["DLC_WEIGHT", "Loss", "Scored", "centred_scores", "dlc_loss", "reduce_loss"]

DLC_WEIGHT: Final = Weight()
"""The lag weight by default: each token's ratio, truncated at 2."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores and weights of kept tokens, before advantages: what a stack needs that reduces its loss itself."""

    score_M: Tensor
    """[M] differentiable; gradient e_a - q in the logits."""
    weight_M: Tensor
    """[M] no gradient."""
    logp_M: Tensor
    """[M] no gradient: log-probability of the sampled token now, nats (renormalised where the list is the support)."""
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it was made of. loss: 0-d, differentiable; the others of kept tokens, without gradient."""

    loss: Tensor
    weight_M: Tensor
    logp_M: Tensor
    metrics: Metrics


def dlc_loss(
    source: Source,
    batch: Batch,
    *,
    weight: Weight = DLC_WEIGHT,
    temperature: float = 1.0,
    denominator: float | None = None,
    chunk_tokens: int | None = None,
) -> Loss:
    """The loss to minimise, with metrics.

    source: `Hidden` (fused, [tokens, vocab] is never held whole) or `Logits`. batch: needs gen_logp unless weight's
    form is `one` (zero lag); its `engine` decides the centring, None leaves it out. denominator: what the sum over
    tokens is divided by; None = the kept tokens of this call (with micro-batches pass the global number).
    No kept token: loss 0 with a gradient of zeros. Batch refuses nan; logits of nan or inf at kept tokens make the loss
    nan, as in any loss, so that the stack skips the step as it would; -inf is a token that cannot be sampled.
    Raises: RecordError where the batch lacks what the weight needs; ShapeError, ConfigError as in fused.
    Source: theory in this module's docstring and in centring's.
    """
    scored = centred_scores(source, batch, weight=weight, temperature=temperature, chunk_tokens=chunk_tokens)
    return reduce_loss(scored, batch, denominator)


def centred_scores(
    source: Source,
    batch: Batch,
    *,
    weight: Weight = DLC_WEIGHT,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Scored:
    """Centred scores and lag weights: `dlc_loss` before it multiplies and adds. Arguments and errors are the same."""
    dtype, listed, facts = _read(source, batch, temperature, chunk_tokens)
    logp_M, logp_ML = now_logp(batch, listed, facts)
    lag_M = _lag(batch, listed, weight, logp_M)
    logw_M = block_log_weight(lag_M, batch.offsets_S1, weight.horizon)
    target: Target
    if listed is not None and logp_ML is not None:
        target = list_target(batch, listed, weight, logw_M - lag_M, logp_ML, rest_mass(batch, facts))
    elif isinstance(batch.engine, EngineFull):
        target = dense_target(batch, weight, logw_M - lag_M)
    else:
        target = plain_target(batch, None, None, facts.lse_M)
    score_M, bias_l1_M = score(source, batch, target, facts, temperature=temperature, chunk_tokens=chunk_tokens)
    weight_M = weight.of(logw_M, batch.advantage_M.to(dtype))
    clipped_M = weight.clipped(logw_M, batch.advantage_M)
    metrics = _metrics(target, batch, lag_M, weight_M, clipped_M, bias_l1_M)
    return Scored(score_M, weight_M, logp_M, metrics)


def reduce_loss(scored: Scored, batch: Batch, denominator: float | None) -> Loss:
    """- sum of weight * advantage * score, over the denominator (None = kept tokens)."""
    if denominator is not None and not denominator > 0.0:
        raise ConfigError(
            f"loss: denominator={denominator}; wanted a positive number of tokens, or None for this call's"
        )
    pull_M = scored.weight_M * batch.advantage_M.to(scored.weight_M.dtype)
    loss = -(pull_M * scored.score_M).sum() / (denominator or max(batch.num_tokens, 1))
    return Loss(loss, scored.weight_M, scored.logp_M, scored.metrics)


def plain_scores(
    source: Source,
    batch: Batch,
    *,
    temperature: float,
    chunk_tokens: int | None,
) -> tuple[Tensor, Tensor, Tensor, ListTarget]:
    """(score_M, logp_M, bias_l1_M, target) without centring: score has the log-probability's gradient."""
    _, listed, facts = _read(source, batch, temperature, chunk_tokens)
    logp_M, logp_ML = now_logp(batch, listed, facts)
    target = plain_target(batch, listed, logp_ML, facts.lse_M)
    score_M, bias_l1_M = score(source, batch, target, facts, temperature=temperature, chunk_tokens=chunk_tokens)
    return score_M, logp_M, bias_l1_M, target


def now_logp(batch: Batch, listed: Listed | None, facts: Facts) -> tuple[Tensor, Tensor | None]:
    """(logp_M, logp_ML): the trainer now at the sampled and at the listed tokens, renormalised on a whole support."""
    if listed is None or facts.listed_z_ML is None:
        return facts.logp_M, None
    z_ML = facts.listed_z_ML.masked_fill(~listed.used_ML, -torch.inf)
    lse_M = facts.lse_M
    if isinstance(batch.engine, EngineList) and batch.engine.whole_support:
        lse_M = z_ML.logsumexp(1)
    return facts.token_z_M - lse_M, z_ML - lse_M[:, None]


def rest_mass(batch: Batch, facts: Facts) -> Tensor:
    """[M] trainer's mass outside the list; 0 where the list is the whole support."""
    if isinstance(batch.engine, EngineList) and batch.engine.whole_support:
        return torch.zeros_like(facts.rest_M)
    return facts.rest_M


def _read(
    source: Source, batch: Batch, temperature: float, chunk_tokens: int | None
) -> tuple[torch.dtype, Listed | None, Facts]:
    dtype = inner_dtype(source)
    listed = listed_tokens(batch, dtype)
    return dtype, listed, read_facts(source, batch, listed, temperature=temperature, chunk_tokens=chunk_tokens)


def _lag(batch: Batch, listed: Listed | None, weight: Weight, logp_M: Tensor) -> Tensor:
    if listed is not None and isinstance(batch.engine, EngineList) and batch.engine.whole_support:
        gen_logp_M = listed.gen_logp_of(batch.token_M)
        if gen_logp_M is not None:
            return logp_M - gen_logp_M
    if batch.gen_logp_M is not None:
        return logp_M - batch.gen_logp_M.to(logp_M.dtype)
    if weight.form == "one":
        return torch.zeros_like(logp_M)
    raise RecordError(
        f"dlc_loss: the batch has no gen_logp, the trainer's log-probabilities at the weights that generated the "
        f"tokens, and the {weight.form} weight is made of it; pass it, or Weight('one') where the lag is zero"
    )


def _metrics(
    target: Target, batch: Batch, lag_M: Tensor, weight_M: Tensor, clipped_M: Tensor, bias_l1_M: Tensor
) -> Metrics:
    none_M = torch.zeros_like(lag_M)
    return measure(
        centring=target.label,
        log_ratio_M=lag_M,
        offsets_S1=batch.offsets_S1,
        weight_M=weight_M,
        clipped_M=clipped_M,
        bias_l1_M=bias_l1_M,
        tail_mass_M=target.tail_mass_M if isinstance(target, ListTarget) else none_M,
        tail_bound_M=target.tail_bound_M if isinstance(target, ListTarget) else none_M,
    )
