"""The main job, run once as a user runs it: what it shows, what its tape says, and that a replay says it again."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace

import pytest
from factories_cli import ended, program
from plain import agree, recompute

from dlc_sentinel.config import Config
from dlc_sentinel.records import Scalars
from dlc_sentinel.runtime import replay
from dlc_sentinel.tape.replay import read_state, read_tape
from dlc_sentinel.wire.codec import decode

pytestmark = pytest.mark.slow

ARMS = ("control", "unwatched", "watched")
EVERY_STEP = 8
"""Recomputing all 480 steps in plain loops would take longer than the demo."""
EVENT_KINDS = ("step", "finding", "command", "ack", "producer", "breaker", "note")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    started = time.monotonic()
    done = ended(program("demo", "--seed", "1", "--plain", "--json", "--out", out), 900.0)
    assert done.code == 0, done.err[-3000:]
    return SimpleNamespace(
        out=out, wall_s=time.monotonic() - started, result=json.loads(done.out.splitlines()[-1]), stderr=done.err
    )


def test_it_takes_less_than_five_minutes_even_on_a_busy_machine(demo):
    assert demo.wall_s < 300


def test_watching_saves_the_run_that_fails_unwatched(demo):
    result = demo.result

    assert result["control"] > 0.7
    assert result["watched"] >= 0.9 * result["control"]
    assert result["watched"] >= 1.3 * result["unwatched"]
    assert result["resyncs"] >= 3
    assert "LAG" in result["verdicts"]


def test_the_split_agrees_with_an_independent_scoring_of_three_snapshots(demo):
    assert demo.result["identity_max_error"] < 1e-5


def test_the_control_is_healthy_to_the_end_and_nothing_is_sent_to_it(demo):
    _, commands, report = replay(demo.out / "tape", Config(), "control")

    assert report["verdict"] == "HEALTHY"
    assert [c for c in commands if c["run"] == "control"] == []


def test_the_reward_of_the_generators_own_samples_does_not_show_the_failure(demo):
    """On the dashboard the unwatched arm stands still; its true reward falls behind by far more."""
    records = [decode(frame.frame)[0] for frame in read_tape(demo.out / "tape") if frame.channel == "data"]
    shown = [
        r.values["reward"] for r in records if isinstance(r, Scalars) and r.source.run == "unwatched" and r.step >= 10
    ]

    assert len(shown) == 150

    assert max(shown) - min(shown) < 0.1


@pytest.mark.parametrize("arm", ARMS)
def test_every_number_of_the_tape_agrees_with_plain_numpy_to_1e_9(demo, arm):
    _, _, report = replay(demo.out / "tape", Config(), arm)
    published = {step["step"]: step for step in report["steps"]}
    plain = recompute(demo.out / "tape", run=arm, only=range(0, 160, EVERY_STEP))

    assert len(plain) == 160 // EVERY_STEP
    wrong = [
        (s, k, published[s][k], v) for s, n in plain.items() for k, v in n.items() if not agree(published[s][k], v)
    ]
    assert wrong == []


def test_a_replay_gives_the_live_events_and_commands_twice(demo):
    live = [
        (row.run, row.step, row.kind, json.dumps(row.json(), sort_keys=True))
        for row in read_state(demo.out / "tape")
        if row.kind in EVENT_KINDS and row.run
    ]

    def again():
        events, _, _ = replay(demo.out / "tape", Config())
        return [(e.run, e.step, e.kind, e.text) for e in events]

    first = again()
    assert first == again()
    assert [(run, step, kind) for run, step, kind, _ in live] == [(run, step, kind) for run, step, kind, _ in first]
    assert [json.loads(text)["text"] for *_, text in live] == [text for *_, text in first]


def test_the_action_horizon_leads_the_token_level(demo):
    least = demo.result["lag_ess_min"]["unwatched"]

    assert least["32"] < 0.5 and least["1"] > least["32"] and not math.isnan(least["1"])
