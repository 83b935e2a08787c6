"""LEARNING: the policy collapses or stands still though engine and trainer agree."""

import pytest
from factories import Job


def learning(values, **more):
    """Kinds of LEARNING found over steps whose scalars are the lists given, the last value held."""
    job = Job()
    for step in range(40):
        scalars = {name: float(of[min(step, len(of) - 1)]) for name, of in values.items()}
        job.step(step, rows=4, lag=0.0, scalars={"lr": 1e-6, "grad_norm": 0.5} | scalars | more)
    return {f["kind"] for f in job.report()["findings"] if f["verdict"] == "LEARNING"}


def test_entropy_below_a_tenth_of_its_start_is_found():
    assert learning({"entropy": [2.0] * 10 + [0.1]}) == {"entropy"}
    assert learning({"entropy": [2.0] * 10 + [0.3]}) == set()


def test_low_entropy_of_a_policy_that_has_learnt_its_task_is_no_fault():
    assert learning({"entropy": [2.0] * 10 + [0.1], "reward": [0.2] * 10 + [0.9]}) == set()
    assert learning({"entropy": [2.0] * 10 + [0.1], "reward": [0.35]}) == {"entropy"}
    assert learning({"entropy": [2.0] * 10 + [0.1], "reward": [0.2] * 6 + [0.9] * 6 + [0.75]}) == {"entropy"}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"truncated_ratio": [0.05] * 10 + [0.9]}, "truncation"),
        ({"response_length": [200] * 10 + [700]}, "length"),
        ({"reward": [0.2] * 6 + [0.8] * 8 + [0.3]}, "reward"),
    ],
)
def test_a_dial_that_leaves_its_range_is_named(values, kind):
    assert learning(values) == {kind}


@pytest.mark.parametrize(
    "values",
    [
        {"truncated_ratio": [0.05] * 10 + [0.45]},  # most rows are whole
        {"truncated_ratio": [0.45] * 10 + [0.6]},  # nearly as many were cut from the start
        {"response_length": [200] * 10 + [550]},
        {"reward": [0.2] * 6 + [0.8] * 8 + [0.5]},
        {"reward": [0.04] * 10 + [0.01]},  # a peak so low is none
    ],
)
def test_a_dial_short_of_its_line_is_no_fault(values):
    assert learning(values) == set()


def test_a_policy_without_a_gradient_is_frozen_unless_its_learning_rate_is_zero():
    assert learning({}, grad_norm=0.0) == {"frozen"}
    assert learning({}, grad_norm=0.0, lr=0.0) == set()


def test_ordinary_noise_is_no_fault():
    assert learning({"entropy": [2.0, 1.6, 1.8], "reward": [0.5, 0.3, 0.6], "truncated_ratio": [0.4, 0.55]}) == set()
