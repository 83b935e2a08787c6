"""A real verl job whose engine keeps its old weights while its label goes on, and one that is only slow."""

import pytest
from stacks.verl.support.job import FLOAT32, JOB_S, TWICE, Size

from dlc_sentinel.config import Act, Config

pytestmark = [pytest.mark.slow, pytest.mark.verl]
SIZE = Size(steps=40, prompts=8, samples=4, mini_batch=8, response=32, lr=1e-3)
UNDELIVERED = {"VERL_CPU_STALE_AFTER": "3", "VERL_CPU_IGNORE_EOS": "1"}


@pytest.fixture(scope="module")
def undelivered(launch, watch):
    """(job, watch) of a job whose weights reach the engine up to version 3 and no further."""
    listening = watch(Config(act=Act(mode="abort", pending_tokens=1024)))
    job = launch(SIZE, *FLOAT32, TWICE, env=listening.env | UNDELIVERED).ended_well(JOB_S)
    return job, listening


def test_undelivered_weights_are_suspected_resynced_once_and_then_proven(undelivered):
    _, listening = undelivered
    commands = [e.data for e in listening.events if e.kind == "command" and e.data.get("kind")]
    found = [(e.data["verdict"], e.data["state"]) for e in listening.events if e.kind == "finding"]

    assert [c["kind"] for c in commands] == ["RESYNC", "ABORT"]
    assert found.index(("STALE_ENGINE", "suspected")) < found.index(("STALE_ENGINE", "confirmed"))


def test_undelivered_weights_are_never_called_lag(undelivered):
    _, listening = undelivered

    assert not [e for e in listening.events if e.kind == "finding" and e.data["verdict"] == "LAG"]


def test_the_job_ends_early_with_a_checkpoint(undelivered):
    job, _ = undelivered
    saved = int((job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    assert saved == max(job.metrics()) < SIZE.steps
