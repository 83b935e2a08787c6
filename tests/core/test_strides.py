"""Step numbers that skip: nothing that counts steps may count their numbers."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from factories import Job, commands, make_rollout, make_source, make_train, of_kind

from dlc_sentinel.core.join import Join
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.core.strides import last_number, stride
from dlc_sentinel.records import Command, Hello, StepEnd
from dlc_sentinel.wire.control import Inbox

TTL_STEPS = 20
MAX_AGE_STEPS = 5


def skipping(k, stride, *, lag_S=None, **fields):
    """Step k of a job whose number is k * stride: the same tokens whatever the stride is. `lag_S`: rms, by row."""
    rng = np.random.default_rng(k)
    record = make_train(k * stride, rng=rng, **({"version": k} | fields))
    if lag_S is None:
        return record
    sigma_N = np.repeat(lag_S, 96)
    moved_N = record.old_N + rng.normal(size=sigma_N.size) * sigma_N - sigma_N**2 / 2
    return replace(record, cur_N=np.minimum(moved_N, 0).astype(np.float32))


def dropped(job):
    return {cause: num for cause, num in job.monitor.snapshot(job.now_s).runs[0].dropped_tokens.items() if num}


def handed_out(command, steps):
    """What a hook's polls at these steps give of a command."""
    inbox = Inbox("r1")
    inbox.put(Command(**{name: value for name, value in command.items() if name not in ("sent", "outcome")}))
    return [None if (given := inbox.take(step)[0]) is None else given.id for step in steps]


def with_queue(per_step, steps=30):
    """A job that trains `per_step` updates a step, on rows half of which are one step old; stale ones are dropped."""
    job, generated = Job(), 0
    for k in range(steps):
        lag_S = np.where(np.arange(32) < 16, 0.3 if k - generated >= 6 else 0.17, 0.0)
        versions_K = np.repeat([max(k - 1, 0), k], 16) * per_step
        record = skipping(k, 1, version=k * per_step, span_version_K=versions_K, lag_S=lag_S)
        for command in commands(job.step(k, record, scalars={"lr": 1e-3})):
            generated = k + 1
            job.ack(command, version=(k + 1) * per_step, step=k)
    return job


def test_a_queue_is_as_deep_in_steps_however_many_updates_a_step_has():
    one, many = with_queue(1), with_queue(16)

    assert [c["action"] for c in commands(one.events)] == ["drop_stale"] * 3
    assert [c["issued_step"] for c in commands(many.events)] == [c["issued_step"] for c in commands(one.events)]
    kept = [job.monitor.dump_state("r1")["decider"]["last_drop"] for job in (one, many)]
    assert kept[0] == kept[1] and kept[0][1] == 1


# -- when a step closes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2, 10])
def test_a_rank_that_is_one_step_behind_is_waited_for(stride):
    job, other = Job(), make_source(producer="p1", rank=1)
    job.feed(Hello(other), numbered=False)
    for k in range(12):
        job.feed(skipping(k, stride))
        if k:
            job.feed(skipping(k - 1, stride, source=other, ids=[f"b{k}-{i}" for i in range(32)]), numbered=False)
            job.feed(StepEnd(other, (k - 1) * stride), numbered=False)
        job.feed(StepEnd(job.source, k * stride))

    assert dropped(job) == {}
    assert {s["num_tokens"] for s in job.report()["steps"]} == {2 * 32 * 96}
    assert job.report()["verdict"] == "HEALTHY"


def test_a_step_that_one_rank_never_ends_closes_at_the_second_step_after_it():
    job, other = Job(), make_source(producer="p1", rank=1)
    job.feed(Hello(other), numbered=False)
    job.feed(skipping(0, 10, source=other, ids=[f"b{i}" for i in range(32)]), numbered=False)

    closed = [[event.step for event in of_kind(job.step(k * 10, skipping(k, 10)), "step")] for k in range(3)]

    assert closed == [[], [], [0]]


