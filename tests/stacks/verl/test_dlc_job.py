"""A real verl job on CPU with the example's lines: it learns, centred at the lists its rollout server sent."""

import shlex

import numpy as np
import pytest
from dlc_sentinel.integrations.verl_actor import ActorTap
from stacks.verl.support.job import FLOAT32, JOB_S, REPO, SYNC_ENV, Size

SIZE = Size(steps=8, prompts=8, samples=8, mini_batch=4, response=16, lr=1e-2)
"""Two updates a step: the second has lag."""
LEARNABLE = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    return sum(c in "aeiou 0123456789" for c in solution_str) / max(len(solution_str), 1)
"""


def lines_of_the_example():
    """The overrides that examples/verl_dlc.sh gives verl."""
    text = (REPO / "examples" / "verl_dlc.sh").read_text()
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return [word for word in words[words.index("verl.trainer.main_ppo") + 1 :] if word != "$@"]


@pytest.fixture(scope="module")
def steps(launch, tmp_path_factory):
    """What verl logged at each step of a finished job; its engine computes with weights rounded to 8 bits."""
    folder = tmp_path_factory.mktemp("dlc-job")
    (folder / "reward.py").write_text(LEARNABLE)
    job = launch(
        SIZE, *FLOAT32, *lines_of_the_example(), f"reward.custom_reward_function.path={folder / 'reward.py'}",
        env=SYNC_ENV,
    ).ended_well(JOB_S)  # fmt: skip
    return [job.metrics()[step] for step in range(1, SIZE.steps + 1)]


@pytest.mark.slow
@pytest.mark.verl
def test_rewards_climb(steps):
    rewards = [step["critic/rewards/mean"] for step in steps]
    quarter = SIZE.steps // 4

    assert np.mean(rewards[-quarter:]) > np.mean(rewards[:quarter]) + 0.3


@pytest.mark.slow
@pytest.mark.verl
def test_verls_log_tells_what_the_loss_rests_on(steps):
    told = {name: [step[f"actor/dlc/{name}"] for step in steps] for name in (
        "centring", "lag_exact_share", "weight_ess_ratio/1", "clip_share", "tail_mass", "centred_bias_l1",
    )}  # fmt: skip

    assert set(told["centring"]) == set(told["lag_exact_share"]) == {1.0}
    assert all(0 < ess < 1 for ess in told["weight_ess_ratio/1"])
    assert all(0 <= share < 0.5 for share in told["clip_share"])
    assert all(0 < mass < 1 for mass in told["tail_mass"][:-1])
    assert max(told["centred_bias_l1"]) > 1e-3


def test_a_watched_actor_sends_nothing_when_it_is_asked_for_scores():
    class Tap(ActorTap):
        def _record(self, **named):
            sent.append(sorted(named))

    sent, tap = [], object.__new__(Tap)
    loss = tap._tapped(lambda **_: "result")

    assert loss(student_logits=1, data=2) == loss(model_output=1, data=2) == "result"
    assert sent == [["data", "model_output"]]
