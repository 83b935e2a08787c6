import math

import numpy as np
import pytest

from dlc_sentinel.maths import EssSums, LagStats, ess_interval


def window(num_groups, rows_per_group, sigma, seed=0, order=None, shift=0.0):
    """One row of 32 tokens per response; the block weight is lognormal(sigma)."""
    rng = np.random.default_rng(seed)
    num = num_groups * rows_per_group
    lag = (rng.normal(0.0, sigma, num) + shift) / 32
    group = np.repeat(np.arange(num_groups), rows_per_group)
    order = np.arange(num) if order is None else order
    stats = LagStats()
    stats.add(np.repeat(lag[order], 32), np.arange(0, 32 * num + 1, 32), group_S=group[order])
    return stats


def test_the_interval_depends_on_the_seed_and_the_data_only():
    stats = window(16, 8, 0.8)

    assert ess_interval(stats.group_sums(), seed=3) == ess_interval(stats.group_sums(), seed=3)
    assert ess_interval(stats.group_sums(), seed=3) != ess_interval(stats.group_sums(), seed=4)


def test_the_order_in_which_rows_came_does_not_move_the_interval():
    order = np.random.default_rng(1).permutation(128)

    got = ess_interval(window(16, 8, 0.8, order=order).group_sums(), seed=3)

    assert got == pytest.approx(ess_interval(window(16, 8, 0.8).group_sums(), seed=3), rel=1e-12)


def test_the_interval_holds_the_estimate_and_widens_with_the_level():
    stats = window(32, 8, 0.8)

    low, high = ess_interval(stats.group_sums(), seed=0)
    lower, higher = ess_interval(stats.group_sums(), level=0.99, seed=0)

    assert lower <= low < stats.action_ess < high <= higher


def test_the_interval_has_the_spread_of_estimates_from_fresh_data():
    fresh = np.quantile([window(64, 4, 0.6, seed=s).action_ess for s in range(200)], [0.05, 0.95])

    low, high = np.mean([ess_interval(window(64, 4, 0.6, seed=s).group_sums(), seed=s) for s in range(40)], axis=0)

    assert high - low == pytest.approx(fresh[1] - fresh[0], rel=0.35)


def test_responses_of_one_prompt_move_together():
    clustered, spread = LagStats(), LagStats()
    lag = np.repeat(np.random.default_rng(0).normal(0, 0.8, 16), 8)
    for stats, group in ((clustered, np.repeat(np.arange(16), 8)), (spread, np.arange(128))):
        stats.add(np.repeat(lag / 32, 32), np.arange(0, 32 * 128 + 1, 32), group_S=group)

    narrow, wide = ess_interval(spread.group_sums(), seed=0), ess_interval(clustered.group_sums(), seed=0)

    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


def test_equal_weights_have_an_interval_without_width():
    assert ess_interval(window(8, 4, 0.0).group_sums(), seed=0) == pytest.approx((1.0, 1.0), abs=1e-12)


def test_fewer_than_two_groups_have_no_interval():
    assert all(map(math.isnan, ess_interval(LagStats().group_sums(), seed=0)))
    assert all(map(math.isnan, ess_interval(window(1, 8, 0.5).group_sums(), seed=0)))


def test_groups_far_apart_in_scale_still_give_numbers():
    stats = window(8, 4, 900.0)

    low, high = ess_interval(stats.group_sums(), seed=0)

    assert 0.0 < low <= high <= 1.0


def test_group_sums_add_up_to_the_window():
    stats = window(8, 4, 0.7)

    total = stats.group_sums().total()

    assert isinstance(total, EssSums)
    assert total.ratio == pytest.approx(stats.action_ess, rel=1e-12)
    assert stats.group_sums().n_G.tolist() == [4] * 8
