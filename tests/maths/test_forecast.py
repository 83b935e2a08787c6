import math

import numpy as np
import pytest
from scipy import stats

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths import Forecast, LoopGain, forecast_steps, growth_exponent, is_feedback, loop_gain
from dlc_sentinel.maths.forecast import t_quantile

AGE = np.arange(1.0, 9.0)


RECORDED = {
    "stops-1001": "998 995 986 960 946 957 956 745 929 867 801 630 187",
    "stops-1002": "999 996 991 987 982 961 975 970 961 947 785 879 783 402",
    "stops-1012": "998 989 947 933 896 798 769 733 655 588 605 584 589 466",
    "stops-1014": "999 997 994 985 976 977 957 969 954 803 799 550 507 96",
}
"""lag_ess["32"] in thousandths, step by step from the last sync to the crossing: tiny real runs of the bench."""


def power_law(age, crossing, exponent):
    return np.exp(-math.log(2) * (age / crossing) ** exponent)


def course(kind, rng):
    """(ages, ESS with noise as in tiny real runs): -log ESS of the kind, through log 2 at a random age."""
    crossing, age = rng.integers(8, 60), np.arange(1.0, 80.0)
    if kind == "feedback":
        rate = rng.uniform(3.0, 8.0) / crossing
        y = np.expm1(rate * age) / math.expm1(rate * crossing)
    elif kind == "turns":
        turn = crossing * rng.uniform(0.3, 0.8)
        y = np.minimum(age, turn) ** rng.uniform(1.0, 2.0) * np.exp(np.maximum(age - turn, 0.0) * 5.0 / crossing)
        y /= np.interp(crossing, age, y)
    else:
        y = (age / crossing) ** {"diffusion": 1, "drift": 2}[kind]
    return age, np.exp(-math.log(2) * y * np.exp(rng.normal(0, rng.uniform(0.1, 0.5), len(age))))


def judged(age, ess):
    """(forecasts with a finite middle at every second step before the crossing, how many held it, their widths)."""
    first = int(np.flatnonzero(ess < 0.5)[0])
    found = [(forecast_steps(age[:n], ess[:n]), age[first] - age[n - 1]) for n in range(3, first + 1, 2)]
    made = [(f, truth) for f, truth in found if math.isfinite(f.mid)]
    return len(made), sum(f.low <= truth <= f.high for f, truth in made), [f.high - f.low for f, _ in made]


@pytest.mark.parametrize("exponent", [1, 2, 3])
@pytest.mark.parametrize("ahead", [1.2, 1.5, 2.0])
def test_a_clean_power_law_is_forecast_to_a_fifth(exponent, ahead):
    age = np.arange(1.0, 21.0)

    forecast = forecast_steps(age, power_law(age, 20 * ahead, exponent))

    truth = 20 * ahead - 20
    assert forecast.mid == pytest.approx(truth, rel=0.2, abs=1.0)
    assert forecast.low < truth <= forecast.high


@pytest.mark.parametrize("exponent", [3, 5])
@pytest.mark.parametrize("ahead", [1.2, 1.5, 2.0])
def test_the_interval_holds_the_crossing_of_lag_that_feeds_itself(exponent, ahead):
    age = np.arange(1.0, 21.0)
    y = math.log(2) * np.expm1(exponent * age / (20 * ahead)) / math.expm1(exponent)

    forecast = forecast_steps(age, np.exp(-y))

    assert forecast.low < 20 * ahead - 20 <= forecast.high


@pytest.mark.parametrize("kind", ["diffusion", "drift", "feedback", "turns"])
def test_at_least_85_percent_of_the_intervals_hold_the_first_crossing(kind):
    runs = [judged(*course(kind, np.random.default_rng(seed))) for seed in range(12)]

    made, held = sum(run[0] for run in runs), sum(run[1] for run in runs)
    assert made > 60
    assert held >= 0.85 * made


def test_intervals_of_recorded_runs_hold_the_crossing_and_are_not_infinite_throughout():
    ess = [np.array(text.split(), float) / 1000 for text in RECORDED.values()]
    runs = [judged(np.arange(1.0, len(run) + 1), run) for run in ess]

    assert sum(run[1] for run in runs) >= 0.85 * sum(run[0] for run in runs)
    assert np.median(np.concatenate([run[2] for run in runs])) <= 30


def test_an_interval_at_a_higher_level_is_wider():
    age = np.arange(1.0, 11.0)
    ess = power_law(age, 15, 2)

    narrow, wide = forecast_steps(age, ess, level=0.5), forecast_steps(age, ess, level=0.95)

    assert wide.low < narrow.low <= narrow.mid == wide.mid <= narrow.high < wide.high


def test_noise_crosses_sooner_than_the_curve_beneath_it():
    age = np.arange(1.0, 21.0)
    shaken = 1.0 + 0.5 * (-1.0) ** age
    ess = power_law(age, 30, 2)

    clean, noisy = forecast_steps(age, ess), forecast_steps(age, ess**shaken)

    assert noisy.low < clean.low
    assert noisy.mid < clean.mid


def test_age_that_grows_half_as_fast_leaves_twice_the_steps():
    age = np.arange(1.0, 21.0)

    whole = forecast_steps(age, power_law(age, 30, 2))
    half = forecast_steps(age, power_law(age, 30, 2), age_per_step=0.5)

    assert half.mid == pytest.approx(2 * whole.mid, abs=1.0)


def test_a_window_already_below_has_no_step_left():
    assert forecast_steps(AGE, np.exp(-0.2 * AGE)) == Forecast(0.0, 0.0, 0.0)


def test_lag_that_does_not_grow_is_not_expected_to_cross():
    noise = np.random.default_rng(0).normal(0, 0.3, 40)
    age = np.arange(1.0, 41.0)

    forecasts = [forecast_steps(age[:n], np.exp(-0.02 * np.exp(noise[:n]))) for n in range(8, 41)]

    assert all(f.mid == f.high == math.inf and f.low > 3.0 for f in forecasts)


def test_lag_of_zero_is_no_basis():
    assert math.isnan(forecast_steps(AGE, np.ones(8)).mid)


def test_under_three_points_or_two_ages_there_is_no_forecast():
    for age, ess in (
        ([], []),
        ([2.0, 4.0], [0.8, 0.7]),
        ([3.0] * 3, [0.8, 0.7, 0.6]),
        ([1.0, 2.0, 4.0], [math.nan, 0.9, 0.8]),
    ):
        assert math.isnan(forecast_steps(np.array(age), np.array(ess)).mid)
    assert math.isnan(forecast_steps(AGE, np.exp(-0.02 * AGE), age_per_step=0.0).mid)


def test_lengths_that_differ_are_refused():
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
