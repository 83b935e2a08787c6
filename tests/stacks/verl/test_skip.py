"""Mini-batches left out on a RESYNC: the plan with plain values, then one real job whose two ranks must agree."""

import math
from types import SimpleNamespace

import pytest
from dlc_sentinel.integrations.verl_actions import Actions
from dlc_sentinel.integrations.verl_driver import Driver
from dlc_sentinel.integrations.verl_skip import OPTION, Plan
from stacks.verl.support.job import FLOAT32, JOB_S, TWICE, Size
from stacks.verl.support.watch import RUN
from stacks.verl.test_actions import DOUBT, RESYNC, Answers, Trainer, v1
from stacks.verl.test_driver import trainer

from dlc_sentinel.config import Act, Config
from dlc_sentinel.records import Command


def walk(plan, commands):
    """(which mini-batches were left out, the answer of the last one), all ranks wishing alike."""
    skipped = []
    answer = None
    for place, command in enumerate(commands):
        plan.begin(command)
        skipped.append(bool(plan.wish))
        answer = plan.done(skipped=skipped[-1], last=place == len(commands) - 1, step=7)
    return skipped, answer


def test_without_a_command_every_mini_batch_is_trained_and_nothing_is_answered():
    assert walk(Plan(), ["", "", ""]) == ([False, False, False], None)


def test_the_first_mini_batch_is_trained_and_the_rest_left_out():
    skipped, answer = walk(Plan(), ["r1"] * 4)

    assert skipped == [False, True, True, True]
    assert answer == ("r1", "applied", "skipped 3 of 4 mini-batches of step 7")


def test_the_batch_after_is_trained_whole_again():
    plan = Plan()
    walk(plan, ["r1"] * 3)

    assert walk(plan, [""] * 3) == ([False] * 3, None)


def test_a_step_of_a_single_mini_batch_is_trained_and_the_command_refused_with_the_reason():
    skipped, (command_id, outcome, reason) = walk(Plan(), ["r1"])

    assert (skipped, command_id, outcome) == ([False], "r1", "refused")
    assert "nothing to skip" in reason


def test_a_rank_without_a_wish_of_its_own_counts_what_the_others_agreed_to_skip():
    plan = Plan()
    plan.begin("r1")
    plan.done(skipped=False, last=False, step=7)
    plan.done(skipped=True, last=False, step=7)

    assert plan.done(skipped=True, last=True, step=7) == ("r1", "applied", "skipped 2 of 3 mini-batches of step 7")


@pytest.mark.parametrize("trainer", [v1(mode="sync"), Trainer(global_steps=5)])
def test_a_trainer_that_delivers_each_step_hands_the_command_to_one_step_only(trainer):
    answers = Answers()
    actions = Actions(trainer, answers, may_skip=True)
    actions.take(RESYNC, 5)

    assert [actions.take_skip(), actions.take_skip()] == ["r1", ""]
    assert answers.given == []


@pytest.mark.parametrize("trainer", [v1(), v1(strategy="wait"), Trainer(message_queue_client=None, global_steps=5)])
def test_a_trainer_with_a_queue_does_not_skip(trainer):
    actions = Actions(trainer, Answers(), may_skip=True)
    actions.take(RESYNC, 5)

    assert not actions.skips and actions.take_skip() == ""


def test_a_doubted_engine_is_no_reason_to_skip():
    actions = Actions(v1(mode="sync"), Answers(), may_skip=True)
    actions.take(DOUBT, 5)

    assert actions.take_skip() == ""


def test_a_refusal_names_the_option():
    told = []
    answers = Answers()
    answers.ack = lambda command, outcome, *, version=None, reason=None: told.append(reason)
    Actions(v1(mode="sync"), answers).take(RESYNC, 5)

    assert f"{OPTION}=1" in told[0]


@pytest.mark.parametrize(("option", "facts"), [("", {}), ("0", {}), ("1", {"dlc_skip": ""})])
def test_the_actor_ranks_hear_of_skipping_only_where_it_is_switched_on(monkeypatch, option, facts):
    monkeypatch.delenv("DLC_SENTINEL", raising=False)
    monkeypatch.setenv("DLC_SENTINEL_METRICS", "0")
    monkeypatch.setenv(OPTION, option)
    batch = SimpleNamespace(extra_info={})
    Driver().wrap_update_actor(lambda *args: None)(trainer(), batch)

    assert {name: value for name, value in batch.extra_info.items() if name == "dlc_skip"} == facts


# Each rank has an engine, and equal engines say equal things: two samples of a prompt would have no advantage.
SIZE = Size(steps=3, prompts=4, samples=4, mini_batch=2, response=16, lr=1e-3)


@pytest.fixture(scope="module")
def skipped(launch, watch):
    """(job, watch) of a job of two ranks, four updates a step, sent a RESYNC when its first step closed."""

    def rule(step):
        return Command("c-RESYNC-1", RUN, "RESYNC", reason="test", issued_step=1) if step["step"] == 1 else None

    listening = watch(Config(act=Act(mode="observe")), rule)
    two = "trainer.n_gpus_per_node=2"
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    env = listening.env | {OPTION: "1"}
    job = launch(SIZE, *FLOAT32, TWICE, two, micro, env=env).ended_well(JOB_S)
    listening.until(lambda: len(listening.steps) == SIZE.steps, 30)
    return job, listening


def updates(listening, step):
    """rank -> the updates of a step that it trained."""
    found = {}
    for t in listening.rows(step):
        found.setdefault(t.source.rank, set()).add(t.update)
    return found


@pytest.mark.slow
@pytest.mark.verl
def test_in_a_real_job_both_ranks_leave_out_the_same_three_of_four(skipped):
    _, listening = skipped

    assert [updates(listening, step) for step in (1, 2, 3)] == [
        {1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}},
        {1: {0}, 2: {0}},
        {1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}},
    ]


@pytest.mark.slow
@pytest.mark.verl
def test_in_a_real_job_the_command_is_answered_with_what_was_skipped_and_the_version_then_delivered(skipped):
    _, listening = skipped

    assert [text.split(" (")[0] for text in listening.texts("ack")] == ["c-RESYNC-1: applied at version 2"]
    assert "skipped 3 of 4 mini-batches of step 2" in listening.texts("ack")[0]


@pytest.mark.slow
@pytest.mark.verl
def test_a_job_that_skipped_logs_finite_numbers_of_what_it_trained(skipped):
    job, _ = skipped
    logged = job.metrics()

    assert sorted(logged) == [1, 2, 3]
    assert logged[2]["actor/lr"] == logged[1]["actor/lr"] > 0
    assert {name for name in logged[1] if name.startswith("actor/")} <= set(logged[2])
    assert all(math.isfinite(value) for value in logged[2].values())
    assert logged[2]["actor/grad_norm"] > 0
