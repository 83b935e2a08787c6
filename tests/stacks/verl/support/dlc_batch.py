"""One micro-batch through verl's own actor code with loss_mode=dlc: logits, columns and the gradient, as NAME.npz.

Usage: dlc_batch.py FOLDER CASES, a JSON object {name: {"rmpad": bool, "lists": bool, "bypass": bool, "kl": bool,
"filled": bool, "versions": [of each row]}}. Everything but the model is verl's: TrainingWorker's
loss, FSDPEngineWithLMHead's forward steps (old_log_probs, then training), ppo_loss. The model is a table of logits, so
that its gradient can be read.
"""

import contextlib
import functools
import json
import sys
import types

import numpy as np
import torch
from dlc_sentinel.integrations import verl_dlc_loss
from dlc_sentinel.integrations.verl_dlc_topk import IDS, LOGP, TOP_K
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

VOCABULARY, LISTED = 7, 3
PROMPTS, RESPONSES = (2, 3), (4, 3)
TEMPERATURE = 0.8
DELIVERED = 5


class Table(torch.nn.Module):
    """A model that gives these logits, [N, V], in whatever layout it is asked for."""

    def __init__(self, logits_NV):
        super().__init__()
        self.logits_NV = torch.nn.Parameter(logits_NV)

    def forward(self, input_ids, attention_mask=None, **_):
        if attention_mask is None:
            return types.SimpleNamespace(logits=self.logits_NV[None])
        lengths = attention_mask.sum(1).tolist()
        rows = torch.nn.utils.rnn.pad_sequence(self.logits_NV.split(lengths), batch_first=True)
        return types.SimpleNamespace(logits=rows)


class Engine(FSDPEngineWithLMHead):
    """verl's engine around a table; nothing of its is started."""

    def __init__(self):
        self.engine_config = types.SimpleNamespace(
            entropy_checkpointing=False, entropy_from_logits_with_chunking=False, use_fused_kernels=False,
            ulysses_sequence_parallel_size=1, pad_to_length=False, use_dynamic_bsz=False, forward_only=False,
            micro_batch_size_per_gpu=1, infer_micro_batch_size_per_gpu=1, max_token_len_per_gpu=None,
            infer_max_token_len_per_gpu=None,
        )  # fmt: skip
        self.use_ulysses_sp = self.pad_to_length = False
        self._autocast_dtype = torch.float32

    def compute_entropy_from_logits(self, logits):
        return torch.distributions.Categorical(logits=logits).entropy()

    def get_data_parallel_group(self):
        return None

    def is_mp_src_rank_with_outputs(self):
        return False

    def train_mode(self, **_):
        return contextlib.nullcontext()

    eval_mode = train_mode

    def train_batch(self, data, loss_function):
        """Notes what the training worker asks for."""
        self.asked = loss_function

    infer_batch = train_batch


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def per_row(values):
    """[R, ...] as a column of the responses."""
    return nested(torch.as_tensor(values).split(list(RESPONSES)))


def filler(name, column):
    """A row that verl fills a batch up with: of one masked token, its lists still those of the first row."""
    if name in (IDS, LOGP):
        return column.unbind()[0]
    return torch.zeros({"prompts": 2, "input_ids": 3, "position_ids": 3}.get(name, 1), dtype=column.dtype)


