"""The experiments' exact numbers against brute force, the trap in small, and a page that says what the rows say."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from benchmarks.experiments.arms import REFERENCE, Arm, gradient
from benchmarks.experiments.geometry import Chain, Tree
from benchmarks.experiments.job import REFERENCE as TINY_REFERENCE
from benchmarks.experiments.job import SPEC, TinyArm, spread
from benchmarks.experiments.judge import crossing, failure, failure_for_good, interval
from benchmarks.experiments.loop import Runs, reference_weights
from benchmarks.experiments.reference import Moment
from benchmarks.experiments.store import play, rows_of
from benchmarks.experiments.worlds import LeafReward, StepReward, World, log_softmax, trap
from dlc_sentinel.maths.ess import block_sums

RNG = np.random.default_rng(5)


def small_tree(sigma=0.3):
    tree = Tree(3, 3)
    return World(
        name="small",
        geometry=tree,
        features_nK=RNG.normal(size=(tree.num_states, 4)),
        base_nV=np.zeros((tree.num_states, 3)),
        reward=LeafReward(tree, RNG.random(tree.num_leaves)),
        xi_nV=sigma * RNG.normal(size=(tree.num_states, 3)),
        num_rows=8,
        num_steps=3,
        learning_rate=0.1,
    )


def small_chain(length=3):
    chain = Chain(RNG.integers(0, 4, (4, 2)), np.array([0.5, 0.2, 0.2, 0.1]), length)
    return World(
        name="small",
        geometry=chain,
        features_nK=np.eye(4),
        base_nV=np.zeros((4, 2)),
        reward=StepReward(chain, RNG.random((4, 2))),
        xi_nV=0.3 * RNG.normal(size=(4, 2)),
        num_rows=8,
        num_steps=3,
        learning_rate=0.1,
    )


def paths_of(world):
    """Every response: ([L] probability of its start, [L, T] states, [L, T] actions)."""
    geometry = world.geometry
    starts, states, actions = [], [], []
    firsts = enumerate(geometry.start_n) if isinstance(geometry, Chain) else [(0, 1.0)]
    for first, probability in firsts:
        for tokens in product(range(geometry.num_actions), repeat=geometry.length):
            at, row = first, []
            for place, token in enumerate(tokens):
                row.append(at)
                if isinstance(geometry, Chain):
                    at = geometry.next_nV[at, token]
                else:
                    at = geometry.first(place + 1) + (at - geometry.first(place)) * geometry.num_actions + token
            starts.append(probability)
            states.append(row)
            actions.append(tokens)
    return np.array(starts), np.array(states), np.array(actions)


def random_policies(world, num):
    num_features, num_actions = world.features_nK.shape[1], world.base_nV.shape[1]
    return log_softmax(world.logits(RNG.normal(size=(num, num_features, num_actions))))


def weights_and_policies(world, num):
    weights = RNG.normal(size=(num, world.features_nK.shape[1], world.base_nV.shape[1]))
    return weights, log_softmax(world.logits(weights))


def brute_kl(world, p_nV, q_nV, seen_nV=None):
    """Sum over all responses; with `seen`, the closed form of each prefix, weighted by how `seen` reaches it."""
    start_L, state_LT, action_LT = paths_of(world)
    law_nV = p_nV if seen_nV is None else seen_nV
    probability_L = start_L * np.exp(law_nV[state_LT, action_LT].sum(1))
    if seen_nV is None:
        return float(probability_L @ (p_nV - q_nV)[state_LT, action_LT].sum(1))
    kl_n = (np.exp(p_nV) * (p_nV - q_nV)).sum(1)
    return float(probability_L @ kl_n[state_LT].sum(1))


@pytest.mark.parametrize("make", [small_tree, small_chain])
def test_the_kl_of_whole_responses_is_that_of_brute_force(make):
    world = make()
    weights, ons = weights_and_policies(world, 3)
    now = random_policies(world, 2)
    moment = Moment(world, weights)

    found = moment.distances(now, random_policies(world, 2))

    apart = np.mean([brute_kl(world, ons[i], ons[j]) for i in range(3) for j in range(3) if i != j])
    assert moment.apart == pytest.approx(apart, rel=1e-10)
    full = [np.mean([brute_kl(world, one, on) for on in ons]) / apart for one in now]
    reverse = [np.mean([brute_kl(world, on, one) for on in ons]) / apart for one in now]
    np.testing.assert_allclose(found.full_S, full, rtol=1e-10)
    np.testing.assert_allclose(found.reverse_S, reverse, rtol=1e-10)


@pytest.mark.parametrize("make", [small_tree, small_chain])
def test_the_prefix_ratio_weighs_both_kls_by_the_generators_prefixes(make):
    world = make()
    weights, ons = weights_and_policies(world, 3)
    now, seen = random_policies(world, 2), random_policies(world, 2)

    found = Moment(world, weights).distances(now, seen).prefix_S

    for number in range(2):
        above = np.mean([brute_kl(world, now[number], on, seen[number]) for on in ons])
        below = np.mean([brute_kl(world, ons[i], ons[j], seen[number]) for i in range(3) for j in range(3) if i != j])
        assert found[number] == pytest.approx(above / below, rel=1e-10)


@pytest.mark.parametrize(("make", "horizons"), [(small_tree, (1, 2, np.inf)), (small_chain, (1, 3, np.inf))])
def test_the_population_ess_is_that_of_all_responses_cut_by_the_house_rule(make, horizons):
    world = make()
    mu, ratio = np.exp(random_policies(world, 1)), np.exp(0.5 * RNG.normal(size=(1, *world.base_nV.shape)))

    found = world.geometry.ess(mu, ratio, horizons)[0]

    start_L, state_LT, action_LT = paths_of(world)
    probability_L = start_L * mu[0][state_LT, action_LT].prod(1)
    lag_LT = np.log(ratio[0])[state_LT, action_LT]
    offsets = np.arange(len(lag_LT) + 1) * lag_LT.shape[1]
    for value, horizon in zip(found, horizons, strict=True):
        sums_B, row_B, _ = block_sums(lag_LT.ravel(), offsets, horizon)
        num_blocks = len(sums_B) / len(lag_LT)
        first = probability_L[row_B] @ np.exp(sums_B)
        second = probability_L[row_B] @ np.exp(2 * sums_B)
        assert value == pytest.approx(first**2 / (num_blocks * second), rel=1e-10)


@pytest.mark.parametrize("make", [small_tree, small_chain])
def test_the_exact_return_is_the_mean_over_all_responses(make):
    world = make()
    p_nV = np.exp(random_policies(world, 1))
    start_L, state_LT, action_LT = paths_of(world)

    mean = world.reward.mean(p_nV)[0]

    reward_L = world.reward.of(state_LT[None], action_LT[None])[0]
    assert mean == pytest.approx(start_L * p_nV[0][state_LT, action_LT].prod(1) @ reward_L, rel=1e-10)


def expected_sums(world, mu_nV):
    """[1, n, V] expected sum of rewards of the tokens of each state and action, samples from mu."""
    start_L, state_LT, action_LT = paths_of(world)
    pull_L = start_L * np.exp(mu_nV[state_LT, action_LT].sum(1)) * world.reward.of(state_LT[None], action_LT[None])[0]
    out = np.zeros((1, *mu_nV.shape))
    np.add.at(out[0], (state_LT, action_LT), pull_L[:, None])
    return out


@pytest.mark.parametrize("make", [small_tree, small_chain])
def test_the_centred_gradient_is_the_finite_difference_of_the_engines_return(make):
    world = make()
    weights = RNG.normal(size=(1, world.features_nK.shape[1], world.base_nV.shape[1]))

    def engine(weights):
        return log_softmax(world.logits(weights) + world.xi_nV)

    now, mu = log_softmax(world.logits(weights)), engine(weights)
    sums = expected_sums(world, mu[0])
    nothing = np.zeros_like(sums)
    found = world.features_nK.T @ gradient(Arm("", "one"), sums, nothing, now, now, mu)
    plain = world.features_nK.T @ gradient(Arm("", "one", is_centred=False), sums, nothing, now, now, mu)

    numeric = np.zeros_like(weights)
    for place in np.ndindex(weights.shape):
        step = np.zeros_like(weights)
        step[place] = 1e-5
        above, below = (world.reward.mean(np.exp(engine(weights + sign * step)))[0] for sign in (1, -1))
        numeric[place] = (above - below) / 2e-5
    np.testing.assert_allclose(found, numeric, atol=1e-8)
    assert np.abs(plain - numeric).max() > 1e-3


@pytest.mark.parametrize("make", [small_tree, small_chain])
def test_samples_follow_the_policy(make):
    world = replace(make(), num_rows=4000)
    p = np.exp(random_policies(world, 2))
    uniform = np.random.default_rng(3).random((2, world.num_rows, world.geometry.length + 1))

    state_SBT, action_SBT = world.geometry.sample(p, uniform)

    found = world.reward.of(state_SBT, action_SBT).mean(1)
    np.testing.assert_allclose(found, world.reward.mean(p), atol=0.02)


TRAP_STEPS = 40


@cache
def trapped(arm_name):
    """Rows of four short runs of an arm in the trap."""
    world = replace(trap(), num_steps=TRAP_STEPS)
    arms = {"TIS": Arm("TIS", of_total=True, is_centred=False), "DLC": Arm("DLC", horizon=32.0)}
    runs = Runs(world, arms[arm_name], range(4))
    runs.run(reference_weights(world, REFERENCE, range(10, 16)))
    return runs.rows()


def test_the_trap_takes_the_return_of_a_stale_run_while_its_generator_earns_the_same():
    for row in trapped("TIS"):
        assert row["return"][-1] < 0.05 < 0.5 * max(row["return"])
        assert row["seen_return"][-1] == pytest.approx(row["seen_return"][0], abs=1e-9)
        assert not row["syncs"]


def test_the_generators_prefixes_show_less_of_the_collapse_than_whole_responses():
    full, prefix = (np.mean([row[key][-1] for row in trapped("TIS")]) for key in ("ratio", "prefix"))

    assert full > 2.0
    assert prefix < 0.5 * full


def test_the_default_rule_keeps_the_return_with_few_syncs():
    for row in trapped("DLC"):
        assert row["return"][-1] > 0.95
        assert 1 <= len(row["syncs"]) <= TRAP_STEPS // 3


def a_row(ratio, ess=(1.0,)):
    return {"ratio": list(ratio), "ess": {"1": list(ess)}, "num_steps": len(ratio), "every": 1}


def test_a_failure_is_five_steps_above_the_band_after_the_warm_up():
    ratio = [9.0] * 10 + [1.0] * 10 + [3.0] * 4 + [1.0] * 6 + [3.0] * 5 + [1.0] * 65

    assert failure(a_row(ratio)) == 30
    assert failure_for_good(a_row(ratio)) is None
    assert failure_for_good(a_row([*ratio, 3.0, 3.0])) == 100


def test_a_crossing_is_the_first_step_below_one_half():
    assert crossing(a_row([1.0] * 4, [1.0, 0.5, 0.49, 0.6]), "1") == 2
    assert crossing(a_row([1.0] * 4, [1.0, 0.9, 0.8, 0.7]), "1") is None


def test_the_interval_holds_the_mean_of_a_known_sample_and_shrinks_with_its_size():
    few, many = (interval(np.random.default_rng(1).normal(3.0, 1.0, num)) for num in (8, 800))

    assert few.low < 3.0 < few.high
    assert many.high - many.low == pytest.approx(2 * 1.96 / np.sqrt(800), rel=0.15)


def test_a_fixed_period_spreads_its_syncs_evenly():
    assert sorted(spread(4, 100)) == [19, 39, 59, 79]
    assert not spread(0, 100)


def test_a_second_call_goes_on_where_the_first_one_stopped(tmp_path):
    made = []

    def job(name):
        return [name], lambda: (made.append(name), [{"name": name}])[1]

    assert not play(tmp_path / "x.jsonl", -1.0, [job("a")])
    assert play(tmp_path / "x.jsonl", 60.0, [job("a"), job("b")])
    assert play(tmp_path / "x.jsonl", 60.0, [job("a"), job("b"), job("c")])

    assert made == ["a", "b", "c"]
    assert [row["name"] for row in rows_of(tmp_path / "x.jsonl")] == made


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page of the trap's short runs alone: (claims.json as text, the page)."""
    from benchmarks.experiments.page import write

    tmp_path = tmp_path_factory.mktemp("page")
    rows = [*trapped("TIS"), *trapped("DLC")]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path, tmp_path / "docs")
    assert sorted(path.suffix for path in (tmp_path / "docs").iterdir()) == [".md", *[".png"] * 5]
    return (tmp_path / "claims.json").read_text(), (tmp_path / "docs" / "claims.md").read_text()


