"""The demo's generator with a real vLLM, in the environment that holds it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dlc_sentinel.demo.client import launch
from dlc_sentinel.demo.engine import EngineSettings
from dlc_sentinel.demo.policy import make_policy, score, weights_of
from dlc_sentinel.demo.shape import PolicyShape

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no real vLLM: .venv-vllm is missing"),
]


def test_a_float32_vllm_agrees_with_the_trainer_before_and_after_new_weights(tmp_path):
    shape = PolicyShape()
    policies = [make_policy(shape, seed) for seed in (1, 2)]
    policies[0].save_pretrained(tmp_path / "model")
    settings = EngineSettings(dtype="float32", num_rows=16, num_tokens=64, model_dir=str(tmp_path / "model"))
    prompts = np.random.default_rng(0).integers(0, shape.vocab_size, (16, 4))

    with launch("vllm", settings, tmp_path, str(PYTHON)) as engine:
        batches = []
        for version, policy in enumerate(policies):
            engine.sync(weights_of(policy), version=version, step=version)
            batches.append(engine.generate(f"b{version}", prompts, 60))

    for version, (policy, batch) in enumerate(zip(policies, batches, strict=True)):
        logprobs = score(policy, torch.from_numpy(prompts), torch.from_numpy(batch.tokens_ST)).numpy()
        assert batch.version == version
        assert float(np.sqrt(np.mean((logprobs - batch.engine_ST) ** 2))) < 1e-5
