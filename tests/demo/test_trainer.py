"""One arm's loop, with its generator inside the test and a recording hook in place of the sentinel's."""

from dataclasses import replace

import numpy as np
import pytest
from demo.recorder import InProcessEngine, RecordingHook

from dlc_sentinel.demo.engine import EngineSettings, TinyBackend
from dlc_sentinel.demo.snapshots import identity_error
from dlc_sentinel.demo.spec import ArmSpec
from dlc_sentinel.demo.trainer import Arm
from dlc_sentinel.records import Command

SMALL = ArmSpec(
    num_steps=8,
    num_groups=2,
    rows_per_group=3,
    response_tokens=12,
    true_reward_rows=4,
    synced_steps=1,
    learning_rate=0.01,
)


def run(tmp_path, spec=SMALL, hook=None, num_steps=5):
    """(arm, its reports, its hook, its engine) after `num_steps` steps."""
    hook = hook or RecordingHook()
    settings = EngineSettings(
        seed=1,
        num_rows=spec.rows,
        num_tokens=4 + spec.response_tokens,
        shape={"vocab_size": spec.vocab_size},
        fault=spec.fault,
        fault_from_version=1,
    )
    engine = InProcessEngine(settings, TinyBackend(settings))
    arm = Arm(spec, tmp_path, engine, hook)
    arm.push(0, -1)
    return arm, [arm.step(step) for step in range(num_steps)], hook, engine


def resync(step: int, action="sync_weights", kind="RESYNC") -> Command:
    return Command(id=f"c{step}", run="r", kind=kind, action=action, reason="asked by the test")


def test_the_control_arm_trains_on_rows_of_the_version_it_starts_from(tmp_path):
    _, reports, hook, engine = run(tmp_path)

    assert [report.age for report in reports] == [0] * 5
    assert engine.pushed == [0, 1, 2, 3, 4, 5]
    assert [(args, told["versions"], told["old_version"]) for args, told in hook.of("train")] == [
        ((step, step), step, step) for step in range(5)
    ]


def test_at_age_zero_there_is_no_lag_and_a_real_discrepancy(tmp_path):
    _, reports, hook, _ = run(tmp_path)

    assert max(report.lag_rms for report in reports) < 1e-5
    assert all(1e-4 < report.discrepancy_rms < 0.045 for report in reports)
    assert all(np.allclose(told["cur"], told["old"], atol=1e-5) for _, told in hook.of("train"))


def test_the_stale_arm_keeps_pushing_only_for_its_first_steps_and_lag_grows(tmp_path):
    _, reports, _, engine = run(tmp_path, replace(SMALL, syncs_every_step=False, synced_steps=2))

    assert engine.pushed == [0, 1, 2]
    assert [report.age for report in reports] == [0, 0, 0, 1, 2]
    assert reports[2].lag_rms < 1e-5 < 1e-3 < reports[3].lag_rms < reports[4].lag_rms
    assert reports[4].lag_ess["inf"] < reports[3].lag_ess["inf"] < 1.0


def test_the_middle_stream_is_that_of_the_weights_last_pushed_whatever_happened_since(tmp_path):
    spec = replace(SMALL, syncs_every_step=False)
    _, reports, hook, _ = run(tmp_path, spec)

    assert {told["old_version"] for _, told in hook.of("train")[1:]} == {1}
    assert all(told["old_is"] == "generator" for _, told in hook.of("train"))
    assert all(report.discrepancy_rms < 0.045 for report in reports)


def test_an_obeyed_resync_pushes_the_next_version_and_says_so(tmp_path):
    hook = RecordingHook({3: resync(3)})

    _, reports, _, engine = run(tmp_path, replace(SMALL, syncs_every_step=False), hook)

    assert engine.pushed == [0, 1, 4]
    assert [report.age for report in reports] == [0, 0, 1, 2, 0]
    assert [(args[1], told["version"]) for args, told in hook.of("ack")] == [("applied", 4)]
    assert [report.command for report in reports] == ["", "", "", "RESYNC", ""]


