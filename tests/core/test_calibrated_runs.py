"""Runs whose stack keeps no trainer logprob at the generator's weights: the lag is had from rows that have none."""

from dataclasses import replace

import numpy as np
import pytest
from factories import Job, commands, make_train, of_kind

from dlc_sentinel.maths import block_sums

DISC = 0.01
BF16 = {"engine": "bfloat16", "trainer": "float32"}


def true_ess(lag_N, rows, length, horizon=32):
    sums, _, _ = block_sums(lag_N, np.arange(rows + 1) * length, horizon)
    w = np.exp(sums)
    return w.sum() ** 2 / (len(w) * (w * w).sum())


ABSENT = {"old_N": None, "old_is": "absent", "old_version_S": None}


def an_async_step(step, *, lag=0.1, age=3, fresh=16, stale=48, disc=DISC, stale_disc=None, length=96, update=0):
    """Fresh rows, a calibration, and stale ones, whose lag nobody knows: (records, the true ESS and rms of lag)."""
    new = make_train(
        step, lag=0.0, disc=disc, rows=fresh, length=length, update=update, ids=[f"n{step}-{i}" for i in range(fresh)],
        groups=[f"n{step}-{i}" for i in range(fresh)],
        rng=np.random.default_rng(step * 100 + update), **ABSENT,
    )  # fmt: skip
    old = make_train(
        step, gen_version=step - age, lag=lag, disc=stale_disc or disc, rows=stale, length=length, update=update,
        ids=[f"o{step}-{i}" for i in range(stale)], groups=[f"o{step}-{i // 4}" for i in range(stale)],
        rng=np.random.default_rng(step * 100 + 50 + update),
    )  # fmt: skip
    lag_N = old.cur_N.astype(np.float64) - old.old_N
    truth = true_ess(lag_N, stale, length)
    hidden = make_train(
        step, gen_version=step - age, rows=stale, length=length, update=update, ids=old.ids, groups=old.groups,
        cur_N=old.cur_N, engine_N=old.engine_N, **ABSENT,
    )  # fmt: skip
    share = fresh / (fresh + stale)
    rms = np.sqrt((1.0 - share) * np.mean(lag_N**2))
    return (new, hidden), 1.0 / (share + (1.0 - share) / truth), rms


@pytest.mark.parametrize("lag", [0.03, 0.1, 0.2])
def test_the_lag_of_stale_rows_is_calibrated_from_fresh_ones(lag):
    job = Job(mode="observe")
    for step in range(3, 6):
        records, truth, rms = an_async_step(step, lag=lag)
        job.step(step, *records)
        now = job.report()["steps"][-1]

        assert now["basis"] == "calibrated"
        assert now["lag_ess"]["32"] == pytest.approx(truth, abs=0.03)
        assert now["lag_ess_interval"][0] <= truth <= now["lag_ess_interval"][1]
        assert now["lag"]["rms"] == pytest.approx(rms, rel=0.05)
        assert now["kl"]["gen_now_prefix"] == pytest.approx(rms * rms / 2, rel=0.1)
        assert set(now["lag_ess_by_age"]) == {"0", "3"} and now["lag_ess_by_age"]["0"] == 1.0


def test_a_calibrated_lag_is_acted_on():
    job = Job()
    for step in range(3, 7):
        job.step(step, *an_async_step(step, lag=0.25)[0])

    assert commands(job.events)[0]["kind"] == "RESYNC"
    assert job.report()["verdict"] == "LAG"


def test_the_rule_waits_until_the_whole_interval_is_below_one_half():
    job = Job()
    for step in range(3, 9):
        records, *_ = an_async_step(step, lag=0.19, stale=24)
        job.step(step, *records)
        now = job.report()["steps"][-1]
        assert now["lag_ess"]["32"] < 0.6 and now["lag_ess_interval"][1] > 0.5
    assert not commands(job.events)


def test_discrepancy_alone_is_not_read_as_lag():
    job = Job(dtypes=BF16)
    for step in range(3, 9):
        job.step(step, *an_async_step(step, lag=1e-6, disc=0.045)[0])
        now = job.report()["steps"][-1]

        assert now["basis"] == "calibrated" and now["lag_ess"]["32"] > 0.95
        assert now["lag"]["rms"] is None and now["kl"]["gen_now_prefix"] is None
    assert job.report()["verdict"] == "HEALTHY" and not commands(job.events)


def test_without_any_fresh_row_the_basis_stays_mixed_and_says_why():
    job = Job()
    for step in range(3, 6):
        job.step(step, an_async_step(step, lag=0.25)[0][1])
    now, (blind, *_) = job.report()["steps"][-1], job.report()["findings"]

    assert now["basis"] == "mixed" and now["lag_ess"]["32"] is None
    assert (blind["verdict"], blind["kind"]) == ("BLIND", "mixed_basis")
    assert "no row without lag" in blind["evidence"]["not_calibrated"]
    assert not commands(job.events)


def test_two_fresh_rows_are_not_enough():
    job = Job()
    job.step(3, *an_async_step(3, fresh=2)[0])

    assert job.report()["steps"][-1]["basis"] == "mixed"


def test_two_fresh_rows_do_not_prove_that_the_engine_changed():
    job = Job(mode="observe")
    for step in range(3, 12):
        few = step >= 8
        records, *_ = an_async_step(step, lag=0.03, fresh=2 if few else 16, disc=0.05 if few else DISC, stale_disc=DISC)
        job.step(step, *records)

    assert job.report()["findings"] == []


