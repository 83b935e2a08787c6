"""Long readings: a bar on a terminal only, and a Ctrl-C that keeps what was read."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager

import pytest
from factories_job import live, train

from dlc_sentinel.cli.reading import reading
from dlc_sentinel.records import Source, StepEnd


def test_the_first_interrupt_ends_the_reading_and_the_second_is_one():
    before = signal.getsignal(signal.SIGINT)

    with reading("a") as watch:
        assert watch(1, 10) is True
        os.kill(os.getpid(), signal.SIGINT)
        assert watch(2, 10) is False
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys):
    with reading("a") as watch:
        watch(5, 10)

    assert capsys.readouterr() == ("", "")


def logged(folder):
    """A log of verl: ages are not in it."""
    data = {"rollout_corr/kl": 5e-4, "rollout_corr/k3_kl": 5e-4, "rollout_corr/chi2_token": 1e-3}
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step in range(1, 6)))
    return path


def test_a_log_of_numbers_is_judged_and_what_it_cannot_tell_is_said_on_stderr(cli, home):
    unsaid, on_policy = cli("analyze", logged(home)), cli("analyze", logged(home), "--on-policy")

    assert (unsaid.code, on_policy.code) == (1, 0)
    assert "basis mixed" in unsaid.err and "basis mixed" not in on_policy.err
    assert "total ESS_1" in on_policy.out and on_policy.out.startswith("HEALTHY")


def test_a_reading_that_was_stopped_prints_what_it_has_and_is_no_verdict(cli, home, monkeypatch):
    rows = [
        {"type": "seq", "step": step, "version": step, "versions": step, "id": f"{step}", "engine": [-1.0] * 2000,
         "old": [-1.001] * 2000, "cur": [-1.001] * 2000, "old_is": "generator"}
        for step in range(6)
    ]  # fmt: skip
    path = home / "job.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @contextmanager
    def stopping(name):
        yield lambda done, total: done < total / 2

    monkeypatch.setattr("dlc_sentinel.cli.reading.reading", stopping)

    done = cli("analyze", path, "--json")

    assert done.code == 1 and "stopped early" in done.err
    assert 0 < len(done.json()["steps"]) < 6


def test_a_run_that_had_not_come_when_the_reading_was_stopped_is_not_called_missing(cli, home, monkeypatch):
    late = Source("late", "trainer", "00000000000000bb")
    live(home / "tape", [*map(train, range(4)), train(9, source=late), StepEnd(late, 9)])

    @contextmanager
    def stopping(name):
        yield lambda done, total: done < total / 4

    monkeypatch.setattr("dlc_sentinel.cli.reading.reading", stopping)

    done = cli("analyze", home / "tape", "--run", "late")

    assert done.code == 1 and "no run 'late' came before the reading was stopped" in done.err
    assert done.out.startswith("BLIND: ") and "stopped early" in done.err
