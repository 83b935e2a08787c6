"""What the vLLM plug-in costs a real engine: microseconds of the engine process's CPU per token, beyond logprobs=0.

A real engine generates one batch; its outputs, step by step, then go through vLLM's real front end many times, the
plug-in's wraps in and out in turn. So the model's own CPU, a hundred times the difference, is out of the noise. Every
thread counts, the sender included, until all is sent. Run alone: `python -m benchmarks.bench_vllm_plugin`, one JSON
object on stdout. Needs .venv-vllm (`make .venv-vllm/.ready`).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PAIRS = 120
NUM_SEQUENCES = 32
NUM_TOKENS = 192
MAX_US = 1.5
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "dlc_sentinel",
}


def run(pairs: int = PAIRS) -> dict[str, object]:
    """The figures, in microseconds per token with a 90 % bootstrap interval; `kept` says whether the promise holds."""
    from dlc_sentinel.wire.receiver import Receiver

    if not ENGINE_PYTHON.exists():
        return {"skipped": f"no vLLM at {ENGINE_PYTHON}"}
    with tempfile.TemporaryDirectory() as folder, Receiver("tcp://127.0.0.1:0") as receiver:
        env = os.environ | ENGINE_ENV | {"DLC_SENTINEL": str(receiver.address)}
        command = [str(ENGINE_PYTHON), str(Path(__file__).resolve()), folder, str(pairs)]
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as engine:
            done = threading.Event()
            reader = threading.Thread(target=_drain, args=(receiver, done))
            reader.start()
            out, _ = engine.communicate()
            done.set()
            reader.join()
    if engine.returncode:
        raise RuntimeError(f"the engine process ended with {engine.returncode}")
    return _figures(json.loads(out.splitlines()[-1]))


def _drain(receiver: Any, done: threading.Event) -> None:
    while not done.is_set():
        receiver.poll(20)


def _figures(measured: dict[str, Any]) -> dict[str, object]:
    on, off = np.array(measured["on_us"]), np.array(measured["off_us"])
    extra = on - off
    rng = np.random.default_rng(0)
    draws = np.median(rng.choice(extra, (2000, extra.size)), axis=1)
    low, high = np.quantile(draws, [0.05, 0.95])
    extra_us = float(np.median(extra))
    return {
        "sequences_a_step": NUM_SEQUENCES,
        "tokens_a_batch": measured["tokens"],
        "pairs": len(extra),
        "front_end_us_per_token": round(float(np.median(off)), 2),
        "plugin_us_per_token": round(extra_us, 3),
        "interval_90": [round(float(low), 3), round(float(high), 3)],
        "tokens_sent": measured["sent"],
        "promise": {"plugin_us_per_token": MAX_US},
        "kept": extra_us <= MAX_US,
    }


def _engine(folder: str, pairs: int) -> None:
    """Runs in .venv-vllm: prints the CPU of each batch, wraps in and out."""
    sys.path.insert(0, str(ROOT / "tests" / "stacks" / "vllm"))
    from vllm import LLM
    from vllm.v1.engine.output_processor import OutputProcessor

    tiny_model: Any = importlib.import_module("tiny_model")
    model = tiny_model.write(Path(folder) / "model")
    llm = LLM(
        str(model), dtype="float32", seed=1, enforce_eager=True, max_model_len=256, max_num_seqs=NUM_SEQUENCES,
        disable_log_stats=True, distributed_executor_backend="uni", enable_prefix_caching=False,
    )  # fmt: skip
    requests, steps = _record(llm)
    processor = llm.llm_engine.output_processor
    switch, hooks = _switch(OutputProcessor), _hooks(OutputProcessor)
    num_tokens = sum(len(output.new_token_ids) for outputs, _ in steps for output in outputs)

    def batch(wrapped: bool) -> float:
        switch(wrapped)
        start = time.process_time()
        for request in requests:
            processor.add_request(request, None, None, 0)
        for outputs, version in steps:
            processor.process_outputs(outputs, 0.0, None, weight_version=version)
        while any(hook.account()[2] for hook in hooks()):
            time.sleep(0.001)
        time.sleep(0.005)
        return 1e6 * (time.process_time() - start) / num_tokens

    took: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(-8, pairs):
        for wrapped in (True, False) if pair % 2 else (False, True):
            cost = batch(wrapped)
            if pair >= 0:
                took[wrapped].append(cost)
    sent = sum(hook.account()[0] for hook in hooks())
    print(json.dumps({"on_us": took[True], "off_us": took[False], "tokens": num_tokens, "sent": sent}))


def _record(llm: Any) -> tuple[list[Any], list[tuple[list[Any], str]]]:
    """The requests of one batch and every step of real engine outputs, as the front end got them."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    requests: list[Any] = []
    steps: list[tuple[list[Any], str]] = []
    add, get = engine.engine_core.add_request, engine.engine_core.get_output

    def keep_request(request: Any) -> None:
        requests.append(request)
        add(request)

    def keep_output() -> Any:
        outputs = get()
        steps.append((list(outputs.outputs), outputs.weight_version))
        return outputs

    engine.engine_core.add_request, engine.engine_core.get_output = keep_request, keep_output
    prompts = [{"prompt_token_ids": [3 + i, 40, 50, 60]} for i in range(NUM_SEQUENCES)]
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    return requests, [step for step in steps if step[0]]


def _switch(processor: Any) -> Callable[[bool], None]:
    wrapped = {name: getattr(processor, name) for name in ("add_request", "process_outputs", "abort_requests")}

    def turn(on: bool) -> None:
        for name, method in wrapped.items():
            setattr(processor, name, method if on else method.__wrapped__)

    return turn


def _hooks(processor: Any) -> Callable[[], list[Any]]:
    """The hooks of the plug-in in this process, found where its wraps keep them."""
    closure = dict(zip(processor.add_request.__code__.co_freevars, processor.add_request.__closure__, strict=True))
    plugin = closure["plugin"].cell_contents
    return lambda: [hook for _, hook in plugin._hooks.values()]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _engine(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(run(), indent=1))
