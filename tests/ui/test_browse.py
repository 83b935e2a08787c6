"""Where keys lead, and what they open."""

from __future__ import annotations

import io
import os
import pty
import threading

import pytest
from factories_snapshots import NOW_S, make_event, make_finding, make_run, make_snapshot
from factories_story import make_strip
from rich.console import Console

from dlc_sentinel.ui.browse import KEYS, Place, press
from dlc_sentinel.ui.keys import Keyboard, named
from dlc_sentinel.ui.live import watch
from dlc_sentinel.ui.view import view

HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]m[/]<script>\u202e" + "W" * 5000
SIGHTS = ("finding", "history", "worst", "help")
SIZES = [(80, 24), (200, 60), (40, 10)]


def shown(run, place, width=80, height=24, **settings):
    file = io.StringIO()
    console = Console(width=width, height=height, file=file, color_system=None, legacy_windows=False, _environ={})
    console.print(view(run, now_s=NOW_S, place=place, **settings), height=height)
    return file.getvalue().splitlines()


def page(run, place, *size, **settings):
    return "\n".join(shown(run, place, *size, **settings))


def after(*keys, num_findings=3, runs=("a", "b", "c"), at="a"):
    """Where these keys lead from the run `at`; a run chosen by key is the one shown."""
    place = Place()
    for key in keys:
        place = press(place, key, num_findings=num_findings, runs=runs, shown=place.run or at)
        if place is None:
            return None
    return place


def test_a_digit_opens_that_finding_and_escape_goes_back():
    assert after("2") == Place("finding", 1)
    assert after("2", "esc") == Place()


def test_a_digit_beyond_the_findings_leads_nowhere():
    assert after("4") == Place()
    assert after("enter", num_findings=0) == Place()


def test_enter_opens_the_first_finding_and_arrows_the_ones_beside_it():
    assert after("enter") == Place("finding", 0)
    assert after("enter", "right", "right", "right") == Place("finding", 2)
    assert after("2", "left", "left") == Place("finding", 0)


def test_help_opens_and_closes_with_the_same_key():
    assert after("?") == Place("help")
    assert after("?", "?") == Place()


def test_runs_go_round_in_both_directions():
    assert after("n").run == "b"
    assert after("p").run == "c"
    assert after("n", "n", "n").run == "a"
    assert after("n", "1", "esc").run == "b"


def test_scrolling_never_goes_above_the_top():
    assert after("h", "j", "j", "k").scroll == 1
    assert after("h", "k").scroll == 0
    assert after("h", "pagedown").scroll == 10


def test_q_quits_and_a_key_that_means_nothing_does_nothing():
    assert after("q") is None
    assert after("x", "", "é") == Place()


def rich_run(**changes):
    findings = (make_finding(evidence={f"fact_{n}": float(n) for n in range(9)}), make_finding("ENGINE", kind="level"))
    settings = {"verdict": "LAG", "findings": findings, "worst": (make_strip(), make_strip(id="s2", gen=None))}
    return make_run(**{**settings, **changes})


def test_a_finding_is_shown_with_evidence_worst_tokens_and_what_to_check():
    text = page(rich_run(), Place("finding"), 120, 60)

    for part in ("finding 1 of 2", "LAG (queue) confirmed", "fact_8 8", "how sure", "check first", "ignore it when"):
        assert part in text, part
    assert "33      2       7     0.018      0.02      0.61      0.1      3.4  s1" in text


def test_an_80_by_24_screen_says_what_is_below_and_scrolls_to_it():
    top, bottom = page(rich_run(), Place("finding")), page(rich_run(), Place("finding", scroll=99))

    assert "more lines below (j)" in top
    assert "ignore it when" not in top
    assert "ignore it when" in bottom
    assert "more lines below" not in bottom


def test_the_worst_sequences_are_drawn_with_a_mark_over_the_token():
    lines = shown(rich_run(), Place("worst"))
    at = next(i for i, line in enumerate(lines) if line.startswith("step 33, sequence s1"))

    assert lines[at + 1].index("v") == lines[at + 2].index("▅", 14)
    assert lines[at + 3].startswith("trainer then")
    assert lines[at + 6].startswith("|lag|")
    assert lines[at + 2].rstrip().endswith("·"), "a token without a logprob is a dot"