def test_rows_of_unknown_version_are_not_calibrated():
    job = Job()
    for step in range(3, 6):
        fresh, stale = an_async_step(step)[0]
        job.step(step, fresh, replace(stale, span_version_K=np.full_like(stale.span_version_K, -1)))

    assert job.report()["steps"][-1]["basis"] == "mixed"


def test_an_engine_change_is_called_once_a_second_step_shows_it_and_is_not_read_as_lag():
    job = Job()
    for step in range(3, 13):
        disc = 0.01 if step < 8 else 0.03
        stale_disc = 0.01 if step - 3 < 8 else 0.03
        job.step(step, *an_async_step(step, lag=0.02, disc=disc, stale_disc=stale_disc)[0])
        found = {f["verdict"] for f in job.report()["findings"]}
        assert found == (set() if step < 9 else {"ENGINE"})

    change = job.report()["findings"][-1]
    assert (change["kind"], change["since_step"]) == ("changed", 8)
    assert change["evidence"]["second_moment_ratio"] == pytest.approx(9.0, rel=0.3)
    assert not commands(job.events)
    assert [s["basis"] for s in job.report()["steps"]] == ["calibrated"] * 10


def test_a_better_engine_is_no_fault():
    job = Job(dtypes=BF16)
    for step in range(3, 10):
        disc = 0.03 if step < 6 else 0.01
        job.step(step, *an_async_step(step, lag=0.02, disc=disc, stale_disc=0.03 if step - 3 < 6 else 0.01)[0])

    assert not job.report()["findings"]
    assert job.report()["steps"][-1]["lag_ess"]["32"] > 0.95


def test_where_a_copy_of_the_engine_stands_for_old_the_first_update_calibrates_the_others():
    job = Job(mode="observe")
    for step in range(3):
        updates = [make_train(step, lag=0.05 * u, disc=DISC, update=u) for u in range(4)]
        job.step(step, *[replace(r, old_N=r.engine_N, old_is="engine") for r in updates])
        truth = true_ess(updates[-1].cur_N.astype(np.float64) - updates[-1].old_N, 32, 96)
    now = job.report()["steps"][-1]

    assert now["basis"] == "calibrated"
    assert now["discrepancy"]["rms"] == pytest.approx(DISC, rel=0.05)
    assert now["lag_ess"]["32"] == pytest.approx(truth, abs=0.03)


def test_the_order_of_rows_and_records_changes_nothing():
    def facts(order):
        job = Job(mode="observe")
        for step in range(3, 6):
            job.step(step, *[an_async_step(step)[0][i] for i in order])
        return job.report()["steps"]

    for one, other in zip(facts((0, 1)), facts((1, 0)), strict=True):
        assert one["lag_ess"] == pytest.approx(other["lag_ess"], rel=1e-12)
        assert one["lag_ess_interval"] == pytest.approx(other["lag_ess_interval"], rel=1e-12)


def test_a_run_that_is_all_fresh_stays_exact():
    job = Job()
    for step in range(4):
        job.step(step, lag=0.0)

    assert {s["basis"] for s in job.report()["steps"]} == {"exact"}
    assert not of_kind(job.events, "finding")


def a_step_without_fresh_rows(step):
    """(eight stale rows with all three streams, stale rows without the middle one)."""
    hidden = an_async_step(step)[0][1]
    few = make_train(step, gen_version=step - 3, lag=0.1, disc=DISC, rows=8, ids=[f"k{step}-{i}" for i in range(8)],
                     groups=[f"k{step}-{i}" for i in range(8)], rng=np.random.default_rng(step * 100 + 7))  # fmt: skip
    return few, hidden


def test_rows_scored_again_at_a_kept_snapshot_calibrate_the_others():
    job = Job(mode="observe")
    for step in range(3, 8):
        few, hidden = a_step_without_fresh_rows(step)
        job.step(step, replace(few, old_version_S=few.span_version_K.copy(), old_is="proximal"), hidden)

    now = job.report()["steps"][-1]
    assert now["basis"] == "calibrated" and set(now["lag_ess_by_age"]) == {"3"}
    assert now["lag"]["rms"] == pytest.approx(0.1, rel=0.1)


def test_rows_scored_again_by_the_engine_calibrate_the_others_and_show_the_other_order_of_terms():
    job = Job(mode="observe")
    for step in range(3, 8):
        few, hidden = a_step_without_fresh_rows(step)
        rng = np.random.default_rng(step)
        again = (few.cur_N - rng.normal(0, DISC, len(few.cur_N))).astype(np.float32)
        job.step(step, replace(few, old_N=np.minimum(again, 0), old_is="rescored"), hidden)

    now = job.report()["steps"][-1]
    assert now["basis"] == "calibrated" and now["lag"]["rms"] == pytest.approx(0.1, rel=0.1)
    assert now["rescored"]["rms"] == pytest.approx(DISC, rel=0.1)
    assert abs(now["rescored"]["interaction"]) < 0.4 * DISC * 0.1
    assert now["discrepancy"]["rms"] is None


def test_an_engine_change_shows_in_rows_scored_again():
    job = Job(mode="observe")
    for step in range(3, 10):
        few, hidden = a_step_without_fresh_rows(step)
        rms = DISC if step < 7 else 4 * DISC
        again = (few.cur_N - np.random.default_rng(step).normal(0, rms, len(few.cur_N))).astype(np.float32)
        job.step(step, replace(few, old_N=np.minimum(again, 0), old_is="rescored"), hidden)

    facts = {c.facts.step: c.facts.engine_change for c in job.monitor._runs["r1"]._closed}
    assert facts[7] > 4 and all(np.isnan(facts[step]) for step in facts if step != 7)
