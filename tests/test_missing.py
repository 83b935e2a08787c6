"""What a BLIND verdict says is missing: always the true cause, where the steps or the live run tell it."""

from __future__ import annotations

from typing import Any

import pytest
from factories_snapshots import make_producer, make_run, make_step

from dlc_sentinel import missing

TRAINER, ENGINE = make_producer("trainer"), make_producer("engine")
NOTHING = {"engine": 0, "old": 0, "cur": 0}
THIN = {"num_tokens": 0}


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ({"producers": ()}, "no step was closed: nobody has connected"),
        ({"producers": (ENGINE,)}, "no step was closed: only an engine has connected, no trainer"),
        ({"producers": (ENGINE, TRAINER)}, "no step was closed: the trainer has sent no logprobs yet"),
        (
            {"producers": (TRAINER,), "dropped_tokens": {"late": 0, "mis_sized": 6000, "unmatched": 7}},
            "no step was closed: 6,000 tokens were lost as mis_sized",
        ),
        (
            {"producers": (TRAINER,), "dropped_tokens": {"late": 512}, "last_step": -1},
            "no step was closed: 512 tokens were lost as late, with a step below 0",
        ),
        (
            {"producers": (TRAINER,), "num_tokens": {"engine": 0, "old": 0, "cur": 900}},
            "no step was closed: the first one is open, with 900 tokens; it ends with `hook.poll(step)`",
        ),
    ],
    ids=["nobody", "engine only", "no logprobs", "mis-sized", "below 0", "open"],
)
def test_a_live_run_without_a_closed_step_says_which_of_the_causes_it_is(run: dict[str, Any], why: str) -> None:
    shown = make_run(**({"history": (), "step": None, "last_step": -1, "num_tokens": NOTHING} | run))

    assert missing.line("BLIND", shown.history, run=shown) == f"cannot say: {why}"


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([THIN], "0 of the 1,000 tokens that a verdict needs"),
        (
            [THIN | {"dropped": {"unmatched": 300}}, THIN | {"dropped": {"unmatched": 300, "late": 400}}],
            "0 of the 1,000 tokens that a verdict needs; 600 were lost as unmatched",
        ),
        (
            [{"dropped": {"late": 9}}, THIN | {"dropped": {"positive": 400}}],
            "no usable token in the newest step; 400 were lost as positive",
        ),
    ],
    ids=["none came", "unmatched", "newest"],
)
def test_steps_that_lost_their_tokens_say_under_which_cause(steps: list[dict[str, Any]], why: str) -> None:
    assert missing.line("BLIND", [make_step(n, **step) for n, step in enumerate(steps)]) == f"cannot say: {why}"


def test_a_trainer_whose_engine_logprobs_never_came_is_told_so() -> None:
    steps = (make_step(0, **THIN, dropped={"unmatched": 4096}),)
    run = make_run(history=steps, step=steps[0], num_tokens={"engine": 0, "old": 4096, "cur": 4096})

    assert missing.line("BLIND", steps, run=run).endswith("needs; no engine logprobs have come, from trainer or engine")


def test_a_verdict_that_is_known_keeps_its_own_line() -> None:
    assert "BLIND" not in missing.line("LAG", ())
    assert not missing.line("LAG", (), run=make_run(history=())).startswith("cannot say")
