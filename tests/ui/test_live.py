"""Showing snapshots once, or until told to stop."""

from __future__ import annotations

import io
import json
import threading

import pytest
from factories_snapshots import make_finding, make_run, make_snapshot, make_step
from rich.console import Console

from dlc_sentinel.errors import RecordError
from dlc_sentinel.sinks.snapshot_json import decode, encode
from dlc_sentinel.ui.live import choose, once, watch


def a_console(**settings):
    return Console(
        file=io.StringIO(), width=80, height=24, color_system=None, legacy_windows=False, _environ={}, **settings
    )


class Script:
    """A source that plays snapshots or raises errors in turn, then stops the loop."""

    def __init__(self, *plays):
        self.plays = list(plays)
        self.stop = threading.Event()

    def __call__(self):
        play = self.plays.pop(0)
        if not self.plays:
            self.stop.set()
        if isinstance(play, Exception):
            raise play
        return play


def watched(*plays, **settings):
    console, script = a_console(**settings), Script(*plays)
    assert watch(script, console, period_s=0.001, stop=script.stop) == 0
    return console.file.getvalue()


def at(step, verdict="HEALTHY"):
    return make_snapshot(make_run(last_step=step, verdict=verdict, step=make_step(step)))


def test_once_prints_one_picture_as_text():
    console = a_console()

    assert once(make_snapshot, console) == 0
    assert "[ok] HEALTHY" in console.file.getvalue()


def test_once_as_json_prints_one_object_and_nothing_else():
    console = a_console()

    assert once(make_snapshot, console, as_json=encode) == 0
    assert decode(console.file.getvalue()) == make_snapshot()
    assert json.loads(console.file.getvalue())["schema"] == 1


@pytest.mark.parametrize("verdict", ["BLIND", "UNWIRED"])
def test_once_returns_1_where_health_is_not_known(verdict):
    assert once(lambda: make_snapshot(make_run(verdict=verdict)), a_console()) == 1


def test_once_without_a_run_says_what_to_look_at_and_returns_1():
    console = a_console()

    assert once(lambda: make_snapshot(runs=()), console) == 1
    assert "DLC_SENTINEL" in console.file.getvalue()


def test_a_run_that_is_not_there_is_said_with_those_that_are():
    console = a_console()

    assert once(make_snapshot, console, run="\x1b[31mr9") == 1
    assert "runs known: r1" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


def test_more_runs_than_are_listed_are_counted():
    console = a_console()
    snapshot = make_snapshot(*(make_run(run=f"r{number}") for number in range(12)))

    once(lambda: snapshot, console, run="nope")

    assert "r9 and 2 more" in " ".join(console.file.getvalue().split())


def test_once_leaves_a_source_that_fails_to_the_caller():
    def source():
        raise OSError("nobody there")

    with pytest.raises(OSError, match="nobody there"):
        once(source, a_console())


def test_the_run_shown_is_the_one_asked_for_else_the_one_worst_off():
    snapshot = make_snapshot(make_run(run="a"), make_run(run="b", verdict="LAG"), make_run(run="c", verdict="BLIND"))

    assert choose(snapshot).run == "b"
    assert choose(snapshot, "a").run == "a"
    assert choose(snapshot, "z") is None


def test_other_runs_are_named_with_their_verdicts():
    console = a_console()
    once(lambda: make_snapshot(make_run(run="a"), make_run(run="b", verdict="LAG")), console)

    assert "other runs (--run NAME): a HEALTHY" in console.file.getvalue()


def test_without_a_tty_a_picture_is_printed_only_when_step_or_verdict_change():
    text = watched(at(1), at(1), at(2), at(2, "LAG"), at(2, "LAG"))

    assert text.count("run r1") == 3


@pytest.mark.parametrize("error", [OSError("link down"), RecordError("link down")])
def test_a_source_that_fails_leaves_the_last_picture_marked_as_old(error):
    text = watched(at(1), error)

    assert "PICTURE IS OLD" in text
    assert "link down" in text
    assert "NOT KNOWN, last seen HEALTHY" in text


def test_a_source_that_comes_back_is_shown_as_fresh_again():
    text = watched(at(1), OSError("link down"), at(2))

    assert "PICTURE IS OLD" not in text[text.rindex("run r1") - 100 :]


def test_before_the_first_answer_it_waits_and_says_for_what():
    assert "waiting for the sentinel: link down" in watched(OSError("link \x1b[2Jdown"), OSError("link down"))


def test_a_fault_of_our_own_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        watched(ZeroDivisionError())


def test_on_a_terminal_the_whole_screen_is_used_and_given_back():
    text = watched(at(1), at(2), at(3), force_terminal=True)

    assert text.index("\x1b[?1049h") < text.index("HEALTHY") < text.rindex("\x1b[?1049l")


def test_a_screen_of_24_lines_shows_every_part_down_to_the_last():
    lagging = make_snapshot(make_run(verdict="LAG", findings=(make_finding(advice="sync the weights now " * 6),)))

    text = watched(lagging, lagging, force_terminal=True)

    assert "findings: 1 open" in text
    assert "commands, mode resync" in text
    assert "trainer rank 0" in text


def test_ctrl_c_ends_it_quietly():
    def source():
        raise KeyboardInterrupt

    assert watch(source, a_console()) == 0
