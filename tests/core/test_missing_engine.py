"""A job whose engine logprobs are missing is BLIND; it has no bad data."""

from __future__ import annotations

from factories import Job, make_source, make_train
from factories_streams import make_streams

from dlc_sentinel.records import Hello, StepEnd


def found(job):
    return [(f["verdict"], f["kind"]) for f in job.report()["findings"]]


def test_a_run_without_any_engine_logprobs_is_BLIND_and_not_bad_DATA():
    job = Job()
    for step in range(8):
        job.step(step, make_train(step, with_engine=False))

    assert found(job) == [("BLIND", "unusable_tokens")]


def test_one_rank_of_four_with_engine_logprobs_is_BLIND_and_not_bad_DATA():
    job = Job()
    ranks = [job.source, *(make_source(producer=f"p{rank}", rank=rank) for rank in (1, 2, 3))]
    for source in ranks[1:]:
        job.feed(Hello(source), numbered=False)
    for step in range(8):
        for source in ranks:
            ids = [f"{source.rank}-{step}-{i}" for i in range(32)]
            job.feed(make_train(step, source=source, ids=ids, with_engine=source.rank == 0), numbered=False)
        for source in ranks:
            job.feed(StepEnd(source, step), numbered=False)
        job.tick()
        job.tick()

    assert found(job) == [("BLIND", "unusable_tokens")]


def test_an_engine_that_dies_leaves_the_run_BLIND_from_that_step_on():
    job = Job()
    for step in range(12):
        streams = make_streams(step, disc=1e-3)
        if step < 6:
            job.feed(streams.rollout(version=step), numbered=False)
        job.step(step, streams.train(with_engine=False, span_start_K=None, span_version_K=None))
        job.tick()
        job.tick()

    assert found(job) == [("BLIND", "unusable_tokens")]
    assert job.report()["findings"][0]["since_step"] == 6
