"""The generator's process with a real vLLM on CPU: `python -m dlc_sentinel.demo.vllm_engine`, in vLLM's environment.

Speaks what engine.py speaks. Weights go in through vLLM's own `reload_weights`, after which the prefix cache is reset:
`reload_weights` leaves it, and old keys under new weights are a fault that no version tag reveals.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dlc_sentinel.demo.engine import EngineSettings, own_pipe, serve
from dlc_sentinel.records import F32, I64

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; unset, it wants a large share of the memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: weights are passed by reference
    "TORCH_COMPILE_DISABLE": "1",  # the first request for logprobs would compile for half a minute
    "OMP_NUM_THREADS": "1",  # two spinning OpenMP threads on two cores are fifty times slower than one
    "VLLM_PLUGINS": "none",  # this process has a hook of its own
}


class VllmBackend:
    """A vLLM engine inside this process."""

    stack = "vllm"

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.update(VLLM_ENV)
        import vllm

        self.dtype = settings.dtype
        self._engine: LLM = vllm.LLM(
            settings.model_dir,
            dtype=settings.dtype,
            seed=settings.seed,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=max(64, settings.num_tokens),
            max_num_seqs=settings.num_rows,
            disable_log_stats=True,
            distributed_executor_backend="uni",
        )

    def load(self, weights: Mapping[str, F32]) -> None:
        import torch

        payload = [(name, torch.from_numpy(np.array(value))) for name, value in weights.items()]
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": payload})
        self._engine.reset_prefix_cache()

    def generate(self, prompts_SP: I64, num_tokens: int) -> tuple[I64, F32]:
        prompts = [{"prompt_token_ids": row} for row in prompts_SP.tolist()]
        answers = self._engine.generate(prompts, self._sampling(num_tokens), use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        tokens = np.array([output.token_ids for output in outputs], dtype=np.int64)
        chosen = [[at[token].logprob for at, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
        return tokens, np.array(chosen, dtype=np.float32)

    def coarsen(self, grid_nats: float) -> None:
        raise ValueError(f"logits rounded to {grid_nats} nats: the vLLM engine has no such fault; use the tiny engine")

    def _sampling(self, num_tokens: int) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(temperature=1.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    serve(own_pipe(), VllmBackend)
