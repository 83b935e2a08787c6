import math

import numpy as np
import pytest
from scipy.stats import norm

from dlc_sentinel.maths.corrections import CORRECTIONS, compare_corrections, recommend

LENGTHS = (1, 0, 7, 8, 9, 33, 70)


def run(seed=0, *, lag=0.3, disc=0.1, lengths=LENGTHS):
    """(total, offsets, lag): independent tokens whose ratios have mean 1."""
    rng, offsets = np.random.default_rng(seed), np.concatenate(([0], np.cumsum(lengths)))
    lag_N = rng.normal(-lag * lag / 2, lag, offsets[-1])
    return lag_N + rng.normal(-disc * disc / 2, disc, offsets[-1]), offsets, lag_N


def slow(reference, total, offsets, lag, advantage, within, horizon):
    """{name: (weights used, exact weights, clipped)} token by token."""
    out = {name: ([], [], []) for name in CORRECTIONS}
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        cuts = reference.row_blocks(end - start, horizon)
        for t in range(start, end):
            first, last = next(cut for cut in cuts if start + cut[0] <= t < start + cut[1])
            block = slice(start + first, start + last)
            exact, row = math.exp(total[block].sum()), math.exp(total[start:end].sum())
            r, lag_block, behave, ppo = (
                math.exp(x) for x in (total[t], lag[block].sum(), total[t] - within[t], within[t])
            )
            cut = (ppo > 1.2 and advantage[t] > 0) or (ppo < 0.8 and advantage[t] < 0)
            found = {
                "none": (1.0, exact, False),
                "tis": (min(r, 2.0), exact, r > 2),
                "sequence_mis": (row if row <= 2 else 0.0, exact, row > 2),
                "icepop": (r if 0.5 <= r <= 5 else 0.0, exact, not 0.5 <= r <= 5),
                "decoupled_ppo": (0.0 if cut else min(behave, 5.0) * ppo, exact, cut or behave > 5),
                "dlc_token": (min(math.exp(lag[t]), 2.0), lag_block, math.exp(lag[t]) > 2),
                "dlc_block": (min(lag_block, 2.0), lag_block, lag_block > 2),
            }
            for name, values in found.items():
                for column, value in zip(out[name], values, strict=True):
                    column.append(value)
    return out


@pytest.mark.parametrize("horizon", [1, 8, 32, math.inf])
def test_every_effect_is_that_of_its_weights_taken_token_by_token(reference, horizon):
    total, offsets, lag = run(seed=3, lag=0.7, disc=0.5)
    rng = np.random.default_rng(9)
    advantage, within = rng.normal(size=len(total)), rng.normal(0, 0.3, len(total))

    found = compare_corrections(total, offsets, lag_N=lag, within_N=within, advantage_N=advantage, horizon=horizon)

    for name, (used, exact, clipped) in slow(reference, total, offsets, lag, advantage, within, horizon).items():
        used, exact, effect = np.array(used), np.array(exact), found[name]
        assert effect.ess_ratio == pytest.approx(used.sum() ** 2 / (len(used) * (used**2).sum()))
        assert effect.variance_factor == pytest.approx(1 / effect.ess_ratio)
        assert effect.clipped_share == pytest.approx(np.mean(clipped))
        assert effect.bias_left == pytest.approx(0.5 * np.abs(used / used.sum() - exact / exact.sum()).sum())
    assert [effect.name for effect in found.effects] == list(CORRECTIONS)
    assert all(effect.clipped_share > 0 for effect in found.effects[1:])


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_without_correction_the_bias_is_the_distance_of_the_two_policies(sigma):
    total, offsets, _ = run(lag=sigma, disc=0.0, lengths=(400_000,))

    bias = compare_corrections(total, offsets, horizon=1)["none"].bias_left

    assert bias == pytest.approx(2 * norm.cdf(sigma / 2) - 1, rel=0.02)


