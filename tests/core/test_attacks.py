"""Inputs that a hostile or unlucky job sends: nothing crashes, nothing is lost uncounted, no healthy run is accused."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from factories import Job, commands, make_rollout, make_source, make_train, of_kind

from dlc_sentinel.config import Act, Config
from dlc_sentinel.core.detect import KEPT, Findings
from dlc_sentinel.core.facts import StepFacts, from_json
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.core.rules.base import Candidate
from dlc_sentinel.core.trend import with_trend
from dlc_sentinel.records import Bye, Heartbeat, Hello, Scalars, StepEnd, Synced


def closed(events):
    return [event.step for event in of_kind(events, "step")]


def verdicts(job):
    return [(f["verdict"], f["kind"]) for f in job.report()["findings"]]


def dropped(job):
    return dict(job.monitor.snapshot(job.now_s).runs[0].dropped_tokens)


def part(step, number, of=2, **fields):
    """One of `of` micro-batches of a step."""
    return make_train(step, micro=number, ids=[f"{step}-{number}-{i}" for i in range(32)], **fields)


def reloaded(job):
    """The same job after a kill of the sentinel: a new monitor that goes on from the state file."""
    state = json.loads(json.dumps(job.monitor.dump_state("r1"), allow_nan=False))
    job.monitor = Monitor(job.config)
    job.monitor.load_state("r1", state)
    return job


# -- a run that is restarted under its old name ----------------------------------------------------------------------


def test_the_steps_of_a_restarted_run_wait_for_all_their_micro_batches():
    job = Job()
    for step in range(20, 24):
        job.step(step)
    job.source = make_source(producer="p9")

    for step in range(3):
        job.step(step, part(step, 0, source=job.source), part(step, 1, source=job.source))

    assert [s["num_tokens"] for s in job.report()["steps"][-3:]] == [2 * 32 * 96] * 3
    assert dropped(job) == {}


def test_an_abort_of_a_former_life_is_not_sent_to_the_restarted_run():
    job = Job(mode="abort")
    job.step(0, disc=0.5)
    assert [c["kind"] for c in commands(job.events)] == ["ABORT"]
    job.source, job.events = make_source(producer="p9"), []

    for step in range(4):
        job.step(step, disc=1e-3)

    assert commands(job.events) == []
    assert job.report()["verdict"] == "HEALTHY"


def test_every_rank_of_a_restarted_run_is_waited_for_from_its_first_step():
    job = Job()
    for step in range(20, 23):
        for rank in (0, 1):
            job.feed(part(step, rank, source=make_source(producer=f"p{rank}", rank=rank)), numbered=False)
        for rank in (0, 1):
            job.feed(StepEnd(make_source(producer=f"p{rank}", rank=rank), step), numbered=False)
    ranks = [make_source(producer=f"q{rank}", rank=rank) for rank in (0, 1)]
    for source in ranks:
        job.feed(Hello(source), numbered=False)

    for source in ranks:
        job.feed(part(10, source.rank, source=source), numbered=False)
        job.feed(StepEnd(source, 10), numbered=False)

    assert job.report()["steps"][-1]["num_tokens"] == 2 * 32 * 96
    assert dropped(job) == {}


def test_a_rank_that_the_former_life_did_not_have_takes_part_in_the_new_one():
    job = Job()
    for step in range(20, 23):
        job.step(step)
    ranks = [make_source(producer=f"q{rank}", rank=rank) for rank in (1, 0)]
    for source in ranks:
        job.feed(Hello(source), numbered=False)

    for step in range(3):
        for source in ranks:
            job.feed(part(step, source.rank, source=source), numbered=False)
            job.feed(StepEnd(source, step), numbered=False)

    assert [s["num_tokens"] for s in job.report()["steps"][-2:]] == [2 * 32 * 96] * 2
    assert dropped(job) == {"late": 32 * 96}


def test_two_trainers_of_one_rank_are_no_restart_when_one_of_them_is_late():
    job = Job()
    first, second = make_source(producer="a"), make_source(producer="b")
    for step in range(3):
        for source in (first, second):
            ids = [f"{source.producer}{step}-{i}" for i in range(32)]
            job.feed(make_train(step, source=source, ids=ids), numbered=False)
        for source in (first, second):
            job.feed(StepEnd(source, step), numbered=False)

    job.feed(make_train(1, source=second, ids=[f"late-{i}" for i in range(32)]), numbered=False)

    assert not any("restarted" in e.text for e in of_kind(job.events, "producer"))
    assert dropped(job) == {"late": 32 * 96}


def test_command_ids_stay_unique_over_a_restart_of_the_sentinel_and_one_of_the_job():
    job = Job(mode="observe")
    job.monitor.load_state("r1", many_commands(job, 300))
    job.source = make_source(producer="p9")
    job.events = []

    for step in range(8):
        job.step(step, gen_version=0, version=step + 1, lag=0.4)

    assert [int(c["id"][-4:]) for c in commands(job.events)] == [301]


def many_commands(job, num):
    """A state in which `num` commands were issued, of which the newest are kept."""
    job.step(50)
    state = json.loads(json.dumps(job.monitor.dump_state("r1")))
    state["decider"]["num_commands"] = num
    entry = {"step": 1, "kind": "RESYNC", "action": None, "reason": "", "id": "x", "outcome": "sent", "version": None}
    state["ledger"]["commands"] = [dict(entry) for _ in range(256)]
    return state


def test_a_rank_of_the_former_life_that_goes_on_is_refused_and_closes_no_step_of_the_new_one():
    job = Job()
    for step in range(20, 23):
        job.step(step)
    zombie, job.source = job.source, make_source(producer="p9")
    job.step(0)

    for step in (1, 2):
        job.feed(part(step, 0, source=job.source))
        job.feed(make_train(30 + step, source=zombie), numbered=False)
        job.feed(StepEnd(zombie, 30 + step), numbered=False)
        job.feed(part(step, 1, source=job.source))
        job.feed(StepEnd(job.source, step))

    last = job.report()["steps"][-1]
    assert (last["step"], last["num_tokens"], last["dropped"]["restarted_version"]) == (2, 2 * 32 * 96, 32 * 96)


# -- ranks, versions and lateness ------------------------------------------------------------------------------------


def test_a_rank_that_is_one_step_behind_has_not_restarted():
    job = Job()
    ranks = [make_source(producer=f"p{rank}", rank=rank) for rank in (0, 1)]
    for source in ranks:
        job.feed(Hello(source), numbered=False)

    for step in range(4):
        job.feed(part(step, 0, source=ranks[0]), numbered=False)
        job.feed(StepEnd(ranks[0], step), numbered=False)
        if step:
            job.feed(part(step - 1, 1, source=ranks[1]), numbered=False)
            job.feed(StepEnd(ranks[1], step - 1), numbered=False)

    assert dropped(job) == {}
    assert [s["num_tokens"] for s in job.report()["steps"]] == [2 * 32 * 96] * 3


def test_a_run_whose_versions_all_went_back_is_DATA_and_not_still_healthy():
    job = Job()
    for step in range(3):
        job.step(step, version=1000 if step == 2 else step)

    for step in range(3, 8):
        job.step(step, version=step)

    assert job.report()["steps"][-1]["dropped"]["restarted_version"] == 32 * 96
    assert ("DATA", "restarted_version") in verdicts(job) and ("BLIND", "unusable_tokens") in verdicts(job)


def test_a_trainer_version_that_is_unknown_is_neither_an_age_nor_a_restart():
    job = Job()
    job.step(0, version=7, gen_version=7)

    job.step(1, version=-1, gen_version=5)

    last = job.report()["steps"][-1]
    assert last["version_age"] == {"mean": None, "max": None} and last["lag_ess_by_age"] == {}
    assert dropped(job) == {}


def test_unknown_versions_on_both_sides_are_never_age_zero():
    job = Job()
    job.step(0, version=-1, gen_version=-1, old_is="proximal", lag=0.1)

    assert job.report()["steps"][0]["basis"] == "mixed"


def test_tokens_that_come_late_again_and_again_make_the_run_BLIND():
    job = Job()
    for step in range(6):
        job.step(step, rows=8)
        job.feed(make_train(step, rows=24, ids=[f"late{step}-{i}" for i in range(24)], source=job.source))

    assert job.report()["steps"][-1]["dropped"]["late"] == 24 * 96
    assert job.report()["verdict"] == "BLIND"


# -- what is lost is counted -----------------------------------------------------------------------------------------


def test_rows_without_a_current_logprob_are_counted():
    job = Job()
    job.step(0, cur_N=None)

    assert job.report()["steps"][0]["dropped"]["unmatched"] == 32 * 96


def test_a_conflict_of_two_engine_streams_hides_no_other_loss():
    job = Job()
    record = make_train(0, rows=2, length=10, source=job.source)
    record.engine_N[5] = np.nan
    other = make_train(0, rows=2, length=10).engine_N.copy()
    other[3] += 0.5
    other[5] = np.inf
    job.feed(make_rollout(record.ids, list(other.reshape(2, 10))), numbered=False)

    job.step(0, record)

    step = job.report()["steps"][0]
    assert (step["dropped"]["unmatched"], step["dropped"]["non_finite"], step["num_tokens"]) == (1, 1, 18)


def test_an_engine_stream_of_its_own_outranks_a_hole_in_the_rollout():
    job = Job()
    record = make_train(0, rows=2, length=10, source=job.source)
    other = record.engine_N.copy()
    other[4] = np.nan
    job.feed(make_rollout(record.ids, list(other.reshape(2, 10))), numbered=False)

    job.step(0, record)

    assert job.report()["steps"][0]["num_tokens"] == 20


def test_infinities_on_both_engine_streams_raise_no_warning():
    job = Job()
    record = make_train(0, rows=2, length=10, source=job.source)
    record.engine_N[4] = -np.inf
    job.feed(make_rollout(record.ids, list(record.engine_N.reshape(2, 10))), numbered=False)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.step(0, record)

    assert job.report()["steps"][0]["dropped"]["non_finite"] == 1


@pytest.mark.parametrize("missing", ["old_N", "mask_N", "engine_N", "cur_N", "spans"])
@pytest.mark.parametrize("first", [True, False])
def test_a_sequence_whose_pieces_carry_different_streams_is_refused_and_the_others_are_used(missing, first):
    job = Job()
    gone = {"span_start_K": None, "span_version_K": None} if missing == "spans" else {missing: None}
    pieces = [
        make_train(
            0, rows=1, length=40, ids=["a"], source=job.source, mask_N=np.arange(40) % 3 > 0,
            token_offset_S=np.array([at]), final_S=np.array([at == 40]),
        )
        for at in (0, 40)
    ]  # fmt: skip
    pieces[0 if first else 1] = replace(pieces[0 if first else 1], **gone)

    job.step(0, *pieces, make_train(0, rows=4, ids=list("bcde"), source=job.source))
    job.tick()
    job.tick()

    step = job.report()["steps"][0]
    assert step["num_tokens"] + sum(step["dropped"].values()) == 4 * 96 + 80
    assert step["num_tokens"] >= 4 * 96


def test_an_empty_segment_at_the_end_of_a_masked_row_is_nothing():
    job = Job()
    mask = np.array([True, False, True, False, True])
    train = make_train(
        0, rows=1, length=5, mask_N=mask, engine_N=None, span_start_K=None, span_version_K=None,
        segments=((("e1", 0, 3), ("e2", 0, 0)),), source=job.source,
    )  # fmt: skip
    rollout = make_rollout(["e1", "e2"], [np.full(3, -1.0), np.full(2, -1.0)])
    job.feed(rollout, numbered=False)

    job.step(0, train)

    assert job.report()["steps"][0]["num_tokens"] == 3


def test_a_segment_that_reaches_beyond_its_rollout_is_mis_sized():
    job = Job()
    train = make_train(
        0, rows=1, length=9, engine_N=None, span_start_K=None, span_version_K=None,
        segments=((("e1", 0, 6), ("e2", 0, 4)),), source=job.source,
    )  # fmt: skip
    job.feed(make_rollout(["e1", "e2"], [np.full(5, -1.0), np.full(4, -2.0)]), numbered=False)

    job.step(0, train)

    assert job.report()["steps"][0]["dropped"]["mis_sized"] == 9


def test_a_rollout_record_without_a_token_is_taken():
    job = Job()
    none = np.empty(0, np.int64)
    empty = make_rollout(["a", "b"], [np.empty(0), np.empty(0)])
    job.feed(replace(empty, span_start_K=none, span_version_K=none), numbered=False)

    job.step(0)

    assert job.report()["steps"][0]["num_tokens"] == 32 * 96


# -- healthy runs that must not be accused ---------------------------------------------------------------------------


def test_a_policy_that_has_become_certain_is_not_UNWIRED():
    job = Job()
    zeros = np.zeros(32 * 96, np.float32)
    for step in range(8):
        job.step(step, version=step + 1, gen_version=step, cur_N=zeros, old_N=zeros.copy(), engine_N=zeros.copy())

    assert job.report()["findings"] == []


def test_one_wild_token_in_a_step_is_no_catastrophe():
    job = Job(mode="abort", dtypes={"engine": "bfloat16", "trainer": "bfloat16"})
    for step in range(12):
        record = make_train(step, disc=0.02)
        if step in (0, 6):
            record.engine_N[7] = -57.0
        job.step(step, record)

    assert commands(job.events) == []
    assert job.report()["verdict"] == "HEALTHY"


def test_a_policy_that_is_nearly_uniform_does_not_make_its_streams_disagree():
    job = Job(mode="abort", dtypes={"engine": "bfloat16", "trainer": "bfloat16"})
    for step in range(6):
        rng = np.random.default_rng(step)
        engine = (-3.5 + rng.normal(0, 0.02, 32 * 96)).astype(np.float32)
        old = (engine + rng.normal(0, 0.02, 32 * 96)).astype(np.float32)
        job.step(step, make_train(step, engine_N=engine, old_N=old, cur_N=old.copy()))

    assert commands(job.events) == [] and job.report()["findings"] == []


def test_steps_of_a_few_tokens_accuse_no_engine():
    job = Job(dtypes={"engine": "bfloat16", "trainer": "bfloat16"})
    for step in range(300):
        job.step(step, disc=0.04, rows=1, length=1)

    assert job.report()["findings"] == []


def test_rows_of_which_one_token_has_no_middle_value_are_not_called_healthy_without_an_ess():
    job = Job()
    for step in range(4):
        record = make_train(step, version=step + 1, gen_version=step, lag=0.4, length=200)
        starts = np.sort(np.concatenate([record.offsets_S1[:-1], record.offsets_S1[:-1] + 1]))
        versions = np.where(np.arange(len(starts)) % 2, step, step - 1)
        changed = {"span_start_K": starts, "span_version_K": versions, "old_version_S": np.full(32, step)}
        job.step(step, replace(record, **changed))

    assert job.report()["steps"][-1]["lag_ess"]["32"] is None
    assert job.report()["verdict"] == "BLIND"


# -- producers -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_that_is_overtaken_by_the_goodbye_brings_nobody_back():
    job = Job()
    job.feed(Heartbeat(job.source, dropped_tokens={"queue_full": 5}), numbered=False)
    job.step(0)
    job.feed(Bye(job.source, dropped_tokens={"queue_full": 9}))
    job.feed(Heartbeat(job.source, dropped_tokens={"queue_full": 5}), numbered=False)

    for _ in range(30):
        job.tick()

    assert job.report()["findings"] == []


def test_counts_that_a_sender_repeats_out_of_order_are_counted_once():
    job = Job()
    for num in (5, 9, 5, 9):
        job.feed(Heartbeat(job.source, dropped_tokens={"queue_full": num}), numbered=False)

    assert dropped(job) == {"queue_full": 9}


def test_a_dead_trainer_stays_missed_when_an_engine_appears():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    job.step(0)
    for _ in range(8):
        job.tick()

    job.feed(Hello(make_source(role="engine", producer="e7")), numbered=False)
    for _ in range(70):
        job.tick()

    assert [(f["kind"], f["state"]) for f in job.report()["findings"]] == [("silent", "confirmed")]
    assert len(of_kind(job.events, "finding")) == 1


def test_the_end_of_a_silence_is_an_event():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    job.step(0)
    for _ in range(8):
        job.tick()

    job.step(1)

    assert [e.data["state"] for e in of_kind(job.events, "finding")] == ["confirmed", "closed"]


def test_silence_is_told_even_where_the_run_was_blind_before():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    for step in range(4):
        job.step(step, gen_version=step, version=step + 3, lag=0.4, old_is="absent", old_N=None)
    assert verdicts(job) == [("BLIND", "mixed_basis")]

    for _ in range(8):
        job.tick()

    assert ("BLIND", "silent") in verdicts(job)


def test_tokens_dropped_before_the_first_step_count_against_it():
    job = Job()
    job.feed(Heartbeat(job.source, dropped_tokens={"queue_full": 700}), numbered=False)

    job.step(0)

    assert job.report()["steps"][0]["dropped"]["queue_full"] == 700


def test_producers_that_come_and_go_are_not_all_remembered():
    job = Job()
    for number in range(1500):
        source = make_source(role="engine", producer=f"e{number}")
        job.feed(Hello(source), numbered=False)
        job.feed(Bye(source), numbered=False)

    assert len(job.monitor.snapshot(job.now_s).runs[0].producers) <= 1024


def test_drops_that_a_sender_reported_are_not_counted_again_after_a_restart_of_the_sentinel():
    job = Job()
    job.feed(Heartbeat(job.source, dropped_tokens={"queue_full": 700}), numbered=False)
    job.step(0)

    reloaded(job).feed(Heartbeat(job.source, dropped_tokens={"queue_full": 700}), numbered=False)

    assert dropped(job) == {"queue_full": 700}


def test_a_trainer_that_died_while_the_sentinel_was_down_is_missed():
    job = Job()
    job.feed(Heartbeat(job.source), numbered=False)
    job.step(0)

    reloaded(job)
    for _ in range(10):
        job.tick()

    assert verdicts(job) == [("BLIND", "silent")]
    (producer,) = job.monitor.snapshot(job.now_s).runs[0].producers
    assert producer["last_seen_s"] == 1000.0


# -- what the trainer answers ----------------------------------------------------------------------------------------


def lagging(job, steps, first=0, delivered=False):
    """Lag that grows; the weights are said to have come but rows of them never do."""
    for step in range(first, first + steps):
        for command in commands(job.step(step, gen_version=0, lag=min(0.06 * step, 0.3))):
            if delivered and command["sent"]:
                job.ack(command, version=step + 1, step=step)


def test_no_row_of_an_acknowledged_version_within_twenty_steps_is_BLIND():
    job = Job()

    lagging(job, 32, delivered=True)

    assert ("BLIND", "no_rows_of_acknowledged_version") in verdicts(job)


def test_a_small_run_is_judged_on_the_new_rows_it_has_when_the_wait_is_over():
    job = Job(config=Config(act=Act(min_interval_steps=1)))
    generated = 0
    for step in range(40):
        lag = 0.06 * (step - generated) if generated == 0 else 0.0
        for command in commands(job.step(step, gen_version=generated, lag=lag, rows=8, length=16)):
            job.ack(command, version=step + 1, step=step)
        generated = step + 1 if commands(job.events) else 0

    assert [e.data["outcome"] for e in of_kind(job.events, "note")] == ["worked"]
    assert not any(verdict == "BLIND" for verdict, _ in verdicts(job))


@pytest.mark.parametrize("outcome", ["refused", "applied"])
def test_an_answer_from_an_impossible_step_does_not_stop_the_clock(outcome):
    job = Job()
    lagging(job, 8)
    (command,) = commands(job.events)
    job.ack(command, outcome, version=9, step=2**53)

    for step in range(8, 60):
        job.step(step, gen_version=0, lag=0.0 if 20 < step < 30 else 0.16)

    assert len(commands(job.events)) >= 2


def test_an_answer_that_overtakes_the_rows_of_its_step_keeps_its_step():
    job = Job()
    lagging(job, 8)
    (command,) = commands(job.events)
    job.ack(command, version=10, step=9)

    assert [event.step for event in of_kind(job.events, "ack")] == [9]


def test_movement_reported_as_infinite_survives_the_state_file():
    job = Job()
    job.feed(Scalars(job.source, 0, {"displacement_nats": float("inf")}))
    job.step(0)

    reloaded(job).step(1, disc=0.1, scalars={"displacement_nats": 1.0})
    job.step(2)

    assert [s["step"] for s in job.report()["steps"]] == [0, 1, 2]


def test_facts_come_back_from_the_state_file_as_they_were():
    facts = StepFacts(step=3, version=3, num_tokens=5, half_horizon=float("inf"), age_mean=1.0)

    again = from_json(json.loads(json.dumps(facts.to_json(), allow_nan=False)))

    assert again.to_public() == facts.to_public() and again.half_horizon == float("inf")


def test_a_repeated_checksum_of_one_replica_is_not_forgotten_when_another_is_synced():
    job = Job()
    for step in range(8):
        for replica in ("a", "b"):
            source = make_source(role="engine", producer=f"e{replica}", replica=replica)
            checksum = f"{replica}{min(step, 2) if replica == 'a' else step}"
            job.feed(Synced(source, step, step, checksum=checksum), numbered=False)
        job.step(step, disc=1e-3 if step < 4 else 0.03, scalars={"lr": 1e-3})

    assert ("STALE_ENGINE", "never_delivered") in verdicts(job)


def test_the_step_in_which_a_wait_ends_does_not_send_the_next_resync():
    job = Job(config=Config(act=Act(min_interval_steps=1)))
    lagging(job, 8)
    (command,) = commands(job.events)
    job.ack(command, version=8, step=7)

    events = [job.step(step, gen_version=8, version=step + 1, lag=0.5) for step in range(8, 12)]

    ended = next(i for i, e in enumerate(events) if any(c.kind == "note" for c in e))
    assert not commands(events[ended])


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "apart"), [(1 / 3, 2.0**-53), (2.0**52, 1.0)])
def test_no_forecast_is_made_from_ages_that_differ_by_rounding_or_are_absurd(first, apart):
    facts = [StepFacts(i, i, basis="exact", age_mean=first + i * apart, action_ess=0.9 - 0.01 * i) for i in range(5)]

    assert np.isnan(with_trend(facts[-1], facts[:-1], Config()).forecast).all()


def test_the_interval_in_the_evidence_is_that_of_the_value_beside_it():
    job = Job()
    for step in range(8):
        rows = {"rows": 4, "groups": [f"{step}{g}" for g in "aabb"]}
        job.step(step, gen_version=step, version=step + 1, lag=0.24 if step == 3 else 0.19, **rows)

    evidence = commands(job.events)[0]["evidence"]
    assert evidence["blocks"] >= 64
    assert evidence["interval"][0] <= evidence["lag_ess_32"] <= evidence["interval"][1]


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_when_there_are_too_many_findings_a_closed_one_is_forgotten_first():
    findings = Findings()
    findings.update(0, [Candidate("ENGINE", "stays", 0.8, "", at_once=True)])
    for step in range(KEPT + 5):
        both = [Candidate("ENGINE", "stays", 0.8, ""), Candidate("DATA", f"k{step}", 0.8, "", at_once=True)]
        findings.update(step, both)
        findings.end("DATA", "closed")

    assert [(f.kind, f.since_step) for f in findings.open()] == [("stays", 0)]
    assert len(findings.items) <= KEPT


def test_scalars_of_steps_that_never_come_are_not_kept_for_ever():
    job = Job()
    for step in range(2000):
        job.feed(Scalars(job.source, 10**6 + step, {"lr": 1.0}), numbered=False)
    job.step(0)

    assert len(job.monitor._runs["r1"]._pending_scalars) <= 64


def test_versions_that_are_noise_cost_neither_time_nor_a_large_state():
    job = Job()
    rows = 5000
    versions = np.random.default_rng(0).integers(0, 2**53, rows)
    for step in range(2):
        record = make_train(step, version=2**53, rows=rows, length=1, span_version_K=versions, lag=0.01)
        job.step(step, record)

    assert len(json.dumps(job.monitor.dump_state("r1"))) < 200_000
    assert job.report()["steps"][-1]["num_tokens"] == rows


def test_many_groups_in_every_step_are_not_held_longer_than_pooling_needs():
    job = Job()
    groups = [f"g{i}" for i in range(2000)]
    for step in range(20):
        job.step(step, rows=2000, length=2, groups=groups, ids=[f"{step}-{i}" for i in range(2000)])

    held = sum(bool(c.sums.num_groups) for c in job.monitor._runs["r1"]._closed)
    assert held <= job.config.window.pool_steps


def test_lag_of_ninety_nats_leaves_every_number_finite_or_unknown():
    job = Job()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            record = make_train(step, version=step + 1, gen_version=step)
            record.cur_N[::50] -= 90
            record.old_N[7::50] -= 90
            record.old_N[9] = -9990
            job.step(step, record)

    json.dumps(job.report(), allow_nan=False)
    assert job.report()["steps"][-1]["lag_ess"]["32"] < 0.25
    assert job.report()["verdict"] in ("LAG", "DATA", "ENGINE")
