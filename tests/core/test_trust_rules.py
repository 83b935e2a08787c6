"""What a single token, block, row or step may not decide, and what a floor lifted by the fault itself may not hide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from factories import Job, commands, of_kind
from factories_streams import make_noise, make_policy, make_streams

from dlc_sentinel.config import Config
from dlc_sentinel.core.diagnose import healthy
from dlc_sentinel.core.facts import StepFacts

BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}


@pytest.fixture
def job():
    return Job(dtypes=BF16)


def open_now(job):
    return {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"] if f["state"] != "closed"}


def kinds(job):
    return {f"{e.data['verdict']}/{e.data['kind']}" for e in of_kind(job.events, "finding")}


def with_odd_ends(step, rows, odd):
    s = make_streams(step, rows=rows, length=1024, disc=0.03)
    s.engine[:odd, -1] = s.old[:odd, -1] - 0.3
    return s.train()


def test_an_odd_last_token_in_one_of_four_rows_is_chance(job):
    for step in range(8):
        job.step(step, with_odd_ends(step, rows=4, odd=1))

    assert kinds(job) == set()


def test_an_odd_last_token_in_16_of_64_rows_is_not(job):
    for step in range(8):
        job.step(step, with_odd_ends(step, rows=64, odd=16))

    assert "DATA/last_token" in kinds(job)


def with_wild_block(step, wild):
    s = make_streams(step, rows=32, length=320, disc=0.02, lag=0.03)
    if wild:
        s.cur[0, :32] = np.minimum(s.old[0, :32] + 0.25, -1e-3)
        s.old[0, :32] = s.cur[0, :32] - 0.25
        s.engine[0, :32] = s.old[0, :32]
    return s.train(gen_version=max(step - 1, 0))


def test_one_wild_block_in_a_step_sends_nothing(job):
    for step in range(10):
        job.step(step, with_wild_block(step, wild=step == 6))

    assert job.report()["steps"][6]["lag_ess"]["32"] < 0.25
    assert commands(job.events) == []


def apart(step, share, by=0.2):
    s = make_streams(step, rows=40, disc=0.03)
    rows = s.rows(share)
    s.engine[rows] = np.minimum(s.old[rows] - make_noise(s.old[rows], by, s.rng), 0.0)
    return s.train()


@pytest.mark.parametrize(("first", "name"), [(40, "LABEL/some_rows"), (0, "ENGINE/some_requests")])
def test_rows_that_are_off_from_the_start_are_found_though_they_lift_the_floor(job, first, name):
    """At the first step of a run there is but one version: no label can be wrong."""
    for step in range(first, first + 14):
        job.step(step, apart(step, 0.3))

    assert job.report()["steps"][-1]["floor"]["rms"] > 0.05
    assert open_now(job) == {name}


def few_rows(step, disc):
    return make_streams(step, rows=8, length=96, disc=disc).train()


def test_a_handful_of_rows_needs_a_second_step_to_call_the_engine_changed(job):
    for step in range(12):
        job.step(step, few_rows(step, 0.03))
    job.step(12, few_rows(12, 0.07))
    assert "ENGINE/changed" not in kinds(job)

    job.step(13, few_rows(13, 0.07))

    assert "ENGINE/changed" in kinds(job)


def test_rows_paired_wrongly_stay_so_for_as_long_as_they_are(job):
    for step in range(12):
        s = make_streams(step, disc=0.03)
        if step >= 4:
            s.old = s.cur = make_policy(s.shape, s.rng, certain=0.4)
        job.step(step, s.train())

    assert open_now(job) == {"DATA/wrong_pairing"}


@pytest.mark.parametrize(
    ("basis", "action_ess", "bound_ess", "expected"),
    [
        ("exact", 0.9, math.nan, True),
        ("calibrated", 0.9, math.nan, True),
        ("exact", math.nan, math.nan, False),
        ("mixed", 0.9, math.nan, False),
        ("mixed", 0.9, 0.4, False),
        ("mixed", math.nan, 0.95, True),
        ("exact", math.nan, 0.95, True),
    ],
)
def test_a_mixed_basis_is_healthy_only_where_the_lower_bound_of_its_ess_says_so(basis, action_ess, bound_ess, expected):
    facts = StepFacts(3, 3, num_tokens=5000, basis=basis, action_ess=action_ess, bound_ess=bound_ess)

    assert healthy([facts], Config()) is expected
