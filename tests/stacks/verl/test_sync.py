"""Real verl, its default trainer, with the plug-in by pip install alone: the numbers equal verl's own."""

import numpy as np
import pytest
from stacks.verl.support.job import DELIVERED, SYNC

pytestmark = [pytest.mark.slow, pytest.mark.verl]
SIZE = SYNC
STEPS = range(1, DELIVERED + 2)
"""Steps whose rows are of weights that were delivered."""


def stream(records, name):
    """A stream of all the records, float64, masked tokens only."""
    parts = [getattr(t, f"{name}_N")[slice(None) if t.mask_N is None else t.mask_N] for t in records]
    return np.concatenate(parts).astype(np.float64)


def test_every_step_is_exact_and_every_token_of_age_0(decoupled):
    _, listening = decoupled

    assert {step["basis"] for step in listening.steps.values()} == {"exact"}
    assert {step["version_age"]["max"] for step in listening.steps.values()} == {0.0}
    assert all(step["version"] == number - 1 for number, step in listening.steps.items())


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


def test_discrepancy_is_at_its_floor_while_weights_are_delivered(decoupled):
    _, listening = decoupled

    assert all(1e-3 < listening.steps[step]["discrepancy"]["rms"] < 0.02 for step in STEPS)


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
    step, logged = max(job.metrics().items())

    assert step - 3 <= logged["dlc/last_step"] < step
    assert 0 < logged["dlc/lag_ess_ratio/32"] <= 1
    assert "dlc/discrepancy_nats/rms" in logged


def test_a_job_that_ends_says_goodbye_for_all_its_processes(decoupled):
    _, listening = decoupled
    states = listening.until(
        lambda: (found := [p["state"] for p in listening.snapshot.runs[0].producers]) == ["gone"] * 2 and found, 20
    )

    assert len(states) == 2
    assert not [e for e in listening.events if e.kind == "finding" and e.data["kind"] == "silent"]
