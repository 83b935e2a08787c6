"""Where in a step the discrepancy sits."""

import numpy as np
import pytest
from factories import Job, make_train


def published(**fields):
    job = Job()
    job.step(3, make_train(3, rows=64, length=200, disc=0.01, **fields))
    return job.report()["steps"][-1]


def test_the_discrepancy_is_told_by_probability_position_and_replica():
    by = published(replica="0")["discrepancy_by"]

    assert set(by["position"]) == {"0..31", "32..127", "128..511"}
    assert len(by["probability"]) == 7 and {"0..0.001", "0.9..0.99", "0.99..1"} <= set(by["probability"])
    assert by["replica"] == {"0": pytest.approx(0.01, rel=0.05)}
    assert all(rms == pytest.approx(0.01, rel=0.3) for bins in by.values() for rms in bins.values())


def test_late_tokens_that_are_off_show_in_their_bin_only():
    record = make_train(3, rows=64, length=200, disc=0.01)
    late = np.arange(len(record.engine_N)) % 200 >= 128
    record.engine_N[late] -= np.random.default_rng(0).normal(0.2, 0.05, late.sum()).astype(np.float32)
    job = Job()
    job.step(3, record)

    position = job.report()["steps"][-1]["discrepancy_by"]["position"]
    assert position["128..511"] > 0.15 and position["0..31"] < 0.012 and position["32..127"] < 0.012


def test_tokens_are_told_by_their_age():
    versions = np.repeat([3, 1], 32).astype(np.int64)

    assert published(span_version_K=versions)["tokens_by_age"] == {"0": 6400, "2": 6400}


@pytest.mark.parametrize(("rows", "bins"), [(30, {"0..31", "32..127"}), (12, {"0..31"})])
def test_a_bin_of_fewer_than_20_tokens_is_left_out(rows, bins):
    job = Job()
    job.step(3, make_train(3, rows=rows, length=33, disc=0.01))

    assert set(job.report()["steps"][-1]["discrepancy_by"]["position"]) == bins


def test_rows_whose_lag_is_not_known_apart_are_left_out():
    job = Job()
    exact = make_train(3, disc=0.01)
    hidden = make_train(3, gen_version=1, lag=0.5, old_is="absent", old_N=None, ids=[f"h{i}" for i in range(32)])
    job.step(3, exact, hidden)

    by = job.report()["steps"][-1]["discrepancy_by"]["position"]
    assert by["0..31"] == pytest.approx(0.01, rel=0.2)


def test_a_replicas_rms_is_that_of_its_tokens_not_of_its_rows():
    record = make_train(3, rows=40, length=100, disc=0.0, replica="a")
    short = np.repeat(np.arange(40) < 20, 100)
    mask = ~short | (np.arange(4000) % 100 < 10)
    record.engine_N[short] -= 0.3
    job = Job()
    job.step(3, make_train(3, rows=40, length=100, disc=0.0, replica="a", mask_N=mask, engine_N=record.engine_N))

    rms = job.report()["steps"][-1]["discrepancy_by"]["replica"]["a"]
    assert rms == pytest.approx(0.3 * np.sqrt(200 / 2200), rel=1e-3)
