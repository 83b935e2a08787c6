"""Token dumps of prime-rl and NeMo-RL: prompts are left out, versions are unknown, and both are said."""

from __future__ import annotations

import json

import numpy as np
import pytest
from factories_streams import make_streams

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.analyze import judge
from dlc_sentinel.offline.sources import kind_of

PROMPT = 12


def rounded(stream_T):
    return [round(float(x), 5) for x in stream_T]


def prime_line(step, rank, number, engine_T, cur_T):
    num = PROMPT + len(engine_T)
    return {
        "schema_version": 1, "step": step, "export_step": step, "rank": rank, "micro_step": 0,
        "micro_sequence_idx": number, "export_sequence_idx": number, "run_id": None, "env_name": "math",
        "token_ids": list(range(num)), "position_ids": list(range(num)),
        "loss_mask": [False] * PROMPT + [True] * len(engine_T), "advantages": [None] * PROMPT + [0.5] * len(engine_T),
        "inference_logprobs": [0.0] * PROMPT + rounded(engine_T), "trainer_logprobs": [None] * PROMPT + rounded(cur_T),
        "entropy": [0.1] * num,
    }  # fmt: skip


def prime_export(folder, steps=3, ranks=2, disc=0.01):
    for step in range(steps):
        s = make_streams(step, disc=disc, rows=32, length=64)
        place = folder / "token_exports" / f"step_{step}"
        place.mkdir(parents=True)
        for rank in range(ranks):
            lines = [prime_line(step, rank, n, s.engine[n], s.cur[n]) for n in range(rank, 32, ranks)]
            (place / f"rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (place / "STABLE").touch()
    return folder


def nemo_file(folder, steps=3, disc=0.01, **changes):
    for step in range(1, steps + 1):
        s = make_streams(step, disc=disc, rows=32, length=64)
        lines = []
        for n in range(32):
            num = PROMPT + 64
            line = {
                "content": ["..."], "rewards": 1.0, "idx": n, "input_lengths": num,
                "generation_logprobs": [[0.0] * PROMPT + rounded(s.engine[n]) + [0.0] * 5],
                "prev_logprobs": [[-3.0] * PROMPT + rounded(s.cur[n]) + [-9.0] * 5],
                "token_loss_mask": [[0] * PROMPT + [1] * 64 + [0] * 5], "sample_loss_mask": [1],
            } | changes  # fmt: skip
            lines.append({key: value for key, value in line.items() if value is not None})
        (folder / f"train_data_step{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(("write", "kind"), [(prime_export, "prime_rl"), (nemo_file, "nemo_rl")])
def test_a_folder_is_known_by_its_names_and_only_trained_tokens_count(write, kind, tmp_path):
    report = judge(write(tmp_path)).report

    assert kind_of(tmp_path) == kind
    assert [s["num_tokens"] for s in report["steps"]] == [32 * 64] * 3
    assert all(sum(s["dropped"].values()) == 0 for s in report["steps"])
    assert report["steps"][0]["total"]["rms"] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("write", [prime_export, nemo_file])
def test_without_versions_the_basis_is_mixed_and_on_policy_makes_it_exact(write, tmp_path):
    unsaid, on_policy = judge(write(tmp_path)), judge(tmp_path, on_policy=True)

    assert {s["basis"] for s in unsaid.report["steps"]} == {"mixed"}
    assert any("does not say which weights" in note for note in unsaid.notes)
    assert {s["basis"] for s in on_policy.report["steps"]} == {"exact"} and on_policy.notes == []
    assert on_policy.report["steps"][0]["discrepancy"]["rms"] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("write", [prime_export, nemo_file])
def test_an_engine_far_off_is_found_in_an_on_policy_dump(write, tmp_path):
    report = judge(write(tmp_path, disc=0.5), on_policy=True).report

    assert report["verdict"] in ("ENGINE", "DATA")


def test_the_ranks_of_a_step_are_one_step_whatever_their_number(tmp_path):
    two, four = tmp_path / "two", tmp_path / "four"

    reports = [judge(prime_export(folder, ranks=n)).report for folder, n in ((two, 2), (four, 4))]

    assert reports[0]["verdict"] == reports[1]["verdict"]
    rms = [[s["total"]["rms"] for s in report["steps"]] for report in reports]
    assert np.allclose(*rms, rtol=1e-12)


def test_one_file_or_one_step_can_be_read_alone(tmp_path):
    prime_export(tmp_path)
    step = tmp_path / "token_exports" / "step_1"

    assert [s["num_tokens"] for s in judge(step).report["steps"]] == [32 * 64]
    assert [s["num_tokens"] for s in judge(step / "rank_0.jsonl").report["steps"]] == [16 * 64]


def test_without_a_token_mask_the_prompt_is_where_generation_logprobs_are_exactly_0(tmp_path):
    report = judge(nemo_file(tmp_path, token_loss_mask=None, sample_loss_mask=None)).report

    assert report["steps"][0]["num_tokens"] <= 32 * 64 and report["steps"][0]["total"]["rms"] < 0.02


def test_a_sample_that_was_masked_out_is_left_out(tmp_path):
    report = judge(nemo_file(tmp_path, sample_loss_mask=[0])).report

    assert report["steps"] == []


def test_a_line_that_is_none_is_reported_and_the_rest_is_used(tmp_path):
    prime_export(tmp_path, steps=1, ranks=1)
    file = tmp_path / "token_exports" / "step_0" / "rank_0.jsonl"
    torn = json.dumps(prime_line(0, 0, 99, [-1.0] * 9, [-1.0] * 8))
    file.write_text(f"{torn}\n{file.read_text()}not json\n")

    report = judge(tmp_path).report

    assert sorted(report["unparsed_lines"]) == [1, 34]
    assert report["steps"][0]["num_tokens"] == 32 * 64


def test_a_path_that_is_not_there_is_said_with_what_can_be_read(tmp_path):
    with pytest.raises(TapeError, match=r"no such file.*token_exports of prime-rl"):
        judge(tmp_path / "nothing")


def call(prompt, response, logprob=-0.5):
    return {
        "prompt_token_ids": prompt, "generation_token_ids": response, "generation_log_probs": [logprob] * len(response),
    }  # fmt: skip


def test_rollouts_of_a_gym_are_blind_and_a_rewritten_earlier_turn_is_said(tmp_path):
    whole = [call([1, 2, 3], [4, 5]), {"type": "tool"}, call([1, 2, 3, 4, 5, 9], [6])]
    rewritten = [call([1, 2, 3], [4, 5]), call([1, 2, 3, 7, 9], [6], logprob=0.5)]
    lines = [{"response": {"output": output}, "reward": 1.0} for output in (whole, rewritten)] + [{"odd": 1}]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    judged = judge(tmp_path / "rollouts.jsonl")

    assert (judged.report["verdict"], judged.report["unparsed_lines"]) == ("BLIND", [3])
    assert judged.notes[1].startswith("4 responses, 6 tokens, 1 of them no logprob")
    assert judged.notes[2].startswith("in 1 calls") and "line 2, call 1, token 3" in judged.notes[2]
