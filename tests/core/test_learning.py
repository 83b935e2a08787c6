"""LEARNING: the policy collapses or stands still though engine and trainer agree."""

import json
import math

import numpy as np
import pytest
from factories import Job

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.learning import Learning
from dlc_sentinel.core.rules import learning as rule
from dlc_sentinel.core.rules.base import View


def learning(values, **more):
    """Kinds of LEARNING found over steps whose scalars are the lists given, the last value held."""
    job = Job()
    for step in range(40):
        scalars = {name: float(of[min(step, len(of) - 1)]) for name, of in values.items()}
        job.step(step, rows=4, lag=0.0, scalars={"lr": 1e-6, "grad_norm": 0.5} | scalars | more)
    return {f["kind"] for f in job.report()["findings"] if f["verdict"] == "LEARNING"}


def test_entropy_below_a_tenth_of_its_start_is_found():
    assert learning({"entropy": [2.0] * 10 + [0.1]}) == {"entropy"}
    assert learning({"entropy": [2.0] * 10 + [0.3]}) == set()


def test_low_entropy_of_a_policy_that_has_learnt_its_task_is_no_fault():
    assert learning({"entropy": [2.0] * 10 + [0.1], "reward": [0.2] * 10 + [0.9]}) == set()
    assert learning({"entropy": [2.0] * 10 + [0.1], "reward": [0.35]}) == {"entropy"}
    assert learning({"entropy": [2.0] * 10 + [0.1], "reward": [0.2] * 6 + [0.9] * 6 + [0.4]}) == {"entropy"}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"truncated_ratio": [0.05] * 10 + [0.9]}, "truncation"),
        ({"response_length": [200] * 10 + [700]}, "length"),
        ({"reward": [0.2] * 6 + [0.8] * 8 + [0.3]}, "reward"),
    ],
)
def test_a_dial_that_leaves_its_range_is_named(values, kind):
    assert learning(values) == {kind}


@pytest.mark.parametrize(
    "values",
    [
        {"truncated_ratio": [0.05] * 10 + [0.45]},  # most rows are whole
        {"truncated_ratio": [0.45] * 10 + [0.6]},  # nearly as many were cut from the start
        {"response_length": [200] * 10 + [550]},
        {"reward": [0.2] * 6 + [0.8] * 8 + [0.5]},
        {"reward": [0.04] * 10 + [0.01]},  # a peak so low is none
    ],
)
def test_a_dial_short_of_its_line_is_no_fault(values):
    assert learning(values) == set()


def line(start, end, at, steps, num):
    return start + (end - start) * np.clip((np.arange(num) - at) / steps, 0.0, 1.0)


def found(num, **scalars):
    """Kinds of LEARNING that single steps point at, of the courses given, one value a step."""
    course, history, kinds = Learning(), [], set()
    for step in range(num):
        now = {"lr": 1e-6, "grad_norm": 0.5} | {name: float(of[step]) for name, of in scalars.items()}
        history = [*history, StepFacts(step, step, "exact", scalars=now, learning=course.update(now))][-64:]
        kinds |= {one.kind for one in rule.learning(history, View(Config()))}
    return kinds


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("reward", "num_prompts"),
    [
        (line(0.7, 0.98, 0, 100, 200), 64),  # strong from the start: there is no half more to gain
        (line(0.5, 0.72, 0, 100, 200), 64),
        (line(0.2, 0.75, 0, 60, 200), 8),  # learnt, then as noisy as 8 prompts are
        (-1.25 + line(0.0, 1.2, 0, 100, 200), 10**6),  # distillation: below 0 for ever
    ],
)
def test_entropy_falls_where_a_policy_learns_whatever_its_rewards_scale_and_noise(reward, num_prompts, seed):
    rng = np.random.default_rng(seed)
    seen = rng.binomial(num_prompts, reward) / num_prompts if reward[0] > 0 else rng.normal(reward, 0.02)
    assert found(200, entropy=line(1.0, 0.06, 0, 110, 200), reward=seen) == set()


def test_entropy_that_falls_while_the_reward_stays_is_found_amid_noise():
    rng = np.random.default_rng(0)
    seen = rng.binomial(64, 0.4, 200) / 64
    assert found(200, entropy=line(1.0, 0.06, 0, 110, 200), reward=seen) == {"entropy"}


