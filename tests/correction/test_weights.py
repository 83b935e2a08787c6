import math

import numpy as np
import pytest
import torch

from dlc_sentinel.correction import Weight, block_log_weight, ess_ladder
from dlc_sentinel.maths import RUNGS, EssSums, block_sums

LENGTHS = (1, 0, 7, 8, 9, 33, 200, 700)


def rows(seed=0, scale=0.3):
    """(lag [N], offsets [S+1]) of rows of many lengths."""
    offsets = np.concatenate(([0], np.cumsum(LENGTHS)))
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, offsets[-1])), torch.from_numpy(offsets)


@pytest.mark.parametrize("rung", RUNGS)
def test_the_ess_ladder_is_the_sentinels_own(rung):
    lag, offsets = rows()

    got = float(ess_ladder(lag, offsets)[rung])

    sums, _, _ = block_sums(lag.numpy(), offsets.numpy(), math.inf if rung == "inf" else int(rung))
    assert got == pytest.approx(EssSums.of(sums).ratio, rel=1e-10)


def test_log_weights_hundreds_of_nats_apart_do_not_overflow_the_ladder():
    ladder = ess_ladder(torch.tensor([900.0, -900.0]), torch.tensor([0, 1, 2]))

    assert float(ladder["1"]) == pytest.approx(0.5)


def test_no_token_has_no_ess():
    assert all(math.isnan(float(value)) for value in ess_ladder(torch.zeros(0), torch.tensor([0, 0])).values())


@pytest.mark.parametrize("horizon", [2, 8, 32, math.inf])
def test_a_token_gets_the_weight_of_the_first_block_that_holds_it(horizon):
    lag, offsets = rows()

    got = block_log_weight(lag, offsets, float(horizon)).numpy()

    sums, row_B, first_B = block_sums(lag.numpy(), offsets.numpy(), horizon)
    want = np.full(len(lag), np.nan)
    for total, row, first in reversed(list(zip(sums, row_B, first_B, strict=True))):
        end = offsets.numpy()[row + 1] if math.isinf(horizon) else min(first + horizon, offsets.numpy()[row + 1])
        want[first:end] = total
    assert got == pytest.approx(want, abs=1e-12)


def test_at_horizon_one_a_tokens_log_weight_is_its_own_log_ratio():
    lag, offsets = rows()

    assert torch.equal(block_log_weight(lag, offsets, 1.0), lag)


@pytest.mark.parametrize(
    ("form", "advantage", "ratio", "weight", "is_clipped"),
    [
        ("one", 1.0, 3.0, 1.0, False),
        ("unclipped", 1.0, 30.0, 30.0, False),
        ("truncate", -1.0, 3.0, 2.0, True),
        ("truncate", 1.0, 0.01, 0.01, False),
        ("mask", 1.0, 2.1, 0.0, True),
        ("mask", 1.0, 0.4, 0.0, True),
        ("mask", 1.0, 0.6, 0.6, False),
        ("ppo", 1.0, 2.1, 0.0, True),
        ("ppo", -1.0, 2.1, 2.1, False),
        ("ppo", -1.0, 0.4, 0.0, True),
        ("ppo", 1.0, 0.4, 0.4, False),
    ],
)
def test_each_form_clips_on_its_own_side(form, advantage, ratio, weight, is_clipped):
    rule = Weight(form, low=0.5, high=2.0)
    log_ratio, sign = torch.tensor([math.log(ratio)], dtype=torch.float64), torch.tensor([advantage])

    assert rule.of(log_ratio, sign).tolist() == pytest.approx([weight])
    assert rule.clipped(log_ratio, sign).tolist() == [is_clipped]


def test_a_token_the_generator_could_not_produce_is_truncated_like_any_other():
    assert Weight("truncate", high=2.0).of(torch.tensor([math.inf, -math.inf]), torch.ones(2)).tolist() == [2.0, 0.0]


def test_bounds_and_horizons_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="low <= 1 <= high"):
        Weight("ppo", low=0.2, high=0.2)
    with pytest.raises(ValueError, match="whole number of tokens"):
        Weight(horizon=0.5)
    with pytest.raises(ValueError, match="form is 'clip'"):
        Weight("clip")
    with pytest.raises(ValueError, match="offsets end at 3"):
        block_log_weight(torch.zeros(5), torch.tensor([0, 3]), 8.0)
