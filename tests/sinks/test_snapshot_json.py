"""Snapshot <-> JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from factories_http import says
from factories_snapshots import make_command, make_event, make_finding, make_run, make_snapshot, make_step
from factories_story import make_strip

from dlc_sentinel.errors import RecordError
from dlc_sentinel.sinks.snapshot_json import decode, encode, fetch

FULL = make_snapshot(
    make_run(
        findings=(make_finding(),),
        commands=(make_command(),),
        events=(make_event(data={"a": 1, "b": [1.5, "x"]}),),
        worst=(make_strip(),),
        scalars=({"step": 1, "reward": 0.5},),
        synced=({"step": 1, "version": 2},),
        about=({"role": "trainer", "versions": {"torch": "2.13.0"}},),
    ),
    make_run(run="r2", step=None, history=(), last_step=-1, breaker_open=True),
    num_refused={"unparsable": 3},
)


def test_a_snapshot_read_back_is_the_snapshot_written():
    assert decode(encode(FULL)) == FULL


def test_nan_is_null_in_the_text_and_nan_again_in_the_carrier():
    text = encode(make_snapshot(make_run(verdict_latency_s=math.nan, step=make_step(loop_gain=math.nan))))

    tree = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    run = decode(text).runs[0]

    assert tree["runs"][0]["verdict_latency_s"] is None
    assert math.isnan(run.verdict_latency_s)
    assert run.step is not None
    assert run.step["loop_gain"] is None


def test_numbers_of_numpy_are_written_as_numbers():
    step = {**make_step(), "loop_gain": np.float32(0.5), "num_tokens": np.int64(7), "updates": np.array([0, 3])}

    read = decode(encode(make_snapshot(make_run(step=step)))).runs[0].step

    assert read is not None
    assert (read["loop_gain"], read["num_tokens"], read["updates"]) == (0.5, 7, [0, 3])


@pytest.mark.parametrize(("history", "steps"), [(2, [11, 12]), (0, []), (512, list(range(13)))])
def test_only_the_newest_steps_of_the_history_are_written(history, steps):
    read = decode(encode(make_snapshot(), history=history)).runs[0]

    assert [step["step"] for step in read.history] == steps


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<html>", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "schema list"),
        ('{"schema":2}', "schema 2, wanted 1"),
        ('{"schema":1}', "no field 't_s'"),
        (encode(make_snapshot()).replace('"runs":[{', '"runs":[7,{'), "wrong type"),
        (encode(make_snapshot()).replace('"num_frames":260', '"num_frames":"many"'), "wrong type"),
    ],
)
def test_what_is_no_snapshot_is_refused_and_the_message_says_why(text, says):
    with pytest.raises(RecordError, match=says):
        decode(text)


def test_an_unknown_event_level_is_refused():
    text = encode(make_snapshot(make_run(events=(replace(make_event(), level="WARN"),)))).replace('"WARN"', '"LOUD"')

    with pytest.raises(RecordError, match="LOUD"):
        decode(text)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "http://127.0.0.1:1/", "http://[::bad", "http://\x1b[31m", "http://h:x"]
)
def test_a_sentinel_that_cannot_be_reached_is_an_os_error_without_escapes(url):
    with pytest.raises(OSError, match=r"running|usable|refused") as caught:
        fetch(url, timeout_s=2.0)

    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x05\x00\x00 not HTTP\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"HTTP/1.1 200 " + b"x" * 70_000,
        None,
    ],
)
def test_a_server_that_does_not_speak_http_to_the_end_is_an_os_error_that_names_the_port_that_is_wanted(answer):
    with says(answer) as url, pytest.raises(OSError, match=r"metrics port \(9877 unless set"):
        fetch(url, timeout_s=10.0 if answer else 0.2)


def test_a_page_in_place_of_a_snapshot_names_the_port_that_is_wanted():
    with pytest.raises(RecordError, match=r"metrics port \(9877 unless set; 9878 is the page's\)"):
        decode(b"<!doctype html>")