def test_responses_that_grow_with_the_reward_are_no_fault_and_those_that_only_grow_are():
    longer = line(400, 2000, 0, 100, 200)
    rng = np.random.default_rng(0)
    assert found(200, response_length=longer, reward=rng.binomial(64, line(0.2, 0.7, 0, 100, 200)) / 64) == set()
    assert found(200, response_length=longer, reward=rng.binomial(64, 0.3, 200) / 64) == {"length"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_rows", "cut"), [(4, 0.3), (8, 0.3), (8, 0.45), (16, 0.35), (6, 0.25)])
def test_a_constant_share_of_cut_rows_is_no_fault_however_few_the_rows(num_rows, cut, seed):
    shares = np.random.default_rng(seed).binomial(num_rows, cut, 300) / num_rows
    assert found(300, truncated_ratio=shares) == set()


@pytest.mark.parametrize("seed", range(4))
def test_lengths_of_a_few_heavy_tailed_rows_are_no_fault(seed):
    lengths = np.random.default_rng(seed).lognormal(5.0, 1.0, (300, 4)).mean(1)
    assert found(300, response_length=lengths) == set()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_steps_whose_rewards_are_all_equal_have_no_gradient_and_freeze_nothing(share, seed):
    rng = np.random.default_rng(seed)
    assert found(300, grad_norm=np.where(rng.random(300) < share, 0.0, 0.5)) == set()


def test_a_gradient_that_stops_is_found_soon_where_there_always_was_one():
    norms = np.where(np.arange(60) < 40, 0.5, 0.0)
    assert found(44, grad_norm=norms) == {"frozen"} and found(42, grad_norm=norms) == set()


def test_a_policy_without_a_gradient_is_frozen_unless_its_learning_rate_is_zero():
    assert learning({}, grad_norm=0.0) == {"frozen"}
    assert learning({}, grad_norm=0.0, lr=0.0) == set()


def steps_found(rewards):
    """Steps at which the reward alone is held against the policy."""
    scalars = [{"reward": float(value)} for value in rewards]
    course = Learning()
    facts = [StepFacts(step, step, "exact", scalars=s, learning=course.update(s)) for step, s in enumerate(scalars)]
    return [fact.step for fact in facts if rule.learning([fact], View(Config()))]


def lasting(rng, num, share):
    """Noise of which each step keeps a share, with a standard deviation of 1."""
    values = rng.normal(0.0, math.sqrt(1.0 - share * share), num)
    for at in range(1, num):
        values[at] += share * values[at - 1]
    return values


NOISE = {
    "few solved, clipped": lambda rng: np.clip(rng.normal(0.04, 0.05, 400), 0.0, 1.0),
    "around zero": lambda rng: rng.normal(0.0, 0.15, 400),
    "6 % of 64 solved": lambda rng: rng.binomial(64, 0.06, 400) / 64,
    "8 % of 32 solved": lambda rng: rng.binomial(32, 0.08, 400) / 32,
    "scores of a reward model": lambda rng: rng.normal(0.05, 0.1, 400),
    "one of five batches has a reward": lambda rng: (rng.random(400) < 0.2) * 1.0,
    "penalties": lambda rng: rng.normal(-1.0, 0.3, 400),
    "lasts for some steps": lambda rng: 0.15 * lasting(rng, 400, 0.3),
    "dies down": lambda rng: 0.06 + np.where(np.arange(400) < 200, 0.1, 0.01) * rng.normal(size=400),
    "climbs": lambda rng: rng.binomial(64, line(0.02, 0.6, 0, 200, 400)) / 64,
    "climbs to zero": lambda rng: -2.0 * np.exp(-np.arange(400) / 30) - 0.05 + rng.normal(0.0, 0.02, 400),
    "one wild batch": lambda rng: rng.normal(0.3, 0.05, 400) + 50.0 * (np.arange(400) == 20),
    "harder data by turns": lambda rng: np.where(np.arange(400) // 40 % 2, 0.42, 0.7) + rng.normal(0.0, 0.03, 400),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_what_the_noise_of_a_healthy_reward_makes_is_no_fall(noise):
    assert [steps_found(noise(np.random.default_rng(seed))) for seed in range(6)] == [[]] * 6


def test_the_noise_of_a_run_of_few_steps_is_no_fall():
    runs = [np.random.default_rng(seed).normal(0.05, 0.1, 30) for seed in range(400)]
    assert [steps_found(rewards) for rewards in runs] == [[]] * 400


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("solved", "num", "by"),
    [
        (line(0.7, 0.1, 40, 1, 100), 64, 45),
        (line(0.7, 0.1, 40, 10, 100), 64, 50),
        (line(0.6, 0.2, 0, 7, 100), 2048, 12),
        (line(0.3, 0.0, 40, 10, 100), 64, 55),
        (line(0.06, 0.0, 40, 1, 100), 512, 46),
    ],
)
def test_a_reward_that_falls_for_good_is_found_amid_its_noise(solved, num, by, seed):
    found = steps_found(np.random.default_rng(seed).binomial(num, solved) / num)
    assert found and found[0] <= by
    assert len(found) >= 40


def test_a_fall_that_the_short_mean_does_not_tell_from_noise_is_seen_in_the_long_one():
    rewards = np.random.default_rng(2).normal(line(0.3, 0.0, 40, 1, 100), 0.1)
    assert 50 < steps_found(rewards)[0] < 60


def test_a_steady_climb_and_a_steady_fall_are_not_taken_for_noise():
    rewards = np.concatenate([line(0.1, 0.6, 0, 15, 15), line(0.6, 0.1, 0, 15, 30)])
    means = np.convolve(rewards, np.ones(5) / 5, "valid")
    halved = 4 + next(i for i in range(len(means)) if means[i] < 0.5 * means[: i + 1].max())
    assert steps_found(rewards)[0] == halved


def test_a_reward_below_zero_that_loses_most_of_what_it_had_gained_is_found():
    lost = np.concatenate([line(-0.9, -0.1, 0, 20, 25), line(-0.1, -0.9, 0, 10, 25)])
    assert learning({"reward": lost}) == {"reward"}
    noise = np.random.default_rng(0).normal(0.0, 0.05, 50)
    assert 30 < steps_found(lost + noise)[0] < 36


@pytest.mark.parametrize(
    "rewards",
    [
        np.concatenate([line(-0.9, -0.1, 0, 20, 30), line(-0.1, -0.45, 0, 5, 30)]),  # less than half of the gain
        np.concatenate([line(-0.9, 0.3, 0, 20, 30), line(0.3, 0.05, 0, 5, 30)]),  # of -1 or 1: 65 % solved, then 52 %
        line(-0.1, -0.3, 10, 5, 40),  # nothing was gained, and a score has no natural zero
        np.random.default_rng(0).normal(line(-1.0, -1.7, 30, 5, 60), 0.1),  # nothing but noise was gained
        np.concatenate([line(-100.0, -99.0, 0, 10, 20), line(-99.0, -100.0, 0, 5, 20)]),
        np.concatenate([line(-0.04, -0.01, 0, 5, 10), line(-0.01, -0.04, 0, 5, 20)]),
    ],
)
def test_a_reward_below_zero_that_keeps_most_of_what_it_had_gained_is_no_fault(rewards):
    assert steps_found(rewards) == []


def test_what_the_reward_is_held_against_outlives_a_restart():
    rewards = [0.6] * 30 + [0.2] * 6
    whole, before = Learning(), Learning()
    for value in rewards:
        expected = whole.update({"reward": value})
    for value in rewards[:30]:
        before.update({"reward": value})
    after = Learning.from_json(json.loads(json.dumps(before.to_json())))
    for value in rewards[30:]:
        found = after.update({"reward": value})
    assert found == expected
    assert found["reward_peak"] == pytest.approx(0.6)


def test_a_state_written_when_only_the_peak_was_kept_is_read():
    old = {"first": {"reward": [0.5]}, "rewards": [0.5, 0.5, 0.5, 0.5], "peak": None}
    assert Learning.from_json(old).update({"reward": 0.5})["reward_peak"] == 0.5


def test_a_reward_that_is_no_number_or_too_large_to_square_is_left_out():
    assert steps_found([0.5, math.nan, math.inf, 1e300, -1e300] * 8) == []


def test_ordinary_noise_is_no_fault():
    assert learning({"entropy": [2.0, 1.6, 1.8], "reward": [0.5, 0.3, 0.6], "truncated_ratio": [0.4, 0.55]}) == set()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("norms", [[0.5] * 10 + ["x"], [0.5] * 10 + ["x", "x", 0.5] * 10, ["x"], [0.5, "x"] * 20])
def test_a_gradient_that_is_not_finite_is_found_and_is_not_called_frozen(norms, wrong):
    assert learning({"grad_norm": [wrong if norm == "x" else norm for norm in norms]}) == {"non_finite_gradient"}


@pytest.mark.parametrize(
    "norms",
    [
        ([0.5] * 9 + [math.inf]) * 4,  # mixed precision skips a step now and then
        [0.5] * 10 + [math.nan] * 2 + [0.5],
        [math.inf] * 7 + [0.5],  # the loss scale starts too high
    ],
)
def test_steps_that_mixed_precision_skips_are_no_fault(norms):
    assert learning({"grad_norm": norms}) == set()


WORSE, BETTER, SAME = [0.4] * 10 + [0.25], [0.4] * 10 + [0.6], [0.4]


def test_responses_a_third_as_long_as_at_the_start_are_found_where_the_reward_falls_with_them():
    short = {"response_length": [800] * 10 + [250]}
    assert learning(short | {"reward": WORSE}) == {"length_collapse"}
    assert learning(short | {"reward": BETTER}) == learning(short | {"reward": SAME}) == learning(short) == set()
    assert learning({"response_length": [800] * 10 + [300], "reward": WORSE}) == set()


def test_entropy_five_times_its_start_is_found_where_the_reward_falls_with_it():
    random = {"entropy": [0.4] * 10 + [2.1]}
    assert learning(random | {"reward": WORSE}) == {"entropy_surge"}
    assert learning(random | {"reward": BETTER}) == learning(random | {"reward": SAME}) == learning(random) == set()
    assert learning({"entropy": [0.4] * 10 + [1.9], "reward": WORSE}) == set()


@pytest.mark.parametrize("norm", [0.0, math.nan])
def test_a_gradient_norm_that_is_no_longer_reported_keeps_no_finding_alive(norm):
    def steps(num, every):
        return [
            StepFacts(
                step, step, num_tokens=100, scalars={"grad_norm": norm} if step % every == 0 and step < num else {}
            )
            for step in range(40)
        ]

    assert rule.learning(steps(9, 1), View(Config())) == []
    assert rule.learning(steps(40, 2), View(Config())) != []
