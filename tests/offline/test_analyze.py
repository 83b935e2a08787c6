"""`analyze` prints the object of the file format, whether the run comes from a tape or from JSON lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from factories_job import CONFIG, TRAINER, live, stale_job, train

import dlc_sentinel
from dlc_sentinel.config import Config, Ess
from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.analyze import analyze, exit_code, judge, replay
from dlc_sentinel.offline.export import export
from dlc_sentinel.records import TOKEN_CAUSES, Hello, Rollout, Scalars, Source, StepEnd, Train

TOP = {"schema", "verdict", "findings", "steps", "commands", "unparsed_lines", "corrections", "run", "other_runs"}
STEP = {
    "step", "version", "updates", "basis", "num_tokens", "num_groups", "num_blocks", "version_age", "lag_ess",
    "lag_ess_interval", "lag_ess_by_age", "half_horizon", "coverage", "discrepancy", "lag", "total", "stale_kv",
    "floor",     "loop_gain", "forecast_steps", "kl", "dropped", "rescored", "discrepancy_by", "tokens_by_age",
}  # fmt: skip
TERM = {"mean", "rms", "p50_abs", "p99_abs"}
RUNGS = {"1", "8", "32", "128", "512", "inf"}


def lines(records):
    """The open file format, written here a second time and in the plainest way."""
    for record in records:
        if isinstance(record, Train):
            for i, name in enumerate(record.ids):
                at = slice(int(record.offsets_S1[i]), int(record.offsets_S1[i + 1]))
                yield {
                    "type": "seq", "step": record.step, "update": record.update, "version": record.version, "id": name,
                    "group": record.groups[i], "engine": record.engine_N[at].tolist(), "old": record.old_N[at].tolist(),
                    "cur": record.cur_N[at].tolist(), "old_is": record.old_is,
                    "versions": int(record.span_version_K[i]),
                }  # fmt: skip
        elif not isinstance(record, StepEnd):
            yield {"type": "synced", "step": record.step, "version": record.version, "checksum": record.checksum}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbers(tree):
    """Every number of a JSON tree."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return [n for item in tree for n in numbers(item)]
    return [tree] if isinstance(tree, float) else []


def without(step, *keys):
    return {key: value for key, value in step.items() if key not in keys}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("a") / "job.jsonl", lines(stale_job(20)))


@pytest.fixture(scope="module")
def report(file):
    return analyze(file)


def test_every_key_of_the_format_is_there(report):
    assert set(report) == TOP and report["schema"] == 1 and report["unparsed_lines"] == []
    for step in report["steps"]:
        assert set(step) == STEP
        assert set(step["num_blocks"]) == set(step["lag_ess"]) == set(step["coverage"]) == RUNGS
        assert all(set(step[term]) == TERM for term in ("discrepancy", "lag", "total"))
        assert set(step["dropped"]) == set(TOKEN_CAUSES) and set(step["version_age"]) == {"mean", "max"}
    for finding in report["findings"]:
        assert set(finding) == {
            "verdict", "kind", "confidence", "since_step", "state", "acted", "catastrophic", "evidence", "advice"
        }  # fmt: skip
    assert all(set(command) == {"step", "kind", "action", "reason"} for command in report["commands"])


def test_the_object_is_json_without_nan_or_infinity(report):
    text = json.dumps(report, allow_nan=False)

    assert json.loads(text) == report and np.isfinite(numbers(report)).all()


def test_published_numbers_agree_with_plain_numpy_to_1e_9(report):
    jobs = {record.step: record for record in stale_job(20) if isinstance(record, Train)}
    for step in report["steps"]:
        job = jobs[step["step"]]
        cur, old, engine = (x.astype(np.float64) for x in (job.cur_N, job.old_N, job.engine_N))
        weight = np.exp(cur - old)
        blocks = np.exp((cur - old).reshape(-1, 32).sum(axis=1))
        assert step["num_tokens"] == cur.size and step["num_groups"] == 8
        for term, x in (("lag", cur - old), ("discrepancy", old - engine), ("total", cur - engine)):
            assert step[term]["mean"] == pytest.approx(x.mean(), rel=1e-9, abs=1e-12)
            assert step[term]["rms"] == pytest.approx(np.sqrt((x**2).mean()), rel=1e-9)
        assert step["lag_ess"]["1"] == pytest.approx(weight.sum() ** 2 / (weight.size * (weight**2).sum()), rel=1e-9)
        assert step["lag_ess"]["32"] == pytest.approx(blocks.sum() ** 2 / (blocks.size * (blocks**2).sum()), rel=1e-9)
        assert step["version_age"]["max"] == step["step"] % 12


