"""Frames: what goes in comes out, in pieces of at most a megabyte, and nothing but FrameError comes of bad bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.errors import FrameError, ShapeError
from dlc_sentinel.records import (
    OLD_IS,
    Ack,
    Bye,
    Heartbeat,
    Hello,
    Record,
    Rollout,
    Scalars,
    Source,
    StepEnd,
    Synced,
    Train,
)
from dlc_sentinel.wire.codec import MAX_FRAME_BYTES, UNNUMBERED, decode, encode

SOURCE = Source("run", "trainer", "0123456789abcdef", 3, "r1")
TEXT = st.text(max_size=8)
STEP = st.integers(-1, 2**50)
COUNTS = st.dictionaries(TEXT, st.integers(0, 2**40), max_size=3)


def same(left: Any, right: Any) -> bool:
    """Equal field by field, NaN equal to NaN."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    if isinstance(left, float):
        return left == right or (left != left and right != right)
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left)
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def floats(n: int, seed: int) -> np.ndarray[Any, Any]:
    array = np.random.default_rng(seed).normal(-1, 1, n).astype(np.float32)
    array[seed % 7 :: 7] = [np.nan, np.inf, -9999.0][seed % 3]
    return array


@st.composite
def spans(draw: st.DrawFn, lengths: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    starts, at = [], 0
    for length in lengths:
        if length:
            inner = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
            starts += [at, *(at + cut for cut in sorted(inner))]
        at += length
    versions = draw(st.lists(st.integers(-1, 2**40), min_size=len(starts), max_size=len(starts)))
    return np.asarray(starts, np.int64), np.asarray(versions, np.int64)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    lengths = draw(st.lists(st.integers(0, 40), max_size=6))
    n, count, seed = sum(lengths), len(lengths), draw(st.integers(0, 99))
    start, version = draw(spans(lengths))
    maybe = draw(st.booleans())
    return Rollout(
        SOURCE,
        tuple(f"é{i}" for i in range(count)),
        np.cumsum([0, *lengths]),
        np.arange(count) * 3,
        np.arange(count) % 2 == 0,
        floats(n, seed),
        start,
        version,
        finish=("stop",) * count if maybe else (),
        cached_tokens_S=np.arange(count) if maybe else None,
        tokens_N=np.arange(n, dtype=np.int32) if maybe else None,
        sampling=({"temperature": 0.5, "stop": ["a", None]},) * count if maybe else (),
    )


@st.composite
def trains(draw: st.DrawFn) -> Train:
    lengths = draw(st.lists(st.integers(0, 40), max_size=6))
    n, count, seed = sum(lengths), len(lengths), draw(st.integers(0, 99))
    start, version = draw(spans(lengths))

    def maybe(value: Any, otherwise: Any = None) -> Any:
        return value if draw(st.booleans()) else otherwise

    labelled = draw(st.booleans())
    return Train(
        SOURCE,
        draw(STEP),
        draw(STEP),
        tuple(f"s{i}" for i in range(count)),
        np.cumsum([0, *lengths]),
        update=draw(st.integers(0, 9)),
        micro=draw(st.integers(0, 9)),
        token_offset_S=maybe(np.arange(count)),
        final_S=maybe(np.arange(count) % 2 == 1),
        cur_N=maybe(floats(n, seed)),
        old_N=maybe(floats(n, seed + 1)),
        engine_N=maybe(floats(n, seed + 2)),
        mask_N=maybe(np.arange(n) % 3 != 0),
        span_start_K=start if labelled else None,
        span_version_K=version if labelled else None,
        old_is=draw(st.sampled_from(OLD_IS)),
        old_version_S=maybe(np.arange(count) - 1),
        groups=maybe(tuple(f"g{i}" for i in range(count)), ()),
        segments=maybe(tuple((("e", 0, 1), ("f", 5, i)) for i in range(count)), ()),
        advantage_S=maybe(floats(count, seed + 3)),
        tokens_N=maybe(np.arange(n, dtype=np.int32)),
        dtypes=maybe({"cur": "bfloat16"}, {}),
        replica=draw(TEXT),
    )


RECORDS: st.SearchStrategy[Record] = st.one_of(
    rollouts(),
    trains(),
    st.builds(
        Hello, st.just(SOURCE), TEXT, TEXT, st.dictionaries(TEXT, TEXT), st.integers(0, 2**22), TEXT,
        st.just({"temperature": 1.0, "bad_words": ["x"], "seed": None}), st.dictionaries(TEXT, TEXT),
    ),
    st.builds(Bye, st.just(SOURCE), st.integers(0, 2**40), COUNTS),
    st.builds(Heartbeat, st.just(SOURCE), STEP, st.integers(0, 2**40), st.integers(0, 2**40), COUNTS, st.just(5)),
    st.builds(Synced, st.just(SOURCE), STEP, STEP, TEXT, TEXT, st.floats(), st.integers(-1, 99)),
    st.builds(Scalars, st.just(SOURCE), STEP, st.dictionaries(TEXT, st.floats())),
    st.builds(StepEnd, st.just(SOURCE), STEP),
    st.builds(Ack, st.just(SOURCE), TEXT, st.sampled_from(["applied", "refused", "expired"]), STEP, STEP, TEXT),
)  # fmt: skip


def example_train(lengths: list[int], **changes: Any) -> Train:
    n, count = sum(lengths), len(lengths)
    start = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    record = Train(
        SOURCE, 1, 2, tuple(f"s{i}" for i in range(count)), np.cumsum([0, *lengths]),
        cur_N=floats(n, 1), engine_N=floats(n, 2), mask_N=np.arange(n) % 5 != 0,
        span_start_K=start, span_version_K=np.arange(count), advantage_S=np.arange(count, dtype=np.float32),
    )  # fmt: skip
    return replace(record, **changes)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.integers(0, 2**40))
