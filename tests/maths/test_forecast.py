import math

import numpy as np
import pytest
from scipy import stats

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths import LoopGain, forecast_steps, growth_exponent, is_feedback, loop_gain
from dlc_sentinel.maths.forecast import t_quantile

AGE = np.arange(1.0, 9.0)


def test_a_clean_curve_is_forecast_exactly():
    forecast = forecast_steps(AGE, np.exp(-0.01 * AGE - 0.004 * AGE**2))

    crossing = (-0.01 + math.sqrt(0.01**2 + 4 * 0.004 * math.log(2))) / (2 * 0.004)
    assert forecast.mid == pytest.approx(crossing - 8, rel=1e-9)
    assert forecast.low == pytest.approx(forecast.high, rel=1e-6)


def test_pure_diffusion_and_pure_drift_are_both_met():
    assert forecast_steps(AGE, np.exp(-0.02 * AGE)).mid == pytest.approx(math.log(2) / 0.02 - 8, rel=1e-9)
    drift = math.sqrt(math.log(2) / 0.002) - 8
    assert forecast_steps(AGE, np.exp(-0.002 * AGE**2)).mid == pytest.approx(drift, rel=1e-9)


def test_noise_opens_an_interval_that_holds_the_truth_about_as_often_as_it_says():
    truth, held = math.log(2) / 0.02 - 8, 0
    for seed in range(200):
        y = 0.02 * AGE + np.random.default_rng(seed).normal(0, 0.004, 8)
        forecast = forecast_steps(AGE, np.exp(-y))
        held += forecast.low <= truth <= forecast.high
        assert forecast.low <= forecast.mid <= forecast.high
    assert held > 160


def test_a_window_already_below_has_no_step_left():
    assert forecast_steps(AGE, np.exp(-0.2 * AGE)).mid == 0.0


def test_lag_that_does_not_grow_never_crosses():
    assert forecast_steps(AGE, np.ones(8)).mid == math.inf


def test_the_count_starts_where_asked():
    assert forecast_steps(AGE, np.exp(-0.02 * AGE), now_age=2.0).mid == pytest.approx(math.log(2) / 0.02 - 2, rel=1e-9)


def test_one_point_is_no_forecast():
    for age, ess in (([], []), ([3.0], [0.8]), ([3.0, 3.0], [0.8, 0.7]), ([1.0, 2.0], [math.nan, 0.5])):
        assert math.isnan(forecast_steps(np.array(age), np.array(ess)).mid)
    with pytest.raises(ShapeError, match="2 ages for 1 values"):
        forecast_steps(np.ones(2), np.ones(1))


def test_loop_gain_is_the_ratio_of_lag_per_unit_age():
    gain = loop_gain(AGE, 0.01 * AGE, AGE, 0.015 * AGE)

    assert gain.value == pytest.approx(1.5)
    assert gain.low == pytest.approx(1.5)


def test_the_lower_limit_of_the_loop_gain_is_welchs():
    rng = np.random.default_rng(0)
    before, now = 0.01 * AGE * np.exp(rng.normal(0, 0.1, 8)), 0.02 * AGE * np.exp(rng.normal(0, 0.3, 8))

    test = stats.ttest_ind(np.log(now / AGE), np.log(before / AGE), equal_var=False)

    assert loop_gain(AGE, before, AGE, now).low == pytest.approx(math.exp(test.confidence_interval(0.90).low), rel=1e-3)


def test_feedback_needs_three_windows_whose_lower_limit_is_above_one():
    up, unsure = LoopGain(1.5, 1.1), LoopGain(1.5, 0.9)

    assert is_feedback([unsure, up, up, up])
    assert not is_feedback([up, up])
    assert not is_feedback([up, unsure, up])
    assert not is_feedback([up, up, LoopGain(1.5, math.nan)])


def test_too_few_points_have_a_gain_without_limit_or_none():
    assert math.isnan(loop_gain(AGE[:1], AGE[:1], AGE, AGE).low)
    assert loop_gain(AGE[:1], AGE[:1], AGE, 2 * AGE).value == pytest.approx(2.0)
    assert math.isnan(loop_gain(np.zeros(0), np.zeros(0), AGE, AGE).value)


@pytest.mark.parametrize("slope", [1.0, 2.0, 3.2])
def test_growth_exponent_is_the_log_log_slope(slope):
    assert growth_exponent(AGE, 1e-6 * AGE**slope).value == pytest.approx(slope)


def test_the_lower_limit_of_the_growth_exponent_is_that_of_least_squares():
    y = 1e-6 * AGE**2.5 * np.exp(np.random.default_rng(0).normal(0, 0.2, 8))

    fit = stats.linregress(np.log(AGE), np.log(y))

    growth = growth_exponent(AGE, y)
    assert growth.value == pytest.approx(fit.slope)
    assert growth.low == pytest.approx(fit.slope - stats.t.ppf(0.95, 6) * fit.stderr, rel=1e-4)


def test_exponent_without_enough_ages_is_nan():
    assert math.isnan(growth_exponent(np.array([2.0, 2.0]), np.array([1.0, 2.0])).value)
    assert math.isnan(growth_exponent(np.array([1.0, 2.0]), np.array([1.0, 2.0])).low)
    assert math.isnan(growth_exponent(np.array([0.0, 2.0]), np.array([1.0, 2.0])).value)


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 10, 100])
@pytest.mark.parametrize("p", [0.9, 0.95, 0.975])
def test_t_quantiles_are_right_to_one_percent(p, dof):
    assert t_quantile(p, dof) == pytest.approx(stats.t.ppf(p, dof), rel=0.01)
