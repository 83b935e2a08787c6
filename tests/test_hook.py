"""The hook: every way to hand arrays in, what is refused and counted, and that a job never notices it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlc_sentinel.config import Config
from dlc_sentinel.core.floors import coarsest
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.hook import Hook, NoHook, connect, hash_id
from dlc_sentinel.records import Bye, Heartbeat, Hello, Rollout, Scalars, StepEnd, Synced, Train
from dlc_sentinel.wire import line
from dlc_sentinel.wire.keys import new_keys
from dlc_sentinel.wire.receiver import Receiver
from dlc_sentinel.wire.tensors import DTYPE_NAMES, EIGHT_BIT_PARTS, is_known_dtype
from tests.wire.live import Reader, hooked, wait

LENGTHS = [3, 1, 4]
ROWS = [np.array(row, np.float32) for row in ([-1, -2, -3], [-4], [-5, -6, -7, -8])]
PACKED = np.concatenate(ROWS)
PADDED = np.full((3, 6), 99, np.float32)
MASK = np.zeros((3, 6), bool)
for _i, _row in enumerate(ROWS):
    PADDED[_i, : _row.size] = _row
    MASK[_i, : _row.size] = True

Send = Callable[..., Train]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with Receiver(f"ipc://{tmp_path}/s.sock") as receiver:
        yield Reader(receiver)


@pytest.fixture
def hook(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    made = hooked(monkeypatch, reader.receiver.address)
    yield made
    reader.close(made)


@pytest.fixture
def send(hook: Hook, reader: Reader) -> Send:
    def one(**arguments: Any) -> Train:
        before = len(reader.of(Train))
        hook.train(7, 5, **arguments)
        return reader.until_any(Train, before + 1)[-1]

    return one


@pytest.mark.parametrize(
    "arguments",
    [
        {"cur": ROWS},
        {"cur": [row.tolist() for row in ROWS]},
        {"cur": [torch.tensor(row) for row in ROWS]},
        {"cur": PACKED, "cu_seqlens": np.array([0, 3, 4, 8], np.int32)},
        {"cur": PACKED[None], "cu_seqlens": torch.tensor([0, 3, 4, 8])},
        {"cur": PACKED, "lengths": LENGTHS},
        {"cur": PADDED, "lengths": torch.tensor(LENGTHS)},
        {"cur": PADDED, "mask": MASK},
        {"cur": torch.tensor(PADDED), "mask": torch.tensor(MASK).long()},
        {"cur": PADDED.astype(np.float64), "mask": MASK.astype(np.float32)},
        {"cur": np.asfortranarray(PADDED), "mask": MASK},
        {"cur": torch.tensor(PADDED, requires_grad=True), "lengths": LENGTHS},
        {"cur": PACKED, "lengths": LENGTHS, "owned": True},
        {"cur": PADDED, "engine": ROWS, "mask": MASK},
        {"cur": PADDED, "engine": ROWS},
        {"cur": ROWS, "engine": PACKED, "cu_seqlens": np.array([0, 3, 4, 8])},
    ],
)
def test_padded_packed_and_listed_rows_arrive_as_the_same_tokens(send: Send, arguments: dict[str, Any]) -> None:
    record = send(**arguments)

    assert record.cur_N is not None
    assert record.cur_N.tolist() == PACKED.tolist()
    assert record.offsets_S1.tolist() == [0, 3, 4, 8]


def test_masked_positions_inside_a_response_are_kept(send: Send) -> None:
    mask = MASK.copy()
    mask[2, 1] = False

    record = send(cur=PADDED, mask=mask)

    assert record.mask_N is not None
    assert record.cur_N is not None
    assert record.cur_N.tolist() == PACKED.tolist()
    assert np.flatnonzero(~record.mask_N).tolist() == [5]


def test_full_padded_rows_are_sent_whole(send: Send) -> None:
    assert send(cur=PADDED[:, :2]).offsets_S1.tolist() == [0, 2, 4, 6]


def test_every_field_of_a_call_arrives(send: Send) -> None:
    record = send(
        update=2, micro=3, seq_id=["a", "b", 9], group=[1, 1, 2], segments=[[("e", 0, 3)], [], [["f", 1, 4]]],
        cur=ROWS, engine=[row - 1 for row in ROWS], old=[row - 2 for row in ROWS], old_is="proximal",
        old_version=[4, 5, 4], versions=[4, "step-5", None], advantage=[0.5, -0.5, 1.0],
        tokens=[[1, 2, 3], [4], [5, 6, 7, 8]], dtypes={"engine": "float8"}, replica=2,
    )  # fmt: skip

    assert (record.step, record.version, record.update, record.micro) == (7, 5, 2, 3)
    assert (record.ids, record.groups) == (("a", "b", "9"), ("1", "1", "2"))
    assert record.segments == ((("e", 0, 3),), (), (("f", 1, 4),))
    assert record.old_is == "proximal"
    assert record.dtypes == {"cur": "float32", "engine": "float8", "old": "float32"}
    assert record.replica == "2"
    arrays = [record.engine_N, record.old_N, record.old_version_S, record.span_version_K, record.advantage_S]
    assert [None if a is None else a.tolist() for a in arrays] == [
        (PACKED - 1).tolist(), (PACKED - 2).tolist(), [4, 5, 4], [4, 5, -1], [0.5, -0.5, 1.0],
    ]  # fmt: skip
    assert record.tokens_N is not None
    assert record.tokens_N.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("versions", "starts", "values"),
    [
        (4, [0, 3, 4], [4, 4, 4]),
        (np.int64(4), [0, 3, 4], [4, 4, 4]),
        ([4, 5, 6], [0, 3, 4], [4, 5, 6]),
        (torch.tensor([4, 5, 6]), [0, 3, 4], [4, 5, 6]),
        ([[4, 4, 5], [5], [5, 5, 6, 6]], [0, 2, 3, 4, 6], [4, 5, 5, 5, 6]),
        (np.array([[4, 4, 5, 0, 0, 0], [5] + [0] * 5, [5, 5, 6, 6, 0, 0]]), [0, 2, 3, 4, 6], [4, 5, 5, 5, 6]),
        ("global_step_12", [0, 3, 4], [12, 12, 12]),
        ("default", [0, 3, 4], [-1, -1, -1]),
    ],
)
def test_generator_versions_become_spans_that_never_cross_rows(
    send: Send, versions: Any, starts: list[int], values: list[int]
) -> None:
    record = send(cur=PADDED, lengths=LENGTHS, versions=versions)

    assert record.span_start_K is not None
    assert record.span_version_K is not None
    assert record.span_start_K.tolist() == starts
    assert record.span_version_K.tolist() == values


def test_versions_that_are_not_known_stay_absent(send: Send) -> None:
    assert send(cur=ROWS).span_start_K is None


def test_bfloat16_arrives_as_float32_with_its_own_dtype_named(send: Send) -> None:
    record = send(cur=torch.tensor(PACKED, dtype=torch.bfloat16), lengths=LENGTHS)

    assert record.cur_N is not None
    assert record.cur_N.tolist() == PACKED.tolist()
    assert record.dtypes == {"cur": "bfloat16"}


def test_a_job_of_bfloat16_numerics_that_says_no_dtype_is_judged_by_them_and_not_by_its_float32_arrays(
    hook: Hook, reader: Reader
) -> None:
    rng, monitor = np.random.default_rng(0), Monitor(Config())
    for step in range(4):
        cur = -rng.exponential(1.2, (32, 64)).astype(np.float32) - 0.3
        engine = cur + rng.normal(0.0, 0.04, cur.shape).astype(np.float32)
        hook.train(step, step, cur=cur, engine=engine, versions=step)
        hook.poll(step)
    reader.close(hook)
    for number, record in enumerate(r for r in reader.records if isinstance(r, (Hello, Train, StepEnd))):
        monitor.feed(record, number, 1000.0)

    report = monitor.report(hook.source.run)
    assert reader.of(Train)[0].dtypes == {"cur": "float32", "engine": "float32"}
    assert len(report["steps"]) == 4
    assert report["findings"] == []


def test_a_missing_logprob_in_a_list_arrives_as_nan(send: Send) -> None:
    record = send(cur=[[-1.0, None, -3.0]])

    assert record.cur_N is not None
    assert np.isnan(record.cur_N).tolist() == [False, True, False]


def test_old_without_values_is_absent_whatever_the_flag_says(send: Send) -> None:
    assert send(cur=ROWS, old_is="generator").old_is == "absent"


def test_rows_without_ids_get_ids_that_are_unique_in_their_update(send: Send) -> None:
    ids = send(cur=ROWS).ids + send(cur=ROWS).ids

    assert len(set(ids)) == 6


def test_an_array_changed_after_the_call_does_not_change_what_was_sent(hook: Hook, reader: Reader) -> None:
    for _ in range(50):
        array, versions = np.full(4096, -1, np.float32), np.zeros(1, int)
        hook.train(1, 1, cur=array, versions=versions)
        array[:] = -2
        versions[:] = 9

    records = reader.until_any(Train, 50)

    assert {float(value) for record in records for value in np.unique(record.cur_N)} == {-1.0}  # type: ignore[arg-type]
    assert {int(record.span_version_K[0]) for record in records} == {0}  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "left", "refused", "numbers"),
    [
        ({"cur": ROWS, "engine": [ROWS[0], ROWS[1][:0], ROWS[2]]}, ["a", "c"], 1, "'cur': 1, 'engine': 0"),
        ({"cur": PADDED, "engine": PADDED[:, :3], "lengths": LENGTHS}, ["a", "b"], 4, "length 4"),
        ({"cur": PADDED, "engine": PADDED[:, 1:], "mask": MASK}, [], 18, r"\(3, 5\)"),
        ({"cur": PACKED, "engine": PACKED[1:], "lengths": LENGTHS}, [], 8, "'engine': 7"),
        ({"cur": PACKED, "cu_seqlens": [0, 3, 2, 8]}, [], 8, "disagree"),
        ({"cur": PADDED, "lengths": [3, 1]}, [], 18, r"\[3, 1\]"),
        ({"cur": ROWS, "engine": ROWS[:2]}, [], 8, "'engine': 2"),
    ],
)
def test_rows_whose_lengths_disagree_are_counted_and_told_and_the_rest_is_sent(
    hook: Hook, reader: Reader, caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any], left: list[str], refused: int, numbers: str,
) -> None:  # fmt: skip
    with caplog.at_level(logging.WARNING, "dlc_sentinel.hook"):
        for _ in range(3):
            hook.train(1, 1, seq_id=["a", "b", "c"], versions=[1, 2, 3], **arguments)
        hook.synced(1, 1)
        reader.until_any(Synced)

    sent = reader.of(Train)
    assert [list(record.ids) for record in sent] == ([left] * 3 if left else [])
    assert [list(record.span_version_K) for record in sent] == ([[ord(i) - 96 for i in left]] * 3 if left else [])  # type: ignore[arg-type]
    assert hook.account()[1] == {"mis_sized": 3 * refused}
    assert len(caplog.records) == 1
    assert re.search(numbers, caplog.text)


def test_what_cannot_be_understood_is_said_once_and_never_raised(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        hook.train(1, 1)
        hook.train("step", 1, cur=ROWS)  # type: ignore[arg-type]
        hook.train(1, 1, cur=object())
        hook.train(1, 1, cur=ROWS, old=ROWS, old_is="wrong")
        hook.rollout("a", "text")
        hook.synced(object(), 1)
        hook.scalars(1, None)  # type: ignore[arg-type]
        hook.ack(None, "applied")  # type: ignore[arg-type]
        assert hook.poll("x") is None  # type: ignore[arg-type]

    assert sum(hook.num_errors.values()) == 27
    assert len(caplog.records) <= 11


def test_a_wrong_old_is_is_named_with_what_was_wanted(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    hook.train(1, 1, cur=ROWS, old=ROWS, old_is="wrong")

    assert "old_is='wrong': wanted one of generator" in caplog.text


def test_a_group_list_of_another_length_costs_that_call_only(hook: Hook, reader: Reader) -> None:
    hook.train(1, 1, cur=ROWS, group=["g"])
    hook.train(2, 1, cur=ROWS)

    assert [record.step for record in reader.until_any(Train)] == [2]
    assert hook.num_errors == {"_finish": 1}


def test_one_rollout_arrives(hook: Hook, reader: Reader) -> None:
    hook.rollout(
        "req-1", [-1.0, -2.0, -3.0], version_spans=[(9, 0), (10, 2), (11, 3)], finish="stop", cached_tokens=5,
        replica=4, sampling={"temperature": 0.7}, tokens=[1, 2, 3], token_offset=8, final=False,
    )  # fmt: skip

    record = reader.until_any(Rollout)[0]

    assert (record.ids, record.finish, record.source.replica) == (("req-1",), ("stop",), "4")
    assert record.sampling == ({"temperature": 0.7},)
    assert record.logprobs_N.tolist() == [-1, -2, -3]
    assert (record.span_start_K.tolist(), record.span_version_K.tolist()) == ([0, 2], [9, 10])
    assert (record.token_offset_S.tolist(), record.final_S.tolist()) == ([8], [False])


def test_many_rollouts_of_one_call_arrive_in_one_record(hook: Hook, reader: Reader) -> None:
    hook.rollout(["a", "b"], [ROWS[0], ROWS[2]], version=[1, "v2"], finish=["stop", None], cached_tokens=[0, 7])

    record = reader.until_any(Rollout)[0]

    assert record.offsets_S1.tolist() == [0, 3, 7]
    assert record.span_version_K.tolist() == [1, 2]
    assert record.finish == ("stop", "")
    assert record.cached_tokens_S is not None
    assert record.cached_tokens_S.tolist() == [0, 7]


@pytest.mark.parametrize(
    ("version", "number", "label"),
    [(7, 7, ""), ("step-12", 12, "step-12"), ("default", -1, "default"), ("v2-beta", -1, "v2-beta")],
)
def test_a_text_version_becomes_its_trailing_integer_and_stays_as_label(
    hook: Hook, reader: Reader, version: Any, number: int, label: str
) -> None:
    hook.synced(version, 3, checksum="ab")

    record = reader.until_any(Synced)[0]

    assert (record.version, record.label, record.checksum) == (number, label, "ab")
    assert np.isnan(record.norm)


def test_scalars_that_are_no_numbers_are_left_out(hook: Hook, reader: Reader) -> None:
    hook.scalars(3, {"reward": torch.tensor(0.5), "lr": np.float32(0.25), "name": "x", "none": None})

    assert reader.until_any(Scalars)[0].values == {"reward": 0.5, "lr": 0.25}


def test_the_hash_id_is_blake2b_of_the_last_32_prompt_ids_and_the_response() -> None:
    prompt, response = list(range(100)), [7, 8]
    expected = blake2b(np.array(prompt[-32:] + response, "<i4").tobytes(), digest_size=16).hexdigest()

    assert hash_id(prompt, response) == f"h:{expected}#1"
    assert hash_id(np.array(prompt), torch.tensor(response), 3) == f"h:{expected}#3"  # type: ignore[arg-type]


def test_without_an_address_the_hook_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLC_SENTINEL", raising=False)
    hook = connect(run="r")

    hook.train(1, 1, cur=object())
    hook.rollout("a", None)

    assert isinstance(hook, NoHook)
    assert hook is connect()
    assert hook.poll(1) is None


@pytest.mark.parametrize("address", ["nonsense", "tcp://10.1.2.3:5", "ipc:///" + "x" * 200])
def test_a_wrong_address_costs_the_watching_and_not_the_run(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DLC_SENTINEL", address)

    assert isinstance(connect(), NoHook)
    assert "training goes on unwatched" in caplog.text


def test_a_role_that_there_is_not_costs_the_watching_and_is_said(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DLC_SENTINEL", str(reader.receiver.address))

    assert isinstance(connect(role="trianer"), NoHook)  # type: ignore[arg-type]
    assert "training goes on unwatched: role='trianer': wanted one of trainer, engine" in caplog.text


def test_a_run_that_is_a_number_is_its_text(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.close(hooked(monkeypatch, reader.receiver.address, run=7))

    assert reader.of(Hello)[0].source.run == "7"
    assert reader.refused == []


@pytest.mark.parametrize("dtypes", [{"engine": "bf17"}, {"engin": "bfloat16"}, {"engine": "bf16", "old": "double"}])
def test_a_dtype_or_side_that_is_not_known_is_sent_and_said_once_for_connect_and_train(
    dtypes: dict[str, str], reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook = hooked(monkeypatch, reader.receiver.address, dtypes=dtypes)
    for step in range(2):
        hook.train(step, step, cur=ROWS, dtypes=dtypes)
    reader.close(hook)

    assert reader.of(Hello)[0].dtypes == dtypes
    assert reader.of(Train)[0].dtypes == {"cur": "float32"} | dtypes
    wrong = ": ".join(list(dtypes.items())[-1])
    assert [f"dtypes={{{wrong}}}: not known" in record.getMessage() for record in caplog.records] == [True, True]
    assert "known keys: cur, old, engine, trainer; known values: float64, float32" in caplog.text


def test_dtypes_as_the_stacks_name_them_are_not_remarked_on(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"engine": "torch.bfloat16", "trainer": "", "kv_cache": "auto", "quantization": "awq"}
    hook = hooked(monkeypatch, reader.receiver.address, dtypes=told)
    hook.train(1, 1, cur=ROWS, dtypes={"engine": "fp8_e4m3", "cur": torch.float16})  # type: ignore[dict-item]
    reader.close(hook)

    assert caplog.records == []


def test_the_dtypes_that_the_hook_knows_are_those_that_have_a_floor() -> None:
    for name in DTYPE_NAMES:
        assert name in ("bfloat16", "bf16") or coarsest([name]) == coarsest([name, "float32"])
        assert is_known_dtype(name)
    for part in EIGHT_BIT_PARTS:
        assert coarsest([part]) == "float8"
    assert coarsest(["bf17", "float32"]) == "float32"
    assert not is_known_dtype("bf17")


def test_a_version_without_a_number_is_said_once(hook: Hook, reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(2):
        hook.train(step, "abc", cur=ROWS)
        hook.train(step, None, cur=ROWS)
        hook.train(step, "step-12", cur=ROWS)

    assert [record.version for record in reader.until_any(Train, 6)] == [-1, -1, 12] * 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "hook.train: version='abc' ends in no whole number" in said


def test_a_step_below_0_is_refused_counted_and_said_once(hook: Hook, caplog: pytest.LogCaptureFixture) -> None:
    for step in (-1, -2):
        hook.train(step, 1, cur=ROWS)

    assert hook.num_errors == {"train": 2}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "step=-1: wanted 0 or more" in said


def test_a_second_failure_of_the_same_type_is_said_too_up_to_20_of_them(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    hook.train(1, 1, cur=ROWS, old=ROWS, old_is="wrong")
    hook.train(-1, 1, cur=ROWS)
    for n in range(40):
        hook.train(1, 1, cur=ROWS, old=ROWS, old_is="x" * n)

    said = [record.getMessage() for record in caplog.records]
    assert ["old_is='wrong'" in said[0], "step=-1" in said[1], len(said)] == [True, True, 20]
    assert sum("other failures are counted only" in text for text in said) == 1
    assert hook.num_errors == {"train": 42}


def test_run_comes_from_the_environment_where_the_call_names_none(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLC_SENTINEL_RUN", "night")
    hook = hooked(monkeypatch, reader.receiver.address, run=None)
    hook.close()

    assert reader.until_any(Hello)[0].source.run == "night"


def child(hook: Hook) -> None:
    hook.train(2, 1, cur=ROWS, seq_id=["a", "b", "c"])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_sends_as_a_producer_of_its_own(hook: Hook, reader: Reader) -> None:
    hook.train(1, 1, cur=ROWS)
    process = multiprocessing.get_context("fork").Process(target=child, args=(hook,))
    process.start()
    reader.until(lambda: len(reader.of(Train)) == 2 and reader.of(Bye))
    process.join()
    hook.train(3, 1, cur=ROWS)
    sources = {record.step: record.source.producer for record in reader.until_any(Train, 3)}

    assert sources[1] == sources[3] != sources[2]


def played(reader: Reader, code: str) -> tuple[int, str]:
    """(exit code, stderr) of a job in a process of its own, read until it has said goodbye."""
    environment = os.environ | {"DLC_SENTINEL": str(reader.receiver.address)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            reader.until_any(Bye)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    return process.returncode, said


def test_a_job_that_ends_at_once_still_delivers(reader: Reader) -> None:
    code = "from dlc_sentinel import connect; connect('short').train(1, 1, cur=[[-1.0] * 1000])"

    assert played(reader, code)[0] == 0
    assert reader.num_tokens == 1000


def test_a_job_that_ends_without_close_delivers_frames_that_are_not_copied(reader: Reader) -> None:
    code = (
        "import time, numpy as np\nfrom dlc_sentinel import connect\nh = connect('large')\n"
        "for step in range(3):\n"
        "    h.train(step, step, cur=-np.ones((64, 4096), 'f4'), engine=-np.ones((64, 4096), 'f4'))\n"
        "    h.poll(step)\n"
    )

    assert played(reader, code) == (0, "")
    assert reader.num_tokens == 3 * 64 * 4096


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_nobody_watches_says_so_once_on_rank_0(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line, "ALONE_S", 0.0)
    hook = hooked(monkeypatch, f"ipc://{tmp_path}/none.sock", rank=rank)
    for step in range(20):
        hook.train(step, step, cur=[[-1.0]])
        hook.poll(step)
    hook.close()

    said = [record.getMessage() for record in caplog.records if "nobody answers" in record.getMessage()]
    assert len(said) == (1 if rank == 0 else 0)
    assert all(f"{tmp_path}/none.sock" in text and "dlc-sentinel serve" in text for text in said)


@pytest.mark.parametrize(("rank", "keys"), [(0, False), (0, True), (1, False)])
def test_a_job_that_nobody_ever_watched_ends_with_the_number_of_its_tokens_and_what_may_be_wrong(
    rank: int, keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if keys:
        new_keys(tmp_path / "k")
        monkeypatch.setenv("DLC_SENTINEL_KEYS", str(tmp_path / "k"))
    hook = hooked(monkeypatch, "tcp://127.0.0.1:9", rank=rank)
    hook.train(0, 0, cur=[np.full(50_000, -1, np.float32)])
    hook.poll(0)
    hook.close()

    said = [record.getMessage() for record in caplog.records if "tokens of run" in record.getMessage()]
    advice = "with the keys that DLC_SENTINEL_KEYS holds" if keys else "if it has keys, set DLC_SENTINEL_KEYS"
    assert len(said) == (1 if rank == 0 else 0)
    assert all("none of the 50,000 tokens" in text and "tcp://127.0.0.1:9" in text and advice in text for text in said)


def test_dtypes_may_be_torchs_own(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = {"engine": torch.float8_e4m3fn, "trainer": torch.bfloat16}
    hook = hooked(monkeypatch, reader.receiver.address, dtypes=dtypes)
    reader.until_any(Hello)
    hook.close()

    assert reader.of(Hello)[0].dtypes == {"engine": "float8_e4m3fn", "trainer": "bfloat16"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sentinel_that_goes_away_and_comes_back_is_said_on_rank_0_once_a_minute(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line, "HEARTBEAT_S", 0.05)
    address = f"ipc://{tmp_path}/s.sock"
    hook: Hook | None = None

    def said(part: str) -> int:
        return sum(part in record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.WARNING, "dlc_sentinel.hook"):
        for life in range(3):
            with Receiver(address) as receiver:
                hook = hook or hooked(monkeypatch, address, rank=rank)
                Reader(receiver).until_any(Heartbeat, 3)
                wait(lambda: rank or said("a sentinel answers at") == min(life, 1))  # noqa: B023
            if rank == 0:
                wait(lambda: said("no longer answers at") == 1)
        hook.close()  # type: ignore[union-attr]

    assert said("no longer answers at") == said("a sentinel answers at") == (1 if rank == 0 else 0)


@pytest.mark.parametrize("num_steps", [3, 20, 120])
def test_what_a_stopped_sentinel_did_not_take_at_the_end_is_said_with_its_tokens(
    num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Receiver(f"ipc://{tmp_path}/s.sock") as receiver, caplog.at_level(logging.WARNING, "dlc_sentinel.hook"):
        hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
        reader.until_any(Heartbeat)
        for step in range(num_steps):
            hook.train(step, step, cur=[np.full(50_000, -1, np.float32)])
        hook.close()
        with suppress(AssertionError):
            reader.until(lambda: reader.of(Bye), 1.0)
        told = [record.getMessage() for record in caplog.records]
        _, dropped, waiting = hook.account()

    assert waiting == 0
    if num_steps == 3:
        assert told == []
        assert reader.num_tokens == 3 * 50_000
        return
    (text,) = told
    numbers = re.search(r": ([\d,]+) of ([\d,]+) tokens of run run were not sent", text)
    assert numbers is not None and str(receiver.address) in text
    waited, offered = (int(number.replace(",", "")) for number in numbers.groups())
    assert offered == num_steps * 50_000
    assert dropped == ({"queue_full": waited} if waited else {})
    assert (waited > 0) == (num_steps == 120)
    assert reader.num_tokens <= offered - waited


def test_a_watched_job_does_not_say_that_it_is_not(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys, time\nfrom dlc_sentinel.wire import line\nline.ALONE_S = 0.5\n"
        "from dlc_sentinel import connect\nh = connect()\n"
        "end_s = time.monotonic() + 1\nwhile time.monotonic() < end_s: pass\n"
        "h.close()\n"
    )
    code_of_exit, said = played(reader, code)

    assert code_of_exit == 0 and "nobody answers" not in said


def test_a_job_ends_within_seconds_when_no_sentinel_was_ever_there(tmp_path: Path) -> None:
    code = (
        "import time\nfrom dlc_sentinel import connect\nh = connect()\n"
        "for i in range(500): h.train(i, 1, cur=[[-1.0] * 9])\n"
        "start = time.monotonic()\nh.close()\nassert time.monotonic() - start < 2"
    )
    environment = os.environ | {"DLC_SENTINEL": f"ipc://{tmp_path}/none.sock"}

    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=20, check=False).returncode == 0


def test_a_hook_survives_pickling_with_its_trainer(hook: Hook) -> None:
    again = pickle.loads(pickle.dumps(hook))
    again.close()

    assert again.source.run == hook.source.run
    assert again.source.producer != hook.source.producer


def test_importing_and_connecting_loads_nothing_heavier_than_numpy_msgspec_and_zmq(tmp_path: Path) -> None:
    code = (
        "import sys, dlc_sentinel.hook\n"
        "print('zmq' in sys.modules)\n"
        "dlc_sentinel.hook.connect().close()\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))\n"
        "print('dlc_sentinel.config' in sys.modules, 'tomllib' in sys.modules)"
    )
    environment = os.environ | {"DLC_SENTINEL": f"ipc://{tmp_path}/none.sock"}
    text = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    before, modules, unwanted = text.stdout.splitlines()

    assert before == "False"
    assert {name for name in modules.split() if not name.startswith("_")} <= {
        "dlc_sentinel", "numpy", "msgspec", "zmq", "cython_runtime", "sitecustomize", "typing_extensions",
    }  # fmt: skip
    assert unwanted == "False False"


class FakeEvent:
    def __init__(self) -> None:
        self.waited = False

    def record(self, stream: object) -> None:
        assert isinstance(stream, FakeStream)

    def synchronize(self) -> None:
        self.waited = True


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.waits_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits_for.append(other)


class FakeHost:
    """Pinned memory that is filled only once somebody waited for the copy."""

    def __init__(self, events: list[FakeEvent], shape: tuple[int, ...]) -> None:
        self.events, self.place, self.shape = events, len(events), shape
        self.nbytes = 4 * int(np.prod(shape))

    def numel(self) -> int:
        return int(np.prod(self.shape))

    def copy_(self, source: Any, non_blocking: bool) -> None:
        assert non_blocking
        self.values = source.values

    def numpy(self) -> np.ndarray[Any, Any]:
        assert self.events[self.place].waited
        return np.asarray(self.values, np.float32)


class CudaDevice:
    type = "cuda"


class CudaTensor:
    """A tensor on a device, as far as the hook may look at it."""

    device = CudaDevice()

    def __init__(self, values: np.ndarray[Any, Any], dtype: str = "torch.float32") -> None:
        self.values, self.dtype, self.shape = values, dtype, values.shape
        self.read_by: list[object] = []

    def detach(self) -> CudaTensor:
        return self

    def float(self) -> CudaTensor:
        return CudaTensor(self.values)

    def record_stream(self, stream: object) -> None:
        self.read_by.append(stream)


def test_device_tensors_are_copied_on_a_side_stream_and_waited_for_in_the_sender_thread(
    hook: Hook, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[FakeEvent] = []

    def event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    cuda = types.SimpleNamespace(
        Stream=FakeStream, Event=event, current_stream=lambda device: "main", stream=lambda side: nullcontext()
    )
    fake = types.SimpleNamespace(cuda=cuda, empty=lambda shape, dtype, pin_memory: FakeHost(events, shape))
    monkeypatch.setitem(sys.modules, "fake_torch", fake)
    monkeypatch.setattr(CudaTensor, "__module__", "fake_torch.tensor")
    cur, engine = CudaTensor(PADDED, "torch.bfloat16"), PADDED.copy()

    hook.train(1, 1, cur=cur, engine=engine, mask=CudaTensor(MASK), versions=np.array([1, 2, 3]))
    engine[:] = 0
    record = reader.until_any(Train)[0]

    assert record.cur_N is not None
    assert record.engine_N is not None
    assert record.cur_N.tolist() == PACKED.tolist()
    assert record.engine_N.tolist() == PACKED.tolist()
    assert record.dtypes == {"cur": "bfloat16", "engine": "float32"}
    assert all(event.waited for event in events)
    assert cur.read_by[0].waits_for[0] == "main"  # type: ignore[attr-defined]
    assert hook.account()[0] == PACKED.size