def test_an_arm_that_ignores_commands_refuses_them_with_a_reason(tmp_path):
    hook = RecordingHook({3: resync(3)})

    _, reports, _, engine = run(tmp_path, replace(SMALL, syncs_every_step=False, obeys=False), hook)

    assert engine.pushed == [0, 1]
    (((_, outcome), told),) = hook.of("ack")
    assert outcome == "refused"
    assert "ignore" in told["reason"]
    assert not reports[3].synced


def test_an_abort_ends_the_arm_without_a_push(tmp_path):
    hook = RecordingHook({2: resync(2, None, "ABORT")})

    arm, _, _, engine = run(tmp_path, SMALL, hook, num_steps=3)

    assert "ABORT at step 2" in arm.ended
    assert engine.pushed == [0, 1, 2]
    assert [args[1] for args, _ in hook.of("ack")] == ["applied"]


def test_with_a_queue_rows_wait_their_batches_and_keep_their_own_labels(tmp_path):
    spec = replace(SMALL, fault="queue", fault_from_step=0, queue_batches=3)

    _, reports, hook, engine = run(tmp_path, spec, num_steps=6)

    assert [report.age for report in reports] == [0, 1, 2, 3, 3, 3]
    assert [told["old_version"] for _, told in hook.of("train")] == [0, 0, 0, 0, 1, 2]
    assert engine.pushed == [0, 1, 2, 3, 4, 5, 6]


def test_dropping_stale_rows_empties_the_queue(tmp_path):
    spec = replace(SMALL, fault="queue", fault_from_step=0, queue_batches=3)
    hook = RecordingHook({3: resync(3, "drop_stale")})

    _, reports, _, _ = run(tmp_path, spec, hook, num_steps=7)

    assert [report.age for report in reports] == [0, 1, 2, 3, 0, 1, 2]


def test_undelivered_weights_leave_lag_at_zero_by_label_and_show_as_growing_discrepancy(tmp_path):
    _, reports, _, _ = run(tmp_path, replace(SMALL, fault="undelivered", learning_rate=0.002))

    rms = [report.discrepancy_rms for report in reports]
    assert [report.age for report in reports] == [0] * 5
    assert max(report.lag_rms for report in reports) < 1e-5
    assert max(rms[:2]) * 3 < rms[2] < rms[3] < rms[4]


def test_the_hook_may_be_used_in_alternating_steps(tmp_path):
    _, reports, hook, _ = run(tmp_path, replace(SMALL, hook_every=2))

    assert [args[0] for args, _ in hook.of("train")] == [0, 2, 4]
    assert [args[0] for args, _ in hook.of("poll")] == [0, 2, 4]
    assert len(reports) == 5


def test_true_reward_is_measured_at_its_interval_and_nan_between(tmp_path):
    _, reports, _, _ = run(tmp_path, replace(SMALL, true_reward_every=2))

    assert [report.true_reward == report.true_reward for report in reports] == [True, False, True, False, True]


def test_measuring_the_true_reward_does_not_change_the_training(tmp_path):
    often, seldom = (run(tmp_path, replace(SMALL, true_reward_every=every))[1] for every in (1, 8))

    assert [report.grad_norm for report in often] == [report.grad_norm for report in seldom]


def test_a_snapshot_scored_again_by_other_means_gives_the_split_that_was_sent(tmp_path):
    spec = replace(SMALL, syncs_every_step=False, snapshot_steps=(4,))

    arm, _, _, _ = run(tmp_path, spec)

    assert identity_error(tmp_path / "snapshot-4.npz") < 1e-5
    assert arm.snapshot_files == [str(tmp_path / "snapshot-4.npz")]


@pytest.mark.parametrize("stream", ["cur", "old"])
def test_a_stream_that_was_not_what_it_claims_shows_in_the_identity(tmp_path, stream):
    run(tmp_path, replace(SMALL, syncs_every_step=False, snapshot_steps=(4,)))
    path = tmp_path / "snapshot-4.npz"
    with np.load(path) as held:
        arrays = {name: held[name] for name in held.files}
    arrays[stream][1, 3] += 0.01
    np.savez(path, **arrays)

    assert identity_error(path) == pytest.approx(0.01, abs=1e-4)
