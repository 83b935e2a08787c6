import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlc_sentinel.maths import EssSums, LagStats, j3, k1, k3, reliability

RATIOS = arrays(np.float64, st.integers(1, 60), elements=st.floats(-20, 20))


def filled(rows, **more):
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    stats = LagStats()
    stats.add(np.concatenate(rows), offsets, group_S=np.arange(len(rows)), **more)
    return stats


class Tree:
    """All V^T responses under a uniform generator and a random present policy: each response once = the population."""

    def __init__(self, seed, strength, vocabulary=3, length=5):
        rng = np.random.default_rng(seed)
        self.vocabulary, self.length = vocabulary, length
        self.policy = {}
        for t in range(length):
            for prefix in itertools.product(range(vocabulary), repeat=t):
                logits = rng.normal(0, strength, vocabulary)
                self.policy[prefix] = logits - np.log(np.exp(logits).sum())
        self.paths = list(itertools.product(range(vocabulary), repeat=length))
        self.rows = [np.array([self.lag(path, t) for t in range(length)]) for path in self.paths]
        self.now = np.exp([row.sum() for row in self.rows]) / len(self.paths)

    def lag(self, path, t):
        return self.policy[path[:t]][path[t]] + math.log(self.vocabulary)


@given(RATIOS)
@settings(deadline=None, max_examples=80)
def test_k3_and_j3_are_never_negative(x):
    assert np.all(k3(x) >= 0.0)
    assert np.all(j3(x) >= -1e-12 * np.exp(np.abs(x)))


@given(RATIOS)
@settings(deadline=None, max_examples=80)
def test_k1_minus_k3_is_one_minus_the_mean_ratio(x):
    assert k1(x).mean() - k3(x).mean() == pytest.approx(1 - np.exp(x).mean(), rel=1e-9, abs=1e-9)


@given(RATIOS)
@settings(deadline=None, max_examples=80)
def test_swapping_the_policies_flips_k1_and_turns_k3_into_j3(x):
    assert np.array_equal(k1(-x), -k1(x))
    assert j3(x) == pytest.approx(np.exp(x) * k3(-x), rel=1e-6, abs=1e-9)


@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(-4, 4)))
@settings(deadline=None, max_examples=80)
def test_token_ess_follows_from_verls_kl_k3_and_chi2(x):
    kl, k3_kl, chi2 = k1(x).mean(), k3(x).mean(), np.exp(2 * x).mean() - 1

    assert EssSums.of(x).ratio == pytest.approx((1 + k3_kl - kl) ** 2 / (1 + chi2), rel=1e-9)


@pytest.mark.parametrize("strength", [0.1, 0.7, 1.5])
@pytest.mark.parametrize("seed", [0, 1])
def test_on_the_whole_population_every_kl_is_the_enumerated_one(seed, strength):
    tree = Tree(seed, strength)

    kl = filled(tree.rows).kl()

    gen = 1 / len(tree.paths)
    assert kl.gen_now_full == pytest.approx(np.sum(gen * np.log(gen / tree.now)), rel=1e-9)
    assert kl.gen_now_k1 == pytest.approx(kl.gen_now_full, rel=1e-9)
    assert kl.gen_now_prefix == pytest.approx(kl.gen_now_full / tree.length, rel=1e-9)
    assert kl.now_gen_full == pytest.approx(np.sum(tree.now * np.log(tree.now / gen)), rel=1e-9)


def test_kl_of_a_trajectory_is_the_sum_over_its_prefixes():
    tree = Tree(3, 0.8)
    by_prefix = 0.0
    for t in range(tree.length):
        for prefix in itertools.product(range(tree.vocabulary), repeat=t):
            reach = sum(p for path, p in zip(tree.paths, tree.now, strict=True) if path[:t] == prefix)
            logp = tree.policy[prefix]
            by_prefix += reach * np.sum(np.exp(logp) * (logp + math.log(tree.vocabulary)))

    assert filled(tree.rows).kl().now_gen_full == pytest.approx(by_prefix, rel=1e-9)


def test_prefix_ess_of_the_population_never_rises_with_the_prefix():
    tree = Tree(4, 1.0)

    by_length = [filled([row[:t] for row in tree.rows]).ess()["inf"] for t in range(1, tree.length + 1)]

    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(by_length))


@pytest.mark.parametrize("strength", [0.1, 0.7, 1.5])
def test_kl_and_total_variation_stay_under_the_bounds_that_ess_certifies(strength):
    tree = Tree(5, strength)
    stats = filled(tree.rows)

    chi2 = 1 / stats.ess()["inf"] - 1
    gen = 1 / len(tree.paths)
    tv = 0.5 * np.abs(tree.now - gen).sum()
    hellinger2 = 1 - np.sum(np.sqrt(tree.now * gen))
    assert chi2 == pytest.approx(np.sum(tree.now**2 / gen) - 1, rel=1e-9)
    assert 2 * tv**2 <= stats.kl().now_gen_full <= math.log(1 + chi2)
    assert hellinger2 <= tv <= math.sqrt(chi2) / 2


