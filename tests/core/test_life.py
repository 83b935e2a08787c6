"""Steps that open and close over ranks and time, producers that fall silent, runs that restart, state that survives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from factories import Job, commands, make_rollout, make_source, make_train, of_kind

from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import RecordError
from dlc_sentinel.records import Bye, Heartbeat, StepEnd


def closed(events):
    return [event.step for event in of_kind(events, "step")]


def test_a_step_closes_at_once_when_its_only_trainer_has_ended_it():
    job = Job()

    assert closed(job.feed(make_train(0, source=job.source))) == []
    assert closed(job.feed(StepEnd(job.source, 0))) == [0]


def test_a_step_waits_for_every_rank_that_took_part():
    job = Job()
    ranks = [job.source, make_source(producer="p1", rank=1)]
    for step in (0, 1):
        for number, source in enumerate(ranks):
            job.feed(make_train(step, source=source, ids=[f"{number}-{step}-{i}" for i in range(32)]), numbered=False)
        first = closed(job.feed(StepEnd(ranks[0], step), numbered=False))
        second = closed(job.feed(StepEnd(ranks[1], step), numbered=False))
        assert (first, second) == ([], [step])

    assert job.report()["steps"][-1]["num_tokens"] == 2 * 32 * 96


def test_a_rank_that_never_polls_delays_the_verdict_by_two_ticks_at_most():
    job = Job()
    quiet = make_source(producer="p1", rank=1)
    job.feed(make_train(0, source=job.source), numbered=False)
    job.feed(make_train(0, source=quiet, ids=[f"q{i}" for i in range(32)]), numbered=False)
    job.feed(StepEnd(job.source, 0), numbered=False)

    assert closed(job.tick()) == []
    assert closed(job.tick()) == [0]


@pytest.mark.parametrize(("seconds", "late"), [(3, 0), (9, 0), (11, 32 * 96)])
def test_rows_of_a_rank_that_ends_its_steps_are_waited_for_ten_seconds(seconds, late):
    job = Job()
    slow = make_source(producer="p1", rank=1)

    def send(step):
        job.feed(make_train(step, source=slow, ids=[f"q{i}" for i in range(32)]), numbered=False)
        job.feed(StepEnd(slow, step), numbered=False)

    for step in range(3):
        send(step)
        job.step(step)
    job.step(3)
    for _ in range(seconds):
        job.tick()
    send(3)

    assert job.monitor.snapshot(0.0).runs[0].dropped_tokens.get("late", 0) == late


def test_rows_for_a_step_that_is_closed_are_late():
    job = Job()
    job.step(0)
    job.step(1)

    job.feed(make_train(0, source=job.source, ids=[f"late{i}" for i in range(32)]))

    assert job.monitor.snapshot(0.0).runs[0].dropped_tokens == {"late": 32 * 96}


def test_a_step_waits_two_ticks_for_rollouts_that_are_late():
    job = Job()
    record = make_train(0, source=job.source, engine_N=None, span_start_K=None, span_version_K=None)
    arrays = list(make_train(0).engine_N.reshape(32, 96))
    job.feed(record)
    assert closed(job.feed(StepEnd(job.source, 0))) == []

    events = job.feed(make_rollout(record.ids, arrays, version=0), numbered=False)

    assert closed(events) == [0]
    assert job.report()["steps"][0]["num_tokens"] == 32 * 96


def test_rollouts_that_never_come_make_the_step_BLIND():
    job = Job()
    for step in range(3):
        job.feed(make_train(step, source=job.source, engine_N=None))
        job.feed(StepEnd(job.source, step))
        job.tick()
        job.tick()

    assert job.report()["steps"][-1]["dropped"]["unmatched"] == 32 * 96
    assert "BLIND" in [f["verdict"] for f in job.report()["findings"]]


def test_missing_frame_numbers_are_counted_as_gaps():
    job = Job()
    job.frame_no += 3

    job.step(0)

    snapshot = job.monitor.snapshot(0.0).runs[0]
    assert snapshot.sequence_gaps == 3 and snapshot.refused_frames == {"frame_gap": 3}


def test_tokens_that_the_sender_dropped_count_against_the_step():
    job = Job()
    for step in range(3):
        job.feed(make_train(step, source=job.source, rows=8))
        job.feed(Heartbeat(job.source, dropped_tokens={"queue_full": (step + 1) * 50_000}), numbered=False)
        job.feed(StepEnd(job.source, step))

    assert job.report()["steps"][-1]["dropped"]["queue_full"] == 50_000
    assert job.report()["verdict"] == "BLIND"


def test_a_trainer_that_was_killed_is_reported_within_ten_seconds():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    job.step(0)
    start = job.now_s

    while not of_kind(job.events, "finding"):
        job.tick()

    assert job.now_s - start <= 10
    assert job.report()["verdict"] == "BLIND"
    assert job.report()["findings"][0]["kind"] == "silent"


def test_a_trainer_that_said_goodbye_is_not_missed():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    job.step(0)
    job.feed(Bye(job.source))

    for _ in range(30):
        job.tick()

    assert job.report()["findings"] == []


def test_the_last_step_is_judged_when_the_trainers_have_said_goodbye():
    job = Job()
    job.feed(make_train(0))
    job.feed(make_train(0, source=make_source(producer="p1", rank=1)))

    job.feed(Bye(job.source))
    assert job.report()["steps"] == []
    job.feed(Bye(make_source(producer="p1", rank=1)))

    assert [step["step"] for step in job.report()["steps"]] == [0]


def test_a_rank_that_left_early_does_not_close_the_steps_of_the_others():
    job = Job()
    job.feed(make_train(0, source=make_source(producer="p1", rank=1)))
    job.feed(Bye(make_source(producer="p1", rank=1)))
    job.feed(make_train(1))

    for _ in range(10):
        job.tick()

    assert [step["step"] for step in job.report()["steps"]] == [0]


def test_silence_ends_when_the_trainer_is_heard_again():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    job.step(0)
    for _ in range(10):
        job.tick()

    job.step(1)

    assert [f["state"] for f in job.report()["findings"]] == ["closed"]


def test_a_run_restarted_under_its_old_name_goes_on_and_old_rollouts_are_refused():
    job = Job()
    for step in range(20, 24):
        job.step(step)
    job.feed(make_rollout(["old"], [np.zeros(40, np.float32)], version=24), numbered=False)
    job.source = make_source(producer="p9")

    for step in range(3):
        job.step(step, gen_version=step)

    assert [step["step"] for step in job.report()["steps"]] == [20, 21, 22, 23, 0, 1, 2]
    assert any("restarted" in e.text for e in of_kind(job.events, "producer"))
    assert job.monitor.snapshot(0.0).runs[0].dropped_tokens == {"restarted_version": 40}


def test_versions_that_go_back_without_a_restart_are_refused_and_counted():
    job = Job()
    job.step(0, version=10, gen_version=10)

    job.step(1, version=4, gen_version=4)

    assert job.monitor.snapshot(0.0).runs[0].dropped_tokens == {"restarted_version": 32 * 96}


def test_runs_are_kept_apart():
    job = Job()
    job.step(0, disc=0.05)
    other = make_source(run="r2", producer="x")
    job.monitor.feed(make_train(0, source=other), 0, 0.0)
    job.monitor.feed(StepEnd(other, 0), 1, 0.0)

    assert job.report()["steps"][0]["discrepancy"]["rms"] > 0.04
    assert job.monitor.report("r2")["steps"][0]["discrepancy"]["rms"] < 2e-3


def drive(job, first, last, generated=0):
    for step in range(first, last):
        for command in commands(job.step(step, gen_version=generated, lag=0.06 * (step - generated))):
            generated = step + 1
            job.ack(command, version=generated, step=step)
    return generated


def test_a_monitor_loaded_from_its_state_decides_as_if_it_had_never_stopped():
    whole = Job()
    drive(whole, 0, 40)

    first = Job()
    generated = drive(first, 0, 22)
    state = json.loads(json.dumps(first.monitor.dump_state("r1")))
    second = Job()
    second.monitor = Monitor(second.config)
    second.monitor.load_state("r1", state)
    second.frame_no, second.events = first.frame_no, []
    drive(second, 22, 40, generated)

    expected = [(e.kind, e.step, e.text) for e in whole.events if e.step >= 22 and e.kind != "producer"]
    assert [(e.kind, e.step, e.text) for e in second.events if e.kind != "producer"] == expected
    assert len(commands(second.events)) >= 2


def test_the_snapshot_shows_what_was_sent_and_what_came_of_it():
    job = Job()
    drive(job, 0, 12)

    run = job.monitor.snapshot(job.now_s).runs[0]

    assert run.num_commands["RESYNC/sent"] == run.num_commands["RESYNC/applied"] >= 1
    assert run.commands[0]["outcome"] == "applied"
    assert run.num_tokens["cur"] == 12 * 32 * 96


def test_the_same_records_give_the_same_events():
    def texts():
        job = Job()
        drive(job, 0, 30)
        return [(e.kind, e.step, e.text, json.dumps(e.data, sort_keys=True)) for e in job.events]

    assert texts() == texts()


def test_a_state_of_another_version_is_one_clear_error():
    job = Job()
    job.step(0)
    state = job.monitor.dump_state("r1")
    del state["floors"]["numerics"]

    with pytest.raises(RecordError, match=r"the state of run 'r1' is of another version \(KeyError: 'numerics'\)"):
        Job().monitor.load_state("r1", state)