def test_neither_a_gap_in_the_numbers_nor_a_short_step_is_their_stride():
    numbers = [10, 20, 30, 40, 900, 902, 912, 922]

    assert stride(numbers) == 10
    assert last_number(numbers, 922, 20) == 922 + 20 * 10


def test_the_stride_is_the_one_of_the_newest_steps():
    assert stride([*range(100), *range(100, 200, 10)]) == 10


# -- commands --------------------------------------------------------------------------------------------------------


def queued(job, k, generated):
    """LAG that a RESYNC ends, behind a queue of four batches."""
    queue = job.__dict__.setdefault("queue", deque([0] * 4))
    queue.append(generated)
    held = queue.popleft()
    return {"gen_version": held, "lag": 0.03 * (k - held)}


def never_fresh(job, k, generated):
    """The trainer says it has synced; no row of those weights is ever trained on."""
    return {"gen_version": 0, "lag": 0.04 * k}


def sawtooth(job, k, generated):
    """Labelled current, in truth up to nine versions old: a RESYNC helps until the next tooth."""
    return {"disc": np.hypot(1e-3, 0.03 * (k % 10))}


def creeping(job, k, generated):
    """Labelled current, in truth of the last RESYNC: it helps, and at once the engine begins to fall behind again."""
    return {"disc": np.hypot(1e-3, 0.015 * (k - generated))}


def straggling(job, k, generated):
    """Half the rows are of the first weights for ever: what was queued before a RESYNC does not drain."""
    return {"span_version_K": np.repeat([0, k], 16), "lag_S": np.repeat([0.3 * (k > 2), 0.0], 16)}


def refilling(job, k, generated):
    """Most rows come from a queue of six batches that a RESYNC empties, and that is full again three steps later."""
    full, is_old = k - generated > 2, np.arange(32) < 26
    return {"span_version_K": np.where(is_old & full, max(k - 6, 0), k), "lag_S": 0.27 * (is_old & full)}


def hovering(job, k, generated):
    """Off by ever more, well below what counts as off for six steps, then off again in the same way."""
    first, second = 0.02 * max(k - 3, 0) * (k < 14), 0.02 * max(k - 20, 0)
    return {"disc": np.hypot(1e-3 if k < 14 else 0.01, first + second)}


def courses(rows_at, stride, steps, *, answer="applied", reload_at=-1):
    """(commands, outcomes, findings) of a job, each with the count of its step instead of its number."""
    job, generated = Job(), 0
    for k in range(steps):
        events = job.step(k * stride, skipping(k, stride, **rows_at(job, k, generated)), scalars={"lr": 1e-3})
        for command in commands(events):
            if command["kind"] == "RESYNC" and command["sent"] and answer:
                generated = k + 1
                job.ack(command, answer, version=k + 1 if answer == "applied" else -1, step=k * stride)
        if k == reload_at:
            state = json.loads(json.dumps(job.monitor.dump_state("r1"), allow_nan=False))
            job.monitor = Monitor(job.config)
            job.monitor.load_state("r1", state)
    sent = [(c["issued_step"] / stride, c["kind"], c["action"]) for c in commands(job.events)]
    came = [(e.step / stride, e.kind, e.data.get("outcome")) for e in job.events if e.kind in ("ack", "effect", "note")]
    found = [(f["verdict"], f["kind"], f["state"], f["since_step"] / stride) for f in job.report()["findings"]]
    return sent, came, found


@pytest.mark.parametrize(
    ("rows_at", "answer", "steps"),
    [
        (queued, "applied", 40),
        (never_fresh, "applied", 40),
        (never_fresh, "", 40),
        (straggling, "applied", 40),
        (sawtooth, "applied", 45),
        (creeping, "applied", 45),
        (refilling, "applied", 24),
        (hovering, "applied", 40),
    ],
    ids=["queue", "no fresh rows", "unanswered", "stragglers", "sawtooth", "creeping", "refilling", "hovering"],
)
def test_a_job_whose_numbers_skip_is_sent_what_the_same_job_is_sent_without(rows_at, answer, steps):
    expected = courses(rows_at, 1, steps, answer=answer)

    assert expected[0]
    assert courses(rows_at, 25, steps, answer=answer) == expected


