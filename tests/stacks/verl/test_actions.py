"""What RESYNC and ABORT do to each kind of trainer, and what is answered. The trainers here are plain stand-ins."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from dlc_sentinel.integrations.verl_actions import Actions
from dlc_sentinel.integrations.verl_wraps import Aborted

from dlc_sentinel.records import Command


class Answers:
    """A hook that keeps what was acknowledged."""

    def __init__(self):
        self.given = []

    def ack(self, command, outcome, *, version=None, reason=None):
        self.given.append((command.id, outcome, version))


class Trainer(SimpleNamespace):
    def _save_checkpoint(self):
        self.saved = [*getattr(self, "saved", []), self.global_steps]


def v1(mode="separate_async", strategy="drop", threshold=8):
    buffer = SimpleNamespace(max_off_policy_threshold=threshold, max_off_policy_strategy=strategy)
    return Trainer(global_steps=5, trainer_mode=mode, replay_buffer=buffer, total_training_steps=100)


def acting(trainer):
    answers = Answers()
    return Actions(trainer, answers), answers.given


RESYNC = Command("r1", "run", "RESYNC", action="drop_stale")
DOUBT = Command("r2", "run", "RESYNC", action="sync_weights", reset_cache=True)
ABORT = Command("a1", "run", "ABORT", reason="why")


def test_an_asynchronous_trainer_takes_only_fresh_prompts_for_one_step():
    trainer = v1()
    actions, given = acting(trainer)
    actions.take(RESYNC, 5)
    during = trainer.replay_buffer.max_off_policy_threshold
    actions.step_over(6)

    assert (during, trainer.replay_buffer.max_off_policy_threshold) == (1, 8)
    assert given == [("r1", "applied", 5)]


def test_the_step_that_is_over_when_a_resync_comes_does_not_end_it():
    trainer = v1()
    actions, _ = acting(trainer)
    actions.take(RESYNC, 5)
    actions.step_over(5)

    assert trainer.replay_buffer.max_off_policy_threshold == 1


def test_two_resyncs_in_one_step_still_restore_what_the_job_had():
    trainer = v1(threshold=None)
    actions, _ = acting(trainer)
    actions.take(RESYNC, 5)
    actions.take(Command("r3", "run", "RESYNC"), 5)
    actions.step_over(6)

    assert trainer.replay_buffer.max_off_policy_threshold is None


@pytest.mark.parametrize("trainer", [v1(mode="sync"), v1(strategy="wait"), Trainer(global_steps=5)])
def test_a_trainer_that_cannot_resync_says_so_and_changes_nothing(trainer):
    before = str(trainer)
    actions, given = acting(trainer)
    actions.take(RESYNC, 5)

    assert given == [("r1", "refused", None)]
    assert str(trainer) == before


@pytest.mark.parametrize("trainer", [v1(mode="sync"), v1(), Trainer(global_steps=5)])
def test_a_doubted_engine_is_answered_by_the_next_regular_delivery(trainer):
    actions, given = acting(trainer)
    actions.take(DOUBT, 5)
    actions.step_over(5)
    early = list(given)
    actions.step_over(6)
    actions.step_over(7)

    assert (early, given) == ([], [("r2", "applied", 6)])


def test_abort_saves_between_steps_and_lets_v1_end_by_itself():
    trainer = v1()
    actions, given = acting(trainer)
    actions.take(ABORT, 4)
    at_once = hasattr(trainer, "saved")
    actions.between_steps(5)

    assert not at_once and trainer.saved == [5]
    assert trainer.total_training_steps == 5
    assert given == [("a1", "applied", 5)]


def test_abort_makes_the_next_step_of_an_older_trainer_its_last():
    trainer = Trainer(global_steps=5, total_training_steps=100)
    actions, _ = acting(trainer)
    actions.take(ABORT, 5)
    actions.between_steps(5)

    assert trainer.total_training_steps == 6 and trainer.is_last_step


def test_abort_ends_fully_async_by_an_error_after_the_checkpoint():
    trainer = Trainer(global_steps=5, message_queue_client=None)
    actions, given = acting(trainer)
    actions.take(ABORT, 5)

    with pytest.raises(Aborted, match="checkpoint of step 5"):
        actions.between_steps(5)
    assert trainer.saved == [5] and given == [("a1", "applied", 5)]


class Queue:
    """A message queue behind Ray, as far as it is used: queue.queue_actor.clear_queue.remote().future()."""

    def __init__(self):
        self.cleared = 0
        self.queue_actor = self.clear_queue = self

    def remote(self):
        self.cleared += 1
        return self

    def future(self):
        done = Future()
        done.set_result(None)
        return done


def test_fully_async_syncs_at_the_update_at_hand_and_takes_up_its_cycle_again():
    queue = Queue()
    trainer = Trainer(message_queue_client=queue, trigger_parameter_sync_step=4, local_trigger_step=2, global_steps=9)
    actions, given = acting(trainer)
    actions.take(RESYNC, 2)
    actions.between_updates()
    during, early = trainer.trigger_parameter_sync_step, list(given)
    actions.step_over(3)

    assert (during, early, queue.cleared) == (2, [], 1)
    assert trainer.trigger_parameter_sync_step == 4 and given == [("r1", "applied", 3)]


def test_without_a_command_nothing_happens_at_any_place():
    trainer = v1()
    before = str(trainer)
    actions, given = acting(trainer)
    actions.between_updates()
    actions.step_over(5)
    actions.between_steps(5)

    assert str(trainer) == before and given == []