def test_without_the_middle_stream_only_the_total_is_drawn():
    assert "|total|" in page(rich_run(worst=(make_strip(gen=None),)), Place("worst"))


def test_the_history_is_newest_first():
    run = rich_run(events=(make_event(text="older", step=1), make_event(text="newer", step=2)))
    text = page(run, Place("history"))

    assert text.index("newer") < text.index("older")


def test_the_help_names_every_key():
    text = page(rich_run(), Place("help"))

    assert all(keys in text and what in text for keys, what in KEYS)


def test_the_last_line_names_the_keys_where_there_are_any():
    assert shown(rich_run(), Place(), has_keys=True)[-1].startswith("? keys")
    assert "? keys" not in page(rich_run(), Place())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("sight", SIGHTS)
def test_every_sight_fits_its_console_and_holds_printable_text_only(sight, size):
    strip = make_strip(id=HOSTILE, step=HOSTILE, at=HOSTILE, length=HOSTILE, version=HOSTILE)
    hostile = rich_run(
        run=HOSTILE, events=(make_event(text=HOSTILE),) * 9, worst=(strip, make_strip(id=HOSTILE)),
        findings=(make_finding(kind=HOSTILE, advice=HOSTILE, evidence={HOSTILE: HOSTILE, "l": [HOSTILE]}),) * 9,
    )  # fmt: skip
    for run in (hostile, rich_run(), make_run(findings=({},), worst=({},))):
        lines = shown(run, Place(sight), *size, has_keys=True)

        assert len(lines) <= size[1]
        assert all(len(line) <= size[0] and line.isprintable() for line in lines)


def test_the_history_of_a_finding_that_is_gone_says_so():
    assert "no longer here" in page(make_run(), Place("finding", 5))


# -- keys of a real terminal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "name"), [("\x1b[A", "up"), ("\x1b", "esc"), ("\r", "enter"), ("w", "w"), ("\x1b[99~", ""), ("\x07", "")]
)
def test_keys_have_names(typed, name):
    assert named(typed) == name


def test_a_key_is_heard_at_once_and_the_terminal_is_given_back_as_it_was():
    import termios

    master, slave = pty.openpty()
    try:
        before = termios.tcgetattr(slave)
        with Keyboard(slave) as keys:
            assert keys(0.0) == ""
            os.write(master, b"\x1b[B")
            assert keys(10.0) == "down"
            assert termios.tcgetattr(slave) != before
        assert termios.tcgetattr(slave) == before
    finally:
        os.close(master)
        os.close(slave)


def typed(*keys, source=None):
    """What a terminal shows while these keys are typed, then `q`."""
    waiting = [*keys, "q"]
    console = Console(
        file=io.StringIO(), width=80, height=24, color_system=None, force_terminal=True, legacy_windows=False,
        _environ={},
    )  # fmt: skip
    snapshot = make_snapshot(rich_run(run="a"), rich_run(run="b", verdict="HEALTHY", findings=()))
    code = watch(source or (lambda: snapshot), console, period_s=60.0, keys=lambda timeout_s: waiting.pop(0))
    assert (code, waiting) == (0, [])
    return console.file.getvalue()


def test_a_key_redraws_at_once_and_q_ends_it():
    text = typed("1", "w", "n", "?")

    assert "finding 1 of 2" in text
    assert "worst sequences" in text
    assert "run b" in text
    assert "quit; the sentinel and the job go on" in text


def test_where_no_key_will_ever_come_the_picture_goes_on():
    stop = threading.Event()
    calls = []

    def source():
        calls.append(1)
        if len(calls) == 3:
            stop.set()
        return make_snapshot(rich_run())

    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True, legacy_windows=False, _environ={})

    assert watch(source, console, period_s=0.001, stop=stop, keys=lambda timeout_s: None) == 0
    assert len(calls) == 3