def test_a_tape_and_its_json_lines_give_the_same_steps_and_commands(tmp_path, report):
    live(tmp_path, stale_job(20))

    taped = analyze(tmp_path)

    assert taped["steps"] == report["steps"] and taped["commands"] == report["commands"] != []
    assert taped["verdict"] == report["verdict"]


def test_naming_a_run_of_a_file_that_holds_one_is_said_and_changes_nothing(file, report):
    judged = judge(file, run="another")

    assert judged.report == report
    assert any("--run another chose nothing" in note for note in judged.notes)


def test_lines_in_any_order_give_the_same_report(tmp_path, report):
    rows = list(lines(stale_job(20)))
    order = np.random.default_rng(3).permutation(len(rows))
    shuffled = analyze(write(tmp_path / "job.jsonl", [rows[i] for i in order]))

    assert shuffled["commands"] == report["commands"] and shuffled["verdict"] == report["verdict"]
    for one, other in zip(shuffled["steps"], report["steps"], strict=True):
        assert one["lag_ess"] == pytest.approx(other["lag_ess"], rel=1e-9)
        assert one["total"]["rms"] == pytest.approx(other["total"]["rms"], rel=1e-9)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_an_exported_tape_analyzes_like_the_tape(tmp_path, name):
    meta = Hello(
        TRAINER, model_name="tiny", dtypes={"engine": "float32", "trainer": "float32"}, sampling={"temperature": 1.0}
    )
    live(
        tmp_path / "tape",
        [meta, *stale_job(16), Scalars(TRAINER, 16, {"reward": 0.5}), train(16), StepEnd(TRAINER, 16)],
    )

    num_lines = export(tmp_path / "tape", tmp_path / name)

    assert num_lines == 1 + 17 * 16 + 1 + 1
    assert analyze(tmp_path / name)["steps"] == analyze(tmp_path / "tape")["steps"]


def test_an_export_joins_what_engine_and_trainer_sent_apart(tmp_path):
    engine = Source("r1", "engine", "00000000000000ee", replica="2")
    whole = train(1, gen=1)
    half = len(whole.ids) // 2
    cut = int(whole.offsets_S1[half])
    sides = [
        Rollout(
            engine, whole.ids, whole.offsets_S1, np.zeros(16, np.int64), np.ones(16, np.bool_), whole.engine_N,
            whole.span_start_K, whole.span_version_K, finish=("stop",) * 16,
        ),
        train(1, engine_N=None, span_start_K=None, span_version_K=None),
    ]  # fmt: skip
    live(tmp_path / "tape", [*sides, StepEnd(TRAINER, 1)])
    live(tmp_path / "late", [*sides[::-1], StepEnd(TRAINER, 1)])

    for name in ("tape", "late"):
        export(tmp_path / name, tmp_path / f"{name}.jsonl")
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        seqs = [row for row in rows if row["type"] == "seq"]
        assert [row["id"] for row in seqs] == list(whole.ids)
        assert (
            np.array([x for row in seqs[:half] for x in row["engine"]], np.float32).tolist()
            == whole.engine_N[:cut].tolist()
        )
        assert all((row["versions"], row["finish"], row["replica"]) == (1, "stop", "2") for row in seqs)


def test_a_long_sequence_cut_over_frames_is_one_line_of_an_export(tmp_path):
    size = 200_000
    long = train(
        1, ids=("long",), offsets_S1=np.array([0, size]), groups=("g",), span_start_K=np.array([0, 150_000]),
        span_version_K=np.array([0, 1]), mask_N=np.arange(size) % 7 > 0,
        **{name: np.linspace(-2, -1, size, dtype=np.float32) for name in ("cur_N", "old_N", "engine_N")},
    )  # fmt: skip
    live(tmp_path / "tape", [long, StepEnd(TRAINER, 1)])

    export(tmp_path / "tape", tmp_path / "out.jsonl")

    (row,) = [
        row for line in (tmp_path / "out.jsonl").read_text().splitlines() if (row := json.loads(line))["type"] == "seq"
    ]
    assert row["versions"] == [[0, 0], [1, 150_000]]
    assert np.array(row["cur"], np.float32).tolist() == long.cur_N.tolist()
    assert row["mask"] == long.mask_N.astype(int).tolist()


