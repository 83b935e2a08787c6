import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths import RUNGS, EssSums, block_sums, pooled_ess, rung_name

LOGW = st.lists(st.floats(-700, 700), min_size=1, max_size=60)


@given(LOGW)
@settings(deadline=None, max_examples=80)
def test_ess_lies_between_one_over_n_and_one(logw):
    ratio = EssSums.of(np.array(logw)).ratio

    assert 1 / len(logw) - 1e-12 <= ratio <= 1.0


@given(LOGW, st.floats(-700, 700))
@settings(deadline=None, max_examples=80)
def test_a_constant_factor_on_all_weights_changes_nothing(logw, shift):
    assert EssSums.of(np.array(logw) + shift).ratio == pytest.approx(EssSums.of(np.array(logw)).ratio, rel=1e-11)


@given(st.floats(-700, 700), st.integers(1, 50))
@settings(deadline=None, max_examples=40)
def test_ess_is_one_when_all_weights_are_equal(value, num):
    assert EssSums.of(np.full(num, value)).ratio == pytest.approx(1.0, abs=1e-15)


@given(LOGW)
@settings(deadline=None, max_examples=80)
def test_ess_is_one_over_one_plus_the_squared_coefficient_of_variation(logw):
    w = np.exp(np.array(logw) - max(logw))

    assert EssSums.of(np.array(logw)).ratio == pytest.approx(1 / (1 + w.var() / w.mean() ** 2), rel=1e-9)


@given(LOGW, st.integers(2, 5))
@settings(deadline=None, max_examples=40)
def test_repeating_every_sample_leaves_ess_as_it_is(logw, times):
    once = EssSums.of(np.array(logw)).ratio

    assert EssSums.of(np.tile(logw, times)).ratio == pytest.approx(once, rel=1e-12)


def test_two_weights_of_one_and_three_have_an_ess_of_four_fifths():
    sums = EssSums.of(np.log([1.0, 3.0]))

    assert sums.ratio == pytest.approx(0.8, rel=1e-15)
    assert sums.max_share == pytest.approx(0.75, rel=1e-15)


def test_independent_factors_multiply_their_ess():
    rng = np.random.default_rng(0)
    lag, disc = rng.normal(0, 0.5, 40), rng.normal(0, 0.3, 30)

    both = EssSums.of((lag[:, None] + disc).ravel()).ratio

    assert both == pytest.approx(EssSums.of(lag).ratio * EssSums.of(disc).ratio, rel=1e-12)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=8), st.sampled_from([1, 8, 32, 5, math.inf]))
@settings(deadline=None, max_examples=80)
def test_blocks_follow_the_block_rule(reference, lengths, horizon):
    rng = np.random.default_rng(1)
    rows = [rng.normal(size=length) for length in lengths]
    x, offsets = reference.packed(rows)

    sums, row_B, first_B = block_sums(x, offsets, horizon)

    cuts = [reference.row_blocks(length, horizon) for length in lengths]
    want = [(r, a, math.fsum(rows[r][a:b])) for r, cut in enumerate(cuts) for a, b in cut]
    assert [(r, f - offsets[r]) for r, f in zip(row_B, first_B, strict=True)] == [(r, a) for r, a, _ in want]
    assert sums == pytest.approx([s for _, _, s in want], rel=1e-12, abs=1e-14)


def test_left_over_tokens_are_covered_by_the_last_h_tokens():
    sums, _, first = block_sums(np.arange(10.0), np.array([0, 10]), 4)

    assert first.tolist() == [0, 4, 6]
    assert sums.tolist() == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 6 + 7 + 8 + 9]


def test_a_rung_is_named_by_its_tokens():
    assert [rung_name(h) for h in (1, 8, 32, 128, 512, math.inf)] == list(RUNGS)


def test_offsets_that_do_not_fit_the_values_are_refused():
    with pytest.raises(ShapeError, match="5 tokens"):
        block_sums(np.zeros(5), np.array([0, 4]), 8)
    with pytest.raises(ShapeError):
        block_sums(np.zeros(5), np.array([0, 4, 3, 5]), 8)


def test_nothing_has_no_ess():
    empty = EssSums.of(np.zeros(0))

    assert math.isnan(empty.ratio)
    assert math.isnan(empty.max_share)


def test_parts_put_together_have_the_harmonic_mean_of_their_ess():
    assert pooled_ess([3, 1], [0.5, 1.0]) == pytest.approx(4 / (3 / 0.5 + 1))
    assert pooled_ess([3, 0], [0.5, math.nan]) == 0.5
    assert math.isnan(pooled_ess([3, 1], [0.5, math.nan])) and math.isnan(pooled_ess([], []))


def test_windows_put_together_agree_with_their_ess_where_weights_average_alike():
    rng = np.random.default_rng(0)
    parts = [rng.normal(-s * s / 2, s, 200_000) for s in (0.2, 0.8)]
    whole = EssSums.of(np.concatenate(parts)).ratio

    assert pooled_ess([200_000] * 2, [EssSums.of(x).ratio for x in parts]) == pytest.approx(whole, rel=0.01)
