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
