"""Scores from hidden states and an output matrix (or from logits), chunk by chunk, with a gradient of their own.

    score_t = z_a - sum_b q_b z_b,    d score_t / d z = e_a - q

q is a constant here (see centring), its sum is 1, hence the log of the softmax's normaliser drops out. The backward
pass makes the logits of a chunk again instead of keeping them: the largest thing alive is one chunk of logits and one
temporary like it, plus the weight gradient. Input may be bf16 or fp16; everything inside is float32 (float64 for
float64 input), autocast off, the weight gradient too; torch hands it over in the matrix's own dtype.
A GPU user who wants TF32 products says so with torch.set_float32_matmul_precision.

Axes: X source positions (flattened), M kept tokens, C tokens of a chunk, H hidden, V vocabulary, L listed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from dlc_sentinel.correction.batch import Batch
from dlc_sentinel.correction.centring import DenseTarget, Listed, ListTarget, Target
from dlc_sentinel.correction.source import Reader, Source, check_vocabulary, grad_rows
from dlc_sentinel.errors import RecordError

__all__ = ["Facts", "read_facts", "score"]

LOWEST_Z: Final = -1e30
"""Stands in for a logit of -inf where it is multiplied with its probability 0: finite, in TF32 products too."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What one pass over the logits leaves of each kept token; z is the logit over the temperature."""

    lse_M: Tensor
    """[M] log sum exp of z."""
    token_z_M: Tensor
    """[M] z of the sampled token."""
    listed_z_ML: Tensor | None
    """[M, L] z at the listed tokens."""
    rest_M: Tensor
    """[M] softmax mass outside the list (1 without a list)."""
    rest_z_M: Tensor
    """[M] sum of softmax times z outside the list."""

    @property
    def logp_M(self) -> Tensor:
        """[M] log-probability of the sampled token, nats."""
        return self.token_z_M - self.lse_M


