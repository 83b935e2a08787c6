"""The DLC loss and its neighbours, in torch; usable without the sentinel.

    batch = Batch.packed(token_N, advantage_N, offsets_S1=cu_seqlens, gen_logp_N=..., engine_logp_N=..., engine=top_k)
    out = dlc_loss(Hidden(hidden_NH, model.lm_head.weight), batch)
    out.loss.backward()
    log(out.metrics.as_dict())

loss: dlc_loss, read it first. batch: what it reads. weights: the lag ratio's forms. centring: the closed form of q.
source, fused: logits in chunks, and their gradient. neighbours: TIS, sequence MIS, IcePop, decoupled PPO. metrics: what
is reported.
"""

from __future__ import annotations

from dlc_sentinel.correction.batch import Batch, EngineFull, EngineList
from dlc_sentinel.correction.loss import DLC_WEIGHT, Loss, Scored, centred_scores, dlc_loss, reduce_loss
from dlc_sentinel.correction.metrics import CENTRING_CODES, Metrics
from dlc_sentinel.correction.neighbours import (
    LOSSES,
    LossFunction,
    decoupled_ppo_loss,
    icepop_loss,
    sequence_mis_loss,
    tis_loss,
)
from dlc_sentinel.correction.source import Hidden, Logits, Source
from dlc_sentinel.correction.weights import Weight, block_log_weight, ess_ladder

__all__ = [
    "CENTRING_CODES", "DLC_WEIGHT", "LOSSES",
    "Batch", "EngineFull", "EngineList", "Hidden", "Logits", "Loss", "LossFunction", "Metrics", "Scored", "Source",
    "Weight", "block_log_weight", "centred_scores", "decoupled_ppo_loss", "dlc_loss", "ess_ladder", "icepop_loss",
    "reduce_loss", "sequence_mis_loss", "tis_loss",
]  # fmt: skip
