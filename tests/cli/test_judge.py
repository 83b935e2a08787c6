"""analyze and replay: the exit code is the verdict, the report is on stdout."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from factories_cli import shuffled
from factories_job import live, stale_job, train

from dlc_sentinel.cli import judge, screen
from dlc_sentinel.config import Act, Config
from dlc_sentinel.offline.analyze import Judged, analyze
from dlc_sentinel.records import Ack, Source, StepEnd, Train


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


def test_on_a_terminal_of_80_columns_no_line_of_the_summary_is_longer(cli, home, monkeypatch):
    path = write(home / "job.jsonl", JOBS["LAG", 10]())
    monkeypatch.setattr(screen, "width", lambda: 80)

    done = cli("analyze", path)
    head = done.out[: done.out.index("commands (")].splitlines()

    assert any(line.strip().startswith("do: ") for line in head) and all(len(line) <= 80 for line in head)


def test_numbers_in_lists_of_the_evidence_are_short(capsys):
    evidence = {"interval": [0.3002643455997828, 0.45], "by_age": {"0": 0.123456789, "1": None}}
    finding = {"verdict": "LAG", "kind": "queue", "state": "confirmed", "catastrophic": False, "acted": False,
               "confidence": 0.9, "since_step": 3, "advice": "sync", "evidence": evidence}  # fmt: skip
    report = {"verdict": "LAG", "run": "r1", "other_runs": [], "findings": [finding], "steps": [], "commands": [],
              "unparsed_lines": [], "corrections": None}  # fmt: skip

    judge.summary(Judged(report), Config())

    assert "evidence: interval [0.3, 0.45], by_age {0: 0.123, 1: -}\n" in capsys.readouterr().out


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


def answered(outcome):
    """The stale job, which answers its first RESYNC so."""
    return [replace(r, outcome=outcome) if isinstance(r, Ack) else r for r in stale_job(20, answers=True)]


@pytest.mark.parametrize(
    ("records", "outcome"),
    [(answered("refused"), "refused"), (answered("applied"), "applied"), (list(stale_job(11)), "no answer")],
    ids=["refused", "applied", "no answer"],
)
@pytest.mark.parametrize("command", ["analyze", "replay"])
def test_a_command_is_listed_with_what_came_of_it(cli, home, command, records, outcome):
    live(home / "tape", records)

    out = cli(command, home / "tape").out
    first = out[out.index("commands (") :].splitlines()[2]

    assert f" {outcome} " in first and "lag ESS_32" in first
    assert ", asked for a RESYNC, confidence" in out and "acted on" not in out


def test_commands_of_a_file_and_of_a_run_that_observes_were_never_sent(cli, home):
    path = write(home / "job.jsonl", JOBS["LAG", 10]())
    live(home / "tape", stale_job(20), config=Config(act=Act(mode="observe")))

    file, tape = cli("analyze", path).out, cli("analyze", home / "tape", "--set", "act.mode=observe").out

    assert ", would have asked for a RESYNC, " in file and " hypothetical " in file
    assert "asked for a RESYNC" not in tape and " not sent (mode) " in tape


def two_runs(folder):
    """A tape of a run that is LAG and, newer, of one that is healthy."""
    healthy = Source("r2", "trainer", "00000000000000bb")
    last = 23
    later = [train(step, source=healthy) for step in range(last + 1, last + 5)]
    live(folder, [*stale_job(20), *later, StepEnd(healthy, last + 4)])
    return folder


def test_of_several_runs_the_worst_is_taken_and_the_others_are_named(cli, home):
    tape = two_runs(home / "tape")

    text, tree = cli("analyze", tape), cli("replay", tape, "--json").json()

    assert text.code == 10 and text.out.startswith("LAG: ")
    assert text.out.splitlines()[1] == "run r1; also on this tape: r2 HEALTHY (--run NAME shows one)"
    assert (tree["run"], tree["other_runs"]) == ("r1", [{"run": "r2", "verdict": "HEALTHY"}])


def test_a_named_run_is_judged_alone_and_no_line_of_another_is_printed(cli, home):
    tape = two_runs(home / "tape")

    done, both = cli("replay", tape, "--run", "r2"), cli("replay", tape)

    assert done.code == 0 and "run r2; also on this tape: r1 LAG" in done.out
    assert " r1 step" not in done.out and " r1 step" in both.out


def test_a_run_that_the_tape_does_not_hold_is_a_usage_error_that_names_those_it_holds(cli, home):
    done = cli("analyze", two_runs(home / "tape"), "--run", "r3")

    assert done.code == 2 and "no run 'r3'; it holds r1, r2" in done.err


def test_blind_says_how_many_tokens_are_missing(cli, home):
    path = write(home / "job.jsonl", [train(0, ids=("a",), offsets_S1=np.array([0, 128]), groups=("g",))])

    done = cli("analyze", path)

    assert done.code == 1
    assert done.out.startswith("BLIND: cannot say: 128 of the 1,000 tokens that a verdict needs\n")


def test_blind_says_where_nothing_was_there_to_judge(cli, home):
    meta, unusable = {"type": "meta", "run": "r"}, {"type": "seq", "step": 0, "id": "a"}
    (home / "begun.jsonl").write_text(f"{json.dumps(meta)}\n")
    (home / "unusable.jsonl").write_text(f"{json.dumps(meta)}\n{json.dumps(unusable)}\n")

    begun, lost = cli("analyze", "begun.jsonl"), cli("analyze", "unusable.jsonl")

    assert begun.code == lost.code == 1
    assert begun.out.startswith("BLIND: cannot say: no step was closed\n")
    assert lost.out.startswith("BLIND: cannot say: no usable row of tokens (1 lines not used)\n")
    assert "1 line was not used: 2\n" in lost.err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no line in it; wanted JSON lines of this format"),
        (
            '{"type":"seq","step":0,"id":"a"}\n',
            "no line can be used; line 1: id 'a': none of engine, old, cur is there",
        ),
    ],
)
def test_a_file_in_which_no_line_can_be_used_is_a_usage_error(cli, home, text, why):
    (home / "a.jsonl").write_text(text)

    done = cli("analyze", "a.jsonl")

    assert done.code == 2 and done.out == "" and f"a.jsonl: {why}" in done.err


def test_a_packed_file_that_a_killed_job_left_is_judged_as_far_as_it_goes(cli, home):
    path = write(home / "job.jsonl", JOBS["HEALTHY", 0]())
    packed = home / "job.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes())[:-100])

    done = cli("analyze", packed, "--json")

    assert done.code == 0 and len(done.json()["unparsed_lines"]) == 1
    assert "is not used: cannot be read from here on (Compressed file ended" in done.err


def test_export_writes_a_tape_as_lines_that_analyze_reads_alike(cli, home):
    live(home / "tape", stale_job(20))

    done = cli("analyze", home / "tape", "--export", "job.jsonl", "--json")
    again = cli("analyze", "job.jsonl", "--json")

    assert [step["lag_ess"] for step in again.json()["steps"]] == [step["lag_ess"] for step in done.json()["steps"]]


def test_corrections_are_a_table_after_the_steps_with_the_one_needed_marked(cli, home):
    path = write(home / "job.jsonl", JOBS["LAG", 10]())

    done = cli("analyze", path, "--corrections")
    lines = done.out[done.out.index("correction this run needs") :].splitlines()

    assert lines[0] == "correction this run needs: resync (in 3 of 6 steps)"
    assert lines[2].strip() == "medians over those steps; 12288 tokens with exact lag"
    assert lines[3].split()[:2] == ["correction", "ESS"]
    assert [line.split()[0] for line in lines[4:11]] == [
        "none", "tis", "sequence_mis", "icepop", "decoupled_ppo", "dlc_token", "dlc_block",
    ]  # fmt: skip
    assert lines[11].strip() == "steps that need: none 3, resync 3"


def test_lines_that_do_not_parse_are_named_and_the_rest_is_used(cli, home):
    path = write(home / "job.jsonl", JOBS["HEALTHY", 0]())
    path.write_text("{broken\n" + path.read_text())

    done = cli("analyze", path, "--json")

    assert done.code == 0 and done.json()["unparsed_lines"] == [1] and "line 1 is not used" in done.err


def test_of_many_broken_lines_a_few_are_explained_and_the_rest_counted(cli, home):
    path = write(home / "job.jsonl", JOBS["HEALTHY", 0]())
    path.write_text("{broken\n" * 50 + path.read_text())

    done = cli("analyze", path)

    assert done.err.count("is not used: no JSON: ") == 10 and "40 lines more are not used" in done.err
    assert "50 lines were not used: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...\n" in done.err


def test_a_file_that_is_no_json_lines_is_one_line_and_a_usage_error(cli, home):
    (home / "train.py").write_text("import torch\n\nprint(torch)\n" * 9)

    done = cli("analyze", "train.py")

    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert "train.py: not JSON Lines of this format: no line can be used; line 1: no JSON" in done.err


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
