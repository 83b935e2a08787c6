import io

import numpy as np
import pytest

from dlc_sentinel.demo.protocol import Link, checksum
from dlc_sentinel.errors import FrameError


def loop(raw: bytes = b"") -> tuple[Link, io.BytesIO]:
    """A link that reads `raw`, and what it wrote."""
    written = io.BytesIO()
    return Link(io.BytesIO(raw), written), written


def sent(kind: str = "batch", fields=None, arrays=None) -> bytes:
    link, written = loop()
    link.send(kind, fields, arrays)
    return written.getvalue()


def test_what_is_sent_is_received_bit_by_bit():
    weights = {
        "a.weight": np.array([[1.5, -0.0], [np.nan, np.inf]], dtype=np.float32),
        "empty": np.zeros((0, 3), dtype=np.int64),
        "b": np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
    }
    link, _ = loop(sent("sync", {"version": 7, "text": "ü"}, weights))

    message = link.receive()

    assert message is not None
    assert (message.kind, message.fields) == ("sync", {"version": 7, "text": "ü"})
    assert list(message.arrays) == list(weights)
    for name, value in weights.items():
        assert message.arrays[name].dtype == value.dtype
        assert message.arrays[name].shape == value.shape
        assert message.arrays[name].tobytes() == np.ascontiguousarray(value).tobytes()


def test_messages_follow_each_other_and_the_end_of_the_stream_is_none():
    link, _ = loop(sent("one") + sent("two", arrays={"x": np.zeros(3)}) + sent("three"))

    messages = [link.receive() for _ in range(4)]

    assert [message.kind if message else None for message in messages] == ["one", "two", "three", None]


@pytest.mark.parametrize("keep", [2, 4, 20, -1])
def test_a_stream_that_ends_within_a_message_is_an_error(keep):
    link, _ = loop(sent("sync", {"version": 1}, {"w": np.zeros(100, dtype=np.float32)})[:keep])

    with pytest.raises(FrameError, match="engine pipe"):
        link.receive()


@pytest.mark.parametrize(
    "raw",
    [
        b"Loading weights: 100%|#####| 1/1\n",
        b"\x04\x00\x00\x00nope",
        b"\x02\x00\x00\x00[]",
        sent("batch", arrays={"x": np.zeros(2)}).replace(b"<f8", b"|O8"),
        sent("batch", arrays={"x": np.zeros(2)}).replace(b"[2]", b"[-2]").replace(b"\x39", b"\x3a", 1),
    ],
    ids=["text", "no json", "no object", "python objects", "negative shape"],
)
def test_bytes_that_are_no_message_are_refused(raw):
    link, _ = loop(raw)

    with pytest.raises(FrameError):
        link.receive()


def test_arrays_of_python_objects_are_never_sent():
    with pytest.raises(FrameError, match="object"):
        sent("sync", arrays={"x": np.array([object()])})


def test_the_checksum_tells_one_changed_bit_and_not_the_order_of_names():
    weights = {"a": np.ones(4, dtype=np.float32), "b": np.zeros(2, dtype=np.float32)}
    nudged = {**weights, "b": np.array([0.0, 1e-45], dtype=np.float32)}

    assert checksum(weights) == checksum(dict(reversed(weights.items())))
    assert checksum(weights) != checksum(nudged)
