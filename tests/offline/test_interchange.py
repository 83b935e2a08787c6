"""JSON lines become the records a hook would have sent, whatever state the file is in."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline import interchange, lines
from dlc_sentinel.offline.interchange import BATCH_TOKENS, Interchange
from dlc_sentinel.records import Heartbeat, Hello, Scalars, Synced, Train


def seq(step=0, name="s", **fields):
    return {
        "type": "seq",
        "step": step,
        "version": step,
        "id": name,
        "engine": [-1.0, -2.0],
        "cur": [-1.5, -2.5],
    } | fields


def write(path, *rows):
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    file = Interchange(path)
    return list(file.records()), file


def trains(records):
    return [record for record in records if isinstance(record, Train)]


def rows(records):
    """(step, update, id, first cur) of every sequence, in the order the monitor sees them."""
    return [
        (r.step, r.update, name, float(r.cur_N[at]))
        for r in trains(records)
        for name, at in zip(r.ids, r.offsets_S1, strict=False)
    ]


def test_one_line_with_every_field_becomes_one_train_record(tmp_path):
    line = seq(
        12, "s1", update=3, version=11, group="p1", engine=[-1, None, "-Infinity"], old=[-1, -2, -3], cur=[-4, -5, -6],
        old_is="generator", old_version=9, versions=[[9, 0], [10, 2]], mask=[1, 1, 0], tokens=[5, 6, 7], advantage=0.5,
        finish="stop", replica="2", cached_tokens=4,
    )  # fmt: skip

    (record,) = trains(read(write(tmp_path / "a.jsonl", line))[0])

    assert (record.step, record.update, record.version, record.ids, record.groups) == (12, 3, 11, ("s1",), ("p1",))
    np.testing.assert_array_equal(record.engine_N, np.array([-1, np.nan, -np.inf], np.float32))
    np.testing.assert_array_equal(record.old_N, np.array([-1, -2, -3], np.float32))
    np.testing.assert_array_equal(record.cur_N, np.array([-4, -5, -6], np.float32))
    assert (record.old_is, record.old_version_S.tolist(), record.replica) == ("generator", [9], "2")
    assert (record.span_start_K.tolist(), record.span_version_K.tolist()) == ([0, 2], [9, 10])
    assert (record.mask_N.tolist(), record.tokens_N.tolist()) == ([True, True, False], [5, 6, 7])
    assert record.advantage_S.tolist() == [0.5]
    assert record.cur_N.dtype == np.float32 and record.mask_N.dtype == np.bool_


@pytest.mark.parametrize(
    ("versions", "starts", "values"),
    [
        (9, [0], [9]),
        ([9, 9, 10], [0, 2], [9, 10]),
        ([[9, 0], [10, 1]], [0, 1], [9, 10]),
        ([None, 3, 3], [0, 1], [-1, 3]),
    ],
)
def test_versions_are_a_number_one_per_token_or_pairs(tmp_path, versions, starts, values):
    line = seq(engine=[-1, -1, -1], cur=[-1, -1, -1], versions=versions)

    (record,) = trains(read(write(tmp_path / "a.jsonl", line))[0])

    assert (record.span_start_K.tolist(), record.span_version_K.tolist()) == (starts, values)


def test_spans_of_packed_lines_start_at_their_lines(tmp_path):
    path = write(
        tmp_path / "a.jsonl", seq(name="a", versions=4), seq(name="b", versions=[4, 5]), seq(name="c", versions=6)
    )

    (record,) = trains(read(path)[0])

    assert record.offsets_S1.tolist() == [0, 2, 4, 6]
    assert (record.span_start_K.tolist(), record.span_version_K.tolist()) == ([0, 2, 3, 4], [4, 4, 5, 6])


def test_absent_fields_stay_unknown(tmp_path):
    (record,) = trains(read(write(tmp_path / "a.jsonl", {"type": "seq", "step": 1, "id": 7, "cur": [-1]}))[0])

    assert (record.version, record.ids, record.groups, record.old_is) == (-1, ("7",), (), "absent")
    assert record.engine_N is record.old_N is record.mask_N is record.span_version_K is record.old_version_S is None


def test_lines_of_unlike_shape_are_not_packed_together(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        seq(name="a"),
        seq(name="b", group="g"),
        seq(name="c", old=[-1, -1]),
        seq(name="d", version=9),
    )

    assert [record.ids for record in trains(read(path)[0])] == [("a",), ("b",), ("c",), ("d",)]


def test_a_masked_line_packs_with_an_unmasked_one(tmp_path):
    (record,) = trains(read(write(tmp_path / "a.jsonl", seq(name="a", mask=[0, 1]), seq(name="b")))[0])

    assert record.mask_N.tolist() == [False, True, True, True]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_lines_in_any_order_are_read_by_step_and_update(tmp_path, suffix):
    lines = [seq(step, f"{step}.{update}.{i}", update=update, cur=[-float(step), -1.0])
             for step in (3, 4, 7) for update in (0, 1) for i in range(2)]  # fmt: skip
    lines += [{"type": "scalars", "step": step, "values": {"reward": step}} for step in (3, 4, 7)]
    lines += [{"type": "synced", "step": step, "version": step + 1} for step in (3, 7)]
    lines += [{"type": "meta", "run": "shuffled"}]
    random.Random(1).shuffle(lines)
    path = tmp_path / f"a{suffix}"
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)

    records, file = read(path)

    assert file.run == "shuffled" and file.problems == []
    assert [(step, update) for step, update, _, _ in rows(records)] == [
        (s, u) for s in (3, 4, 7) for u in (0, 1) for _ in range(2)
    ]
    kinds = [type(record).__name__ for record in records]
    assert kinds == ["Hello", "Train", "Train", "Scalars", "Synced", "StepEnd", "Train", "Train", "Scalars", "StepEnd",
                     "Train", "Train", "Scalars", "Synced", "StepEnd"]  # fmt: skip


def test_lines_of_one_update_keep_the_order_of_the_file(tmp_path):
    names = [f"n{i}" for i in (3, 1, 2)]

    records, _ = read(write(tmp_path / "a.jsonl", seq(9, "last"), *(seq(1, name) for name in names)))

    assert [name for _, _, name, _ in rows(records)] == [*names, "last"]


def test_lines_that_do_not_parse_are_reported_by_number_and_the_rest_is_used(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        seq(name="a"),                                              # 1
        "not json",
        "",                                                         # 3: empty lines are no fault
        seq(name="b", versions=[1, 2, 3]),
        seq(name="c", versions=[[1, 1]]),                           # 5
        '{"type":"seq","step":"x","id":"d"}',
        '{"type":"seq","step":0}',                                  # 7
        '{"type":"what","step":0}',
        "[1,2]",                                                    # 9
        seq(name="e", cur=["abc", 1]),
        "[" * 5000,                                                 # 11
        '{"type":"seq","step":1e999,"id":"f"}',
        seq(name="g", engine=None, cur=None),                       # 13
        seq(name="z"),
    )  # fmt: skip

    records, file = read(path)

    assert [number for number, _ in file.problems] == [2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [name for _, _, name, _ in rows(records)] == ["a", "z"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"type":seq}', "no JSON: Expecting value at column 9"),
        ('{"type":"seqq","step":0}', "type is 'seqq'; wanted meta, seq, scalars, synced"),
        ('{"step":0}', "no type; wanted meta, seq, scalars, synced"),
        ("[1]", "no JSON object but list"),
        (
            '{"type":"seq","step":0,"id":"a","cur":[-1],"old_is":"generater"}',
            "old_is is 'generater'; wanted generator, proximal, reused, engine, rescored, absent",
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_what_was_wanted(tmp_path, line, why):
    _, file = read(write(tmp_path / "a.jsonl", seq(), line))

    assert file.problems == [(2, why)]


def test_a_field_that_is_not_of_the_format_is_named_with_the_one_it_may_have_meant(tmp_path):
    wrong = {**seq(name="b"), "engin": [-1.0, -2.0], "prompt": "hello"}
    del wrong["engine"]

    records, file = read(write(tmp_path / "a.jsonl", {"type": "meta", "runn": "r1"}, seq(name="a"), wrong))

    assert [name for _, _, name, _ in rows(records)] == ["a", "b"] and file.problems == []
    (note,) = file.notes
    assert "'engin' (1 line, did you mean 'engine'?)" in note
    assert "'prompt' (1 line)" in note and "'runn' (1 line, did you mean 'run'?)" in note


def test_fields_of_the_format_are_never_named(tmp_path):
    loose = '{"type":"seq","step":1.0,"id":"b","cur":[NaN]}'

    _, file = read(write(tmp_path / "a.jsonl", seq(name="a", tokens=[1, 2]), loose))

    assert file.notes == [] and file.problems == []


def test_a_file_in_which_no_line_is_of_the_format_is_refused_as_a_whole(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\n\nprint(torch.__version__)\n")

    with pytest.raises(TapeError, match=r"not JSON Lines of this format: .* line 1: no JSON: Expecting value at"):
        Interchange(path)


def test_arrays_of_unlike_length_are_refused_with_the_numbers(tmp_path):
    _, file = read(write(tmp_path / "a.jsonl", seq(name="a", cur=[-1.0, -2.0, -3.0]), seq(name="b")))

    assert file.problems == [(1, "id 'a': lengths disagree: cur 3, engine 2")]


def test_tokens_of_refused_lines_are_counted_with_their_step(tmp_path):
    path = write(tmp_path / "a.jsonl", seq(1), seq(2, "bad", cur=[-1.0] * 5), seq(2), seq(3))

    records, _ = read(path)

    told = [(r.last_step, dict(r.dropped_tokens)) for r in records if isinstance(r, Heartbeat)]
    assert told == [(2, {"mis_sized": 5}), (3, {"mis_sized": 5})]


def test_bare_nan_and_infinity_as_python_writes_them_are_read(tmp_path):
    path = write(
        tmp_path / "a.jsonl", '{"type":"seq","step":1,"id":"a","cur":[NaN,-Infinity,-1],"engine":["NaN",null,-1]}'
    )

    (record,) = trains(read(path)[0])

    np.testing.assert_array_equal(record.cur_N, np.array([np.nan, -np.inf, -1], np.float32))
    np.testing.assert_array_equal(record.engine_N, np.array([np.nan, np.nan, -1], np.float32))


def test_a_repeated_id_reaches_the_monitor_which_counts_it(tmp_path):
    records, file = read(write(tmp_path / "a.jsonl", seq(name="a"), seq(name="a")))

    assert [name for _, _, name, _ in rows(records)] == ["a", "a"] and file.problems == []


def test_the_meta_line_becomes_a_hello(tmp_path):
    meta = {"type": "meta", "run": "r1", "temperature": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs",
            "engine_dtype": "bfloat16", "trainer_dtype": "float32"}  # fmt: skip

    hello = read(write(tmp_path / "a.jsonl", meta, seq()))[0][0]

    assert isinstance(hello, Hello) and hello.source.run == "r1"
    assert hello.sampling == {"temperature": 1.0, "top_k": -1, "logprobs_mode": "processed_logprobs"}
    assert hello.dtypes == {"engine": "bfloat16", "trainer": "float32"}


def test_without_a_meta_line_the_run_is_named_by_the_file(tmp_path):
    assert Interchange(write(tmp_path / "my-run.jsonl", seq())).run == "my-run"


def test_scalars_and_syncs_keep_their_values(tmp_path):
    records, _ = read(write(
        tmp_path / "a.jsonl",
        {"type": "scalars", "step": 2, "values": {"reward": 0.5, "entropy": None, "lr": 1e-6}},
        {"type": "synced", "step": 2, "version": 3, "checksum": "ab12", "norm": 2.5},
    ))  # fmt: skip

    (scalars,) = [r for r in records if isinstance(r, Scalars)]
    (synced,) = [r for r in records if isinstance(r, Synced)]
    assert scalars.values["reward"] == 0.5 and np.isnan(scalars.values["entropy"])
    assert (synced.step, synced.version, synced.checksum, synced.norm, synced.tensors) == (2, 3, "ab12", 2.5, -1)


def test_a_long_step_becomes_records_of_bounded_size(tmp_path):
    path = write(tmp_path / "a.jsonl", *(seq(1, f"s{i}", engine=[-1.0] * 4096, cur=[-1.0] * 4096) for i in range(20)))

    sizes = [int(record.offsets_S1[-1]) for record in trains(read(path)[0])]

    assert sum(sizes) == 20 * 4096 and max(sizes) <= BATCH_TOKENS + 4096 and len(sizes) > 1


def test_a_file_of_a_meta_line_gives_a_hello_and_nothing_else(tmp_path):
    records, file = read(write(tmp_path / "a.jsonl", {"type": "meta", "run": "r"}))

    assert [type(r) for r in records] == [Hello] and file.problems == []


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_a_line_is_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)

    with pytest.raises(TapeError, match=r"a\.jsonl: no line in it; wanted JSON lines"):
        Interchange(tmp_path / "a.jsonl")


def test_a_file_in_which_every_line_turns_out_useless_is_refused_with_the_first_reason(tmp_path):
    path = write(tmp_path / "a.jsonl", seq(cur=[-1.0]), seq(cur=[-1.0]))

    with pytest.raises(TapeError, match=r"a\.jsonl: no line can be used; line 1: id 's': lengths disagree: cur 1"):
        read(path)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(TapeError, match=r"missing\.jsonl"):
        Interchange(tmp_path / "missing.jsonl")


def packed(path, lines, keep=slice(None)):
    """Lines whose bytes do not compress to nothing, packed, and of that the part that is to be there."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text)[keep])
    return path


