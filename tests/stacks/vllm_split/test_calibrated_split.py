"""The calibrated split on a real vLLM loop, in a size for every run: one engine, batches three versions old."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LAG = 3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no real vLLM: .venv-vllm is missing"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twelve versions with an fp8 key-value cache, at the highest of the bench's learning rates."""
    from benchmarks.bench_calibrated import record
    from benchmarks.split_cases import load

    folder = tmp_path_factory.mktemp("split")
    size = ["--versions", "12", "--pretraining-steps", "150"]
    record(folder, "--engines", "fp8", "--rates", "5e-4", *size, python=ENGINE_PYTHON)
    return load(folder / "fp8-0.0005.npz")


@pytest.fixture(scope="module")
def found(run):
    from benchmarks.split_cases import cases

    return [case for case in cases(run) if case.lag == LAG]


def test_the_calibrated_ess_is_the_exact_one_to_three_hundredths(found):
    error = np.array([case.results["pool"].action_ess - case.ess for case in found])

    assert len(error) >= 6
    assert math.sqrt(np.mean(error**2)) <= 0.03


def test_the_interval_holds_the_exact_ess_in_three_batches_of_four(found):
    inside = [case.results["pool"].interval[0] <= case.ess <= case.results["pool"].interval[1] for case in found]

    assert np.mean(inside) >= 0.75


def test_the_engine_of_one_run_is_not_called_a_change(run):
    from dlc_sentinel.maths.calibrated import CalibrationPool

    pool = CalibrationPool()

    assert sum(pool.add(run.few_cells(version), version) for version in range(len(run.batches))) <= 1


def test_the_recorded_lag_is_real(found, run):
    assert sys.modules.get("vllm") is None
    assert min(case.rms for case in found) > 1e-3
    assert 1e-3 < np.sqrt(np.mean(run.batches[0].difference(0) ** 2)) < 0.2