@pytest.mark.slow
def test_the_page_can_be_made_again_from_the_json_alone_and_shows_its_numbers(written):
    from benchmarks.experiments.page import page

    text, shown = written
    found = json.loads(text)
    assert page(found) == shown
    found["trap"]["table"][0]["full"] = [7.771, 7.661, 7.881]
    found["num_runs"] = 4711

    changed = page(found)

    assert "7.77 (7.66, 7.88)" in changed
    assert "7.77 (7.66, 7.88)" not in shown
    assert "from 4711 runs" in changed


@pytest.mark.slow
def test_the_page_says_where_the_trap_caught_a_run_and_where_it_did_not(written):
    lines = [line for line in written[1].splitlines() if line.startswith(("| TIS |", "| DLC |"))]

    end = {line.split(" | ")[0].strip("| "): float(line.split(" | ")[4].split(" ")[0]) for line in lines}
    assert end["TIS"] < 0.05
    assert end["DLC"] > 0.95


@pytest.mark.slow
def test_the_tiny_engine_tells_the_logprobs_of_all_tokens_and_samples_as_before():
    import torch

    from benchmarks.experiments.tiny import FullSampler
    from dlc_sentinel.demo.policy import make_policy, weights_of
    from dlc_sentinel.demo.sampler import Sampler
    from dlc_sentinel.demo.shape import PolicyShape

    shape = PolicyShape(vocab_size=12)
    prompts = torch.randint(0, 12, (3, 4), generator=torch.Generator().manual_seed(0))
    full, plain = FullSampler(shape, 3, 12, "bfloat16"), Sampler(shape, 3, 12, "bfloat16")
    for sampler in (full, plain):
        sampler.load(weights_of(make_policy(shape, 1)))

    tokens, logps = full.full(prompts, 8, torch.Generator().manual_seed(2))

    wanted, wanted_logps = plain.generate(prompts, 8, torch.Generator().manual_seed(2))
    assert torch.equal(tokens, wanted)
    assert torch.equal(logps.gather(-1, tokens[..., None])[..., 0], wanted_logps)


