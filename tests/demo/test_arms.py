"""Arms as processes. Each start costs an import of torch and transformers, so there are few of these."""

from dataclasses import replace

import pytest

from dlc_sentinel.demo.arms import ArmFailed, run_demo, three_arms
from dlc_sentinel.demo.spec import ArmResult, ArmSpec, StepReport, report_from_dict, report_to_dict

SHORT = ArmSpec(num_steps=5, num_groups=2, rows_per_group=3, response_tokens=12, true_reward_rows=4, synced_steps=3)


def test_the_three_arms_are_one_job_that_differs_in_who_delivers_weights():
    watched, unwatched, control = three_arms(seed=4, base=SHORT)

    assert [arm.seed for arm in (watched, unwatched, control)] == [4] * 3
    free = {"name": "x", "syncs_every_step": True, "obeys": True, "snapshot_steps": ()}
    assert replace(watched, **free) == replace(unwatched, **free) == replace(control, **free)
    assert [(a.syncs_every_step, a.obeys) for a in (watched, unwatched, control)] == [
        (False, True), (False, False), (True, True),
    ]  # fmt: skip


def test_a_spec_survives_its_way_through_json():
    spec = replace(SHORT, snapshot_steps=(1, 2), fault="queue", queue_batches=4)

    assert ArmSpec.from_json(spec.to_json()) == spec


def test_a_report_survives_its_way_through_json_with_nan_as_null():
    report = StepReport("a", 1, 2, float("nan"), 0.5, 1.0, 2.0, {"1": 0.5}, 0.1, 0.2, 3, True, "RESYNC", 0.25)

    again = report_from_dict(report_to_dict(report))

    assert report_to_dict(report)["true_reward"] is None
    assert replace(again, true_reward=0.0) == replace(report, true_reward=0.0)


@pytest.mark.slow
def test_arms_run_as_processes_without_a_sentinel_and_are_equal_until_their_weights_part(tmp_path):
    watched, _, control = three_arms(seed=1, base=SHORT)

    items = list(run_demo([watched, control], tmp_path))

    results = {item.spec.name: item for item in items if isinstance(item, ArmResult)}
    reports = {name: [(r.reward, r.grad_norm, r.age) for r in results[name].steps] for name in results}
    assert len(items) == 12
    assert {name: len(result.steps) for name, result in results.items()} == {"watched": 5, "control": 5}
    assert reports["watched"][:4] == reports["control"][:4]
    assert [age for _, _, age in reports["watched"]] == [0, 0, 0, 0, 1]
    assert [age for _, _, age in reports["control"]] == [0] * 5
    assert len({text for _, text in results["control"].checksums}) == 6


@pytest.mark.slow
def test_an_arm_that_breaks_is_named_with_the_end_of_its_errors(tmp_path):
    broken = replace(SHORT, name="broken", engine="vllm", engine_python="/nowhere/python")

    with pytest.raises(ArmFailed, match=r"arm broken after 0 steps: (.|\n)*nowhere"):
        list(run_demo([broken], tmp_path))


@pytest.mark.slow
def test_closing_the_iterator_ends_the_arms_that_run(tmp_path):
    progress = run_demo([replace(SHORT, num_steps=100_000)], tmp_path)
    first = next(progress)

    progress.close()

    assert isinstance(first, StepReport)
    assert list(progress) == []
