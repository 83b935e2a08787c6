"""Per-prefix centring of the score in closed form: what is taken from e_a so that the expected update is unbiased.

    gradient in the logits = w A (e_a - q),    q = nu / Z,    nu_b = mu_b * w_b,    Z = sum of nu

e_a: the sampled token; mu: the engine's distribution at the prefix; w_b: the weight token b would have got in place of
the sampled one, with the same form and clip. Then the mean of w (e_a - q) over tokens drawn from mu is 0 at every
prefix, clipped or not (with a horizon above 1: given the other tokens of the block). At zero lag q = mu. Without
centring q is the trainer's own softmax and the mean is mu - pi.

Where only a list of tokens is known, the rest has mass m = 1 - sum of listed mu, spread in proportion to the trainer
now, with one weight for all of it: form(trainer's rest now / trainer's rest then). L1 error of q from that model, by
the largest weight W the form can give: <= 2 m W / (listed nu + m W); at zero lag 2 m.
Without the generator's log-probabilities on the list, w_b is unknown: nu = mu, and the label says so.

Axes: M kept tokens, V vocabulary, L listed tokens and the sampled one last, C tokens of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dlc_sentinel.correction.batch import Batch, EngineFull, EngineList
from dlc_sentinel.correction.weights import Weight
from dlc_sentinel.errors import RecordError

__all__ = [
    "LABEL_MU", "LABEL_NONE", "LABEL_NU",
    "DenseTarget", "ListTarget", "Listed", "Target", "dense_target", "list_target", "listed_tokens", "plain_target",
]  # fmt: skip

LABEL_NONE: Final = "none"
"""Not centred: q is the trainer's own distribution."""
LABEL_MU: Final = "nu=mu"
"""Centred at the engine's distribution without weights: exact at zero lag only."""
LABEL_NU: Final = "nu"
"""Centred with the very weights that the sampled token gets."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The tokens of a list with the sampled one as last column, so that each position knows the sampled token's mu."""

    index_ML: Tensor
    """[M, L] int64; unused slots point at the sampled token."""
    used_ML: Tensor
    """[M, L] bool; False in unused slots. Every token is used at most once."""
    mu_ML: Tensor
    """[M, L] engine probability, 0 in unused slots."""
    gen_logp_ML: Tensor | None
    """[M, L] trainer at the generator's weights, -inf in unused slots; renormalised on a whole support."""

    def gen_logp_of(self, token_M: Tensor) -> Tensor | None:
        """[M] the generator's value at the sampled token, which is in the list; None where the list has none."""
        if self.gen_logp_ML is None:
            return None
        is_sampled_ML = (self.index_ML == token_M[:, None]) & self.used_ML
        return self.gen_logp_ML.masked_fill(~is_sampled_ML, 0.0).sum(1)


@dataclass(frozen=True, slots=True)
class ListTarget:
    """q in sparse form: q_ML at index_ML, tail_M times the trainer's softmax elsewhere; its sum is 1."""

    index_ML: Tensor
    q_ML: Tensor
    tail_M: Tensor
    logp_ML: Tensor
    """[M, L] trainer now at the list, renormalised where the list is the whole support."""
    rest_M: Tensor
    """[M] trainer's mass outside the list; 0 where the list is the whole support."""
    label: str
    tail_mass_M: Tensor
    """[M] engine mass m outside the list."""
    tail_bound_M: Tensor
    """[M] bound of the L1 error of q that the tail model can cause, 0..2."""


