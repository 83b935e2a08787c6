"""What a path holds is told by names and first lines; nothing is guessed."""

from __future__ import annotations

import gzip
import json

import pytest

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.analyze import judge
from dlc_sentinel.offline.sources import kind_of

LINES = {
    "lines": {"type": "scalars", "step": 1, "values": {}},
    "metrics": {"step": 1, "data": {"rollout_corr/kl": 0.0}},
    "prime_rl": {"step": 1, "loss_mask": [True], "inference_logprobs": [-1.0], "trainer_logprobs": [-1.0]},
    "nemo_rl": {"generation_logprobs": [-1.0], "prev_logprobs": [-1.0]},
    "nemo_gym": {"response": {"output": [{"generation_log_probs": [-1.0]}]}},
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_file_of_lines_is_told_by_its_first_object_whatever_its_name(kind, packed, tmp_path):
    text = ("not json\n[1]\n" + json.dumps(LINES[kind]) + "\n").encode()
    (tmp_path / "any.jsonl").write_bytes(gzip.compress(text) if packed else text)

    assert kind_of(tmp_path / "any.jsonl") == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("metrics.jsonl", "metrics"),
        ("trainer_state.json", "trainer_state"),
        ("checkpoint-20/trainer_state.json", "trainer_state"),
        ("global_step_4/transfer_queue/simple_storage/su_0_X.pkl", "transfer_queue"),
        ("exp/3/gen_batch.dp", "skip_dump"),
        ("exp/3/0/tq_batch.pt", "skip_dump"),
        ("token_exports/step_3/rank_0.jsonl", "prime_rl"),
        ("logs/exp_001/train_data_step3.jsonl", "nemo_rl"),
    ],
)
def test_a_folder_is_told_by_the_names_below_it(name, kind, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()

    assert kind_of(tmp_path) == kind


def test_a_packed_log_of_numbers_is_read(tmp_path):
    text = "".join(
        json.dumps({"step": n, "data": {"rollout_corr/kl": 0.0, "rollout_corr/k3_kl": 0.0}}) + "\n" for n in range(3)
    )
    (tmp_path / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode()))

    assert [s["step"] for s in judge(tmp_path / "metrics.jsonl.gz").report["steps"]] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["metrics", "prime_rl", "nemo_rl", "nemo_gym"])
def test_of_a_packed_file_cut_short_the_whole_lines_are_used(kind, tmp_path):
    text = "".join(json.dumps(LINES[kind] | {"step": n, "salt": hash(n * 0.1)}) + "\n" for n in range(900))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode())[:-500])

    (broken_at,) = judge(tmp_path / "a.jsonl.gz").report["unparsed_lines"]

    assert 300 < broken_at <= 900


def test_an_empty_folder_is_refused_with_all_that_could_be_there(tmp_path):
    with pytest.raises(TapeError, match=r"nor anything else that is read; wanted a tape folder.*NeMo Gym"):
        kind_of(tmp_path)


def test_a_torn_gzip_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(LINES["lines"]).encode() * 99)[:40])

    with pytest.raises(TapeError, match="cannot be read"):
        judge(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("kind", LINES)
def test_a_line_nested_too_deep_is_reported_and_the_rest_is_used(kind, tmp_path):
    good, deep = json.dumps(LINES[kind]), json.dumps(LINES[kind])[:-1] + ', "x": ' + "[" * 200_000
    (tmp_path / "any.jsonl").write_text(f"{deep}\n{good}\n{deep}\n")

    assert kind_of(tmp_path / "any.jsonl") == kind
    assert judge(tmp_path / "any.jsonl").report["unparsed_lines"] == [1, 3]


def test_the_log_of_a_run_comes_before_dumps_of_its_steps_and_says_that_they_are_there(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINES["metrics"]) + "\n")
    (tmp_path / "checkpoints" / "global_step_1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "global_step_1" / "su_0.pkl").touch()

    assert (kind_of(tmp_path), kind_of(tmp_path / "checkpoints")) == ("metrics", "transfer_queue")
    assert "also holds tokens (transfer_queue)" in judge(tmp_path).notes[-1]