@torch.no_grad()
def read_facts(
    source: Source,
    batch: Batch,
    listed: Listed | None = None,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> Facts:
    """Facts of every kept token, no gradient, inner dtype: one pass over the logits.

    Logits of nan or inf make nan, as in any loss: the stack's own guard sees it. -inf is a token that is ruled out.
    Raises: ShapeError where source and batch disagree, ConfigError for a temperature or chunk that is not positive.
    """
    reader = Reader(source, batch, temperature, chunk_tokens)
    check_vocabulary(batch, reader.num_vocab)
    parts = []
    with torch.autocast(reader.main_XD.device.type, enabled=False):
        for start, end in reader.chunks():
            z_CV = reader.z(reader.main_rows(reader.main_XD, start, end), reader.output_VH, reader.bias_V)
            parts.append(_chunk_facts(z_CV, batch.token_M[start:end], listed, start, end))
    if not parts:
        none_M = torch.zeros(0, dtype=reader.dtype, device=reader.main_XD.device)
        listed_z_ML = None if listed is None else none_M[:, None].expand(0, listed.index_ML.shape[1])
        return Facts(none_M, none_M, listed_z_ML, none_M, none_M)
    lse_M, token_z_M, rest_M, rest_z_M, listed_z_ML = (torch.cat(column) for column in zip(*parts, strict=True))
    return Facts(lse_M, token_z_M, None if listed is None else listed_z_ML, rest_M, rest_z_M)


def score(
    source: Source,
    batch: Batch,
    target: Target,
    facts: Facts,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(score_M, bias_l1_M): the differentiable score of each kept token, and the L1 norm of what centring removed.

    d score / d z = e_a - q. bias_l1 = sum over the vocabulary of |q - pi|, no gradient: the mean score at the prefix
    that an uncentred loss leaves in. facts must be of the same source, batch and temperature.
    """
    reader = Reader(source, batch, temperature, chunk_tokens)
    if isinstance(target, DenseTarget):
        value_M, bias_l1_M = _dense_values(reader, target, facts)
    else:
        value_M, bias_l1_M = _list_values(target, facts)
    plan = _Plan(reader, target, facts.lse_M, value_M)
    out_M = _Score.apply(reader.main_XD, reader.output_VH, reader.bias_V, plan)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return cast(Tensor, out_M), bias_l1_M


@dataclass(frozen=True, slots=True)
class _Plan:
    reader: Reader
    target: Target
    lse_M: Tensor
    value_M: Tensor


class _Score(torch.autograd.Function):
    """The score with its closed-form gradient; the forward pass hands out values that are known already."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, main_XD: Tensor, output_VH: Tensor | None, bias_V: Tensor | None, plan: _Plan
    ) -> Tensor:
        ctx.save_for_backward(main_XD, *(part for part in (output_VH, bias_V) if part is not None))
        ctx.plan = plan  # type: ignore[attr-defined]  # a place for one's own data
        ctx.has = output_VH is not None, bias_V is not None  # type: ignore[attr-defined]
        return plan.value_M.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_M: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan  # type: ignore[attr-defined]
        saved = list(ctx.saved_tensors)  # type: ignore[attr-defined]
        main_XD = saved.pop(0)
        has_output, has_bias = ctx.has  # type: ignore[attr-defined]
        output_VH = saved.pop(0) if has_output else None
        bias_V = saved.pop(0) if has_bias else None
        needs_main, needs_output, needs_bias = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        reader = plan.reader
        grad_main_XD = torch.zeros_like(main_XD) if needs_main else None
        grad_output_VH = None
        if output_VH is not None and needs_output:
            grad_output_VH = torch.zeros_like(output_VH, dtype=reader.dtype)
        grad_bias_V = None
        if bias_V is not None and needs_bias:
            grad_bias_V = torch.zeros_like(bias_V, dtype=reader.dtype)
        with torch.autocast(main_XD.device.type, enabled=False):
            for start, end in reader.chunks():
                main_CD = reader.main_rows(main_XD, start, end)
                grad_CV = _grad_logits(plan, reader.z(main_CD, output_VH, bias_V), grad_M[start:end], start)
                if grad_main_XD is not None:
                    grad_main_XD[reader.batch.rows(start, end)] = grad_rows(grad_CV, output_VH).to(main_XD.dtype)
                if grad_output_VH is not None:
                    grad_output_VH.addmm_(grad_CV.T, main_CD)
                if grad_bias_V is not None:
                    grad_bias_V += grad_CV.sum(0)
        return grad_main_XD, grad_output_VH, grad_bias_V, None


def _chunk_facts(
    z_CV: Tensor, token_C: Tensor, listed: Listed | None, start: int, end: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(lse, token_z, rest, rest_z, listed_z) of one chunk."""
    top_C1 = z_CV.amax(1, keepdim=True)
    e_CV = (z_CV - top_C1).exp_()
    sum_C = e_CV.sum(1)
    listed_z_CL = token_z_C1 = z_CV.gather(1, token_C[:, None])
    if listed is not None:
        listed_z_CL = z_CV.gather(1, listed.index_ML[start:end])
        e_CV.scatter_(1, listed.index_ML[start:end], 0.0)
    rest_z_C = torch.einsum("cv,cv->c", e_CV, z_CV.clamp_(min=LOWEST_Z)) / sum_C
    rest_C = torch.ones_like(sum_C) if listed is None else e_CV.sum(1) / sum_C
    return sum_C.log() + top_C1.squeeze(1), token_z_C1.squeeze(1), rest_C, rest_z_C, listed_z_CL


def _list_values(target: ListTarget, facts: Facts) -> tuple[Tensor, Tensor]:
    """(score, bias_l1) from what is known: no pass over the logits."""
    value_M = facts.token_z_M - target.tail_M * facts.rest_z_M
    bias_l1_M = (target.tail_M - 1.0).abs() * target.rest_M
    if target.index_ML.shape[1] and facts.listed_z_ML is not None:
        value_M = value_M - (target.q_ML * facts.listed_z_ML.clamp(min=LOWEST_Z)).sum(1)
        bias_l1_M = bias_l1_M + (target.q_ML - target.logp_ML.exp()).abs().sum(1)
    return value_M, bias_l1_M


@torch.no_grad()
def _dense_values(reader: Reader, target: DenseTarget, facts: Facts) -> tuple[Tensor, Tensor]:
    """(score, bias_l1) of a full engine distribution: a second pass over the logits."""
    value_M, bias_l1_M = facts.token_z_M.clone(), torch.zeros_like(facts.token_z_M)
    with torch.autocast(reader.main_XD.device.type, enabled=False):
        for start, end in reader.chunks():
            z_CV = reader.z(reader.main_rows(reader.main_XD, start, end), reader.output_VH, reader.bias_V)
            logp_CV = z_CV - facts.lse_M[start:end, None]
            q_CV = target.q(logp_CV, start)
            value_M[start:end] -= torch.einsum("cv,cv->c", q_CV, z_CV.clamp_(min=LOWEST_Z))
            bias_l1_M[start:end] = (q_CV - logp_CV.exp()).abs().sum(1)
    bad_M = ~value_M.isfinite() & facts.logp_M.isfinite()
    if bool(bad_M.any()):
        raise RecordError(
            f"EngineFull: no centre can be made at {int(bad_M.sum())} of {len(bad_M)} kept tokens: logp or gen_logp "
            f"holds nan or inf, or logp is -inf throughout; wanted log-probabilities, -inf where the engine has no mass"
        )
    return value_M, bias_l1_M


def _grad_logits(plan: _Plan, z_CV: Tensor, grad_C: Tensor, start: int) -> Tensor:
    """grad times (e_a - q) over the temperature, [C, V]; made inside z_CV where q is a list."""
    reader, target, end = plan.reader, plan.target, start + len(z_CV)
    grad_C1 = grad_C.to(reader.dtype)[:, None] / reader.temperature
    z_CV -= plan.lse_M[start:end, None]
    if isinstance(target, DenseTarget):
        out_CV = target.q(z_CV, start).mul_(-grad_C1)
    else:
        out_CV = z_CV.exp_().mul_(-grad_C1 * target.tail_M[start:end, None])
        if target.index_ML.shape[1]:
            index_CL = target.index_ML[start:end]
            out_CV.scatter_(1, index_CL, 0.0).scatter_add_(1, index_CL, -grad_C1 * target.q_ML[start:end])
    return out_CV.scatter_add_(1, reader.batch.token_M[start:end, None], grad_C1)