@pytest.mark.slow
def test_a_tiny_run_syncs_by_its_rule_and_an_on_policy_one_has_neither_lag_nor_discrepancy():
    from benchmarks.experiments.tiny import TinyRun

    spec = replace(SPEC, num_steps=6, response_tokens=8, synced_steps=1, learning_rate=0.05)
    measured = []
    runs = [
        TinyRun(arm, 3, measure=lambda run, step: measured.append(run.own.tokens_ST.shape[1]), spec=spec)
        for arm in (TINY_REFERENCE, TinyArm("DLC, ESS_8", horizon=8), TinyArm("IS", "is"))
    ]
    for run in runs:
        for step in range(spec.num_steps):
            run.step(step)

    on, ruled, stale = (run.course for run in runs)
    assert measured == [8, 8, 8]
    assert max(on.lag_rms) == 0.0
    assert max(on.discrepancy_rms) < 1e-5 < min(stale.discrepancy_rms)
    assert ruled.syncs == [step for step in range(1, 6) if ruled.ess["8"][step] < 0.5] != []
    assert stale.syncs == []
    assert stale.lag_rms[-1] > 0.1


@pytest.mark.slow
def test_the_closed_form_of_a_kl_is_the_sum_over_positions_of_a_known_one():
    import torch

    from benchmarks.experiments.tiny_kl import divergence

    left = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 4, 3)
    right = torch.tensor([0.25, 0.5, 0.25]).log().expand(2, 4, 3)

    assert divergence(left, right) == pytest.approx(4 * 0.25 * np.log(2.0))
