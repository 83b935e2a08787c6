"""A real AsyncGRPOTrainer on CPU under a real sentinel: engine and current logprobs with each sample's version."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from dlc_sentinel.integrations.trl_hook import attach
from stacks.trl.async_job import PER_STEP, async_grpo
from stacks.trl.job import LENGTH, acting, plain_logps, sentinel, watch_along

from dlc_sentinel.records import Command, Scalars, Synced

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's and torch's own warnings

STEPS = 9


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


class Seen:
    """One finished run; `rows` with the sample each one came from."""

    def __init__(self, job, worker, watched, attached):
        self.job, self.watched, self.attached = job, watched, attached
        self.rows, self.steps = watched.rows, watched.ears.steps
        by_logps = {np.float32(made[2]).tobytes(): made for made in worker.made.values()}
        self.made = {row.id: by_logps[row.engine.tobytes()] for row in self.rows}


def run(patch, folder, *, max_steps, plan, at_step=None, **changes):
    with sentinel(patch, acting("observe")) as watched:
        job, worker = async_grpo(patch, folder, max_steps=max_steps, plan=plan, **changes)
        attached = attach(job.trainer)
        watch_along(job, watched.ears, at_step and (lambda step: at_step(step, watched)))
        job.trainer.train()
        attached.hook.close()
        watched.ears.wait_for(lambda event: event.kind == "producer" and "left" in event.text)
    return Seen(job, worker, watched, attached)


@pytest.fixture(scope="module")
def observed(patch, tmp_path_factory):
    """Samples for four steps at the first version and for three at each third one after it, so ages go 0 to 3."""

    def plan(version):
        return 4 if version == 1 else 3 if version % 3 == 1 else 0

    return run(patch, tmp_path_factory.mktemp("async"), max_steps=STEPS, plan=plan)


def test_every_sample_is_sent_once_with_what_the_engine_said(observed):
    assert Counter(row.step for row in observed.rows) == dict.fromkeys(range(STEPS), PER_STEP)
    assert len({row.id for row in observed.rows}) == STEPS * PER_STEP and len(observed.made) == STEPS * PER_STEP
    assert observed.attached.num_errors == {}
    assert not any(sum(step["dropped"].values()) for step in observed.steps.values())


def test_samples_carry_the_step_whose_weights_made_them(observed):
    """TRL's version n is the n-th sync: the first at step 0, then one after each step."""
    assert all(row.generated_at == observed.made[row.id][3] - 1 for row in observed.rows)
    assert {row.age for row in observed.rows} == {0, 1, 2, 3}
    assert all(row.version == row.step for row in observed.rows)


def test_ages_are_trls_own_staleness(observed):
    ages = [np.mean([row.age for row in observed.rows if row.step == step]) for step in range(STEPS)]
    staleness = [log["sample/staleness_mean"] for log in observed.job.logs[:STEPS] if "sample/staleness_mean" in log]

    # TRL reads it when a sample leaves the queue, one batch ahead of its training: that one step is missing there
    assert max(ages) - max(staleness) in (0.0, 1.0) and ages[0] == staleness[0] == 0.0


@pytest.mark.parametrize("step", [0, 3, 6])
def test_current_is_the_policys_at_its_weights(observed, step):
    rows = [row for row in observed.rows if row.step == step]
    made = [observed.made[row.id] for row in rows]
    ids = [prompt + ids + [0] * (LENGTH - len(ids)) for prompt, ids, _, _ in made]
    want = plain_logps(observed.job.weights[step], ids, LENGTH)

    for i, row in enumerate(rows):
        np.testing.assert_allclose(row.cur, want[i, : len(row.cur)], atol=2e-5)
        assert row.old is None and row.old_is == "absent"


def test_only_samples_of_the_current_weights_are_exact_and_staleness_shows(observed):
    by_age = {age: [row for row in observed.rows if row.age == age] for age in range(4)}
    total = {age: np.abs(np.concatenate([r.cur - r.engine for r in rows])).mean() for age, rows in by_age.items()}

    assert observed.steps[0]["basis"] == "exact" and observed.steps[2]["basis"] == "calibrated"
    assert total[0] < 2e-3 < 0.02 < total[1] < total[3]


def test_groups_are_trls(observed):
    per_group = {}
    for row in observed.rows:
        per_group.setdefault(row.group, set()).add(tuple(observed.made[row.id][0]))

    assert len(per_group) == STEPS * 2 and all(len(prompts) == 1 for prompts in per_group.values())


def test_syncs_and_scalars_are_told(observed):
    synced = observed.watched.of(Synced)
    scalars = {record.step: record.values for record in observed.watched.of(Scalars)}

    assert [record.version for record in synced] == list(range(STEPS + 1))
    assert synced[0].label == "model_version 1"
    assert sorted(scalars) == list(range(STEPS)) and {"reward", "entropy", "grad_norm", "lr"} <= set(scalars[3])


def order(kind, action=None):
    return Command(f"trl-{kind}-0001", "trl", kind, action, not_before_step=0, expires_step=100, reason="by hand")


def test_resync_pushes_weights_and_drops_what_older_ones_made(patch, tmp_path):
    """TRL syncs only at the start here; eight steps' worth of samples wait in the queue."""
    seen = run(
        patch, tmp_path, max_steps=8, plan=lambda version: 8, weight_sync_steps=100,
        at_step=lambda step, watched: step == 1 and watched.order(order("RESYNC", "sync_weights")),
    )  # fmt: skip

    (ack,) = seen.watched.acks
    assert (ack.outcome, seen.job.trainer.model_version) == ("applied", 2)
    assert "weights synced" in ack.reason and ack.version in (2, 3, 4)
    # one batch was out of the queue already
    assert {row.generated_at for row in seen.rows if row.step > ack.version} == {ack.version}
    assert {row.generated_at for row in seen.rows if row.step < ack.version} == {0}
    assert seen.job.logs[-2]["dlc/commands_total/RESYNC/applied"] == 1


def test_drop_stale_empties_the_queue_without_another_sync(patch, tmp_path):
    seen = run(
        patch, tmp_path, max_steps=8, plan=lambda version: 8 if version < 6 else 0,
        at_step=lambda step, watched: step == 1 and watched.order(order("RESYNC", "drop_stale")),
    )  # fmt: skip

    (ack,) = seen.watched.acks
    assert ack.outcome == "applied" and ack.reason.startswith("queued samples") and ack.version in (2, 3, 4)
    assert seen.job.trainer.model_version == 1 + 8
    assert min(row.generated_at for row in seen.rows if row.step > ack.version) == ack.version


def test_abort_ends_the_run_with_a_checkpoint(patch, tmp_path):
    seen = run(
        patch, tmp_path, max_steps=20, plan=lambda version: 2,
        at_step=lambda step, watched: step == 1 and watched.order(order("ABORT")),
    )  # fmt: skip

    stopped = seen.job.trainer.state.global_step
    (ack,) = seen.watched.acks
    assert stopped in (2, 3, 4) and (ack.outcome, ack.version) == ("applied", stopped)
    assert (tmp_path / "out" / f"checkpoint-{stopped}" / "trainer_state.json").exists()
