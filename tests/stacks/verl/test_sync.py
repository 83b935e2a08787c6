"""Real verl, its default trainer, with the plug-in by pip install alone: the numbers equal verl's own."""

import numpy as np
import pytest
from stacks.verl.support.job import FLOAT32, JOB_S, SYNC, TWICE

from dlc_sentinel.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.verl]
SIZE = SYNC
BYPASS = "algorithm.rollout_correction.bypass_mode=True"


@pytest.fixture(scope="module")
def bypass(launch, watch):
    """(job, watch) of the same job in bypass mode."""
    listening = watch(Config())
    job = launch(SIZE, *FLOAT32, TWICE, BYPASS, env=listening.env).ended_well(JOB_S)
    listening.until(lambda: len(listening.steps) == SIZE.steps, 30)
    return job, listening


def stream(records, name):
    """A stream of all the records, float64, masked tokens only."""
    parts = [getattr(t, f"{name}_N")[slice(None) if t.mask_N is None else t.mask_N] for t in records]
    return np.concatenate(parts).astype(np.float64)


def test_every_step_is_exact_and_every_token_of_age_0(decoupled):
    _, listening = decoupled

    assert [step["basis"] for step in listening.steps.values()] == ["exact"] * SIZE.steps
    assert [step["version_age"]["max"] for step in listening.steps.values()] == [0.0] * SIZE.steps
    assert [step["version"] for step in listening.steps.values()] == [0, 1]


@pytest.mark.parametrize("name", ["kl", "k3_kl", "chi2_token"])
def test_the_discrepancy_gives_the_numbers_that_verl_logs_itself(decoupled, name):
    job, listening = decoupled
    for step, logged in job.metrics().items():
        records = listening.rows(step, update=0)
        x = stream(records, "old") - stream(records, "engine")
        ours = {"kl": -x.mean(), "k3_kl": (np.expm1(x) - x).mean(), "chi2_token": np.exp(2 * x).mean() - 1}

        assert ours[name] == pytest.approx(logged[f"rollout_corr/{name}"], abs=1e-5)


def test_the_published_mean_is_minus_the_kl_that_verl_logs(decoupled):
    job, listening = decoupled
    for step, logged in job.metrics().items():
        assert listening.steps[step]["discrepancy"]["mean"] == pytest.approx(-logged["rollout_corr/kl"], abs=1e-5)


def test_lag_is_nothing_in_the_first_update_and_something_in_the_second(decoupled):
    _, listening = decoupled
    lag = [
        np.abs(stream(listening.rows(1, update), "cur") - stream(listening.rows(1, update), "old")).max()
        for update in (0, 1)
    ]

    assert lag[0] < 1e-5 < 1e-4 < lag[1]


def test_no_token_is_lost_doubled_or_invented(decoupled):
    job, listening = decoupled
    for step, logged in job.metrics().items():
        num = round(logged["response_length/mean"] * SIZE.prompts * SIZE.samples)

        assert sum(int(t.offsets_S1[-1]) for t in listening.rows(step, update=0)) == num
        assert listening.steps[step]["num_tokens"] == 2 * num
        assert not any(listening.steps[step]["dropped"].values())


def test_groups_are_the_prompts(decoupled):
    _, listening = decoupled

    assert {step["num_groups"] for step in listening.steps.values()} == {SIZE.prompts}


def test_number_formats_are_told_as_they_were_before_any_cast(decoupled):
    _, listening = decoupled

    assert {t.dtypes["cur"] for t in listening.trains} <= {"float32", "bfloat16"}
    assert {t.dtypes["cur"] for t in listening.trains} == {t.dtypes["old"] for t in listening.trains}
    assert {t.dtypes["engine"] for t in listening.trains} == {"float32"}


def test_the_sentinels_numbers_stand_in_verls_own_log(decoupled):
    job, _ = decoupled
    logged = job.metrics()[SIZE.steps]

    assert logged["dlc/last_step"] == 1
    assert 0 < logged["dlc/lag_ess_ratio/32"] <= 1
    assert "dlc/discrepancy_nats/rms" in logged


def test_bypass_mode_takes_its_discrepancy_from_the_first_update_and_finds_the_same(decoupled, bypass):
    first = [listening.steps[1]["discrepancy"] for _, listening in (decoupled, bypass)]

    assert bypass[0].metrics()[1].get("rollout_corr/kl") is None
    assert first[1]["rms"] == pytest.approx(first[0]["rms"], abs=1e-5)
    assert first[1]["mean"] == pytest.approx(first[0]["mean"], abs=1e-5)


def test_bypass_mode_sends_no_copy_of_the_engines_values_as_a_middle_stream(bypass):
    _, listening = bypass

    assert {t.old_is for t in listening.trains} == {"engine"}
    assert all(t.old_N is None for t in listening.trains)
