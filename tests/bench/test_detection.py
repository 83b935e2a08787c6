"""The detection bench, small: a thinned grid at test seeds and 2,000 healthy steps. `make bench` runs the whole."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.detection import healthy, labelled, score
from benchmarks.detection.grid import plans

pytestmark = pytest.mark.slow

THIN = 6
STEPS, MAX_ALARMS = 2000, 2
SEEDS_FROM = 5000


@cache
def figures():
    """Every sixth run of the grid, scored."""
    return score.summary([labelled.play(plan).to_json() for plan in plans(thin=THIN)])


def test_95_percent_of_the_visible_faults_get_their_verdict():
    found = figures()

    assert found["visible"] >= 40
    assert found["accuracy"] >= 0.95, found["missed"]


def test_no_verdict_is_right_on_less_than_90_percent_of_its_visible_faults():
    low = {name: of for name, of in figures()["verdicts"].items() if of["visible"] and of["accuracy"] < 0.9}

    assert not low, figures()["missed"]


def test_a_catastrophic_fault_is_never_called_healthy():
    found = figures()

    assert found["catastrophic"] >= 5
    assert found["catastrophic_called_healthy"] == []


def test_no_finding_opens_before_its_fault_begins():
    assert figures()["early_findings"] == []


def test_2000_healthy_steps_raise_at_most_2_alarms():
    rows = [healthy.to_json(run, healthy.play(run)) for run in healthy.runs(STEPS, seeds_from=SEEDS_FROM)]

    found = healthy.summary(rows)

    assert found["steps"] >= STEPS
    assert len(found["findings"]) + len(found["commands"]) <= MAX_ALARMS, found


def test_three_wild_tokens_among_a_mixture_of_experts_are_no_catastrophe():
    alarms = healthy.play(healthy.Healthy("spikes", "moe", 2057, num_steps=24))

    assert (alarms.findings, alarms.commands) == ([], [])


def test_rows_that_hold_a_masked_span_are_off_for_that_and_not_for_a_wrong_label():
    (plan,) = (plan for plan in plans() if plan.name == "masked_span-0.5-256x256-fp8-1126")

    assert list(labelled.play(plan).outcome.kinds) == ["DATA/masked_span"]