def test_every_record_comes_back_as_it_was_sent(record: Record, number: int) -> None:
    frames = encode(record, number)

    decoded, decoded_number = decode(bytes(frames[0]))

    assert len(frames) == 1
    assert decoded_number == number
    assert same(decoded, record)


def decoded_trains(frames: Sequence[memoryview | bytes | bytearray]) -> list[Train]:
    decoded = [decode(part)[0] for part in frames]
    assert all(isinstance(record, Train) for record in decoded)
    return [record for record in decoded if isinstance(record, Train)]


def rejoined(parts: list[Train], field: str) -> np.ndarray[Any, Any]:
    return np.concatenate([getattr(part, field) for part in parts])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), st.integers(3000, 9000))
def test_a_record_longer_than_a_frame_is_split_without_losing_or_moving_a_token(lengths: list[int], limit: int) -> None:
    lengths = [length + 1 for length in lengths]
    record = example_train(lengths, tokens_N=np.arange(sum(lengths), dtype=np.int32))

    frames = encode(record, 10, max_bytes=limit)
    parts = decoded_trains(frames)

    assert max(map(len, frames)) <= limit
    assert [decode(part)[1] for part in frames] == list(range(10, 10 + len(frames)))
    for field in ("cur_N", "engine_N", "mask_N", "tokens_N"):
        assert same(rejoined(parts, field), getattr(record, field))
    places = []
    for part in parts:
        offset_S = np.zeros(len(part.ids), np.int64) if part.token_offset_S is None else part.token_offset_S
        final_S = np.ones(len(part.ids), np.bool_) if part.final_S is None else part.final_S
        assert part.span_version_K is not None
        assert part.span_start_K is not None
        assert part.advantage_S is not None
        version_N = np.repeat(part.span_version_K, np.diff([*part.span_start_K, part.offsets_S1[-1]]))
        for i, seq in enumerate(part.ids):
            lo, hi = part.offsets_S1[i], part.offsets_S1[i + 1]
            ends = offset_S[i] + hi - lo == lengths[int(seq[1:])]
            assert bool(final_S[i]) == bool(ends)
            assert (version_N[lo:hi] == int(seq[1:])).all()
            assert part.advantage_S[i] == int(seq[1:])
            places += [(int(seq[1:]), int(offset_S[i]) + k) for k in range(hi - lo)]
    assert places == [(i, k) for i, length in enumerate(lengths) for k in range(length)]


def test_a_sequence_of_a_million_tokens_spans_frames_of_at_most_a_megabyte() -> None:
    frames = encode(example_train([2**20, 10]), 0)

    assert max(map(len, frames)) <= MAX_FRAME_BYTES
    assert len(frames) <= 10


def test_versions_that_change_at_every_token_still_fit_frames() -> None:
    n = 200_000
    record = example_train([n], span_start_K=np.arange(n), span_version_K=np.arange(n))

    frames = encode(record, 0)
    versions = rejoined(decoded_trains(frames), "span_version_K")

    assert max(map(len, frames)) <= MAX_FRAME_BYTES
    assert np.array_equal(versions, np.arange(n))


def test_one_token_with_an_id_longer_than_a_frame_is_oversize() -> None:
    with pytest.raises(FrameError, match="shorten its id") as caught:
        encode(replace(example_train([1]), ids=("x" * 5000,)), 0, max_bytes=4000)

    assert caught.value.cause == "oversize"


def test_arrays_are_views_of_the_buffer() -> None:
    buffer = bytearray(encode(example_train([100]), 0)[0])

    cur_N = decoded_trains([buffer])[0].cur_N
    assert cur_N is not None
    at = buffer.index(cur_N.tobytes())
    buffer[at : at + 4] = np.float32(-77).tobytes()

    assert cur_N[0] == -77