def test_missing_values_count_as_non_finite_where_the_mask_is_on(tmp_path):
    row = {"type": "seq", "step": 1, "version": 1, "versions": 1, "id": "a", "cur": [-1.0, -1.0, -1.0, -1.0]}
    row |= {"engine": [None, -1.0, "-Infinity", None], "mask": [1, 1, 1, 0]}

    (step,) = analyze(write(tmp_path / "a.jsonl", [row]))["steps"]

    assert step["dropped"]["non_finite"] == 2 and step["num_tokens"] == 1


def test_refused_lines_and_repeats_are_counted_with_the_step(tmp_path):
    row = {"type": "seq", "step": 1, "version": 1, "versions": 1, "id": "a", "cur": [-1.0] * 5, "engine": [-1.0] * 5}
    report = analyze(write(tmp_path / "a.jsonl", [row, row, row | {"id": "b", "engine": [-1.0] * 9}, {"type": "odd"}]))

    (step,) = report["steps"]

    assert step["dropped"]["duplicate"] == 5 and step["dropped"]["mis_sized"] == 9 and step["num_tokens"] == 5
    assert report["unparsed_lines"] == [3, 4]


def test_a_file_of_a_meta_line_is_blind_and_whole(tmp_path):
    report = analyze(write(tmp_path / "a.jsonl", [{"type": "meta", "run": "a"}]))

    assert report == {
        "schema": 1,
        "verdict": "BLIND",
        "findings": [],
        "steps": [],
        "commands": [],
        "unparsed_lines": [],
        "corrections": None,
        "run": "a",
        "other_runs": [],
    }
    assert exit_code(report) == 1


def test_a_config_changes_the_judgement_and_not_the_numbers(file, report):
    lax = analyze(file, Config(ess=Ess(threshold=0.01, severe=0.001)))

    assert report["commands"] and not lax["commands"]
    assert [s["lag_ess"] for s in lax["steps"]] == [s["lag_ess"] for s in report["steps"]]


def test_commands_of_a_file_are_hypothetical(file):
    events, commands, _ = replay(file)

    assert commands[0]["kind"] == "RESYNC"
    assert [e for e in events if e.kind == "command"]


def test_the_same_file_gives_the_same_events_twice(file):
    assert repr(replay(file, CONFIG)) == repr(replay(file, CONFIG))


def test_the_package_exports_analyze(file, report):
    assert dlc_sentinel.analyze(file) == report


def test_a_folder_that_is_no_tape_is_refused(tmp_path):
    with pytest.raises(TapeError, match="no tape in this folder"):
        analyze(tmp_path)


def finding(verdict, state="confirmed", *, acted=False, catastrophic=False):
    return {"verdict": verdict, "state": state, "acted": acted, "catastrophic": catastrophic}


@pytest.mark.parametrize(
    ("verdict", "findings", "code"),
    [
        ("HEALTHY", [], 0),
        ("HEALTHY", [finding("LAG", "closed")], 0),
        ("BLIND", [finding("BLIND")], 1),
        ("LAG", [finding("LAG")], 10),
        ("STALE_ENGINE", [finding("STALE_ENGINE", "suspected")], 10),
        ("STALE_ENGINE", [finding("STALE_ENGINE"), finding("LAG", "superseded")], 20),
        ("ENGINE", [finding("ENGINE")], 10),
        ("ENGINE", [finding("ENGINE", catastrophic=True)], 20),
        ("DATA", [finding("DATA", catastrophic=True)], 20),
        ("HEALTHY", [finding("DATA", "closed", catastrophic=True)], 0),
        ("DATA", [finding("DATA", "closed", catastrophic=True, acted=True)], 20),
        ("LAG", [finding("LAG"), finding("ENGINE", "superseded", catastrophic=True, acted=True)], 10),
    ],
)
def test_the_exit_code_says_whether_an_abort_is_due(verdict, findings, code):
    assert exit_code({"verdict": verdict, "findings": findings}) == code