def test_the_mean_weight_of_the_population_is_one_and_with_a_kept_set_its_mass():
    policy = np.array([0.5, 0.3, 0.2])
    engine = np.array([0.4, 0.4, 0.2])
    kept = engine[:2] / engine[:2].sum()

    assert np.sum(engine * np.exp(np.log(policy) - np.log(engine))) == pytest.approx(1.0)
    assert np.sum(kept * (1 + k3(np.log(policy[:2] / kept)) - k1(np.log(policy[:2] / kept)))) == pytest.approx(0.8)


def test_what_a_rare_branch_hides_from_generator_prefixes_shows_in_the_full_kl():
    # the generator takes branch 1 in 1 of 20; the present policy in 8 of 20, and has changed only behind it
    rows = []
    for branch in range(400):
        rare = branch % 20 == 0
        up = (branch // 20) % 2
        first = math.log(8.0) if rare else math.log(12 / 19)
        rows.append(np.array([first, math.log(1.8 if up else 0.2) if rare else 0.0]))
    gen = np.full(400, 1 / 400)
    now = gen * np.exp([row.sum() for row in rows])

    kl = filled(rows).kl()

    assert now.sum() == pytest.approx(1.0)
    assert kl.now_gen_full == pytest.approx(np.sum(now * np.log(now / gen)), rel=1e-9)
    assert kl.now_gen_full > 1.2 * 2 * kl.now_gen_prefix


def test_a_finished_response_stays_in_the_normaliser_with_its_last_weight():
    rows = [np.log([2.0]), np.log([0.5, 3.0])]

    # t = 0: (2 ln 2 + 0.5 ln 0.5) / 2.5; t = 1: 1.5 ln 3 / (2 + 1.5)
    want = (2 * math.log(2) + 0.5 * math.log(0.5)) / 2.5 + 1.5 * math.log(3) / 3.5
    assert filled(rows).kl().now_gen_full == pytest.approx(want, rel=1e-14)


def test_rows_in_and_out_of_range_of_plain_products_are_weighed_together(reference):
    rng = np.random.default_rng(0)
    rows = [rng.normal(0, 0.5, 40) for _ in range(20)] + [np.full(50, 8.0), np.full(60, -9.0), np.full(45, 7.9)]

    assert filled(rows).kl().now_gen_full == pytest.approx(reference.now_gen_full(rows), rel=1e-9)


def test_zero_lag_is_zero_divergence_and_trusted_from_256_responses_on():
    kl = filled([np.zeros(7)] * 256).kl()

    assert (kl.gen_now_prefix, kl.gen_now_full, kl.gen_now_k1, kl.now_gen_prefix, kl.now_gen_full) == (0, 0, 0, 0, 0)
    assert kl.reliability == "ok"
    assert math.isnan(kl.blind_spot)


def test_blind_spot_is_full_over_prefix_times_mean_length_and_null_unless_reliable():
    rng = np.random.default_rng(0)
    rows = [rng.normal(-0.0002, 0.02, 30) for _ in range(300)]

    kl, few = filled(rows).kl(), filled(rows[:200]).kl()

    assert kl.reliability == "ok"
    assert kl.blind_spot == pytest.approx(kl.now_gen_full / (kl.now_gen_prefix * 30), rel=1e-12)
    assert few.reliability == "low"
    assert math.isnan(few.blind_spot)


@pytest.mark.parametrize(
    ("k_hat", "rows", "value", "grade"),
    [
        (0.3, 256, 0.5, "ok"),
        (0.3, 255, 0.5, "low"),
        (0.3, 256, 1.0, "low"),
        (0.6, 256, 0.5, "low"),
        (0.69, 3000, 0.5, "ok"),
        (0.71, 10**6, 0.5, "low"),
        (1.0, 3000, 0.5, "none"),
        (math.nan, 20, 0.5, "none"),
        (0.1, 300, math.nan, "none"),
    ],
)
def test_reliability_needs_a_light_tail_many_responses_and_a_small_value(k_hat, rows, value, grade):
    assert reliability(k_hat, rows, value) == grade


def test_responses_cut_at_the_length_limit_are_counted():
    assert filled([np.zeros(3)] * 4, num_censored=2).kl().num_censored == 2


def test_nothing_has_no_divergence():
    kl = LagStats().kl()

    assert kl.reliability == "none"
    assert all(map(math.isnan, (kl.gen_now_prefix, kl.gen_now_full, kl.gen_now_k1, kl.now_gen_prefix, kl.now_gen_full)))


@pytest.mark.parametrize("row", [[40.0, -400.0, 0.3], [-200.0, -200.0], [0.9, -350.0], [300.0, 200.0, -0.5]])
def test_divergences_out_of_the_range_of_plain_products_are_the_same_sums(reference, row):
    kl = filled([np.array(row)]).kl()

    assert kl.gen_now_full == pytest.approx(math.fsum(map(reference.k3, row)), rel=1e-12)
    assert kl.now_gen_prefix == pytest.approx(math.fsum(map(reference.j3, row)) / len(row), rel=1e-12)


def test_a_divergence_too_large_for_a_float_is_the_largest_float():
    kl = filled([np.full(3, 709.5)] * 2).kl()

    assert kl.gen_now_full == pytest.approx(1.7976931348623157e308)
    assert math.isfinite(kl.now_gen_prefix)
