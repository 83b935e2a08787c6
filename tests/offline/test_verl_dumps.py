"""verl's own dumps, read without verl: which rows were trained, at which version, and what cannot be compared."""

from __future__ import annotations

import json
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from factories_streams import make_streams

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.analyze import judge
from dlc_sentinel.offline.sources import kind_of
from dlc_sentinel.offline.verl_dumps import VerlDump
from dlc_sentinel.records import Rollout


def storage_unit(step, *, trained=24, queued=8, disc=0.01, lag=0.0, gen_version=None, segments=False, length=64):
    """The state a TransferQueue storage unit pickles: {field_data: {field: {index: value}}}."""
    s = make_streams(step, rows=trained + queued, length=length, disc=disc, lag=lag)
    version = step - 1 if gen_version is None else gen_version
    extra = {"min_global_steps": version, "max_global_steps": version}
    if segments:
        half = length // 2
        extra = {"dlc_segments": {"tokens": [half, length - half], "versions": [version - 1, version], "turns": 1}}
    rows = range(100, 100 + trained + queued)
    return {
        "storage_unit_id": "su", "storage_unit_size": 1000, "active_keys": set(rows),
        "field_data": {
            "uid": {i: f"group-{i // 8}" for i in rows},
            "response_mask": {i: torch.ones(length, dtype=torch.int64) for i in rows},
            "rollout_log_probs": {i: torch.tensor(s.engine[n], dtype=torch.float32) for n, i in enumerate(rows)},
            "old_log_probs": {
                i: torch.tensor(s.cur[n], dtype=torch.float32) for n, i in enumerate(rows) if n < trained
            },
            "extra_fields": dict.fromkeys(rows, extra),
            "metrics": {i: {"generate_sequences": 0.5} for i in rows},
        },
    }  # fmt: skip


def checkpoints(folder, steps=range(1, 5), **unit):
    for step in steps:
        place = folder / f"global_step_{step}" / "transfer_queue" / "simple_storage"
        place.mkdir(parents=True)
        (place / "su_0_X.pkl").write_bytes(pickle.dumps(storage_unit(step, **unit), pickle.HIGHEST_PROTOCOL))
    return folder


def test_the_trained_rows_of_checkpoints_are_judged_and_the_queued_ones_are_said(tmp_path):
    judged = judge(checkpoints(tmp_path))

    assert judged.report["verdict"] == "HEALTHY"
    assert [s["step"] for s in judged.report["steps"]] == [1, 2, 3, 4]
    step = judged.report["steps"][-1]
    assert (step["basis"], step["num_tokens"], step["version_age"]["max"]) == ("exact", 24 * 64, 0.0)
    assert step["discrepancy"]["rms"] == pytest.approx(0.01, rel=0.1)
    assert judged.notes == ["32 rows still wait in the queue and were trained on by nobody yet"]


def test_rows_of_older_weights_are_of_a_mixed_basis(tmp_path):
    (step,) = judge(checkpoints(tmp_path, steps=[7], gen_version=3)).report["steps"]

    assert (step["basis"], step["version_age"]["mean"], step["lag"]["rms"]) == ("mixed", 3.0, None)


def test_the_hooks_own_segments_date_every_token(tmp_path):
    (step,) = judge(checkpoints(tmp_path, steps=[7], segments=True)).report["steps"]

    assert step["version_age"] == {"mean": 0.5, "max": 1.0}


def test_one_checkpoint_and_one_file_of_it_say_the_same(tmp_path):
    folder = checkpoints(tmp_path, steps=[3])

    file = folder / "global_step_3" / "transfer_queue" / "simple_storage" / "su_0_X.pkl"
    # A dump names no run: its own name stands for it.
    by_file, by_step, by_folder = (judge(path).report | {"run": ""} for path in (file, file.parents[2], folder))

    assert by_file == by_step == by_folder


def test_several_storage_units_of_a_step_are_one_step(tmp_path):
    folder = checkpoints(tmp_path, steps=[3])
    place = folder / "global_step_3" / "transfer_queue" / "simple_storage"
    (place / "su_1_X.pkl").write_bytes(pickle.dumps(storage_unit(3)))

    (step,) = judge(folder).report["steps"]

    assert step["num_tokens"] == 2 * 24 * 64 and sum(step["dropped"].values()) == 0


