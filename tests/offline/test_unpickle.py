"""Dumps are read without being run: what a pickle may say, and that a hostile one does nothing and is refused."""

from __future__ import annotations

import os
import pickle
import pickletools
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.pickled import Tensor, Thing
from dlc_sentinel.offline.unpickle import load_bytes, load_file

PLAIN = {
    "a": [1, 2.5, None, True, "text", b"raw"],
    "b": {"c": (1, (2, 3)), "s": {1, 2}, "f": frozenset([3])},
    "n": 2**80,
}


class Runs:
    """Pickles to a call that leaves a file behind when anybody makes it."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def marker_of(tmp_path):
    return tmp_path / "was_run"


def hostile(tmp_path):
    """Name -> bytes of pickles that run something when read with `pickle.load`."""
    touch = f"touch {marker_of(tmp_path)}"
    code = f"open({str(marker_of(tmp_path))!r}, 'w').close()"
    inner = pickle.dumps(Runs(os.system, touch))
    return {
        "os.system": inner,
        "exec": pickle.dumps(Runs(exec, code)),
        "eval": pickle.dumps(Runs(eval, code)),
        "import": pickle.dumps(Runs(__import__, "os")),
        "getattr": pickle.dumps(Runs(getattr, 1, "real")),
        "old protocol": b"cposix\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "inst": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "in a list": pickle.dumps([{"x": Runs(os.system, touch)}]),
        "as a state": pickle.dumps({"field_data": Runs(os.system, touch)}),
        "torch.hub": b"ctorch.hub\nload\n(S'x'\ntR.",
        "numpy's runner": b"cnumpy.testing._private.utils\nrunstring\n(S'" + code.encode() + b"'\n}tR.",
        "extension": b"\x80\x02\x82\x01.",
        "outside": b"\x80\x02X\x01\x00\x00\x00aQ.",
    }


@pytest.mark.parametrize("name", sorted(hostile(Path("/nowhere"))))
def test_a_hostile_pickle_is_refused_and_runs_nothing(name, tmp_path):
    path = tmp_path / "su_0.pkl"
    path.write_bytes(hostile(tmp_path)[name])

    with pytest.raises(TapeError, match=str(path)):
        load_file(path)

    assert not marker_of(tmp_path).exists()


def test_the_hostile_pickles_of_these_tests_are_real(tmp_path):
    pickle.loads(hostile(tmp_path)["os.system"])

    assert marker_of(tmp_path).exists()


def test_a_hostile_pickle_inside_a_tensors_bytes_is_refused_when_the_tensor_is_asked_for(tmp_path):
    good = pickle.dumps({"t": torch.zeros(3)}, protocol=4)
    at = good.index(b"\x80\x02\x8a\n")
    bad = pickle.dumps(Runs(os.system, f"touch {marker_of(tmp_path)}"), protocol=2)
    length = int.from_bytes(good[at - 4 : at], "little")
    path = tmp_path / "a.pkl"
    forged = good[: at - 4] + len(bad).to_bytes(4, "little") + bad + good[at + length :]
    path.write_bytes(forged[:2] + reframed(forged[2:]))

    with pytest.raises(TapeError, match=r"posix\.system"):
        load_file(path)["t"].array()

    assert not marker_of(tmp_path).exists()


def reframed(body):
    """The body of a protocol 4 pickle without its frame: frames carry lengths."""
    return body[9:] if body[:1] == b"\x95" else body


def test_plain_values_come_back_as_they_were(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path = tmp_path / f"{protocol}.pkl"
        value = PLAIN if protocol >= 4 else {**PLAIN, "b": {"c": (1, (2, 3))}}
        path.write_bytes(pickle.dumps(value, protocol))

        assert load_file(path) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("how", ["pickle", "save"])
def test_tensors_of_every_kind_come_back_bit_by_bit(dtype, how, tmp_path):
    tensor = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    path = tmp_path / "t"
    tree = {"x": tensor, "row": tensor[2]}
    if how == "pickle":
        path.write_bytes(pickle.dumps(tree))
    else:
        torch.save(tree, path)

    read = load_file(path)

    assert np.array_equal(read["x"].array(), tensor.numpy()) and read["x"].array().dtype == tensor.numpy().dtype
    assert np.array_equal(read["row"].array(), tensor[2].numpy())


@pytest.mark.parametrize(
    "view", [lambda t: t.T, lambda t: t[:, 1:4], lambda t: t[::2], lambda t: t[1, 2], lambda t: t[:0]]
)
def test_views_keep_their_strides(view, tmp_path):
    tensor = view(torch.arange(30.0).reshape(5, 6))
    (tmp_path / "t").write_bytes(pickle.dumps(tensor))

    assert np.array_equal(load_file(tmp_path / "t").array(), tensor.numpy())


def test_bfloat16_becomes_float32(tmp_path):
    tensor = torch.tensor([-1.5, -0.0078125, 3.0e-5], dtype=torch.bfloat16)
    torch.save(tensor, tmp_path / "t.pt")

    assert np.array_equal(load_file(tmp_path / "t.pt").array(), tensor.float().numpy())


def tensor_of(size, stride, first=0, num=4):
    """A pickle of a tensor that claims what it likes about its storage."""
    parts = pickletools.genops(pickle.dumps(torch.zeros(num), 4))
    stored = next(argument for _, argument, _ in parts if isinstance(argument, bytes))
    data = b"B" + len(stored).to_bytes(4, "little") + stored
    shape, steps = pickle.dumps(size, 2)[2:-1], pickle.dumps(stride, 2)[2:-1]
    load = b"ctorch.storage\n_load_from_bytes\n" + data + b"\x85R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + load + b"K" + bytes([first]) + shape + steps + b"\x89}tR."


@pytest.mark.parametrize(
    ("size", "stride", "first"),
    [((2**40,), (0,), 0), ((5,), (1,), 0), ((4,), (1,), 1), ((2, 2), (4, 1), 0), ((2,), (-1,), 3), ((4,), (2,), 0)],
)
def test_a_tensor_that_claims_more_than_its_storage_holds_is_refused(size, stride, first, tmp_path):
    (tmp_path / "t").write_bytes(tensor_of(size, stride, first))

    with pytest.raises(TapeError, match="does not fit"):
        load_file(tmp_path / "t").array()


def test_a_tensor_within_its_storage_is_read(tmp_path):
    (tmp_path / "t").write_bytes(tensor_of((2, 2), (2, 1)))

    assert load_file(tmp_path / "t").array().shape == (2, 2)


def test_a_memo_index_of_two_thousand_million_costs_nothing(tmp_path):
    (tmp_path / "t").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")

    assert load_file(tmp_path / "t") is None


def test_pickles_in_pickles_end_somewhere():
    with pytest.raises(TapeError, match="nested deeper"):
        load_bytes(b"N.", "t", depth=9)


def test_a_packed_member_is_refused_before_it_is_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**6)

    with pytest.raises(TapeError, match="compressed"):
        load_file(tmp_path / "t.pt")


def test_a_member_with_a_bad_checksum_is_named(tmp_path):
    path = tmp_path / "t.pt"
    torch.save({"x": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(1000.0).numpy().tobytes())
    data[at + 100] ^= 1
    path.write_bytes(data)

    with pytest.raises(TapeError, match=r"data/0.*damaged"):
        load_file(path)


def test_every_cut_of_a_pickle_is_refused(tmp_path):
    whole = pickle.dumps({"t": torch.arange(5.0), "p": PLAIN}, 4)
    path = tmp_path / "t"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(TapeError):
            load_file(path)


WHOLE = pickle.dumps({"t": torch.arange(5.0), "p": PLAIN, "o": [1] * 20}, 2)


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300, deadline=None)
def test_no_damaged_pickle_does_anything_but_be_read_or_refused(changes):
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    modules = set(sys.modules)

    try:
        tree = load_bytes(bytes(data), "damaged")
        if isinstance(tree, dict) and isinstance(tree.get("t"), Tensor):
            tree["t"].array()
    except TapeError:
        pass

    assert set(sys.modules) == modules


def test_a_class_on_the_list_stays_a_thing_nobody_made(monkeypatch, tmp_path):
    class DataProto:
        def __init__(self):
            self.made = True

        def __getstate__(self):
            return (b"bytes", {"uid": "a"}, {})

        def __setstate__(self, state):
            marker_of(tmp_path).touch()

    module = types.ModuleType("verl.protocol")
    DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"
    module.DataProto = DataProto
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", module)
    (tmp_path / "t").write_bytes(pickle.dumps(DataProto()))

    thing = load_file(tmp_path / "t")

    assert isinstance(thing, Thing) and thing.name == "verl.protocol.DataProto"
    assert thing.state == (b"bytes", {"uid": "a"}, {}) and not marker_of(tmp_path).exists()


def test_a_file_that_is_not_there_is_said():
    with pytest.raises(TapeError, match="cannot be read"):
        load_file("/nowhere/su_0.pkl")
