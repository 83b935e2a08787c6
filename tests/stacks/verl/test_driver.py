"""The driver's side with stand-ins for verl's trainers and its logger: what is added, and what is left alone."""

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from dlc_sentinel.integrations import verl_actor
from dlc_sentinel.integrations.verl_driver import Driver
from stacks.verl.support.watch import RUN, Watch

import dlc_sentinel
from dlc_sentinel.config import Config
from dlc_sentinel.records import Command


class Tree(dict):
    """A config that is read by name and by get, as OmegaConf's are."""

    __getattr__ = dict.__getitem__


def trainer(bypass=False, **more):
    model = Tree(model=Tree(path="/models/tiny/"), rollout=Tree(temperature=1.0), actor=Tree())
    config = Tree(algorithm=Tree(rollout_correction=Tree(bypass_mode=bypass)), actor_rollout_ref=model)
    return SimpleNamespace(config=config, global_steps=7, **more)


@pytest.fixture
def unwatched(monkeypatch):
    monkeypatch.delenv("DLC_SENTINEL", raising=False)
    monkeypatch.setenv("DLC_SENTINEL_METRICS", "0")
    return Driver()


def log_through(driver):
    """(log, what reached verl's own log)."""
    seen = []
    return driver.wrap_log(lambda tracking, data, step, backend=None: seen.append((data, step))), seen


@pytest.mark.parametrize("carrier", ["extra_info", "meta_info"])
def test_the_actor_ranks_are_told_step_and_mode_with_the_batch(unwatched, carrier):
    batch = SimpleNamespace(**{carrier: {"temperature": 1.0}})
    update = unwatched.wrap_update_actor(lambda self, batch, metrics=None: "trained")

    assert update(trainer(bypass=True), batch) == "trained"
    assert getattr(batch, carrier) == {"temperature": 1.0, "dlc_step": 7, "dlc_bypass": True}


def test_a_trainer_that_counts_weight_versions_is_at_the_step_it_will_log_next(unwatched):
    batch = SimpleNamespace(extra_info={})
    unwatched.wrap_update_actor(lambda *args: None)(trainer(current_param_version=3), batch)

    assert batch.extra_info["dlc_step"] == 4


def test_a_call_that_reports_no_training_step_goes_through_untouched(unwatched):
    log, seen = log_through(unwatched)
    unwatched.wrap_update_actor(lambda *args: None)(trainer(), SimpleNamespace(extra_info={}))
    data = {"val-core/acc": 0.5}
    log(None, data=data, step=7)

    assert seen[0][0] is data


def test_another_program_that_uses_verls_logger_is_left_alone(unwatched):
    log, seen = log_through(unwatched)
    data = {"training/global_step": 3}
    log(None, data=data, step=3)

    assert seen == [(data, 3)] and seen[0][0] is data


def test_a_batch_we_do_not_understand_is_trained_all_the_same(unwatched):
    update = unwatched.wrap_update_actor(lambda self, batch: "trained")

    assert update(trainer(), object()) == "trained"


@pytest.fixture
def watched(monkeypatch):
    """(driver, watch): a driver under a real sentinel that answers step 7 with a RESYNC."""

    def rule(step):
        return Command("c-RESYNC-1", RUN, "RESYNC", reason="x", issued_step=7) if step["step"] == 7 else None

    watch = Watch(Config(), rule)
    for name, value in watch.env.items():
        monkeypatch.setenv(name, value)
    driver = Driver()
    yield driver, watch
    driver.close()
    watch.stop()


def test_a_step_sends_its_scalars_and_the_next_log_carries_the_sentinels_numbers(watched):
    driver, watch = watched
    log, seen = log_through(driver)
    driver.wrap_update_actor(lambda *args: None)(trainer(), SimpleNamespace(extra_info={}))
    rank = dlc_sentinel.connect(role="trainer", rank=1)
    logprobs = -np.ones((2, 40), np.float32)
    rank.train(7, 6, cur=logprobs, engine=logprobs, versions=6)
    rank.poll(7)
    log(None, data={"training/global_step": 7, "actor/entropy": 1.5}, step=7)
    watch.until(lambda: watch.steps, 20)

    def logged():
        log(None, data={"training/global_step": 8}, step=8)
        return seen[-1][0].get("dlc/last_step") == 7

    watch.until(logged, 20)
    rank.close()
    assert set(seen[0][0]) == {"training/global_step", "actor/entropy"}


def test_a_trainer_without_a_queue_refuses_a_resync_and_says_why(watched):
    driver, watch = watched
    step_once = driver.wrap_before(lambda self: "stepped")
    rank = dlc_sentinel.connect(role="trainer", rank=1)
    log, _ = log_through(driver)
    one = trainer()
    driver.wrap_update_actor(lambda *args: None)(one, SimpleNamespace(extra_info={}))
    logprobs = -np.ones((2, 40), np.float32)
    rank.train(7, 6, cur=logprobs, engine=logprobs, versions=6)
    rank.poll(7)
    log(None, data={"training/global_step": 7}, step=7)
    one.global_steps = 8

    def answered():
        assert step_once(one) == "stepped"
        return watch.texts("ack")

    answers = watch.until(answered, 20)
    rank.close()
    assert "c-RESYNC-1: refused" in answers[0] and "delivers its weights at every step" in answers[0]


class Rank:
    """An actor rank's Ray handle: runs what it is handed at once."""

    def __init__(self, actor):
        self._actor = actor

    @property
    def __ray_call__(self):
        return SimpleNamespace(remote=lambda function: function(self._actor))


@pytest.fixture
def training(watched, monkeypatch):
    """(meet, run, watch): what a training step calls; a trainer's `fit` that runs what it is given."""
    driver, watch = watched
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=lambda asked, **rest: (asked, [])))
    rank = dlc_sentinel.connect(role="trainer", rank=1)
    worker = SimpleNamespace(**{verl_actor.TAP: SimpleNamespace(hook=rank)})
    actor = SimpleNamespace(worker_dict={"actor": worker})
    one = trainer(actor_rollout_wg=SimpleNamespace(workers=[Rank(actor)]))

    def meet():
        driver.wrap_update_actor(lambda *args: None)(one, SimpleNamespace(extra_info={}))
        watch.until(lambda: len(watch.texts("producer")) == 2, 20)
        assert not left(watch)

    yield meet, lambda train: driver.wrap_fit(lambda trainer: train())(one), watch
    rank.close()


def left(watch):
    return sorted(text for text in watch.texts("producer") if text.endswith("left"))


def both_left(watch):
    wanted = ["trainer rank 0 left", "trainer rank 1 left"]
    return watch.until(lambda: left(watch) == wanted, 20)


def test_training_that_comes_to_its_end_says_goodbye_for_all_ranks(training):
    meet, run, watch = training

    assert run(lambda: meet() or "trained") == "trained"
    assert both_left(watch)


def test_training_that_is_a_task_says_goodbye_when_it_is_over(training):
    meet, _, watch = training

    async def fit():
        meet()
        await asyncio.sleep(0)
        assert not left(watch)
        return "trained"

    assert asyncio.run(fit()) == "trained"
    assert both_left(watch)


@pytest.mark.parametrize("is_task", [False, True], ids=["call", "task"])
def test_training_that_fails_does_not_say_goodbye(training, is_task):
    meet, run, watch = training

    def train():
        meet()
        raise RuntimeError("out of memory")

    async def fit():
        train()

    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(fit()) if is_task else run(train)
    assert not left(watch)