def make(case):
    """(data, engine's probabilities [R, V])"""
    torch.manual_seed(1)
    prompts = [torch.randint(0, VOCABULARY, (n,)) for n in PROMPTS]
    responses = [torch.randint(0, VOCABULARY, (n,)) for n in RESPONSES]
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1])
    mu_RV = torch.randn(sum(RESPONSES), VOCABULARY).softmax(-1)
    best = mu_RV.topk(LISTED)
    ids_RK = torch.full((len(mu_RV), TOP_K), -1)
    logp_RK = torch.zeros(len(mu_RV), TOP_K)
    ids_RK[:, :LISTED], logp_RK[:, :LISTED] = best.indices, best.values.log()
    engine_R = mu_RV.gather(1, torch.cat(responses)[:, None])[:, 0].log()
    columns = {
        "prompts": nested(prompts),
        "responses": nested(responses),
        "input_ids": nested(torch.cat(pair) for pair in zip(prompts, responses, strict=True)),
        "position_ids": nested(torch.arange(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)),
        "response_mask": per_row(mask),
        "loss_mask": per_row(mask),
        "advantages": per_row(torch.tensor([1.5] * RESPONSES[0] + [-0.7] * RESPONSES[1])),
        "rollout_log_probs": per_row(engine_R),
    }
    if case["lists"]:
        columns |= {IDS: per_row(ids_RK), LOGP: per_row(logp_RK)}
    if case["filled"]:
        columns = {name: nested([*column.unbind(), filler(name, column)]) for name, column in columns.items()}
    data = TensorDict(columns, batch_size=[len(columns["prompts"].offsets()) - 1])
    extra = [{"min_global_steps": v, "max_global_steps": v} for v in case["versions"]]
    tu.assign_non_tensor_stack(data, "extra_fields", extra)
    tu.assign_non_tensor(
        data, temperature=TEMPERATURE, use_remove_padding=case["rmpad"], use_fused_kernels=False, dp_size=1,
        batch_num_tokens=int(mask.sum()), global_batch_size=len(PROMPTS), calculate_entropy=False,
        compute_loss=False,
    )  # fmt: skip
    return data, mu_RV


def worker_of(case):
    """verl's training worker, given verl's loss as verl gives it."""
    worker = object.__new__(TrainingWorker)
    worker.engine = Engine()
    worker.engine_config, worker.model_config = worker.engine.engine_config, {}
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=case["kl"], kl_loss_coef=0.0,
        policy_loss=PolicyLossConfig(loss_mode="dlc"),
    )  # fmt: skip
    worker.set_loss_fn(functools.partial(ppo_loss, config=config))
    return worker


def step(worker, data, logits_NV, *, forward_only):
    """verl's forward step of a batch that its training worker was asked to train, or to score."""
    worker.engine.module = Table(logits_NV)
    (worker.infer_batch if forward_only else worker.train_batch)(data)
    return worker.engine.forward_step(data, worker.engine.asked, forward_only)


def main(out, case):
    data, mu_RV = make(case)
    worker = worker_of(case)
    num = len(data["input_ids"].values())
    gen_NV = 2 * torch.randn(num, VOCABULARY)
    now_NV = gen_NV + 0.6 * torch.randn(num, VOCABULARY)
    verl_dlc_loss.delivered[0] = DELIVERED
    if case["bypass"]:
        data["old_log_probs"] = data["rollout_log_probs"]
    else:
        with torch.no_grad():
            _, seen = step(worker, data.copy(), gen_NV, forward_only=True)
        columns = seen["model_output"]
        old_BT = no_padding_2_padding(columns.pop("log_probs"), data)
        lengths = data["responses"].offsets().diff()
        data["old_log_probs"] = nested(row[:n] for row, n in zip(old_BT, lengths, strict=True))
        data.update(columns)
    if case["kl"]:
        data["ref_log_prob"] = data["old_log_probs"]
    loss, seen = step(worker, data, now_NV, forward_only=False)
    loss.backward()
    place_R = [sum(PROMPTS[: b + 1]) + sum(RESPONSES[:b]) - 1 + t for b, n in enumerate(RESPONSES) for t in range(n)]
    metrics = {name: float(getattr(m, "values", [m])[0] if hasattr(m, "values") else m) for name, m in
               seen["metrics"].items() if "dlc" in name}  # fmt: skip
    flat = {name: data[name].values()[: sum(RESPONSES)].numpy() for name in ("responses", "response_mask", "advantages",
                                                           "rollout_log_probs", "old_log_probs")}  # fmt: skip
    np.savez(
        out, gen_RV=gen_NV[place_R], now_RV=now_NV[place_R], mu_RV=mu_RV, place_R=place_R,
        grad_NV=worker.engine.module.logits_NV.grad, temperature=TEMPERATURE, listed=LISTED,
        metrics=json.dumps(metrics), entropy="entropy" in seen["model_output"], **flat,
    )  # fmt: skip


if __name__ == "__main__":
    for name, given in json.loads(sys.argv[2]).items():
        main(f"{sys.argv[1]}/{name}.npz", given)