def test_an_exact_weight_leaves_no_bias_and_pays_in_noise():
    total, offsets, lag = run(lag=0.1, disc=0.02, lengths=(20_000,))

    found = compare_corrections(total, offsets, lag_N=lag, horizon=8)

    assert found["dlc_block"].bias_left < 0.01
    assert found["dlc_block"].variance_factor == pytest.approx(math.exp(8 * 0.1**2), rel=0.03)
    assert found["dlc_block"].raw_ess_ratio == pytest.approx(found.lag_ess_ratio, rel=1e-2)
    assert found["dlc_block"].bias_left < found["dlc_token"].bias_left < found["none"].bias_left


def test_ratios_hundreds_of_nats_apart_stay_numbers():
    found = compare_corrections(np.array([900.0, -900.0, 0.0]), np.array([0, 1, 2, 3]), lag_N=np.zeros(3), horizon=32)

    assert all(0.0 <= effect.bias_left <= 1.0 for effect in found.effects)
    assert found["sequence_mis"].clipped_share == pytest.approx(1 / 3)


def test_a_correction_that_masks_everything_keeps_no_sample_and_all_the_bias():
    found = compare_corrections(np.full(4, 3.0), np.array([0, 4]), horizon=1)

    assert found["icepop"].ess_ratio == 0.0
    assert found["icepop"].variance_factor == math.inf
    assert found["icepop"].bias_left == 1.0


def test_without_advantages_half_of_the_ppo_clip_bites():
    within = np.array([0.0, 0.5, -0.5, 0.0])

    found = compare_corrections(within, np.array([0, 4]), within_N=within, horizon=1)

    weight = np.exp(within) * [1.0, 0.5, 0.5, 1.0]
    assert found["decoupled_ppo"].clipped_share == 0.25
    assert found["decoupled_ppo"].ess_ratio == pytest.approx(weight.sum() ** 2 / (4 * (weight**2).sum()))


def test_without_lag_the_dlc_rows_are_nan_and_the_others_are_not():
    total, offsets, _ = run()

    found = compare_corrections(total, offsets)

    assert math.isnan(found["dlc_token"].bias_left)
    assert math.isnan(found["dlc_block"].variance_factor)
    assert found["tis"].ess_ratio > 0


@pytest.mark.parametrize(
    ("lag", "disc", "name", "words"),
    [
        (0.003, 0.01, "none", "at most 0.1"),
        (0.01, 0.1, "dlc_token", "the engine's numerics"),
        (0.09, 0.02, "dlc_block", "leaves a bias of 0.0"),
        (0.4, 0.02, "resync", "below one half"),
    ],
)
def test_the_rule_reads_the_size_of_each_part(lag, disc, name, words):
    total, offsets, lag_N = run(lag=lag, disc=disc, lengths=(320,) * 64)

    got = recommend(compare_corrections(total, offsets, lag_N=lag_N))

    assert got.name == name
    assert words in got.reason


def test_without_lag_the_rule_says_what_to_record_unless_nothing_is_needed():
    small, offsets, _ = run(lag=0.003, disc=0.01, lengths=(320,) * 16)
    large, _, _ = run(lag=0.1, disc=0.01, lengths=(320,) * 16)

    assert recommend(compare_corrections(small, offsets)).name == "none"
    assert "record the trainer's log-probabilities" in recommend(compare_corrections(large, offsets)).reason


def test_no_token_has_no_effect_and_no_recommendation():
    found = compare_corrections(np.zeros(0), np.array([0, 0]), lag_N=np.zeros(0))

    assert all(math.isnan(effect.ess_ratio) for effect in found.effects)
    assert recommend(found).name == "unknown"


def test_streams_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="lag_N has 2 tokens, total_N 3"):
        compare_corrections(np.zeros(3), np.array([0, 3]), lag_N=np.zeros(2))
    with pytest.raises(ValueError, match="3 tokens"):
        compare_corrections(np.zeros(3), np.array([0, 2]))
