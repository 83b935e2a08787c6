"""analyze and replay: the exit code is the verdict, the report is on stdout."""

from __future__ import annotations

import json

import pytest
from factories_cli import shuffled
from factories_job import live, stale_job, train

from dlc_sentinel.offline.analyze import analyze
from dlc_sentinel.records import Train


def write(path, records):
    """The open file format, in the plainest way."""
    with path.open("w") as file:
        for record in records:
            for i, name in enumerate(record.ids if isinstance(record, Train) else ()):
                at = slice(int(record.offsets_S1[i]), int(record.offsets_S1[i + 1]))
                row = {
                    "type": "seq", "step": record.step, "version": record.version, "id": name,
                    "group": record.groups[i], "old_is": "generator", "versions": int(record.span_version_K[i]),
                    "engine": record.engine_N[at].tolist(), "old": record.old_N[at].tolist(),
                    "cur": record.cur_N[at].tolist(),
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
    return path


JOBS = {
    ("HEALTHY", 0): lambda: [train(step) for step in range(4)],
    ("BLIND", 1): lambda: [train(0, ids=("a", "b", "c", "d"))],
    ("LAG", 10): lambda: [train(step, gen=0, lag=0.02 + 0.3 * (step > 2)) for step in range(6)],
    ("DATA", 20): lambda: [train(step, **shuffled(step)) for step in range(4)],
}


@pytest.mark.parametrize(("verdict", "code"), JOBS)
@pytest.mark.parametrize("command", ["analyze", "replay"])
def test_the_exit_code_says_the_verdict(cli, home, command, verdict, code):
    path = write(home / "job.jsonl", JOBS[verdict, code]())

    done = cli(command, path, "--json")

    assert (done.json()["verdict"], done.code) == (verdict, code)


def test_json_is_the_report_object_on_one_line_and_nothing_else(cli, home):
    path = write(home / "job.jsonl", JOBS["LAG", 10]())

    done = cli("analyze", path, "--json")

    assert done.out.count("\n") == 1 and done.json() == analyze(path)


def test_the_summary_leads_with_the_verdict_and_says_what_to_do(cli, home):
    path = write(home / "job.jsonl", JOBS["LAG", 10]())
    advice = analyze(path)["findings"][0]["advice"]

    done = cli("analyze", path)
    lines = done.out.splitlines()

    assert done.code == 10 and lines[0].startswith("LAG: ")
    assert any(line.strip() == f"do: {advice}" for line in lines)
    assert [line.split()[0] for line in lines[-6:]] == ["0", "1", "2", "3", "4", "5"]


def test_a_setting_changes_what_a_replay_says(cli, home):
    path = write(home / "job.jsonl", JOBS["LAG", 10]())

    done = cli("replay", path, "--json", "--set", "ess.threshold=0.001", "--set", "ess.severe=0.0005")

    assert done.code == 0 and done.json()["verdict"] == "HEALTHY"


def test_replay_of_a_tape_prints_the_lines_as_they_fell(cli, home):
    live(home / "tape", stale_job(20))

    done = cli("replay", home / "tape")

    assert done.code == 10
    assert "LAG (old_weights) opened" in done.out and "RESYNC sent" in done.out
    assert done.out.index("RESYNC sent") < done.out.index("steps 0 to 19")


def test_export_writes_a_tape_as_lines_that_analyze_reads_alike(cli, home):
    live(home / "tape", stale_job(20))

    done = cli("analyze", home / "tape", "--export", "job.jsonl", "--json")
    again = cli("analyze", "job.jsonl", "--json")

    assert [step["lag_ess"] for step in again.json()["steps"]] == [step["lag_ess"] for step in done.json()["steps"]]


def test_lines_that_do_not_parse_are_named_and_the_rest_is_used(cli, home):
    path = write(home / "job.jsonl", JOBS["HEALTHY", 0]())
    path.write_text("{broken\n" + path.read_text())

    done = cli("analyze", path, "--json")

    assert done.code == 0 and done.json()["unparsed_lines"] == [1] and "line 1 is not used" in done.err


@pytest.mark.parametrize("command", ["analyze", "replay", "watch"])
def test_what_is_no_recording_exits_2(cli, home, command):
    (home / "empty").mkdir()

    done = cli(command, home / "empty")

    assert done.code == 2 and done.out == "" and "no tape" in done.err


def test_watch_of_a_tape_shows_how_the_run_ended_and_does_not_wait(cli, home):
    live(home / "tape", stale_job(20))

    text, tree = cli("watch", home / "tape"), cli("watch", home / "tape", "--json").json()

    assert text.code == 0 and "step 19" in text.out
    assert tree["runs"][0]["last_step"] == 19 and tree["runs"][0]["commands"][0]["kind"] == "RESYNC"
