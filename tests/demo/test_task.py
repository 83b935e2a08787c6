import numpy as np

from dlc_sentinel.demo.task import CountingTask, group_advantages


def test_the_rows_of_a_group_share_their_prompt():
    prompts = CountingTask().prompts(np.random.default_rng(0), num_groups=3, rows_per_group=2)

    assert prompts.shape == (6, 4)
    assert (prompts[0::2] == prompts[1::2]).all()
    assert len({tuple(row) for row in prompts.tolist()}) == 3


def test_counting_on_from_the_prompt_earns_the_whole_reward_also_past_the_end_of_the_vocabulary():
    task = CountingTask(vocab_size=16)
    prompts = np.array([[3, 1, 4, 14]])

    assert task.rewards(prompts, np.array([[15, 0, 1, 2]])).tolist() == [1.0]


def test_only_tokens_that_follow_their_predecessor_are_rewarded():
    task = CountingTask(vocab_size=16)

    rewards = task.token_rewards(np.array([[0, 0, 0, 5]]), np.array([[6, 6, 7, 9]]))

    assert rewards.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_random_answers_earn_one_in_vocabulary():
    task = CountingTask(vocab_size=16)
    rng = np.random.default_rng(7)
    prompts = task.prompts(rng, 200, 1)

    mean = task.rewards(prompts, rng.integers(0, 16, (200, 96))).mean()

    assert abs(mean - 1 / 16) < 5 * np.sqrt((1 / 16) * (15 / 16) / (200 * 96))


def test_advantages_are_centred_and_scaled_within_each_group():
    advantages = group_advantages(np.array([0.0, 1.0, 10.0, 30.0], dtype=np.float32), rows_per_group=2)

    np.testing.assert_allclose(advantages, [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5], rtol=1e-3)


def test_a_group_with_equal_rewards_pulls_nowhere():
    assert group_advantages(np.full(6, 0.25, dtype=np.float32), rows_per_group=6).tolist() == [0.0] * 6