@dataclass(frozen=True, slots=True)
class DenseTarget:
    """q computed from an EngineFull chunk by chunk: nothing of shape [M, V] is made."""

    batch: Batch
    engine: EngineFull
    weight: Weight
    log_others_M: Tensor
    """[M] log weight of the token's block without the token itself."""
    label: str

    def q(self, logp_CV: Tensor, start: int) -> Tensor:
        """q of a chunk that begins at kept token `start`, [C, V]; logp_CV: the trainer's log-softmax now."""
        end = start + len(logp_CV)
        rows = self.batch.rows(start, end)
        nu_CV = self.engine.logp[rows].to(logp_CV.dtype).exp()
        if self.engine.gen_logp is not None and self.weight.form != "one":
            log_w_CV = logp_CV - self.engine.gen_logp[rows].to(logp_CV.dtype)
            log_w_CV += self.log_others_M[start:end, None]
            w_CV = self.weight.of(log_w_CV, self.batch.advantage_M[start:end, None])
            w_CV.masked_fill_(nu_CV == 0.0, 0.0).mul_(nu_CV)
            nu_CV = torch.where(w_CV.sum(1, keepdim=True) > 0.0, w_CV, nu_CV)  # all masked: any q will do
        return nu_CV / nu_CV.sum(1, keepdim=True)


Target = ListTarget | DenseTarget


def listed_tokens(batch: Batch, dtype: torch.dtype) -> Listed | None:
    """The batch's EngineList with the sampled token in its last column; None for any other batch.

    Raises: RecordError where the sampled token is outside the list and its own log-probability is not given, or the
    list is the whole support and does not hold it.
    """
    engine = batch.engine
    if not isinstance(engine, EngineList):
        return None
    token_M1 = batch.token_M[:, None]
    used_MK = engine.index >= 0
    is_listed_M = ((engine.index == token_M1) & used_MK).any(1)
    _check_sampled(batch, engine, is_listed_M)
    mu_ML = _with_column(engine.logp, batch.engine_logp_M, used_MK, ~is_listed_M, dtype).exp()
    gen_logp_ML = None
    if engine.gen_logp is not None:
        gen_logp_ML = _with_column(engine.gen_logp, batch.gen_logp_M, used_MK, ~is_listed_M, dtype)
        if engine.whole_support:
            gen_logp_ML = gen_logp_ML - gen_logp_ML.logsumexp(1, keepdim=True)
    return Listed(
        index_ML=torch.cat((torch.where(used_MK, engine.index, token_M1), token_M1), 1),
        used_ML=torch.cat((used_MK, ~is_listed_M[:, None]), 1),
        mu_ML=mu_ML,
        gen_logp_ML=gen_logp_ML,
    )


def list_target(
    batch: Batch, listed: Listed, weight: Weight, log_others_M: Tensor, logp_ML: Tensor, rest_M: Tensor
) -> ListTarget:
    """q from a list of engine probabilities.

    log_others_M: log weight of the token's block without the token itself; logp_ML: the trainer's log-probabilities
    now at the list, -inf in unused slots; rest_M: its mass outside the list (0 where the list is the whole support).
    Both are of the trainer renormalised on the list where that is the whole support.
    """
    engine = batch.engine
    assert isinstance(engine, EngineList)
    is_weighted = listed.gen_logp_ML is not None or weight.form == "one"
    w_ML, w_tail_M = torch.ones_like(listed.mu_ML), torch.ones_like(rest_M)
    if listed.gen_logp_ML is not None and weight.form != "one":
        gen_ML = listed.gen_logp_ML
        log_w_ML = (log_others_M[:, None] + logp_ML - gen_ML).masked_fill(~listed.used_ML, -math.inf)
        w_ML = weight.of(log_w_ML, batch.advantage_M[:, None])
        tiny = torch.finfo(gen_ML.dtype).eps
        gen_rest_M = (1.0 - gen_ML.exp().sum(1)).clamp(min=tiny)
        log_w_tail_M = log_others_M + rest_M.clamp(min=torch.finfo(rest_M.dtype).tiny).log() - gen_rest_M.log()
        w_tail_M = weight.of(log_w_tail_M, batch.advantage_M)
    mass_M = torch.zeros_like(rest_M) if engine.whole_support else (1.0 - listed.mu_ML.sum(1)).clamp(min=0.0)
    mass_known_M = mass_M.masked_fill(rest_M == 0.0, 0.0)  # nothing to spread it by
    nu_ML, nu_tail_M = listed.mu_ML * w_ML.masked_fill(listed.mu_ML == 0.0, 0.0), mass_known_M * w_tail_M
    is_void_M = nu_ML.sum(1) + nu_tail_M == 0.0  # every weight masked, the sampled one's too: any q will do
    nu_ML = torch.where(is_void_M[:, None], listed.mu_ML, nu_ML)
    nu_tail_M = torch.where(is_void_M, mass_known_M, nu_tail_M)
    nu_listed_M = nu_ML.sum(1)
    z_M = nu_listed_M + nu_tail_M
    return ListTarget(
        index_ML=listed.index_ML,
        q_ML=nu_ML / z_M[:, None],
        tail_M=(nu_tail_M / (z_M * rest_M)).masked_fill(rest_M == 0.0, 0.0),
        logp_ML=logp_ML,
        rest_M=rest_M,
        label=LABEL_NU if is_weighted else LABEL_MU,
        tail_mass_M=mass_M,
        tail_bound_M=_tail_bound(mass_M, nu_listed_M, weight.largest if is_weighted else 1.0),
    )


