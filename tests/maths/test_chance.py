"""The bound on a share by chance, against exact binomial tails."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dlc_sentinel.maths.chance import chance_nats


def exact_tail(hits, num, rate):
    """P(hits or more of num)."""
    return sum(math.comb(num, k) * rate**k * (1.0 - rate) ** (num - k) for k in range(hits, num + 1))


@pytest.mark.parametrize(
    ("hits", "num", "rate"), [(3, 5, 0.01), (4, 4, 0.2), (20, 64, 0.02), (60, 64, 0.5), (9, 900, 0.002)]
)
def test_it_is_never_surer_than_the_exact_tail_and_not_far_from_it(hits, num, rate):
    nats = float(chance_nats(hits / num, rate, num))

    assert nats <= -math.log(exact_tail(hits, num, rate)) + 1e-12
    assert nats >= -math.log(exact_tail(hits, num, rate)) - 0.5 * math.log(num) - 2.0


def test_a_share_at_or_below_the_rate_is_chance():
    assert chance_nats([0.0, 0.1, 0.3], 0.3, 1000).tolist() == [0.0, 0.0, 0.0]


def test_a_rate_that_was_never_seen_counts_as_one_in_ten_thousand():
    assert chance_nats(0.5, 0.0, 10) == chance_nats(0.5, 1e-4, 10)


def test_shapes_broadcast_and_nan_stays_nan():
    found = chance_nats(np.array([[0.5], [np.nan]]), np.array([0.1, 0.2]), 8)

    assert found.shape == (2, 2) and np.isnan(found[1]).all() and np.isfinite(found[0]).all()


def test_a_rate_above_one_half_is_taken_as_it_is():
    assert chance_nats(0.7, 0.7, 100) == 0.0
    assert chance_nats(0.75, 0.7, 100) == pytest.approx(
        100 * (0.75 * math.log(0.75 / 0.7) + 0.25 * math.log(0.25 / 0.3))
    )
