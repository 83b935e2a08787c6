"""A real AsyncGRPOTrainer in one process: vLLM server, rollout worker and GPU kernel are stood in for, the rest is TRL.

The stand-ins go through TRL's public protocols `rollout_worker=` and `weight_transfer=`; FlashAttention 3 over packed
rows is computed with a plain softmax.
"""

from __future__ import annotations

import queue
from types import SimpleNamespace

import numpy as np
from stacks.trl.job import LENGTH, Engine, Job, prompts, reward, tiny_model, tokenizer

PER_STEP = 8
COMPLETIONS = 4


class Transfer:
    """Weight transfer into an engine of this process."""

    def __init__(self, engine):
        self._engine = engine

    def init_weight_transfer(self): ...
    def pause(self): ...
    def resume(self): ...
    def destroy(self): ...

    def send_weights(self, iterator):
        import torch

        own = dict(self._engine._model.named_parameters())
        with torch.no_grad():
            for name, value in iterator:
                own[name].copy_(value)


class Worker:
    """Fills the queue at each new version: `plan(version)` = optimizer steps' worth of samples to make with it."""

    def __init__(self, engine, plan):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.made = {}
        """(group, number in the group) -> (prompt, completion, logprobs, TRL's version)."""
        self._engine, self._plan = engine, plan
        self._num_groups = 0
        words = list(prompts(512)["prompt"])
        self._prompts = tokenizer()(words)["input_ids"]

    def start(self): ...
    def stop(self): ...
    def check_health(self, stale_after_s): ...

    def update_model_version(self, model_version):
        num = self._plan(model_version) * PER_STEP // COMPLETIONS
        chosen = self._prompts[self._num_groups : self._num_groups + num]
        if chosen:
            completions, logprobs = self._engine.sample([prompt for prompt in chosen for _ in range(COMPLETIONS)])
        for at, prompt in enumerate(chosen):
            mine = slice(at * COMPLETIONS, (at + 1) * COMPLETIONS)
            self._put(prompt, completions[mine], logprobs[mine], model_version)

    def _put(self, prompt, completions, logprobs, version):
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        group = self._num_groups
        self._num_groups += 1
        scores = np.array(reward(completions))
        for number, (ids, logps) in enumerate(zip(completions, logprobs, strict=True)):
            self.made[group, number] = (prompt, ids, logps, version)
            self.rollout_buffer.put_nowait(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(prompt + ids),
                    completion_mask=np.array([0] * len(prompt) + [1] * len(ids)),
                    old_log_probs=np.array([0.0] * len(prompt) + logps, np.float32),
                    advantage=float(scores[number] - scores.mean()),
                    model_version=version,
                    group_id=group,
                    metrics={"reward": float(scores[number])},
                )
            )


def varlen_attention(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=True, window_size=(-1, -1)):
    """FlashAttention's varlen function over segments, each query seeing the keys of its path up to its own place."""
    import torch

    out = torch.empty_like(q)
    shared = q.shape[1] // k.shape[1]
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    for i in range(len(bounds_q) - 1):
        q_i = q[bounds_q[i] : bounds_q[i + 1]].transpose(0, 1)
        k_i, v_i = (x[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1).repeat_interleave(shared, 0) for x in (k, v))
        num_q, num_k = q_i.shape[1], k_i.shape[1]
        scores = q_i @ k_i.transpose(1, 2) * (softmax_scale or q.shape[-1] ** -0.5)
        seen = torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        out[bounds_q[i] : bounds_q[i + 1]] = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_i).transpose(0, 1)
    return out


def async_grpo(patch, folder, *, max_steps, plan, **changes):
    """(job, worker): an AsyncGRPOTrainer whose every optimizer step trains 8 samples, 2 prompts with 4 completions."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo import async_grpo_trainer as module

    patch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))
    patch.setattr(module, "get_peak_flops_per_device", lambda *_: None)
    model = tiny_model()
    model.save_pretrained(folder / "model")
    engine = Engine(model, None, max_completion_length=LENGTH)
    worker = Worker(engine, plan)
    settings = {
        "per_device_train_batch_size": PER_STEP, "gradient_accumulation_steps": 1, "max_steps": max_steps,
        "num_generations": COMPLETIONS, "max_completion_length": LENGTH, "learning_rate": 1e-2, "token_budget": -1,
        "lr_scheduler_type": "constant", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "max_staleness": 50,
        "output_dir": str(folder / "out"), "seed": 1,
    }  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=str(folder / "model"), args=AsyncGRPOConfig(**settings | changes), train_dataset=prompts(64),
        processing_class=tokenizer(), rollout_worker=worker, weight_transfer=Transfer(engine),
    )  # fmt: skip
    return Job(trainer), worker
