import math

import numpy as np
import pytest

from dlc_sentinel.maths.corrections import CORRECTIONS, compare_corrections
from dlc_sentinel.maths.needs import over_steps

OFFSETS = np.arange(0, 4097, 64)


def step(seed, *, lag=0.0, disc=0.0, knows_lag=True):
    """One batch of 64 rows of 64 tokens: independent ratios with mean 1."""
    rng = np.random.default_rng(seed)
    lag_N = rng.normal(-lag * lag / 2, lag, 4096)
    total_N = lag_N + rng.normal(-disc * disc / 2, disc, 4096)
    return compare_corrections(total_N, OFFSETS, lag_N=lag_N if knows_lag else None, horizon=32)


def healthy(num):
    return [step(seed, lag=0.01, disc=0.01) for seed in range(num)]


def stale(num):
    return [step(100 + seed, lag=0.3) for seed in range(num)]


def noisy(num):
    return [step(200 + seed, disc=0.2) for seed in range(num)]


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (healthy(10), "none"),
        (stale(3), "resync"),
        (noisy(3), "dlc_token"),
        (healthy(9) + stale(1), "resync"),
        (healthy(20) + stale(1), "none"),
        (healthy(9) + noisy(1), "dlc_token"),
        (noisy(8) + stale(2), "resync"),
        ([step(seed, lag=0.2, knows_lag=False) for seed in range(3)], "unknown"),
        ([], "unknown"),
    ],
)
def test_the_need_is_the_most_demanding_one_that_a_tenth_of_the_steps_have(steps, name):
    assert over_steps(steps).run.name == name


def test_every_step_is_counted_under_what_it_needs():
    assert over_steps(healthy(5) + noisy(3) + stale(2)).counts == {"none": 5, "dlc_token": 3, "resync": 2}


def test_effects_are_medians_over_the_steps_that_decide():
    bad = stale(3)

    found = over_steps(healthy(4) + bad)

    assert [effect.name for effect in found.effects] == list(CORRECTIONS)
    for effect in found.effects:
        assert effect.ess_ratio == np.median([each[effect.name].ess_ratio for each in bad])
        assert effect.bias_left == np.median([each[effect.name].bias_left for each in bad])
    assert found.lag_ess_ratio == np.median([each.lag_ess_ratio for each in bad])


def test_what_no_step_knows_stays_nan():
    found = over_steps([step(1, disc=0.01, knows_lag=False)])

    assert math.isnan(found.lag_bias) and math.isnan(found.effects[-1].ess_ratio)
    assert found.effects[0].ess_ratio == 1.0