def dense_target(batch: Batch, weight: Weight, log_others_M: Tensor) -> DenseTarget:
    """q from the engine's whole distribution."""
    assert isinstance(batch.engine, EngineFull)
    is_weighted = batch.engine.gen_logp is not None or weight.form == "one"
    return DenseTarget(batch, batch.engine, weight, log_others_M, LABEL_NU if is_weighted else LABEL_MU)


def plain_target(batch: Batch, listed: Listed | None, logp_ML: Tensor | None, like_M: Tensor) -> ListTarget:
    """q = the trainer's own distribution: the ordinary score. On a whole support, renormalised on it."""
    index_ML = batch.token_M[:, None][:, :0]
    logp_used_ML = like_M[:, None][:, :0]
    rest_M = torch.ones_like(like_M)
    is_whole = isinstance(batch.engine, EngineList) and batch.engine.whole_support
    if is_whole and listed is not None and logp_ML is not None:
        index_ML, logp_used_ML, rest_M = listed.index_ML, logp_ML, torch.zeros_like(like_M)
    none_M = torch.full_like(like_M, math.nan)
    return ListTarget(
        index_ML=index_ML,
        q_ML=logp_used_ML.exp(),
        tail_M=rest_M,
        logp_ML=logp_used_ML,
        rest_M=rest_M,
        label=LABEL_NONE,
        tail_mass_M=none_M,
        tail_bound_M=none_M,
    )


def _tail_bound(mass_M: Tensor, nu_listed_M: Tensor, largest: float) -> Tensor:
    if math.isinf(largest):
        return torch.where(mass_M > 0.0, 2.0, 0.0).to(mass_M.dtype)
    most_M = mass_M * largest
    return torch.where(most_M > 0.0, 2.0 * most_M / (nu_listed_M + most_M), torch.zeros_like(most_M))


def _with_column(
    logp_MK: Tensor, sampled_M: Tensor | None, used_MK: Tensor, is_new_M: Tensor, dtype: torch.dtype
) -> Tensor:
    """Log-probabilities [M, L] with the sampled token's own as last column, -inf in unused slots."""
    listed_MK = logp_MK.to(dtype).masked_fill(~used_MK, -math.inf)
    last_M = torch.full_like(listed_MK[:, 0], -math.inf) if sampled_M is None else sampled_M.to(dtype)
    return torch.cat((listed_MK, last_M.masked_fill(~is_new_M, -math.inf)[:, None]), 1)


def _check_sampled(batch: Batch, engine: EngineList, is_listed_M: Tensor) -> None:
    if bool(is_listed_M.all()):
        return
    num = int((~is_listed_M).sum())
    where = f"EngineList: the sampled token is outside the list at {num} of {len(is_listed_M)} kept tokens"
    if engine.whole_support:
        raise RecordError(
            f"{where}, which is declared the whole support; is the list of this position and this sampling setting? "
            f"With a top-k list of an untruncated sampler use whole_support=False"
        )
    if batch.engine_logp_M is None:
        raise RecordError(f"{where} and the batch has no engine_logp; pass the engine's value at the sampled tokens")
    if engine.gen_logp is not None and batch.gen_logp_M is None:
        raise RecordError(f"{where} and the batch has no gen_logp; pass the trainer's at the generator's weights")
