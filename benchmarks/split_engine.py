"""The vLLM engines of `record_split`, in its process; importing this sets the environment that vLLM on a CPU needs.

An fp8 key-value cache needs AVX-512 in vLLM's CPU kernels. Elsewhere keys and values are rounded to the fp8 type before
they go to a bfloat16 cache: the rounding of an fp8 cache at scale 1, vLLM's default, without its kernel.
Axes: S rows, P prompt tokens, T response tokens, N packed tokens.
"""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

from dlc_sentinel.demo.vllm_engine import VLLM_ENV

os.environ.update(VLLM_ENV)  # torch reads TORCH_COMPILE_DISABLE when it is imported

import numpy as np
import torch
from torch import Tensor

ENGINES = {  # name: (dtype of weights and activations, dtype of the key-value cache)
    "fp32": ("float32", "auto"),
    "bf16": ("bfloat16", "auto"),
    "fp8": ("bfloat16", "fp8"),
    "e5m2": ("bfloat16", "fp8_e5m2"),
}
CACHE_ROUNDING = {"fp8": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def must_round(name: str) -> bool:
    """True where vLLM refuses this engine's fp8 cache, which its CPU kernels have for AVX-512 only."""
    return name in CACHE_ROUNDING and not torch.cpu._is_avx512_supported()


def round_cache(dtype: torch.dtype | None) -> None:
    """Makes engines round keys and values to an fp8 type before they are cached; None = leave them as they are.

    The cache then holds the numbers an fp8 cache with scale 1, which is vLLM's default, gives back.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    write = getattr(
        CPUAttentionBackendImpl.do_kv_cache_update, "__wrapped__", CPUAttentionBackendImpl.do_kv_cache_update
    )

    @functools.wraps(write)
    def rounded(
        self: object, layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if dtype is not None:
            largest = torch.finfo(dtype).max
            key, value = (x.clamp(-largest, largest).to(dtype).to(x.dtype) for x in (key, value))
        write(self, layer, key, value, kv_cache, slot_mapping)

    CPUAttentionBackendImpl.do_kv_cache_update = rounded


class Engine:
    """A vLLM engine inside this process, whose weights can be replaced."""

    def __init__(self, name: str, model_dir: Path, seed: int, *, max_rows: int, max_tokens: int) -> None:
        import vllm

        dtype, cache_dtype = ENGINES[name]
        if must_round(name):
            cache_dtype = "auto"
        round_cache(CACHE_ROUNDING[name] if must_round(name) else None)
        self._engine = vllm.LLM(
            str(model_dir),
            dtype=dtype,
            kv_cache_dtype=cache_dtype,
            seed=seed,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=max_tokens,
            max_num_seqs=max_rows,
            disable_log_stats=True,
            distributed_executor_backend="uni",
        )

    def load(self, weights: dict[str, np.ndarray]) -> None:
        """Takes the weights and forgets every cached prefix."""
        payload = [(name, torch.from_numpy(value)) for name, value in weights.items()]
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": payload})
        self._engine.reset_prefix_cache()

    def generate(self, prompts_SP: Tensor, length_S: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """([S, T] responses, right-padded with 0; [N] the engine's own logprobs of them, packed)."""
        from vllm import SamplingParams

        wanted = [
            SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, ignore_eos=True, detokenize=False)
            for length in length_S.tolist()
        ]
        asked = [{"prompt_token_ids": row} for row in prompts_SP.tolist()]
        outputs = [answer.outputs[0] for answer in self._engine.generate(asked, wanted, use_tqdm=False)]
        tokens_ST = torch.zeros(len(outputs), int(length_S.max()), dtype=torch.int64)
        for row, output in enumerate(outputs):
            tokens_ST[row, : len(output.token_ids)] = torch.tensor(output.token_ids)
        chosen = [at[token].logprob for o in outputs for at, token in zip(o.logprobs, o.token_ids, strict=True)]
        return tokens_ST, np.array(chosen, dtype=np.float32)

    def rescore(self, prompt: list[int], response: list[int]) -> np.ndarray:
        """The engine's logprobs, at its present weights, of a response somebody else made."""
        from vllm import SamplingParams

        asked = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        (answer,) = self._engine.generate([{"prompt_token_ids": prompt + response}], asked, use_tqdm=False)
        places = answer.prompt_logprobs[len(prompt) :]
        return np.array([at[token].logprob for at, token in zip(places, response, strict=True)], dtype=np.float32)

    def close(self) -> None:
        """Ends the engine now: collected later, it would take down what the next one has set up."""
        del self._engine
        gc.collect()


class Engines:
    """The engines of a run, one at a time."""

    def __init__(self, names: list[str], model_dir: Path, seed: int, *, max_rows: int, max_tokens: int) -> None:
        self._names, self._model_dir, self._seed = names, model_dir, seed
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._now: tuple[int, Engine] | None = None

    def at(self, place: int) -> Engine:
        """The engine at a place of the list, begun when it is first asked for; the one before is given up."""
        if self._now is None or self._now[0] != place:
            if self._now is not None:
                self._now[1].close()
            size = {"max_rows": self._max_rows, "max_tokens": self._max_tokens}
            self._now = place, Engine(self._names[place], self._model_dir, self._seed * 100 + place, **size)
        return self._now[1]
