"""Starts real vLLM engines and drives them through scenes; runs in .venv-vllm, one process a call.

    python driver.py MODE FOLDER        MODE: inprocess | multiprocess

Prints one JSON line on stdout: per scene what the engine itself says it generated, with Hugging Face's logprobs of the
same tokens where a scene compares them. The plug-in's stream goes to DLC_SENTINEL, beside it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tiny_model
import torch
from transformers import AutoModelForCausalLM

Row = dict[str, Any]
PROMPT = [3, 40, 50, 60]


def engine(folder: Path, dtype: str = "float32", **options: Any) -> Any:
    """A tiny in-process (or, by environment, multi-process) engine."""
    from vllm import LLM

    settings = {
        "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64, "seed": 1, "disable_log_stats": True,
        "distributed_executor_backend": "uni", "enable_prefix_caching": False,
    }  # fmt: skip
    return LLM(str(folder), dtype=dtype, **(settings | options))


def params(**given: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given.setdefault("output_kind", RequestOutputKind.FINAL_ONLY)
    return SamplingParams(**({"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False} | given))


def generate(
    llm: Any,
    prefix: str,
    prompts: Sequence[Sequence[int]],
    sampling: Any,
    between: Callable[[int], object] = lambda step: None,
) -> list[Row]:
    """Every response as the engine returns it. `between` runs before each engine step."""
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{prefix}-{index}", {"prompt_token_ids": list(prompt)}, sampling)
    rows: list[Row] = []
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        between(step)
        rows += [row for output in llm.llm_engine.step() if output.finished for row in _rows(output)]
        step += 1
    return rows


def _rows(output: Any) -> Iterable[Row]:
    many = len(output.outputs) > 1
    for one in output.outputs:
        seen = (
            None if one.logprobs is None else [at[k].logprob for at, k in zip(one.logprobs, one.token_ids, strict=True)]
        )
        yield {
            "id": f"{output.request_id}:{one.index}" if many else output.request_id,
            "prompt": list(output.prompt_token_ids),
            "tokens": list(one.token_ids),
            "logprobs": seen,
            "finish": one.finish_reason,
            "cached": output.num_cached_tokens,
            "spans": [[span.version, span.start, span.end] for span in one.weight_versions or ()],
        }


def score(model: Any, rows: Sequence[Row], key: str = "trainer") -> None:
    """Adds Hugging Face's logprobs of the responses under `key`; rows must be of one shape."""
    with torch.no_grad():
        ids = torch.tensor([row["prompt"] + row["tokens"] for row in rows])
        start = len(rows[0]["prompt"])
        logits = model(ids, use_cache=False).logits[:, start - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
    for row, values in zip(rows, chosen.tolist(), strict=True):
        row[key] = values


def prompts_of(num_rows: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (num_rows, length), generator=generator).tolist()


def trainer(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def perturbed(model: Any, size: float, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Moves the trainer's weights by `size` of their spread, and gives them as a payload for the engine."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return [(name, value.detach().clone()) for name, value in model.state_dict().items()]


def reload(llm: Any, payload: list[tuple[str, torch.Tensor]]) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": payload})


# -- scenes ---------------------------------------------------------------------------------------------------------


def ladder(folder: Path) -> dict[str, list[Row]]:
    """fp32, bf16 and bf16 with FP8 keys: the same weights, three discrepancies."""
    found: dict[str, list[Row]] = {}
    model = trainer(folder / "bf16")
    for name, dtype, options in (
        ("bf16", "bfloat16", {}),
        ("fp8", "bfloat16", {"kv_cache_dtype": "fp8"}),
    ):
        if name == "fp8" and not torch.cpu._is_avx512_supported():
            continue  # vLLM refuses FP8 keys on this CPU
        llm = engine(folder / "bf16", dtype, **options)
        found[name] = generate(llm, name, prompts_of(64, 16), params(max_tokens=64))
        score(model, found[name])
        del llm
    return found


def fp32_scenes(folder: Path) -> dict[str, list[Row]]:
    """Everything that one fp32 engine can show."""
    llm = engine(folder / "fp32")
    model = trainer(folder / "fp32")
    found = {"fp32": generate(llm, "fp32", prompts_of(64, 16), params(max_tokens=64))}
    score(model, found["fp32"])
    found["many"] = generate(llm, "many", [PROMPT] * 4, params(max_tokens=24, n=3))
    found["stop"] = _stopped(llm)
    found["abort"] = _aborted(llm)
    found["unasked"] = generate(llm, "unasked", prompts_of(4, 8), params(max_tokens=12, logprobs=None))
    found["top"] = generate(llm, "top", prompts_of(4, 8), params(max_tokens=12, logprobs=5))
    found["mixed"] = _mixed_widths(llm)
    found["long"] = generate(llm, "long", prompts_of(2, 8), params(max_tokens=480))
    before = trainer(folder / "fp32")
    found["in_flight"] = _in_flight(llm, model)
    score(before, found["in_flight"], "old_weights")
    score(model, found["in_flight"], "new_weights")
    _mixed_score(before, model, found["in_flight"], 30)
    _versions(llm, model, found)
    return found


def _stopped(llm: Any) -> list[Row]:
    """About one token in ten ends with "7>"."""
    return generate(llm, "stop", prompts_of(16, 8), params(max_tokens=200, stop=["7>"], detokenize=True))


def _aborted(llm: Any) -> list[Row]:
    """Half of the requests are given up by the client after 10 tokens."""

    def between(step: int) -> None:
        if step == 10:
            llm.llm_engine.abort_request([f"abort-{i}" for i in range(0, 8, 2)])

    return generate(llm, "abort", prompts_of(8, 8), params(max_tokens=20), between)


def _mixed_widths(llm: Any) -> list[Row]:
    """Requests with logprobs 0, 3 and none share their steps."""
    for index, asked in enumerate((0, 3, None) * 4):
        prompt = {"prompt_token_ids": [*PROMPT, index + 3]}
        llm.llm_engine.add_request(f"mixed-{index}", prompt, params(max_tokens=10 + index, logprobs=asked))
    rows: list[Row] = []
    while llm.llm_engine.has_unfinished_requests():
        rows += [row for output in llm.llm_engine.step() if output.finished for row in _rows(output)]
    return rows


def _in_flight(llm: Any, model: Any) -> list[Row]:
    """New weights at output token 30, nothing paused."""

    def between(step: int) -> None:
        if step == 30:
            reload(llm, perturbed(model, 0.01, 1))

    return generate(llm, "in_flight", prompts_of(16, 16), params(max_tokens=64), between)


def _mixed_score(before: Any, after: Any, rows: Sequence[Row], boundary: int) -> None:
    """Adds under "mixed_kv" what both sets of weights in turn give: keys of the old ones stay in the cache."""
    with torch.no_grad():
        ids = torch.tensor([row["prompt"] + row["tokens"] for row in rows])
        start = len(rows[0]["prompt"])
        # Token k of the response comes from the forward pass over position start + k - 1.
        cut = start + boundary - 1
        first = before(ids[:, :cut], use_cache=True)
        second = after(ids[:, cut:-1], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits, second.logits], 1)[:, start - 1 :].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]
    for row, values in zip(rows, chosen.tolist(), strict=True):
        row["mixed_kv"] = values


def _versions(llm: Any, model: Any, found: dict[str, list[Row]]) -> None:
    def rows(name: str) -> None:
        found[name] = generate(llm, name, prompts_of(4, 8), params(max_tokens=8))

    reload(llm, perturbed(model, 0.01, 2))
    rows("after_reload")
    llm.llm_engine.engine_core.engine_core.set_weight_version("step-40")
    rows("labelled")
    inner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    norms = [(name, p.detach().clone()) for name, p in model.named_parameters() if name.endswith("layernorm.weight")]
    for name, value in norms:  # a trainer that pushes parameter by parameter
        inner.load_weights([(name, value)])
    rows("pushed")
    for name, value in norms:
        inner.load_weights([(name, value)])
    rows("pushed_again")
    reload(llm, perturbed(model, 0.0, 3))
    rows("same_weights")


def stale_cache(folder: Path) -> dict[str, list[Row]]:
    """New weights on a prefix cache that was filled by the old ones."""
    llm = engine(folder / "fp32", enable_prefix_caching=True)
    model = trainer(folder / "fp32")
    prompts = prompts_of(16, 300)
    found = {"warm": generate(llm, "warm", prompts, params(max_tokens=32))}
    reload(llm, perturbed(model, 0.01, 4))
    found["stale"] = generate(llm, "stale", prompts, params(max_tokens=32))
    found["fresh"] = generate(llm, "fresh", prompts_of(16, 300, seed=9), params(max_tokens=32))
    llm.reset_prefix_cache()
    found["reset"] = generate(llm, "reset", prompts, params(max_tokens=32))
    for name in ("stale", "fresh", "reset"):
        score(model, found[name])
    return found


def crowded(folder: Path) -> dict[str, list[Row]]:
    """Too few blocks for all: requests are preempted and come back. Processed logprobs at T = 0.7 beside it."""
    llm = engine(
        folder / "fp32",
        num_gpu_blocks_override=20,
        block_size=32,
        max_model_len=128,
        logprobs_mode="processed_logprobs",
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted: set[str] = set()
    inner = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *rest, **more: (
        preempted.add(request.request_id),
        inner(request, *rest, **more),
    )[1]
    rows = generate(llm, "crowded", prompts_of(16, 16), params(max_tokens=64, temperature=0.7, top_p=0.9, top_k=50))
    return {"crowded": rows, "preempted": [{"id": name} for name in sorted(preempted)]}


def hashed(folder: Path) -> dict[str, list[Row]]:
    """Responses named by their tokens, for trainers that never see a request id. The greedy ones are all alike."""
    os.environ["DLC_SENTINEL_IDS"] = "hash"
    llm = engine(folder / "fp32")
    found = {"hashed": generate(llm, "hashed", prompts_of(8, 40), params(max_tokens=24))}
    found["alike"] = generate(llm, "alike", [PROMPT] * 3, params(max_tokens=8, temperature=0.0))
    del os.environ["DLC_SENTINEL_IDS"]
    score(trainer(folder / "fp32"), found["hashed"])
    return found


def adapters(folder: Path) -> dict[str, list[Row]]:
    """A base model and two LoRA adapters on it, each named by its version."""
    from vllm.lora.request import LoRARequest

    llm = engine(folder / "fp32", enable_lora=True, max_lora_rank=8, max_model_len=128)
    rows = {"base": generate(llm, "base", prompts_of(4, 8), params(max_tokens=8))}
    for name, number in (("policy-v7", 1), ("policy-v8", 2)):
        path = tiny_model.write_adapter(folder / name, folder / "fp32", number)
        adapter = LoRARequest(name, number, str(path))
        llm.llm_engine.add_lora(adapter)  # as the API server's load_lora_adapter does
        for index, prompt in enumerate(prompts_of(4, 8)):
            llm.llm_engine.add_request(
                f"{name}-{index}", {"prompt_token_ids": list(prompt)}, params(max_tokens=8), lora_request=adapter
            )
        rows[name] = []
        while llm.llm_engine.has_unfinished_requests():
            rows[name] += [row for output in llm.llm_engine.step() if output.finished for row in _rows(output)]
    return rows


def multiprocess(folder: Path) -> dict[str, list[Row]]:
    """The engine core in a process of its own."""
    llm = engine(folder / "fp32")
    model = trainer(folder / "fp32")
    found = {"multi": generate(llm, "multi", prompts_of(16, 16), params(max_tokens=32))}
    score(model, found["multi"])
    found["multi_flight"] = generate(
        llm, "multi_flight", prompts_of(8, 16), params(max_tokens=200), lambda step: _reload_file(llm, step)
    )
    return found


def _reload_file(llm: Any, step: int) -> None:
    if step == 50:
        llm.collective_rpc("reload_weights")


def main(mode: str, folder: Path) -> None:
    found: dict[str, list[Row]] = {}
    if mode == "multiprocess":
        found |= multiprocess(folder)
    else:
        for scene in (fp32_scenes, stale_cache, crowded, hashed, adapters, ladder):
            found |= scene(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    home = Path(sys.argv[2])
    os.environ.setdefault("DLC_SENTINEL_RUN", "vllm")
    for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if not (home / kind).exists():
            tiny_model.write(home / kind, dtype)
    main(sys.argv[1], home)
