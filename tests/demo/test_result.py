import json
import math

import pytest

from dlc_sentinel.demo.arms import three_arms
from dlc_sentinel.demo.result import picture, saved, summary, table
from dlc_sentinel.demo.spec import ArmResult, ArmSpec, StepReport

SPECS = {spec.name: spec for spec in three_arms(seed=3, base=ArmSpec(num_steps=8))}


def result(
    name: str, late: float, *, early: float = 0.0, ess: float = 0.7, commands: tuple[int, ...] = ()
) -> ArmResult:
    """An arm of 8 steps whose true reward is `late` in its last quarter and `early` before, measured at even steps."""
    true = [(late if step >= 6 else early) if step % 2 == 0 else math.nan for step in range(8)]
    said = ["RESYNC" if step in commands else "" for step in range(8)]
    steps = [
        StepReport(
            name, step, 8, true[step], 0.3, 1.0, 0.5, {"1": 0.9, "32": ess - step / 100}, 0.1, 0.005, 0,
            said[step] != "", said[step], 0.1,
        )
        for step in range(8)
    ]  # fmt: skip
    return ArmResult(SPECS[name], tuple(steps), "", 30.0)


def arms(control=0.8, unwatched=0.3, watched=0.79):
    return [result("watched", watched, commands=(2, 5)), result("unwatched", unwatched), result("control", control)]


def test_the_true_reward_of_an_arm_is_the_mean_of_its_last_quarter():
    assert result("control", 0.8, early=0.1).true_reward() == pytest.approx(0.8)


def test_an_arm_that_never_came_to_its_last_quarter_has_no_true_reward():
    short = ArmResult(SPECS["control"], result("control", 0.8).steps[:4], "ABORT", 3.0)

    assert math.isnan(short.true_reward())


def test_the_summary_has_exactly_the_promised_fields():
    found = summary(arms(), verdicts=["LAG"], identity_error=3e-6)

    assert found == {
        "seed": 3,
        "control": 0.8,
        "unwatched": 0.3,
        "watched": 0.79,
        "resyncs": 2,
        "verdicts": ["LAG"],
        "lag_ess_min": {"unwatched": {"1": 0.9, "32": 0.63}, "watched": {"1": 0.9, "32": 0.63}},
        "identity_max_error": 3e-6,
    }


def test_the_sentinels_own_least_ess_takes_the_place_of_the_trainers():
    assert summary(arms(), lag_ess_min={"watched": {"32": 0.2}})["lag_ess_min"] == {"watched": {"32": 0.2}}


def test_what_is_unknown_is_null_and_the_object_is_strict_json():
    text = json.dumps(summary(arms()[:1]), allow_nan=False)

    assert '"control": null' in text
    assert '"identity_max_error": null' in text


@pytest.mark.parametrize(
    ("values", "wanted"),
    [((0.8, 0.3, 0.73), True), ((0.8, 0.3, 0.71), False), ((0.8, 0.6, 0.77), False), ((0.8, math.nan, 0.8), False)],
    ids=["kept up and beat it", "fell behind the control", "hardly beat the unwatched arm", "an arm unmeasured"],
)
def test_the_watched_arm_is_saved_when_it_keeps_up_with_the_control_and_beats_the_unwatched_arm(values, wanted):
    assert saved(arms(*values)) is wanted


def test_without_all_three_arms_nothing_is_said_to_be_saved():
    assert not saved(arms()[:2])


def test_the_table_has_a_line_per_arm_with_its_share_of_the_control():
    lines = table(arms()).splitlines()

    assert [line.split()[0] for line in lines[2:5]] == ["control", "unwatched", "watched"]
    assert lines[4].split()[1:3] == ["0.790", "99%"]


def test_the_picture_is_a_png_also_where_an_arm_is_missing(tmp_path):
    for number, some in enumerate((arms(), arms()[1:])):
        path = picture(some, tmp_path / "sub" / f"{number}.png")

        assert path.read_bytes().startswith(b"\x89PNG")
