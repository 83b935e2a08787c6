import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths import RUNGS, UNKNOWN_AGE, LagStats, compress, row_chunks


def filled(reference, rows, *, horizon=32, group=None, **ages):
    x, offsets = reference.packed(rows)
    stats = LagStats(action_horizon=horizon)
    stats.add(x, offsets, group_S=np.arange(len(rows)) if group is None else np.asarray(group), **ages)
    return stats


LENGTHS = st.lists(st.integers(0, 700), min_size=1, max_size=10)
SCALES = st.sampled_from([0.01, 0.3, 3.0, 90.0, 700.0])


@given(LENGTHS, SCALES, st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_every_rung_is_the_ess_of_its_block_weights(reference, lengths, scale, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.normal(0, scale, length) for length in lengths]

    stats = filled(reference, rows)

    for name in RUNGS:
        logw = reference.block_logw(rows, float(name))
        assert stats.num_blocks()[name] == len(logw)
        assert stats.ess()[name] == pytest.approx(reference.ess(logw), rel=1e-9, nan_ok=True)


@given(LENGTHS, st.sampled_from([0.01, 0.3, 3.0]), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_kl_values_are_the_sums_of_their_definitions(reference, lengths, scale, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.normal(0, scale, length) for length in lengths if length]
    if not rows:
        return
    x = np.concatenate(rows)

    kl = filled(reference, rows).kl()

    k3, j3 = math.fsum(map(reference.k3, x)), math.fsum(map(reference.j3, x))
    assert kl.gen_now_prefix == pytest.approx(k3 / len(x), rel=1e-9)
    assert kl.gen_now_full == pytest.approx(k3 / len(rows), rel=1e-9)
    assert kl.gen_now_k1 == pytest.approx(-math.fsum(x) / len(rows), rel=1e-9, abs=1e-12)
    assert kl.now_gen_prefix == pytest.approx(j3 / len(x), rel=1e-9)
    assert kl.now_gen_full == pytest.approx(reference.now_gen_full(rows), rel=1e-9, abs=1e-11)


@given(LENGTHS, st.sampled_from([1, 5, 32]), SCALES, st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_ages_and_groups_split_the_blocks_of_the_action_horizon(reference, lengths, horizon, scale, seed):
    rng = np.random.default_rng(seed)
    rows = [rng.normal(0, scale, length) for length in lengths]
    group = rng.integers(-2, 3, len(rows))
    ages = [np.sort(rng.integers(0, 4, length))[::-1] for length in lengths]
    stats = filled(reference, rows, horizon=horizon, group=group, age_N=np.concatenate(ages).astype(np.int64))

    by_age, by_group = {}, {}
    for row, age, key in zip(rows, ages, group.tolist(), strict=True):
        for first, last in reference.row_blocks(len(row), horizon):
            logw = math.fsum(row[first:last])
            by_age.setdefault(int(age[first:last].max()), []).append(logw)
            by_group.setdefault(key, []).append(logw)
    sums = stats.group_sums()
    assert stats.by_age() == pytest.approx({age: reference.ess(logw) for age, logw in sorted(by_age.items())}, rel=1e-9)
    assert sums.keys_G.tolist() == sorted(by_group)
    assert (sums.s1_G**2 / (sums.n_G * sums.s2_G)).tolist() == pytest.approx(
        [reference.ess(by_group[key]) for key in sorted(by_group)], rel=1e-9
    )


def test_a_blocks_age_is_that_of_its_oldest_token_wherever_it_stands(reference):
    rows = [np.zeros(64), np.zeros(32)]

    stats = filled(reference, rows, span_start_K=np.array([0, 10, 20, 64]), span_age_K=np.array([1, 7, 2, 0]))

    assert list(stats.by_age()) == [0, 2, 7]


def test_spans_emptied_by_the_mask_do_not_count(reference):
    stats = filled(reference, [np.zeros(40)], span_start_K=np.array([0, 10, 10, 40]), span_age_K=np.array([1, 9, 2, 8]))

    assert list(stats.by_age()) == [2]


def test_per_token_ages_and_spans_say_the_same(reference):
    rows = [np.linspace(-1, 1, 50), np.linspace(0, 1, 70)]
    ages = np.repeat([3, 1, 2], [30, 40, 50])

    spans = filled(reference, rows, span_start_K=np.array([0, 30, 50, 70]), span_age_K=np.array([3, 1, 1, 2]))

    assert filled(reference, rows, age_N=ages).by_age() == spans.by_age()


def test_a_block_with_a_token_of_unknown_age_has_no_age(reference):
    stats = filled(reference, [np.zeros(32), np.zeros(32)], span_start_K=np.array([0, 31, 32]),
                   span_age_K=np.array([2, UNKNOWN_AGE, 1]))  # fmt: skip

    assert list(stats.by_age()) == [1]
    assert filled(reference, [np.zeros(8)]).by_age() == {}


def test_coverage_is_the_share_of_blocks_as_long_as_their_horizon(reference):
    stats = filled(reference, [np.zeros(20), np.zeros(33), np.zeros(5)])

    assert stats.num_blocks() == {"1": 58, "8": 3 + 5 + 1, "32": 1 + 2 + 1, "128": 3, "512": 3, "inf": 3}
    assert stats.coverage() == {"1": 1.0, "8": 8 / 9, "32": 0.5, "128": 0.0, "512": 0.0, "inf": 1.0}


@pytest.mark.parametrize(
    ("length", "sigma", "want"),
    [(1000, 0.0, math.inf), (1000, 0.01, math.inf), (100, 0.01, 32.0), (1000, 0.055, 128.0), (1000, 0.12, 32.0),
     (1000, 0.25, 8.0), (1000, 0.5, 1.0), (1000, 1.2, 0.0)],
)  # fmt: skip
def test_half_horizon_is_where_a_lognormal_lag_loses_half_its_samples(reference, length, sigma, want):
    rng = np.random.default_rng(0)

    stats = filled(reference, [rng.normal(0, sigma, length) for _ in range(200)])

    assert stats.half_horizon() == want  # ESS_h = exp(-h sigma^2)


def test_half_horizon_stops_below_the_first_bad_rung_even_if_a_longer_one_recovers(reference):
    swing = np.tile(np.repeat([0.9, -0.3], [8, 24]), 40)

    stats = filled(reference, [swing] * 3)

    assert stats.ess()["8"] < 0.5 <= stats.ess()["32"]
    assert stats.half_horizon() == 1.0


def test_a_lag_of_exactly_zero_is_an_ess_of_exactly_one(reference):
    stats = filled(reference, [np.zeros(600), np.zeros(3)])

    assert set(stats.ess().values()) == {1.0}


def test_splitting_a_long_lag_among_short_chunks_of_rows_changes_nothing(reference):
    rng = np.random.default_rng(0)
    rows = [rng.normal(0, 0.1, length) for length in rng.integers(1, 9000, 60)]
    x, offsets = reference.packed(rows)
    chunked = LagStats()
    for first, last in row_chunks(offsets, 20_000):
        part = slice(offsets[first], offsets[last])
        chunked.add(x[part], offsets[first : last + 1] - offsets[first], group_S=np.arange(first, last))

    whole = filled(reference, rows)

    assert chunked.ess() == pytest.approx(whole.ess(), rel=1e-12)
    assert chunked.kl().now_gen_full == pytest.approx(whole.kl().now_gen_full, rel=1e-11)


def test_masked_positions_and_padding_leave_no_trace(reference):
    rng = np.random.default_rng(0)
    rows = [rng.normal(0, 0.3, length) for length in (50, 90, 7)]
    mask = np.concatenate([np.repeat([True, False], [len(row), 100 - len(row)]) for row in rows])
    padded = np.concatenate([np.concatenate((row, np.full(100 - len(row), 999.0))) for row in rows])

    offsets, (lag,) = compress(mask, np.arange(0, 301, 100), padded)
    stats = LagStats()
    stats.add(lag, offsets, group_S=np.arange(3))

    assert stats.ess() == filled(reference, rows).ess()


def test_rows_without_a_token_are_no_rows(reference):
    stats = filled(reference, [np.zeros(0), np.array([0.5]), np.zeros(0)])

    assert (stats.num_rows, stats.num_tokens, stats.num_blocks()["inf"]) == (1, 1, 1)


def test_a_wild_row_costs_the_others_nothing(reference):
    rng = np.random.default_rng(0)
    rows = [rng.normal(0, 0.1, 300) for _ in range(30)]
    rows.insert(11, np.full(300, -700.0))

    stats = filled(reference, rows)

    assert stats.ess()["8"] == pytest.approx(reference.ess(reference.block_logw(rows, 8)), rel=1e-12)
    assert stats.kl().gen_now_k1 == pytest.approx(-sum(math.fsum(row) for row in rows) / 31, rel=1e-12)


def test_deep_negative_lags_keep_their_digits(reference):
    rows = [np.array([-12.0, 11.5, -0.2, 0.3] * 5), np.array([-30.0, 29.9])]

    stats = filled(reference, rows)

    assert stats.ess()["inf"] == pytest.approx(reference.ess(reference.block_logw(rows, math.inf)), rel=1e-12)


def test_a_ratio_too_large_to_square_is_met_even_where_the_next_one_undoes_it(reference):
    rows = [np.array([80.0, -400.0, 443.0, -100.0]), np.array([0.1, 0.2])]

    stats = filled(reference, rows)

    assert stats.ess()["1"] == pytest.approx(reference.ess(reference.block_logw(rows, 1)), rel=1e-12)
    assert stats.kl().gen_now_prefix == pytest.approx(math.exp(443.0) / 6, rel=1e-9)


def test_lengths_that_disagree_are_refused_with_the_numbers():
    stats = LagStats()
    with pytest.raises(ShapeError, match="5 tokens"):
        stats.add(np.zeros(5), np.array([0, 4]), group_S=np.zeros(1, dtype=np.int64))
    with pytest.raises(ShapeError, match="2 group keys for 1 rows"):
        stats.add(np.zeros(5), np.array([0, 5]), group_S=np.zeros(2, dtype=np.int64))
    with pytest.raises(ShapeError, match="4 ages for 5 tokens"):
        stats.add(np.zeros(5), np.array([0, 5]), group_S=np.zeros(1, dtype=np.int64), age_N=np.zeros(4, dtype=np.int64))
    with pytest.raises(ShapeError, match="first start 2"):
        stats.add(np.zeros(5), np.array([0, 5]), group_S=np.zeros(1, dtype=np.int64), span_start_K=np.array([2]),
                  span_age_K=np.array([1]))  # fmt: skip


def test_windows_of_different_action_horizons_are_not_pooled():
    with pytest.raises(ValueError, match="32 and 8"):
        LagStats(32).merge(LagStats(8))


def test_what_waits_is_a_copy():
    lag = np.zeros(4)
    stats = LagStats()
    stats.add(lag, np.array([0, 4]), group_S=np.zeros(1, dtype=np.int64))
    lag[:] = 9.0

    assert stats.kl().gen_now_k1 == 0.0
