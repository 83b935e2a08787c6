"""verl's other trainers, each as a real job: what they call a version, their middle stream, what they can do."""

import numpy as np
import pytest
from stacks.verl.support.job import FLOAT32, JOB_S, SEPARATE, Size
from stacks.verl.support.watch import RUN

from dlc_sentinel.config import Act, Config
from dlc_sentinel.records import Command

pytestmark = [pytest.mark.slow, pytest.mark.verl]
SIZE = Size(steps=2, prompts=4, samples=2, mini_batch=2, response=16, lr=1e-3)
FULLY_ASYNC = (
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "rollout.n=2",
    "rollout.total_rollout_steps=40",
    "async_training.staleness_threshold=1.0",
    "async_training.trigger_parameter_sync_step=4",
    "data.train_batch_size=0",
    "data.return_raw_chat=True",
)
SLOW_ENGINE = {"VERL_CPU_IGNORE_EOS": "1", "VERL_CPU_TOKEN_S": "0.02"}
"""Responses take longer than a cycle of updates, so that syncs interrupt them."""
OBSERVE = Config(act=Act(mode="observe"))


def ages(records):
    return {int(t.version - v) for t in records for v in t.span_version_K}


def row_versions(record):
    """The generator's version of every token, one array per row."""
    versions = np.repeat(record.span_version_K, np.diff([*record.span_start_K, record.offsets_S1[-1]]))
    return np.split(versions, record.offsets_S1[1:-1])


@pytest.fixture(scope="module")
def fully_async(launch, watch):
    """(job, watch) of a fully asynchronous job, whose cycle of four updates a RESYNC cut short at step 2."""

    def rule(step):
        if step["step"] != 1:
            return None
        return Command("c-RESYNC-1", RUN, "RESYNC", action="sync_weights", reason="test", issued_step=1)

    listening = watch(OBSERVE, rule)
    size = Size(**{**vars(SIZE), "prompts": 0, "response": 32})
    main = "verl.experimental.fully_async_policy.fully_async_main"
    job = launch(size, *FLOAT32, *SEPARATE, *FULLY_ASYNC, main=main, env=listening.env | SLOW_ENGINE).ended_well(JOB_S)
    return job, listening


def test_fully_async_counts_a_step_from_one_weight_sync_to_the_next(fully_async):
    _, listening = fully_async

    assert {t.step - t.version for t in listening.trains} == {1}
    assert {t.update for t in listening.rows(1)} == {0, 1, 2, 3}


def test_fully_async_bypasses_by_default_and_a_copy_of_the_engines_values_is_not_sent(fully_async):
    _, listening = fully_async

    assert {t.old_is for t in listening.trains} == {"absent"}
    assert all(t.old_N is None for t in listening.trains)


def test_fully_async_rows_that_a_sync_interrupted_have_the_version_of_each_piece(fully_async):
    _, listening = fully_async
    spans = {}
    for t in listening.trains:
        for versions in row_versions(t):
            assert (np.diff(versions) >= 0).all()
            spans.setdefault(t.step, []).append(int(versions[-1] - versions[0]))

    assert max(map(max, spans.values())) >= 1


def test_fully_async_applies_a_resync_by_syncing_before_its_cycle_is_full(fully_async):
    _, listening = fully_async
    acks = listening.texts("ack")

    assert len(acks) == 1 and "applied at version 2" in acks[0]
    assert len({t.update for t in listening.rows(2)}) < 4


def test_fully_async_takes_its_own_cycle_up_again_after_a_resync(fully_async):
    _, listening = fully_async

    assert {t.update for t in listening.rows(3)} == {0, 1, 2, 3}


def test_fully_async_says_goodbye_for_all_its_processes(fully_async):
    _, listening = fully_async
    listening.until(lambda: {p["state"] for p in listening.snapshot.runs[0].producers} == {"gone"}, 20)

    assert not [e for e in listening.events if e.kind == "finding" and e.data["kind"] == "silent"]


def test_fully_async_logs_our_numbers_in_its_own_metrics(fully_async):
    job, _ = fully_async

    assert any("dlc/last_step" in logged for logged in job.metrics().values())


def test_colocated_rows_are_one_version_old_and_the_middle_stream_is_of_the_trainer(launch, watch):
    listening = watch(OBSERVE)
    job = launch(SIZE, *FLOAT32, "trainer.v1.trainer_mode=colocate_async", env=listening.env).ended_well(JOB_S)

    assert sorted(job.metrics()) == [1, 2]
    assert 1 in ages(listening.trains) and min(ages(listening.trains)) >= 0
    assert all((t.old_version_S == t.version).all() for t in listening.trains)
    assert {t.old_is for t in listening.trains if ages([t]) != {0}} == {"proximal"}


def test_the_older_trainer_sends_the_same_streams(launch, watch):
    listening = watch(OBSERVE)
    job = launch(SIZE, *FLOAT32, "trainer.use_v1=False", env=listening.env).ended_well(JOB_S)
    x = {
        step: np.concatenate([(t.old_N - t.engine_N)[t.mask_N] for t in listening.rows(step)]) for step in job.metrics()
    }

    assert ages(listening.trains) == {0}
    for step, logged in job.metrics().items():
        assert -x[step].mean(dtype=np.float64) == pytest.approx(logged["rollout_corr/kl"], abs=1e-5)
        assert listening.steps[step]["num_groups"] == SIZE.prompts


def test_one_step_off_rows_are_one_version_old_by_construction(launch, watch):
    listening = watch(OBSERVE)
    main = "verl.experimental.one_step_off_policy.main_ppo"
    # Its own search path is a folder of a source checkout.
    path = "hydra.searchpath=[pkg://verl.trainer.config]"
    extra = (path, "actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=1")
    job = launch(SIZE, *FLOAT32, *SEPARATE, *extra, main=main, env=listening.env).ended_well(JOB_S)

    assert ages(listening.rows(2)) == {1} and sorted(job.metrics()) == [1, 2]
    assert {t.step - t.version for t in listening.trains} == {0}
