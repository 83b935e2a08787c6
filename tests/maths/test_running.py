import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.maths import RELATIVE_PRECISION, StreamStats, quantile_abs

VALUES = st.lists(st.floats(-800, 800), min_size=1, max_size=200)


def filled(values):
    stats = StreamStats()
    stats.add(np.asarray(values, dtype=np.float64))
    return stats


@given(VALUES)
@settings(deadline=None, max_examples=80)
def test_moments_are_those_of_the_values(values):
    stats = filled(values)

    scale = max(map(abs, values))
    assert stats.num == len(values)
    assert stats.mean == pytest.approx(math.fsum(values) / len(values), abs=1e-12 * scale)
    assert stats.rms == pytest.approx(math.sqrt(math.fsum(v * v for v in values) / len(values)), rel=1e-12)
    assert stats.mean_abs == pytest.approx(math.fsum(map(abs, values)) / len(values), rel=1e-12)
    assert stats.max_abs == scale


@given(VALUES, st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=80)
def test_a_quantile_is_within_the_stated_precision_of_the_value_of_its_rank(values, q):
    exact = sorted(map(abs, values))[max(math.ceil(q * len(values)), 1) - 1]

    assert filled(values).quantile_abs(q) == pytest.approx(exact, rel=RELATIVE_PRECISION, abs=2.0**-30)


@given(VALUES, st.floats(0.01, 1.0))
@settings(deadline=None, max_examples=80)
def test_a_plain_array_gives_the_very_same_quantile(values, q):
    assert filled(values).quantile_abs(q) == quantile_abs(np.asarray(values), q)


def test_the_sketch_holds_from_a_billionth_to_thousands_of_nats():
    for value in (1.1e-9, 3e-6, 1.0, 4000.0):
        assert filled([value]).p50_abs == pytest.approx(value, rel=RELATIVE_PRECISION)
    assert filled([1e-12, -1e-12]).p50_abs == 0.0
    assert filled([1e6]).p99_abs == pytest.approx(4096, rel=2 * RELATIVE_PRECISION)
    assert filled([1e6]).max_abs == 1e6


def test_p50_and_p99_are_those_ranks():
    stats = filled(np.arange(1, 201) / 8.0)

    assert stats.p50_abs == pytest.approx(100 / 8, rel=RELATIVE_PRECISION)
    assert stats.p99_abs == pytest.approx(198 / 8, rel=RELATIVE_PRECISION)


def test_share_above_a_power_of_two_counts_the_values_at_or_above_it():
    stats = filled([0.1, -0.25, 0.3, -5.0])

    assert stats.share_above(0.25) == 0.75
    assert stats.share_above(8.0) == 0.0
    assert stats.share_above(2.0**-20) == 1.0


def test_nothing_is_nan_not_zero():
    stats = StreamStats()
    stats.add(np.zeros(0))

    values = (stats.mean, stats.rms, stats.mean_abs, stats.p50_abs, stats.p99_abs, stats.max_abs)
    assert stats.num == 0
    assert math.isnan(stats.share_above(1.0))
    assert all(map(math.isnan, values))
    assert math.isnan(quantile_abs(np.zeros(0), 0.5))


def test_a_nan_that_slips_through_is_an_error_not_a_number():
    with pytest.raises(ValueError, match="NaN or infinity"):
        filled([1.0, math.nan]).mean  # noqa: B018  # the property folds what waits


def test_what_waits_is_a_copy():
    x = np.ones(3)
    stats = StreamStats()
    stats.add(x)
    x[:] = 5.0

    assert stats.mean == 1.0
