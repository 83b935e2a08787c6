"""The hand-written sampler against transformers' own forward pass of the same weights."""

import numpy as np
import pytest
import torch

from dlc_sentinel.demo.policy import make_policy, score, weights_of
from dlc_sentinel.demo.sampler import Sampler
from dlc_sentinel.demo.shape import PolicyShape

SHAPES = {
    "the demo's": PolicyShape(),
    "deep, grouped heads": PolicyShape(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, init_range=0.3),
}


def sampled(
    shape: PolicyShape, dtype: str, *, num_rows: int = 12, num_tokens: int = 40, seed: int = 3, grid: float = 0.0
):
    """(policy, prompts, tokens, the sampler's logprobs)."""
    policy = make_policy(shape, seed)
    sampler = Sampler(shape, num_rows, 4 + num_tokens, dtype)
    sampler.load(weights_of(policy))
    sampler.logit_grid = grid
    prompts = torch.from_numpy(np.random.default_rng(seed).integers(0, shape.vocab_size, (num_rows, 4)))
    tokens, logprobs = sampler.generate(prompts, num_tokens, torch.Generator().manual_seed(seed))
    return policy, prompts, tokens, logprobs


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_in_float32_the_cached_logprobs_are_those_of_one_full_forward_pass(shape):
    policy, prompts, tokens, logprobs = sampled(shape, "float32")

    assert float((logprobs - score(policy, prompts, tokens)).abs().max()) < 1e-5


def test_bfloat16_numerics_differ_from_the_trainers_by_a_real_but_small_discrepancy():
    policy, prompts, tokens, logprobs = sampled(PolicyShape(), "bfloat16")

    rms = float((logprobs - score(policy, prompts, tokens)).square().mean().sqrt())

    assert 1e-3 < rms < 0.045


def test_bfloat16_numerics_are_as_far_from_the_trainers_as_transformers_own():
    policy, prompts, tokens, logprobs = sampled(PolicyShape(num_layers=2), "bfloat16")
    exact = score(policy, prompts, tokens)

    theirs = score(policy.bfloat16(), prompts, tokens)

    ratio = float((logprobs - exact).std() / (theirs - exact).std())
    assert 0.5 < ratio < 2.0


def test_the_first_token_is_drawn_from_the_policys_own_distribution():
    shape = PolicyShape(init_range=0.3)
    policy = make_policy(shape, 5)
    num_rows = 20_000
    sampler = Sampler(shape, num_rows, 5)
    sampler.load(weights_of(policy))
    prompts = torch.tensor([[1, 2, 3, 4]])

    tokens, _ = sampler.generate(prompts.expand(num_rows, -1), 1, torch.Generator().manual_seed(0))

    share_V = np.bincount(tokens[:, 0].numpy(), minlength=shape.vocab_size) / num_rows
    with torch.no_grad():
        wanted_V = torch.softmax(policy(prompts).logits[0, -1], -1).numpy()
    assert np.abs(share_V - wanted_V).max() < 5 * np.sqrt((wanted_V * (1 - wanted_V)).max() / num_rows)


def test_equal_seeds_give_equal_batches_and_other_weights_give_others():
    first, again, other = (sampled(PolicyShape(), "bfloat16", seed=seed) for seed in (1, 1, 2))

    assert torch.equal(first[2], again[2])
    assert torch.equal(first[3], again[3])
    assert not torch.equal(first[2], other[2])


def test_a_row_does_not_depend_on_how_many_rows_were_generated_before_it():
    shape = PolicyShape()
    sampler = Sampler(shape, 8, 24)
    sampler.load(weights_of(make_policy(shape, 1)))
    prompts = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(0))
    first, _ = sampler.generate(prompts, 20, torch.Generator().manual_seed(4))
    sampler.generate(prompts.flip(0), 20, torch.Generator().manual_seed(5))

    again, _ = sampler.generate(prompts, 20, torch.Generator().manual_seed(4))

    assert torch.equal(first, again)


def test_rounding_logits_to_a_grid_moves_logprobs_by_no_more_than_the_grid():
    policy, prompts, tokens, logprobs = sampled(PolicyShape(init_range=0.3), "float32", grid=0.25)

    moved = (logprobs - score(policy, prompts, tokens)).abs()

    assert float(moved.max()) <= 0.25 + 1e-5
    assert float(moved.mean()) > 0.02