def noisy(count):
    draw = random.Random(3)
    return [seq(step, f"s{step}", cur=[-draw.random(), -draw.random()]) for step in range(count)]


def test_a_gzip_file_without_a_whole_line_is_refused_by_name(tmp_path):
    path = packed(tmp_path / "a.jsonl.gz", [seq(engine=[-1.0] * 5000, cur=[-1.0] * 5000)], slice(-20))

    with pytest.raises(TapeError, match=r"a\.jsonl\.gz: .*line 1: cannot be read from here on \(Compressed file ended"):
        Interchange(path)


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_of_a_gzip_file_cut_short_the_whole_lines_are_used_and_the_rest_is_a_problem(tmp_path, order):
    path = packed(tmp_path / "a.jsonl.gz", noisy(2000)[::order], slice(30_000))

    records, file = read(path)

    used = [name for _, _, name, _ in rows(records)][::order]
    assert 500 < len(used) < 2000
    assert used == [f"s{step}" for step in range(2000)][::order][: len(used)]
    assert [number for number, _ in file.problems] == [len(used) + 1]
    assert "cannot be read from here on (Compressed file ended" in file.problems[0][1]


def test_a_gzip_file_damaged_midway_is_read_to_the_damage(tmp_path):
    path = packed(tmp_path / "a.jsonl.gz", noisy(2000))
    data = bytearray(path.read_bytes())
    data[20_000:20_400] = b"\xff" * 400
    path.write_bytes(data)

    records, file = read(path)

    assert 100 < len(rows(records)) < 2000 and "cannot be read from here on" in file.problems[-1][1]


