import math

import numpy as np
import pytest
from arviz_stats.base import array_stats

from dlc_sentinel.maths import pareto_k, pareto_k_threshold


@pytest.mark.parametrize("num", [30, 100, 225, 226, 1000, 5000])
@pytest.mark.parametrize("sigma", [0.05, 0.6, 1.5, 4.0])
def test_k_hat_agrees_with_arviz_stats(num, sigma):
    logw = np.random.default_rng(num).normal(0.0, sigma, num)

    _, want = array_stats.psislw(-logw)  # it takes minus the log weights

    assert pareto_k(logw) == pytest.approx(float(want), rel=1e-9, abs=1e-9)


def test_k_hat_of_exact_pareto_weights_is_their_shape():
    u = (np.arange(100_000) + 0.5) / 100_000

    assert pareto_k(-0.5 * np.log(u)) == pytest.approx(0.5, abs=0.05)


def test_k_hat_does_not_depend_on_order_or_on_a_common_factor():
    logw = np.random.default_rng(0).normal(0, 1, 500)

    assert pareto_k(logw[::-1] + 600.0) == pytest.approx(pareto_k(logw), rel=1e-9)


def test_equal_weights_have_no_tail_to_fear():
    assert 0.0 <= pareto_k(np.zeros(400)) < 0.2
    assert 0.0 <= pareto_k(np.concatenate((np.zeros(397), [0.1, 0.1, 0.2]))) < 0.2


def test_weights_hundreds_of_nats_apart_have_a_huge_k_hat_and_no_infinity():
    assert 1.0 < pareto_k(np.random.default_rng(0).normal(0, 20_000, 400)) < math.inf


def test_too_few_weights_have_no_k_hat():
    assert math.isnan(pareto_k(np.arange(24.0)))
    assert math.isnan(pareto_k(np.zeros(0)))


def test_the_threshold_rises_with_the_number_of_weights_to_seven_tenths():
    assert [round(pareto_k_threshold(n), 2) for n in (100, 320, 1000, 2200, 10**6)] == [0.5, 0.6, 0.67, 0.7, 0.7]