def test_a_row_whose_arrays_disagree_is_reported_and_the_rest_is_used(tmp_path):
    unit = storage_unit(3)
    unit["field_data"]["old_log_probs"][100] = torch.zeros(5)
    place = tmp_path / "global_step_3" / "transfer_queue"
    place.mkdir(parents=True)
    (place / "su_0_X.pkl").write_bytes(pickle.dumps(unit))

    report = judge(tmp_path).report

    assert report["unparsed_lines"] == [0] and report["steps"][0]["num_tokens"] == 23 * 64


def test_a_pickle_that_is_no_storage_unit_is_refused(tmp_path):
    (tmp_path / "su_0.pkl").write_bytes(pickle.dumps({"a": 1}))

    with pytest.raises(TapeError, match="no field_data"):
        judge(tmp_path)


# -- dumps of the SkipManager ----------------------------------------------------------------------------------------


@pytest.fixture
def verl(monkeypatch):
    """Stand-ins under verl's and tensordict's names, so that pickles name what the real ones name."""

    def module(name, **content):
        found = types.ModuleType(name)
        for key, value in content.items():
            value.__module__, value.__qualname__, value.__name__ = name, key, key
            setattr(found, key, value)
        monkeypatch.setitem(sys.modules, name, found)

    def rebuild(metadata, storage):
        raise AssertionError("a reader that runs this has lost")

    class Batch:
        def __init__(self, **fields):
            self.fields = fields

        def __reduce__(self):
            leaves, data = {}, b""
            for key, tensor in self.fields.items():
                raw = tensor.numpy().tobytes()
                pad = -len(raw) % 8
                leaves[key] = (str(tensor.dtype), list(tensor.shape), len(data), len(data) + len(raw) + pad, pad)
                data += raw + b"\0" * pad
            storage = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return rebuild, ({"cls": "TensorDict", "leaves": leaves}, storage)

    class DataProto:
        def __init__(self, batch):
            self.batch = batch

        def __getstate__(self):
            import io

            out = io.BytesIO()
            torch.save(self.batch, out)
            return out.getvalue(), {"uid": np.array(["a", "b"], dtype=object)}, {"global_steps": 3}

    def make(cls, state):
        raise AssertionError("a reader that runs this has lost")

    class Jagged:
        def __init__(self, **fields):
            self.fields = fields

        def __reduce__(self):
            return make, (Jagged, {"_tensordict": self.fields})

    module("tensordict")
    module("tensordict._reductions", _rebuild_tensordict_files_consolidated=rebuild, _make_td=make)
    module("tensordict._td", TensorDict=Jagged)
    module("verl")
    module("verl.protocol", DataProto=DataProto)
    return types.SimpleNamespace(DataProto=DataProto, Batch=Batch, Jagged=Jagged)


def test_a_skip_dump_is_read_and_said_to_hold_the_engines_side_only(verl, tmp_path):
    batch = verl.Batch(rollout_log_probs=-torch.rand(4, 9), response_mask=torch.ones(4, 9, dtype=torch.int64))
    (tmp_path / "exp" / "3").mkdir(parents=True)
    (tmp_path / "exp" / "3" / "gen_batch.dp").write_bytes(pickle.dumps(verl.DataProto(batch)))
    (tmp_path / "exp" / "3" / "meta.json").write_text(json.dumps({"global_steps": 3}))

    judged = judge(tmp_path)

    assert kind_of(tmp_path) == "skip_dump"
    assert judged.report["verdict"] == "BLIND" and judged.report["steps"] == []
    assert judged.notes == ["a skip dump holds the engine's logprobs only: there is nothing to compare them with"]


def test_a_skip_dump_without_engine_logprobs_says_which_setting_was_off(verl, tmp_path):
    (tmp_path / "gen_batch.dp").write_bytes(pickle.dumps(verl.DataProto(verl.Batch(responses=torch.zeros(2, 3)))))

    with pytest.raises(TapeError, match="calculate_log_probs"):
        judge(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_skip_dump_of_the_queue_keeps_the_length_of_every_row(verl, tmp_path):
    rows = [-torch.rand(5), -torch.rand(3)]
    data = verl.Jagged(rollout_log_probs=torch.nested.as_nested_tensor(rows, layout=torch.jagged), uid=["a", "b"])
    (tmp_path / "4" / "0").mkdir(parents=True)
    torch.save({"tensordict": data, "tags": [], "keys": ["a", "b"], "global_steps": 4}, tmp_path / "4/0/tq_batch.pt")

    found = [record for record in VerlDump(tmp_path).records() if isinstance(record, Rollout)]

    assert [np.diff(record.offsets_S1).tolist() for record in found] == [[5, 3]]
    assert np.array_equal(found[0].logprobs_N, torch.cat(rows).numpy())