def test_the_count_of_steps_outlives_a_restart_of_the_sentinel():
    assert courses(never_fresh, 10, 40, reload_at=20)[:2] == courses(never_fresh, 10, 40)[:2]


def test_two_resyncs_are_three_steps_apart_and_one_in_three_over_two_hundred_is_advice():
    sent, notes, _ = courses(never_fresh, 10, 162, answer="expired")

    steps = [step for step, *_ in sent]
    assert set(np.diff(steps)) == {3}
    assert sum(kind == "note" for _, kind, _ in notes) == 1


@pytest.mark.parametrize("stride", [1, 25, 100])
def test_a_command_lasts_for_twenty_of_the_trainers_steps(stride):
    job = Job()
    issued = []
    for k in range(12):
        issued += commands(job.step(k * stride, skipping(k, stride, **never_fresh(job, k, 0))))
    (resync,) = issued
    at, last = resync["issued_step"], resync["issued_step"] + TTL_STEPS * stride

    assert handed_out(resync, [at + stride]) == [resync["id"]]
    assert handed_out(resync, [last]) == [resync["id"]]
    assert handed_out(resync, [last + stride]) == [None]


def test_an_ABORT_before_anyone_knows_the_stride_does_not_expire():
    job = Job(mode="abort")

    (abort,) = commands(job.step(0, disc=0.5))

    assert handed_out(abort, [100]) == [abort["id"]]
    assert job.monitor.awaits(Command(abort["id"], "r1", "ABORT", expires_step=abort["expires_step"]))


def test_an_ABORT_after_many_steps_without_a_usable_token_lasts_from_its_own_step():
    job = Job(mode="abort")
    for k in range(28):
        job.step(10 * k, skipping(k, 10, with_engine=k < 3))
    nan_N = np.full(32 * 96, np.nan, np.float32)

    sent = [c for k in (28, 29) for c in commands(job.step(10 * k, skipping(k, 10, engine_N=nan_N)))]

    assert [c["kind"] for c in sent] == ["ABORT"]
    assert sent[0]["expires_step"] - sent[0]["issued_step"] == TTL_STEPS * 10


def test_an_ABORT_that_does_not_expire_ends_with_its_life_of_the_run():
    job = Job(mode="abort")
    (abort,) = commands(job.step(0, disc=0.5))
    job.source = make_source(producer="p9")

    job.step(0, make_train(0, source=job.source))

    assert not job.monitor.awaits(Command(abort["id"], "r1", "ABORT", expires_step=abort["expires_step"]))


# -- rollouts that wait ----------------------------------------------------------------------------------------------


def halves(k, stride):
    """(rollout, train record) of one step."""
    whole = skipping(k, stride)
    rollout = make_rollout(whole.ids, list(whole.engine_N.reshape(32, 96)), version=k)
    return rollout, skipping(k, stride, engine_N=None, span_start_K=None, span_version_K=None)


@pytest.mark.parametrize(("first", "stride"), [(0, 1), (0, 100), (60, 100), (7000, 1)])
def test_rollouts_three_steps_ahead_of_the_trainer_are_kept_for_it(first, stride):
    job = Job()
    made = [halves(k, stride) for k in range(first, first + 10)]
    for rollout, _ in made[:3]:
        job.feed(rollout, numbered=False)
    for i, (_, train) in enumerate(made):
        if i + 3 < len(made):
            job.feed(made[i + 3][0], numbered=False)
        job.step(train.step, train)
        job.tick()
        job.tick()

    assert dropped(job) == {}
    assert [s["num_tokens"] for s in job.report()["steps"]] == [32 * 96] * 10


