"""The corrections people compare with, behind the interface of `dlc_loss`: TIS, sequence MIS, IcePop, decoupled PPO.

    gradient in the logits = behave(prox - engine) * ppo(now - prox) * A (e_a - pi)

All weigh the total ratio (trainer against engine, discrepancy and lag together) and centre nothing. `prox` is the
trainer at the start of the step's updates; where the batch has none it is the trainer now, the case of one update per
batch, and the PPO factor is 1. Bounds by default are those in common use; every one is an argument.
Sources: TIS: "Your efficient RL framework secretly brings you off-policy RL training", 2025. Sequence MIS: "When speed
kills stability", 2025. IcePop: arXiv 2510.18855. Decoupled PPO: arXiv 2110.00641, 2505.24298.

Axes: M kept tokens, S rows; see batch.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from torch import Tensor

from dlc_sentinel.correction.batch import Batch
from dlc_sentinel.correction.loss import Loss, Scored, dlc_loss, plain_scores, reduce_loss
from dlc_sentinel.correction.metrics import measure
from dlc_sentinel.correction.source import Source
from dlc_sentinel.correction.weights import Weight, block_log_weight
from dlc_sentinel.errors import RecordError

__all__ = [
    "DECOUPLED_WEIGHT", "ICEPOP_WEIGHT", "LOSSES", "LossFunction", "PPO_CLIP", "SEQUENCE_MIS_WEIGHT", "TIS_WEIGHT",
    "decoupled_ppo_loss", "icepop_loss", "sequence_mis_loss", "tis_loss",
]  # fmt: skip

TIS_WEIGHT: Final = Weight("truncate", high=2.0)
SEQUENCE_MIS_WEIGHT: Final = Weight("mask", high=2.0, horizon=math.inf)
ICEPOP_WEIGHT: Final = Weight("mask", low=0.5, high=5.0)
DECOUPLED_WEIGHT: Final = Weight("truncate", high=5.0)
PPO_CLIP: Final = Weight("ppo", low=0.8, high=1.2)


def tis_loss(
    source: Source,
    batch: Batch,
    *,
    weight: Weight = TIS_WEIGHT,
    ppo: Weight = PPO_CLIP,
    temperature: float = 1.0,
    denominator: float | None = None,
    chunk_tokens: int | None = None,
) -> Loss:
    """Truncated importance sampling: min(ratio, 2) per token, outside the PPO clip. Arguments as for `dlc_loss`."""
    return _neighbour("tis_loss", source, batch, weight, ppo, temperature, denominator, chunk_tokens)


def sequence_mis_loss(
    source: Source,
    batch: Batch,
    *,
    weight: Weight = SEQUENCE_MIS_WEIGHT,
    ppo: Weight = PPO_CLIP,
    temperature: float = 1.0,
    denominator: float | None = None,
    chunk_tokens: int | None = None,
) -> Loss:
    """Masked importance sampling: a row's whole ratio as its weight, 0 where it is above 2."""
    return _neighbour("sequence_mis_loss", source, batch, weight, ppo, temperature, denominator, chunk_tokens)


def icepop_loss(
    source: Source,
    batch: Batch,
    *,
    weight: Weight = ICEPOP_WEIGHT,
    ppo: Weight = PPO_CLIP,
    temperature: float = 1.0,
    denominator: float | None = None,
    chunk_tokens: int | None = None,
) -> Loss:
    """Two-sided token mask: the ratio inside [0.5, 5], else 0."""
    return _neighbour("icepop_loss", source, batch, weight, ppo, temperature, denominator, chunk_tokens)


def decoupled_ppo_loss(
    source: Source,
    batch: Batch,
    *,
    weight: Weight = DECOUPLED_WEIGHT,
    ppo: Weight = PPO_CLIP,
    temperature: float = 1.0,
    denominator: float | None = None,
    chunk_tokens: int | None = None,
) -> Loss:
    """PPO around the proximal policy, weighted by proximal over engine, capped at 5. Needs prox_logp: RecordError."""
    if batch.prox_logp_M is None:
        raise RecordError(
            "decoupled_ppo_loss: the batch has no prox_logp, the trainer's log-probabilities at the start of the step; "
            "pass it, or use tis_loss where each batch gets one update"
        )
    return _neighbour("decoupled_ppo_loss", source, batch, weight, ppo, temperature, denominator, chunk_tokens)


class LossFunction(Protocol):
    """What all losses here share, so that one can be put in place of another."""

    def __call__(
        self,
        source: Source,
        batch: Batch,
        *,
        temperature: float = ...,
        denominator: float | None = ...,
        chunk_tokens: int | None = ...,
    ) -> Loss: ...


LOSSES: Final[dict[str, LossFunction]] = {
    "dlc": dlc_loss,
    "tis": tis_loss,
    "sequence_mis": sequence_mis_loss,
    "icepop": icepop_loss,
    "decoupled_ppo": decoupled_ppo_loss,
}
"""Every loss by the name a config would use."""


def _neighbour(
    where: str,
    source: Source,
    batch: Batch,
    behave: Weight,
    ppo: Weight,
    temperature: float,
    denominator: float | None,
    chunk_tokens: int | None,
) -> Loss:
    engine_logp_M = batch.engine_logp_M
    if engine_logp_M is None:
        raise RecordError(f"{where}: the batch has no engine_logp, the engine's values at the sampled tokens; pass it")
    score_M, logp_M, bias_l1_M, target = plain_scores(source, batch, temperature=temperature, chunk_tokens=chunk_tokens)
    prox_M = logp_M if batch.prox_logp_M is None else batch.prox_logp_M.to(logp_M.dtype)
    advantage_M = batch.advantage_M.to(logp_M.dtype)
    behave_log_M = block_log_weight(prox_M - engine_logp_M.to(logp_M.dtype), batch.offsets_S1, behave.horizon)
    ppo_log_M = block_log_weight(logp_M - prox_M, batch.offsets_S1, ppo.horizon)
    weight_M: Tensor = behave.of(behave_log_M, advantage_M) * ppo.of(ppo_log_M, advantage_M)
    metrics = measure(
        centring=target.label,
        log_ratio_M=logp_M - engine_logp_M.to(logp_M.dtype),
        offsets_S1=batch.offsets_S1,
        weight_M=weight_M,
        clipped_M=behave.clipped(behave_log_M, advantage_M) | ppo.clipped(ppo_log_M, advantage_M),
        bias_l1_M=bias_l1_M,
        tail_mass_M=target.tail_mass_M,
        tail_bound_M=target.tail_bound_M,
    )
    return reduce_loss(Scored(score_M, weight_M, logp_M, metrics), batch, denominator)
