"""What the monitor says and does, as a user would see it: whole runs of numbers in, verdicts and commands out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from factories import Job, commands, make_train, of_kind

from dlc_sentinel.config import Act, Config


def run_lagging(job, steps, per_age=0.05, obey=True, first=0):
    """A job that syncs when told to; returns the steps at which it did."""
    generated, synced = first, []
    for step in range(first, first + steps):
        events = job.step(step, gen_version=generated, lag=per_age * (step - generated))
        for command in commands(events):
            if obey and command["kind"] == "RESYNC" and command["sent"]:
                generated = step + 1
                synced.append(step)
                job.ack(command, version=generated, step=step)
    return synced


def test_a_synchronous_run_at_its_floor_is_healthy_and_nothing_is_sent():
    job = Job()

    for step in range(12):
        job.step(step, disc=0.02)

    assert job.report()["verdict"] == "HEALTHY"
    assert job.report()["findings"] == []
    assert commands(job.events) == []


def test_growing_lag_is_LAG_and_a_resync_is_sent_when_ess_falls_below_one_half():
    job = Job()

    synced = run_lagging(job, 30)

    first = commands(job.events)[0]
    assert (first["kind"], first["action"], first["sent"]) == ("RESYNC", "sync_weights", True)
    ess = [step["lag_ess"]["32"] for step in job.report()["steps"]]
    assert ess[synced[0]] < 0.5 and ess[synced[0] + 1] > 0.99
    assert job.report()["verdict"] == "LAG"
    assert [f["acted"] for f in job.report()["findings"] if f["verdict"] == "LAG"] == [True]


def test_every_effective_resync_is_reported_as_having_worked():
    job = Job()

    synced = run_lagging(job, 30)

    worked = [event for event in of_kind(job.events, "note") if event.data["outcome"] == "worked"]
    assert len(synced) >= 4 and len(worked) >= len(synced) - 1


def test_one_step_below_one_half_is_not_enough_but_one_below_one_quarter_is():
    dipped = Job()
    for step, lag in enumerate((0.0, 0.0, 0.0, 0.21, 0.0, 0.0)):
        dipped.step(step, gen_version=0, lag=lag)
    severe = Job()
    for step, lag in enumerate((0.0, 0.0, 0.0, 0.45)):
        severe.step(step, gen_version=0, lag=lag)

    assert 0.25 < dipped.report()["steps"][3]["lag_ess"]["32"] < 0.5
    assert commands(dipped.events) == []
    assert severe.report()["steps"][3]["lag_ess"]["32"] < 0.25
    assert len(commands(severe.events)) == 1


def test_the_first_two_steps_send_nothing():
    job = Job()

    for step in range(2):
        job.step(step, gen_version=0, version=5 + step, lag=0.4)

    assert commands(job.events) == []


def test_observe_mode_says_and_never_sends():
    job = Job(mode="observe")

    run_lagging(job, 15, obey=False)

    assert [c["sent"] for c in commands(job.events)] == [False]
    assert job.report()["verdict"] == "LAG"


def test_nothing_more_is_sent_while_a_resync_is_unanswered_and_it_expires_in_twenty_steps():
    job = Job()

    run_lagging(job, 24, obey=False)

    sent_at = [c["issued_step"] for c in commands(job.events)]
    assert len(sent_at) == 1
    expired = [e for e in of_kind(job.events, "ack") if e.data["outcome"] == "expired"]
    assert not expired
    run_lagging(job, 10, obey=False, first=24)
    expired = [e for e in of_kind(job.events, "ack") if e.data["outcome"] == "expired"]
    assert [e.step - sent_at[0] for e in expired] == [21]


def test_a_refused_resync_is_not_repeated_until_the_finding_has_closed():
    job = Job()
    generated = 0
    for step in range(20):
        for command in commands(job.step(step, gen_version=generated, lag=0.06 * (step - generated))):
            job.ack(command, "refused", step=step, reason="not in this mode")

    assert len(commands(job.events)) == 1


def undelivered(job, steps, *, growth=0.03, healthy=10, checksum=None):
    """The label advances every step, the engine keeps the weights of step `healthy`: current rows drift away."""
    for step in range(steps):
        stuck = max(step - healthy, 0)
        events = job.step(step, disc=max(1e-3, growth * stuck), scalars={"lr": 1e-3, "grad_norm": 1.0})
        job.synced(step + 1, step, checksum=checksum(step) if checksum else None or "")
        for command in commands(events):
            if command["kind"] == "RESYNC" and command["sent"]:
                job.ack(command, version=step + 1, step=step)


def test_undelivered_weights_are_suspected_resynced_once_then_proven_and_abort_is_due():
    job = Job()

    undelivered(job, 40, checksum=lambda step: f"c{min(step, 10)}")

    report = job.report()
    kinds = [(c["kind"], c["action"]) for c in report["commands"]]
    assert kinds == [("RESYNC", "sync_weights"), ("ABORT", None)]
    assert commands(job.events)[0]["reset_cache"] is True
    assert report["verdict"] == "STALE_ENGINE"
    stale = next(f for f in report["findings"] if f["verdict"] == "STALE_ENGINE")
    assert (stale["state"], stale["since_step"] >= 9) == ("confirmed", True)
    assert not any(f["verdict"] == "LAG" for f in report["findings"])
    states = [e.data["state"] for e in of_kind(job.events, "finding") if e.data["verdict"] == "STALE_ENGINE"]
    assert states[0] == "suspected" and states[-1] == "confirmed"


def undelivered_async(job, steps, age, *, checksum, answered=True):
    """As `undelivered`, in a stack that never trains on current rows; RESYNCs are answered or not."""
    for step in range(steps):
        stuck = max(step - 20, 0)
        disc, made = max(1e-3, 0.03 * stuck), max(step - age, 0)
        events = job.step(step, gen_version=made, disc=disc, lag=0.01 * age, scalars={"lr": 1e-3, "grad_norm": 1.0})
        if answered:
            job.synced(step + 1, step, checksum=checksum(step))
        for command in commands(events):
            if command["kind"] == "RESYNC" and command["sent"] and answered:
                job.ack(command, version=step + 1, step=step)


@pytest.mark.parametrize("age", [1, 3])
def test_undelivered_weights_are_proven_where_no_row_is_ever_current(age):
    job = Job()

    undelivered_async(job, 50, age, checksum=lambda step: f"c{min(step, 20)}")

    assert [(c["kind"], c["action"]) for c in job.report()["commands"]] == [("RESYNC", "sync_weights"), ("ABORT", None)]
    assert job.report()["verdict"] == "STALE_ENGINE"
    assert {f["verdict"] for f in job.report()["findings"]} == {"STALE_ENGINE"}


@pytest.mark.parametrize("age", [1, 3])
def test_an_engine_that_drifts_where_no_row_is_ever_current_is_refuted_as_stale(age):
    job = Job()

    undelivered_async(job, 50, age, checksum=lambda step: f"c{step}")

    assert [c["kind"] for c in job.report()["commands"]] == ["RESYNC"]
    assert job.report()["verdict"] == "ENGINE"
    assert [f["state"] for f in job.report()["findings"] if f["verdict"] == "STALE_ENGINE"] == ["superseded"]


def test_a_resync_that_nobody_answers_tests_nothing_and_the_suspicion_stands():
    job = Job()

    undelivered_async(job, 80, 1, checksum=None, answered=False)

    assert [c["kind"] for c in job.report()["commands"]] == ["RESYNC"]
    assert job.report()["verdict"] == "STALE_ENGINE"
    assert {f["verdict"] for f in job.report()["findings"]} == {"STALE_ENGINE"}


def test_in_resync_mode_an_abort_is_said_and_not_sent():
    job = Job(mode="resync")
    undelivered(job, 40, checksum=lambda step: f"c{min(step, 10)}")
    allowed = Job(mode="abort")
    undelivered(allowed, 40, checksum=lambda step: f"c{min(step, 10)}")

    assert [c["sent"] for c in commands(job.events) if c["kind"] == "ABORT"] == [False]
    assert [c["sent"] for c in commands(allowed.events) if c["kind"] == "ABORT"] == [True]


def test_engine_drift_with_delivered_weights_is_ENGINE_and_earns_no_abort():
    job = Job()

    undelivered(job, 40, growth=0.02, checksum=lambda step: f"c{step}")

    report = job.report()
    assert report["verdict"] == "ENGINE"
    assert [c["kind"] for c in report["commands"]] == ["RESYNC"]
    engine = next(f for f in report["findings"] if f["verdict"] == "ENGINE")
    assert engine["kind"] == "drift_or_undelivered"
    assert [f["state"] for f in report["findings"] if f["verdict"] == "STALE_ENGINE"] == ["superseded"]


def test_what_a_resync_refuted_is_ENGINE_in_the_same_step_and_never_healthy_between():
    job = Job()

    undelivered(job, 40, growth=0.02, checksum=lambda step: f"c{step}")

    (refuted,) = [e.step for e in job.events if "no effect" in e.text]
    opened = [e.step for e in of_kind(job.events, "finding") if e.data["kind"] == "drift_or_undelivered"]
    assert opened[0] == refuted


def test_movement_the_trainer_reports_itself_proves_undelivered_weights_without_a_checksum():
    job = Job()
    for step in range(30):
        stuck = max(step - 10, 0)
        scalars = {"lr": 1e-3, "displacement_nats": 0.03}
        for command in commands(job.step(step, disc=max(1e-3, 0.03 * stuck), scalars=scalars)):
            if command["sent"]:
                job.ack(command, version=step + 1, step=step)

    assert job.report()["verdict"] == "STALE_ENGINE"


def test_an_engine_off_from_the_start_is_ENGINE_at_once():
    job = Job()

    for step in range(4):
        job.step(step, disc=0.05)

    assert job.report()["verdict"] == "ENGINE"
    assert commands(job.events) == []


def test_a_catastrophic_engine_on_the_first_step_makes_abort_due():
    job = Job(mode="abort")

    job.step(0, disc=0.5)

    assert [c["kind"] for c in commands(job.events)] == ["ABORT"]
    assert job.report()["findings"][0]["catastrophic"] is True


def queued(job, steps, depth=4, per_age=0.06, drops=True):
    """Weights are delivered every step and labels are right, but rows wait `depth` steps before they are trained on."""
    queue = [0] * depth
    for step in range(steps):
        generated = queue.pop(0)
        events = job.step(step, gen_version=generated, lag=per_age * (step - generated))
        job.synced(step + 1, step, checksum=f"c{step}")
        queue.append(step + 1)
        for command in commands(events):
            if command["sent"] and command["action"] == "drop_stale" and drops:
                queue[:] = [step + 1] * depth
                job.ack(command, version=step + 1, step=step)


def test_a_deep_queue_is_LAG_of_kind_queue_and_asks_to_drop_rows_not_to_sync():
    job = Job()

    queued(job, 12)

    first = commands(job.events)[0]
    assert first["action"] == "drop_stale"
    assert [f["kind"] for f in job.report()["findings"]] == ["queue"]


def test_no_resync_follows_within_the_time_a_queue_needs_to_drain():
    job = Job()

    queued(job, 60)

    sent_at = [c["issued_step"] for c in commands(job.events)]
    assert all(later - earlier > 4 for earlier, later in pairwise(sent_at))
    assert not any(f["verdict"] == "STALE_ENGINE" for f in job.report()["findings"])


def test_when_every_drop_is_due_again_within_the_queues_depth_the_advice_replaces_the_command():
    job = Job()

    queued(job, 80)

    assert 1 <= len(commands(job.events)) <= 3
    assert any("no further RESYNC" in e.text for e in of_kind(job.events, "note"))


def test_lag_that_is_exactly_zero_at_age_is_UNWIRED_not_healthy():
    job = Job()

    for step in range(6):
        job.step(step, gen_version=max(step - 2, 0), lag=0.0)

    assert job.report()["verdict"] == "UNWIRED"


def test_zero_lag_with_a_learning_rate_of_zero_is_not_unwired():
    job = Job()

    for step in range(6):
        job.step(step, gen_version=0, lag=0.0, scalars={"lr": 0.0})

    assert job.report()["verdict"] == "HEALTHY"


def test_three_resyncs_without_effect_open_the_breaker_and_a_reset_closes_it():
    job = Job(config=Config(act=Act(breaker=2)))
    generated = 0
    for step in range(40):
        # the ack lies: rows stay old, only their label is new
        events = job.step(
            step, gen_version=generated, lag=0.0 if generated == step else 0.3, disc=0.3 if generated else 1e-3
        )
        for command in commands(events):
            if command["sent"]:
                generated = step + 1
                job.ack(command, version=generated, step=step)
        generated = step + 1 if generated else 0

    opened = of_kind(job.events, "breaker")
    assert opened and "breaker open" in opened[0].text
    assert job.monitor.snapshot(job.now_s).runs[0].breaker_open
    job.monitor.reset_breaker("r1", job.now_s)
    assert not job.monitor.snapshot(job.now_s).runs[0].breaker_open


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (np.nan, "non_finite"),
        (-np.inf, "non_finite"),
        (np.inf, "non_finite"),
        (-9999.0, "placeholder"),
        (-3.4e38, "placeholder"),
        (0.5, "positive"),
    ],
)
def test_bad_values_are_refused_by_cause_and_the_rest_is_used(value, cause):
    job = Job()
    for step in range(3):
        record = make_train(step)
        record.engine_N[48:148] = value  # of two rows
        job.step(step, record)

    last = job.report()["steps"][-1]
    assert last["dropped"][cause] == 100
    assert last["num_tokens"] == 32 * 96 - 100
    assert last["discrepancy"]["rms"] == pytest.approx(1e-3, rel=0.1)
    verdict, kind = ("TRANSFORM", "logits") if cause == "positive" else ("DATA", cause)
    assert (verdict, kind) in [(f["verdict"], f["kind"]) for f in job.report()["findings"]]


def test_a_few_bad_values_are_counted_and_no_finding():
    job = Job()
    for step in range(5):
        record = make_train(step)
        record.engine_N[:20] = np.nan
        job.step(step, record)

    assert job.report()["verdict"] == "HEALTHY"
    assert job.report()["steps"][-1]["dropped"]["non_finite"] == 20


def test_masked_positions_may_hold_anything():
    job = Job()
    for step in range(3):
        record = make_train(step)
        mask = np.ones(len(record.cur_N), np.bool_)
        mask[::3] = False
        record.engine_N[::3] = np.nan
        record.cur_N[::3] = 0.0
        job.step(step, make_train(step, mask_N=mask, engine_N=record.engine_N, cur_N=record.cur_N, old_N=record.old_N))

    last = job.report()["steps"][-1]
    assert last["num_tokens"] == int(mask.sum()) and sum(last["dropped"].values()) == 0


def test_swapped_rows_are_catastrophic_DATA():
    job = Job()
    good = make_train(0)
    engine = good.engine_N.reshape(32, 96)[::-1].reshape(-1).copy()

    job.step(0, make_train(0, engine_N=engine))

    finding = job.report()["findings"][0]
    assert (finding["verdict"], finding["kind"], finding["catastrophic"]) == ("DATA", "wrong_pairing", True)


def test_mixed_basis_with_low_total_ess_is_BLIND_and_never_LAG():
    job = Job()

    for step in range(6):
        job.step(step, gen_version=max(step - 3, 0), version=step + 3, lag=0.25, old_is="absent", old_N=None)

    report = job.report()
    assert report["steps"][-1]["basis"] == "mixed"
    assert report["steps"][-1]["lag_ess"]["32"] is None
    assert report["verdict"] == "BLIND"
    assert commands(job.events) == []


def test_mixed_basis_with_high_total_ess_excludes_lag():
    job = Job()

    for step in range(6):
        job.step(step, gen_version=step, version=step + 1, lag=0.01, old_is="absent", old_N=None)

    assert job.report()["verdict"] == "HEALTHY"


def test_old_that_is_a_bit_copy_of_the_engine_is_not_believed():
    job = Job()
    for step in range(4):
        record = make_train(step, gen_version=step, version=step + 1, lag=0.1)
        job.step(
            step,
            make_train(
                step,
                version=step + 1,
                gen_version=step,
                old_N=record.engine_N.copy(),
                cur_N=record.cur_N,
                engine_N=record.engine_N,
            ),
        )

    assert job.report()["steps"][-1]["basis"] == "mixed"


def test_without_old_the_first_update_at_age_zero_is_exact():
    job = Job()
    job.step(0, old_is="absent", old_N=None, lag=0.0, disc=0.01)

    step = job.report()["steps"][0]
    assert step["basis"] == "exact"
    assert step["discrepancy"]["rms"] == pytest.approx(0.01, rel=0.1)
    assert step["lag"]["rms"] == 0.0


def test_the_last_quarter_of_updates_is_published_and_discrepancy_pools_all():
    job = Job()
    records = [make_train(0, update=u, lag=0.01 * u, ids=[f"u{u}-{i}" for i in range(32)]) for u in range(8)]
    job.step(0, *records)

    step = job.report()["steps"][0]
    assert step["updates"] == [6, 7]
    assert step["lag"]["rms"] == pytest.approx(np.sqrt((0.06**2 + 0.07**2) / 2), rel=0.05)
    assert step["num_tokens"] == 8 * 32 * 96


def test_a_small_step_is_pooled_with_the_steps_before_it():
    job = Job()
    for step in range(8):
        job.step(step, gen_version=step, version=step + 1, lag=0.19, rows=4, groups=["a", "a", "b", "b"])

    sent = commands(job.events)
    assert sent and sent[0]["evidence"]["blocks"] >= 64


def test_too_few_blocks_even_when_pooled_only_act_below_one_quarter():
    job = Job()
    for step in range(8):
        job.step(step, gen_version=step, version=step + 1, lag=0.2, rows=1, length=64)

    assert commands(job.events) == []


def test_too_few_blocks_even_when_pooled_make_no_finding_above_one_quarter():
    job = Job()
    for step in range(8):
        job.step(step, gen_version=step, version=step + 1, lag=0.2, rows=1, length=64)

    assert job.report()["findings"] == []


def test_one_large_step_between_one_quarter_and_one_half_sends_nothing():
    job = Job()
    for step in range(8):
        job.step(step, gen_version=step, version=step + 1, lag=0.18 if step == 5 else 0.01, rows=160)

    assert 0.25 < job.report()["steps"][5]["lag_ess"]["32"] < job.report()["steps"][5]["lag_ess_interval"][1] < 0.5
    assert commands(job.events) == []


def test_no_resync_follows_while_a_tenth_of_the_rows_is_older_than_what_was_delivered():
    job = Job()
    for step in range(6):
        job.step(step, gen_version=0, lag=0.06 * step)
    (command,) = commands(job.events)
    job.ack(command, version=6, step=5)
    for step in range(6, 16):
        fresh = make_train(step, gen_version=step, ids=[f"f{step}-{i}" for i in range(32)])
        old = make_train(step, gen_version=0, lag=0.5, ids=[f"o{step}-{i}" for i in range(32)])
        job.step(step, fresh, old)

    assert job.report()["steps"][-1]["lag_ess"]["32"] < 0.25
    assert len(commands(job.events)) == 1


def test_two_resyncs_keep_the_minimum_interval():
    job = Job(config=Config(act=Act(min_interval_steps=7, pending_tokens=1, pending_groups=1)))

    run_lagging(job, 40, per_age=0.5)

    sent_at = [c["issued_step"] for c in commands(job.events)]
    assert len(sent_at) >= 3 and min(b - a for a, b in pairwise(sent_at)) == 7


def test_more_than_one_RESYNC_in_four_steps_over_two_hundred_is_advice_once_and_no_breaker():
    job = Job(config=Config(act=Act(pending_tokens=1, pending_groups=1)))
    synced = run_lagging(job, 170, per_age=0.5)

    advice = [e for e in of_kind(job.events, "note") if "RESYNCs in 200 steps" in e.text]
    assert [e.step for e in advice] == [synced[50]]
    assert of_kind(job.events, "breaker") == []


def test_three_steps_of_exactly_zero_lag_are_needed_before_unwired_is_thought_of():
    job = Job()
    for step in range(4):
        job.step(step, gen_version=max(step - 1, 0), lag=0.0)

    assert job.report()["verdict"] == "HEALTHY"
    job.step(4, gen_version=3, lag=0.0)
    assert job.report()["verdict"] == "UNWIRED"


def test_observe_mode_waits_for_no_answer():
    job = Job(mode="observe")

    run_lagging(job, 40, obey=False)

    assert len(commands(job.events)) == 1 and of_kind(job.events, "ack") == []


def test_engine_numerics_that_grow_with_the_policy_do_not_make_a_resync_a_failure():
    job = Job()
    generated = 0
    for step in range(20):
        events = job.step(step, gen_version=generated, lag=0.06 * (step - generated), disc=1e-3 if step < 4 else 4e-3)
        for command in commands(events):
            generated = step + 1
            job.ack(command, version=generated, step=step)

    effects = [event.data["outcome"] for event in of_kind(job.events, "note") + of_kind(job.events, "breaker")]
    assert len(effects) >= 2 and set(effects) == {"worked"}


def lag_kinds(rates):
    """Kinds of the LAG findings of a job whose lag per version is the next of `rates` after every sync."""
    job, generated, window = Job(), 0, 0
    for step in range(60):
        rate = rates[min(window, len(rates) - 1)]
        for command in commands(job.step(step, gen_version=generated, lag=rate * (step - generated))):
            generated, window = step + 1, window + 1
            job.ack(command, version=generated, step=step)
    return {f["kind"] for f in job.report()["findings"] if f["verdict"] == "LAG"}


def test_lag_that_grows_faster_after_each_of_three_syncs_feeds_itself():
    assert "feedback" in lag_kinds([0.03, 0.045, 0.065, 0.09, 0.12])


def test_lag_that_grows_alike_after_every_sync_is_only_old_weights():
    assert lag_kinds([0.06]) == {"old_weights"}