@pytest.mark.parametrize("stride", [1, 100])
def test_a_rollout_that_nobody_trains_on_is_forgotten_after_as_many_steps(stride):
    join = Join(lambda step, cause, tokens: None, max_bytes=2**20, max_age_steps=MAX_AGE_STEPS)
    join.close_step(0)
    join.close_step(stride)
    join.feed_rollout(make_rollout(["x"], [np.zeros(50, np.float32)]), stride)

    held = []
    for k in range(2, 3 + MAX_AGE_STEPS):
        join.close_step(k * stride)
        held.append(join.num_bytes > 0)

    assert held == [True] * MAX_AGE_STEPS + [False]


def test_rollouts_that_a_restarted_run_still_holds_age_by_its_new_numbers():
    join = Join(lambda step, cause, tokens: None, max_bytes=2**20, max_age_steps=MAX_AGE_STEPS)
    join.close_step(900)
    join.feed_rollout(make_rollout(["x"], [np.zeros(50, np.float32)]), 900)
    join.restart(version=3)

    for step in range(2 + MAX_AGE_STEPS):
        assert join.num_bytes > 0
        join.close_step(step)

    assert join.num_bytes == 0


# -- rollouts that come no more --------------------------------------------------------------------------------------


def missing(join, steps, rollouts_at):
    """`missing_tokens` of each step in which the trainer sends one row of ten tokens that is in no rollout."""
    counted = []
    for step in steps:
        if rollouts_at(step):
            join.feed_rollout(make_rollout([f"other-{step}"], [np.zeros(10, np.float32)]), step - 1)
        row = make_train(step, rows=1, length=10, with_engine=False, span_start_K=None, span_version_K=None)
        join.feed_train(row)
        join.close_step(step)
        counted.append(join.missing_tokens)
    return counted


@pytest.fixture
def join():
    return Join(lambda step, cause, tokens: None, max_bytes=2**20, max_age_steps=50)


def test_rows_are_missing_their_rollouts_where_none_ever_came(join):
    assert missing(join, range(3), lambda step: False) == [10, 10, 10]


def test_rows_are_missing_their_rollouts_from_the_step_on_at_which_none_come_any_more(join):
    assert missing(join, range(6), lambda step: step < 3) == [0, 0, 0, 10, 10, 10]


def test_rows_of_other_ids_are_not_missing_while_rollouts_come(join):
    assert missing(join, range(6), lambda step: True) == [0] * 6


def test_rollouts_that_come_in_bursts_are_not_missing_between_two_of_them(join):
    missing(join, range(8), lambda step: step % 4 == 0)

    assert missing(join, range(8, 16), lambda step: step % 4 == 0) == [0] * 8


def test_engines_that_stay_away_after_a_restart_at_lower_numbers_are_missed_like_any_others(join):
    missing(join, range(900, 903), lambda step: True)
    join.restart(version=3)

    assert missing(join, range(3), lambda step: False) == [0, 10, 10]


def test_a_row_that_a_rollout_began_is_not_one_that_none_named(join):
    unfinished = make_rollout(["s3-0-0"], [np.zeros(4, np.float32)], final=False)
    join.feed_rollout(unfinished, 0)

    assert missing(join, range(1, 5), lambda step: False) == [0, 10, 0, 10]


def test_steps_that_close_together_after_the_trainer_has_gone_on_are_not_missing_their_rollouts(join):
    for step in range(4):
        join.feed_train(make_train(step, rows=1, length=10, with_engine=False, span_start_K=None, span_version_K=None))
    join.feed_rollout(make_rollout(["other"], [np.zeros(10, np.float32)]), 3)

    counted = []
    for step in range(4):
        join.close_step(step)
        counted.append(join.missing_tokens)

    assert counted == [0] * 4
