"""The JSON-lines log of events."""

from __future__ import annotations

import json
import os
import stat
from contextlib import closing

import pytest
from factories_snapshots import make_event, make_finding

from dlc_sentinel.sinks.event_log import EventLog


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def test_each_event_of_level_warn_and_above_is_one_line_and_others_are_not(tmp_path):
    with closing(EventLog(tmp_path / "e.jsonl")) as log:
        for level in ("INFO", "WARN", "CRITICAL"):
            log.handle(make_event("finding", level=level, text=level, data=make_finding()))

    assert [line["text"] for line in lines(tmp_path / "e.jsonl")] == ["WARN", "CRITICAL"]
    assert lines(tmp_path / "e.jsonl")[0]["data"] == make_finding()


def test_a_line_can_be_read_while_the_log_is_open(tmp_path):
    with closing(EventLog(tmp_path / "e.jsonl")) as log:
        log.handle(make_event())

        assert len(lines(tmp_path / "e.jsonl")) == 1


def test_a_log_that_is_opened_again_goes_on_at_its_end(tmp_path):
    for text in ("one", "two"):
        with closing(EventLog(tmp_path / "e.jsonl")) as log:
            log.handle(make_event(text=text))

    assert [line["text"] for line in lines(tmp_path / "e.jsonl")] == ["one", "two"]


def test_hostile_text_stays_inside_its_line_and_nan_is_null(tmp_path):
    hostile = '\x1b[2J\n{"kind":"forged"}\u2028\u202e</script>' + "z" * 10_000
    with closing(EventLog(tmp_path / "e.jsonl")) as log:
        log.handle(make_event(run=hostile, t_s=float("nan"), data={"a": float("inf"), hostile: hostile}))

    (line,) = lines(tmp_path / "e.jsonl")
    assert (line["run"], line["t_s"], line["data"]) == (hostile, None, {"a": None, hostile: hostile})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_loses_lines_and_counts_them():
    with closing(EventLog("/dev/full")) as log:
        log.handle(make_event())
        log.handle(make_event())

        assert log.num_lost == 2


def test_a_closed_log_takes_no_more_and_may_be_closed_again(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.close()
    log.close()
    log.handle(make_event())

    assert lines(tmp_path / "e.jsonl") == []


def test_a_log_that_cannot_be_opened_says_so_at_the_start(tmp_path):
    with pytest.raises(FileNotFoundError):
        EventLog(tmp_path / "missing" / "e.jsonl")


def test_only_its_owner_can_read_it(tmp_path):
    EventLog(tmp_path / "events.jsonl").close()

    assert stat.S_IMODE((tmp_path / "events.jsonl").stat().st_mode) == 0o600
