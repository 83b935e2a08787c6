import math
from dataclasses import replace

import numpy as np
import pytest

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.trend import with_trend


def window(ages, ess):
    return [
        StepFacts(step, step, basis="exact", age_mean=float(age), action_ess=float(value))
        for step, (age, value) in enumerate(zip(ages, ess, strict=True))
    ]


def forecast(facts):
    return with_trend(facts[-1], facts[:-1], Config()).forecast


def drift(ages, crossing):
    return np.exp(-math.log(2) * (np.asarray(ages) / crossing) ** 2)


def test_a_window_whose_age_grows_with_every_step_is_forecast():
    ages = np.arange(1.0, 21.0)

    low, mid, high = forecast(window(ages, drift(ages, 30)))

    assert low < 10 <= high
    assert mid == pytest.approx(10, abs=1.0)


def test_ages_that_grow_by_two_a_step_halve_the_steps_left():
    ages = np.arange(2.0, 42.0, 2.0)

    assert forecast(window(ages, drift(ages, 60)))[1] == pytest.approx(10, abs=1.0)


def test_a_queue_that_is_full_adds_no_age_and_has_no_forecast():
    ages = [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0]

    assert np.isfinite(forecast(window(ages[:4], drift(ages[:4], 8)))[:2]).all()
    assert np.isnan(forecast(window(ages, drift(ages, 8)))).all()


def test_a_sync_begins_a_new_window():
    ages = [0.0, *np.arange(1.0, 11.0), 0.0, 1.0, 2.0]

    assert np.isnan(forecast(window(ages, drift(ages, 15)))).all()


def test_steps_without_a_usable_basis_are_left_out():
    ages = np.arange(1.0, 11.0)
    facts = window(ages, drift(ages, 15))
    holed = [replace(f, basis="mixed", action_ess=0.01) if f.step == 5 else f for f in facts]

    assert forecast(holed)[1] == pytest.approx(forecast(facts)[1], abs=1.0)