def test_the_mask_takes_one_bit_a_token() -> None:
    with_mask = len(encode(example_train([8000]), 0)[0])
    without = len(encode(example_train([8000], mask_N=None), 0)[0])

    assert 1000 <= with_mask - without <= 1040


def test_control_records_carry_no_number() -> None:
    assert decode(encode(Heartbeat(SOURCE), UNNUMBERED)[0])[1] == -1


def test_an_unknown_protocol_version_is_refused_as_such() -> None:
    frame = bytearray(encode(StepEnd(SOURCE, 1), 0)[0])
    frame[0] = 9

    with pytest.raises(FrameError, match="protocol version 9") as caught:
        decode(frame)

    assert caught.value.cause == "unknown_protocol"


def test_a_field_that_a_newer_release_added_is_ignored() -> None:
    frame = bytes(encode(StepEnd(SOURCE, 7), 4)[0])
    size = int.from_bytes(frame[4:8], "little")
    header = msgspec.msgpack.decode(frame[8 : 8 + size]) | {"mood": "new"}
    packed = msgspec.msgpack.encode(header)
    newer = frame[:4] + len(packed).to_bytes(4, "little") + packed + bytes(-(8 + len(packed)) % 8)

    assert decode(newer) == (StepEnd(SOURCE, 7), 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cur_N": floats(9, 0)}, "cur_N has shape"),
        ({"offsets_S1": np.array([0, 6, 5])}, "ascend"),
        ({"offsets_S1": np.array([1, 3, 10])}, "start at 1"),
        ({"span_start_K": np.array([0, 4])}, "does not start a span"),
        ({"span_start_K": np.array([0, 10])}, "end before token 10"),
        ({"span_version_K": np.array([0, -2])}, "-2"),
        ({"groups": ("a",)}, "groups has 1 entries for 2"),
        ({"token_offset_S": np.array([0, -1])}, "never negative"),
        ({"span_version_K": None}, "together"),
    ],
)
def test_arrays_that_disagree_are_refused_with_the_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        encode(example_train([5, 5], **changes), 0)


def frames_of_all_kinds() -> list[bytes]:
    rollout = Rollout(
        SOURCE, ("a", "b"), np.array([0, 3, 5]), np.zeros(2, np.int64), np.ones(2, bool), floats(5, 0),
        np.array([0, 3]), np.array([1, 2]), finish=("stop", ""), sampling=({"a": [1, {"b": 2}]}, None),
    )  # fmt: skip
    records: list[Record] = [
        rollout, example_train([4, 3], segments=((("e", 0, 4),), (("f", 0, 3),))), Hello(SOURCE, sampling={"t": 1.0}),
        Bye(SOURCE, 3, {"oversize": 1}), Heartbeat(SOURCE), Synced(SOURCE, 1, 2, norm=0.5), StepEnd(SOURCE, 2),
        Scalars(SOURCE, 1, {"reward": 0.5}), Ack(SOURCE, "c", "applied"),
    ]  # fmt: skip
    return [bytes(encode(record, 5)[0]) for record in records]


def test_one_changed_byte_anywhere_gives_a_record_or_a_frame_error() -> None:
    refused = 0
    for frame in frames_of_all_kinds():
        for at in range(len(frame)):
            for value in (frame[at] ^ 1, frame[at] ^ 0x80, 0xFF, 0x00, 0xC7, 0xDF):
                try:
                    decode(frame[:at] + bytes([value]) + frame[at + 1 :])
                except FrameError:
                    refused += 1

    assert refused > 1000


def test_a_frame_cut_anywhere_or_with_a_byte_more_is_refused() -> None:
    for frame in frames_of_all_kinds():
        for cut in [*range(len(frame)), None]:
            with pytest.raises(FrameError):
                decode(frame[:cut] if cut is not None else frame + b"\0")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused(noise: bytes, framed: bool) -> None:
    with pytest.raises(FrameError):
        decode(b"\1\0\0\0" + len(noise).to_bytes(4, "little") + noise if framed else noise)


def test_a_header_nested_without_end_is_refused() -> None:
    noise = b"\x81\xa1a" * 100_000

    with pytest.raises(FrameError):
        decode(b"\1\0\0\0" + len(noise).to_bytes(4, "little") + noise)


@pytest.mark.parametrize("value", [b"bytes", msgspec.msgpack.Ext(5, b"x")])
def test_a_value_that_json_does_not_know_is_refused(value: object) -> None:
    head = {
        "kind": "hello", "frame_no": 0, "sampling": {"x": value},
        "source": {"run": "r", "role": "trainer", "producer": "p"},
    }  # fmt: skip
    packed = msgspec.msgpack.encode(head)
    frame = b"\1\0\0\0" + len(packed).to_bytes(4, "little") + packed + bytes(-(8 + len(packed)) % 8)

    with pytest.raises(FrameError, match="only JSON types"):
        decode(frame)
