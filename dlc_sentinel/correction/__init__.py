"""The DLC loss and its neighbours, in torch; usable without the sentinel. Two packed rows, with lists of 4 tokens:

    import torch
    from dlc_sentinel.correction import Batch, EngineList, Hidden, dlc_loss

    hidden_NH, head = torch.randn(9, 16, requires_grad=True), torch.nn.Linear(16, 50, bias=False)
    gen_logp_NV = head(hidden_NH).detach().log_softmax(1)     # the trainer at the generator's weights
    logp_NK, index_NK = gen_logp_NV.topk(4)                   # the engine's list; here it agrees with the trainer
    top_k = EngineList(index_NK, logp_NK, gen_logp_NV.gather(1, index_NK))
    batch = Batch.packed(
        index_NK[:, 0], torch.randn(9), offsets_S1=torch.tensor([0, 4, 9]),
        gen_logp_N=top_k.gen_logp[:, 0], engine_logp_N=logp_NK[:, 0], engine=top_k,
    )
    out = dlc_loss(Hidden(hidden_NH, head.weight), batch)
    out.loss.backward()
    print(out.metrics.as_dict())

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
