"""demo: the JSON line, the files, and a stop that leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from factories_cli import DEADLINE_S, ended, program, wait_until
from factories_job import TRAINER, live, stale_job

from dlc_sentinel.cli.demo import Witness
from dlc_sentinel.config import Config
from dlc_sentinel.records import Event
from dlc_sentinel.runtime import replay

KEYS = ["seed", "control", "unwatched", "watched", "resyncs", "verdicts", "lag_ess_min", "identity_max_error"]

OLD = replace(TRAINER, run="control", producer="0" * 16)


def step_event(run, step, **ess):
    return Event("step", run, step, 0.0, "INFO", "", {"lag_ess": ess})


def test_the_smallest_lag_ess_of_each_arm_is_remembered_and_what_is_unknown_left_out():
    witness = Witness()

    for step, value in enumerate([0.9, 0.4, None, 0.6]):
        witness.handle(step_event("watched", step, **{"32": value}))
    witness.handle(step_event("unwatched", 0, **{"32": 0.1}))

    assert witness.lag_ess_min == {"watched": {"32": 0.4}, "unwatched": {"32": 0.1}}


@pytest.mark.slow
def test_the_last_line_is_the_result_and_the_tape_of_an_earlier_demo_is_not_gone_on_with(home):
    live(home / "out" / "tape", (replace(record, source=OLD) for record in stale_job(9)))

    done = ended(program("demo", "--steps", "8", "--plain", "--json", "--out", home / "out"), 5 * DEADLINE_S)
    result = json.loads(done.out.splitlines()[-1])
    _, _, report = replay(home / "out" / "tape", Config(), "control")

    assert done.code == 0 and list(result) == KEYS
    assert result == json.loads((home / "out" / "result.json").read_text())
    assert set(result["lag_ess_min"]) == {"unwatched", "watched"} and 0 < result["lag_ess_min"]["watched"]["32"] <= 1
    assert [step["step"] for step in report["steps"]] == list(range(8))
    assert "watched" in (home / "out" / "table.txt").read_text()
    assert (home / "out" / "demo.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_demo_that_is_stopped_leaves_no_process_behind(home):
    process = program("demo", "--plain", "--out", home / "out")

    def working():
        """Processes that the demo started, arms and their generators, by their folder on the command line."""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            if f"{home}/out/" in line:
                found.append(pid)
        return found

    wait_until(lambda: len(working()) >= 2, "the arms")
    os.kill(process.pid, signal.SIGINT)
    done = ended(process)

    assert done.code == 130 and "the demo was stopped" in done.err
    wait_until(lambda: not working(), "the end of the arms")
