"""The main job on a real vLLM engine: in fp32 everything measured is lag, in bf16 the engine's own numerics show."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from statistics import median

import pytest
from test_demo_faults import run_arms, said

import dlc_sentinel
from dlc_sentinel.demo.spec import ArmSpec

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no real vLLM: .venv-vllm is missing (`make test` makes it)"),
]


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    """(result, events) of one watched arm whose generator is a real vLLM in fp32."""
    spec = ArmSpec(
        name="vllm", engine="vllm", engine_python=str(PYTHON), engine_dtype="float32", num_steps=60,
        syncs_every_step=False, synced_steps=8, learning_rate=0.003, true_reward_every=1000,
    )  # fmt: skip
    results, events = run_arms(tmp_path_factory.mktemp("vllm"), spec)
    return results["vllm"], events["vllm"]


def steps_of(events):
    return {event.step: event.data for event in said(events, "step")}


def test_with_an_fp32_engine_the_discrepancy_stays_below_1e_5_while_ess_falls_below_one_half(stale):
    _, events = stale
    steps = steps_of(events)

    assert max(step["discrepancy"]["rms"] for step in steps.values()) < 1e-5
    assert min(step["lag_ess"]["32"] for step in steps.values()) < 0.5


def test_the_resync_is_sent_applied_acknowledged_and_brings_the_total_down(stale):
    _, events = stale
    steps = steps_of(events)
    acks = [event for event in said(events, "ack") if event.data["outcome"] == "applied"]

    assert acks and any("worked" in event.text for event in said(events, "note"))
    for ack in acks:
        fresh = next((step for number, step in sorted(steps.items()) if number > ack.step), None)
        if fresh is None:
            continue
        earlier = [s["total"]["rms"] for n, s in steps.items() if n < ack.step and s["version_age"]["max"] == 0]
        assert fresh["version_age"]["max"] == 0
        assert fresh["total"]["rms"] <= 1.5 * median(earlier)


def test_a_bf16_engine_on_a_random_model_shows_its_numerics_at_step_zero(tmp_path):
    quiet = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1",
        "VLLM_PLUGINS": "none",
    }  # fmt: skip
    script = Path(__file__).with_name("random_model.py")
    out = tmp_path / "random.jsonl"
    done = subprocess.run(
        [str(PYTHON), str(script), str(tmp_path / "model"), str(out)],
        env={**os.environ, **quiet}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]

    report = dlc_sentinel.analyze(out)

    assert 5e-3 <= report["steps"][0]["discrepancy"]["rms"] <= 3e-2
    assert report["verdict"] == "HEALTHY"
