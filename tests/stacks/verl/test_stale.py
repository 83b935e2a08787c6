"""A real verl job whose engine keeps its old weights while its label goes on (the second half of `decoupled`)."""

import pytest
from stacks.verl.support.job import DELIVERED, SYNC

pytestmark = [pytest.mark.slow, pytest.mark.verl]


def findings(listening):
    return [(e.data["verdict"], e.data["state"]) for e in listening.events if e.kind == "finding"]


def test_undelivered_weights_are_suspected_resynced_once_and_then_proven(decoupled):
    _, listening = decoupled
    commands = [e.data["kind"] for e in listening.events if e.kind == "command"]
    found = findings(listening)

    assert commands == ["RESYNC", "ABORT"]
    assert found.index(("STALE_ENGINE", "suspected")) < found.index(("STALE_ENGINE", "confirmed"))


def test_undelivered_weights_are_never_called_lag(decoupled):
    _, listening = decoupled

    assert "LAG" not in {verdict for verdict, _ in findings(listening)}


def test_nothing_is_suspected_while_weights_are_delivered(decoupled):
    _, listening = decoupled

    assert not [e for e in listening.events if e.kind == "finding" and e.step <= DELIVERED + 1]


def test_the_job_ends_early_with_a_checkpoint(decoupled):
    job, _ = decoupled
    saved = int((job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    assert saved == max(job.metrics()) < SYNC.steps
