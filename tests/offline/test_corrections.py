"""`analyze --corrections`: what each correction would have done, from the tokens of the recording."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from factories_job import live, stale_job, train

import dlc_sentinel
from dlc_sentinel.offline import corrections
from dlc_sentinel.offline.analyze import analyze, judge
from dlc_sentinel.offline.export import export

EFFECT = {"name", "ess", "raw_ess", "clipped_share", "bias_left", "variance_factor"}


def one_token_rows(path, num_rows, *, num_steps=3, moved=lambda i: i % 2, by_lag=True):
    """The rows that `moved` have three times the engine's probability, by lag or discrepancy; the others the same."""
    with path.open("w") as file:
        for step in range(num_steps):
            for i in range(num_rows):
                cur = -3.0 + math.log(3.0) * moved(i)
                row = {
                    "type": "seq", "step": step, "version": 1, "versions": 0, "id": f"s{step}.{i}",
                    "group": f"g{i // 4}", "old_is": "generator", "engine": [-3.0], "old": [-3.0 if by_lag else cur],
                    "cur": [cur],
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
    return path


def effects(report):
    return {effect["name"]: effect for effect in report["corrections"]["effects"]}


def test_effects_are_those_of_the_closed_form(tmp_path):
    report = analyze(one_token_rows(tmp_path / "run.jsonl", 32), corrections=True)

    # half the weights 3, half 1: (4 / 2)^2 / ((9 + 1) / 2); cut at 2: (3 / 2)^2 / ((4 + 1) / 2)
    found = effects(report)
    for name in ("tis", "dlc_token", "dlc_block"):
        assert found[name]["raw_ess"] == pytest.approx(0.8)
        assert found[name]["ess"] == pytest.approx(0.9)
        assert found[name]["variance_factor"] == pytest.approx(1 / 0.9)
        assert found[name]["clipped_share"] == pytest.approx(0.5)
        assert found[name]["bias_left"] == pytest.approx(3 / 4 - 2 / 3)
    assert found["none"]["bias_left"] == pytest.approx(3 / 4 - 1 / 2)
    assert found["icepop"]["bias_left"] == pytest.approx(0.0, abs=1e-7)
    assert report["corrections"]["lag_ess"] == pytest.approx(0.8)


def test_dlc_weighs_the_lag_alone_and_the_others_the_total(tmp_path):
    found = effects(analyze(one_token_rows(tmp_path / "run.jsonl", 32, by_lag=False), corrections=True))

    assert found["dlc_token"]["ess"] == pytest.approx(1.0) and found["dlc_token"]["bias_left"] == pytest.approx(0.0)
    assert found["tis"]["ess"] == pytest.approx(0.9)


@pytest.mark.parametrize("moved", [lambda i: i % 2, lambda i: i < 500, lambda i: i % 8 < 4])
def test_a_step_with_more_tokens_than_are_compared_is_thinned_evenly(tmp_path, monkeypatch, moved):
    monkeypatch.setattr(corrections, "MAX_TOKENS", 200)

    found = analyze(one_token_rows(tmp_path / "run.jsonl", 1000, num_steps=1, moved=moved), corrections=True)

    assert found["corrections"]["num_tokens"] == 1000
    assert 100 <= found["corrections"]["num_tokens_compared"] <= 200
    assert effects(found)["tis"]["ess"] == pytest.approx(0.9, abs=0.01)


def test_without_the_flag_the_key_is_there_and_null(tmp_path):
    assert analyze(one_token_rows(tmp_path / "run.jsonl", 8))["corrections"] is None


def test_a_run_whose_syncs_stop_needs_a_resync_and_says_in_how_many_steps(tmp_path):
    live(tmp_path / "tape", stale_job(24))

    found = dlc_sentinel.analyze(tmp_path / "tape", corrections=True)["corrections"]

    assert found["need"] == "resync" and "sync the generator more often" in found["reason"]
    assert (found["basis"], found["num_steps"], found["horizon"]) == ("exact", 24, 32)
    assert found["num_tokens"] == found["num_tokens_compared"] == 24 * 2048
    assert sum(found["steps_that_need"].values()) == 24
    assert all(set(effect) == EFFECT for effect in found["effects"])


def test_a_tape_and_the_lines_exported_from_it_need_the_same(tmp_path):
    live(tmp_path / "tape", stale_job(12))
    export(tmp_path / "tape", tmp_path / "job.jsonl")

    tape, lines = (analyze(tmp_path / name, corrections=True)["corrections"] for name in ("tape", "job.jsonl"))

    assert lines["effects"] == [pytest.approx(effect) for effect in tape["effects"]]
    for key in ("need", "reason", "basis", "num_tokens", "steps_that_need"):
        assert lines[key] == tape[key]


def test_rows_without_exact_lag_are_left_out_and_counted(tmp_path):
    records = [train(0, span_version_K=np.array([0] * 12 + [-1] * 4), old_is="proximal"), train(1)]
    live(tmp_path / "tape", records)

    found = analyze(tmp_path / "tape", corrections=True)["corrections"]

    assert (found["basis"], found["num_tokens"], found["num_tokens_left_out"]) == ("exact", 28 * 128, 4 * 128)


def test_a_run_without_any_exact_row_is_compared_by_its_total(tmp_path):
    live(tmp_path / "tape", [train(step, gen=0, old_N=None, old_is="absent", lag=0.3) for step in range(1, 4)])

    found = analyze(tmp_path / "tape", corrections=True)["corrections"]

    assert (found["basis"], found["need"], found["num_tokens_left_out"]) == ("total", "unknown", 0)
    by_name = {effect["name"]: effect for effect in found["effects"]}
    assert by_name["dlc_token"]["ess"] is None and 0.9 < by_name["tis"]["ess"] < 1.0


def test_a_log_of_numbers_has_nothing_to_compare_and_a_note_says_so(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "data": {"training/rollout_probs_diff_mean": 0.01}}) + "\n")

    judged = judge(path, corrections=True)

    assert judged.report["corrections"] is None
    assert any("holds numbers per step, no tokens" in note for note in judged.notes)