def test_a_gzip_file_with_another_checksum_is_used_and_says_so(tmp_path):
    path = packed(tmp_path / "a.jsonl.gz", noisy(50))
    path.write_bytes(path.read_bytes()[:-8] + bytes(8))

    records, file = read(path)

    assert len(rows(records)) == 50 and [number for number, _ in file.problems] == [51]


def test_what_only_begins_like_gzip_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b" + b"no gzip at all" * 9)

    with pytest.raises(TapeError, match=r"a\.jsonl\.gz: cannot be read"):
        Interchange(tmp_path / "a.jsonl.gz")


def test_lines_after_one_that_is_too_long_are_read_where_they_are(tmp_path, monkeypatch):
    for module in (interchange, lines):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "a.jsonl", seq(0, "a"), seq(1, "b", cur=[-1.0] * 900), seq(2, "c"))

    records, file = read(path)

    assert [name for _, _, name, _ in rows(records)] == ["a", "c"]
    assert file.problems == [(2, "longer than 1000 bytes")]


def test_a_dtype_that_is_not_known_is_named_and_the_rest_of_its_line_is_used(tmp_path):
    meta = {"type": "meta", "run": "r9", "engine_dtype": "flot32", "trainer_dtype": "bfloat16"}
    _, file = read(write(tmp_path / "f.jsonl", meta, seq()))

    ((number, why),) = file.problems
    assert (number, file.run) == (1, "r9") and why.startswith("engine_dtype 'flot32': wanted float64, float32")
