"""Alert lines, read as a person reads them."""

from __future__ import annotations

import io
import os
import termios

import pytest
from factories_snapshots import NOW_S, make_event, make_finding

from dlc_sentinel.sinks.alert_lines import AlertLines


class Tty(io.StringIO):
    def isatty(self):
        return True


def said(*events, stream=None, **settings):
    """The lines written for these events."""
    stream = stream or io.StringIO()
    lines = AlertLines(stream, **settings)
    for event in events:
        lines.handle(event)
    return stream.getvalue().splitlines()


def finding(state="confirmed", level="WARN", t_s=NOW_S, run="r1", verdict="LAG", text="", **changes):
    return make_event(
        "finding", run=run, level=level, t_s=t_s, text=text, data=make_finding(verdict, state=state, **changes)
    )


def test_a_finding_that_opens_says_what_since_when_evidence_and_next_move_on_one_line():
    (line,) = said(finding(since_step=31, evidence={"lag_ess": 0.4312, "age": 3}, advice="sync the weights now"))

    for part in (
        "r1 step 33",
        "LAG (queue) opened (confirmed)",
        "since step 31",
        "old weights",
        "lag_ess 0.431, age 3",
        "next: sync the weights now",
        "dlc-sentinel explain LAG",
    ):
        assert part in line


def test_a_finding_that_stays_as_it_is_says_nothing_more():
    assert len(said(*(finding(t_s=NOW_S + 1000.0 * n) for n in range(5)))) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (finding("suspected"), finding("confirmed")),
        (finding("confirmed"), finding("confirmed", catastrophic=True)),
        (finding("confirmed"), finding("confirmed", level="CRITICAL")),
    ],
    ids=["confirmed", "catastrophic", "critical"],
)
def test_a_finding_that_gets_worse_speaks_again_at_once(before, after):
    lines = said(before, after)

    assert len(lines) == 2
    assert "escalated" in lines[1]


def test_a_finding_that_gets_milder_says_nothing_until_it_closes():
    assert len(said(finding("confirmed"), finding("suspected"), finding("confirmed"))) == 1


@pytest.mark.parametrize("state", ["closed", "superseded"])
def test_the_end_of_a_finding_is_said_without_the_numbers_it_opened_with(state):
    lines = said(finding(), finding(state, level="INFO", evidence={"lag_ess": 0.71}))

    assert lines[1].endswith(f"LAG (queue) {state}, was open since step 31")
    assert "[ok]" in lines[1]


def test_a_finding_that_opens_and_closes_again_and_again_is_said_once_a_minute_and_counted():
    flapping = [finding(state, t_s=NOW_S + t) for t in range(50) for state in ("confirmed", "closed")]

    lines = said(*flapping, finding("confirmed", t_s=NOW_S + 60.0))

    assert len(lines) == 3
    assert "(+49 like it held back)" in lines[2]


def test_what_is_held_back_at_the_end_is_said_once_by_its_last_line_and_counted():
    stream = io.StringIO()
    lines = AlertLines(stream)
    for n in range(4):
        data = {"kind": "RESYNC", "reason": f"reason {n}", "id": f"c-{n}"}
        lines.handle(make_event("command", t_s=NOW_S + n, step=33 + n, data=data))
    lines.handle(make_event("ack", t_s=NOW_S, level="INFO", data={"id": "c-0", "outcome": "applied"}))
    lines.handle(make_event("ack", t_s=NOW_S + 1, level="INFO", data={"id": "c-1", "outcome": "applied"}))
    lines.handle(finding())
    lines.close()
    lines.close()

    resync, ack = stream.getvalue().splitlines()[3:]
    assert "r1 step 36: RESYNC sent" in resync and resync.endswith("reason 3 [c-3] (the last of 3 like it held back)")
    assert ack.endswith("[c-1] (held back until now)")


def test_one_run_does_not_use_up_the_rate_of_another():
    assert len(said(finding(run="r1"), finding(run="r2"))) == 2


def test_healthy_is_no_alert():
    assert said(finding(verdict="HEALTHY")) == []


def test_a_command_says_kind_action_reason_deadline_and_id():
    data = {
        "id": "c-9",
        "kind": "RESYNC",
        "action": "sync_weights",
        "reset_cache": True,
        "reason": "ESS 0.43 < 0.5",
        "evidence": {"lag_ess": 0.43},
        "expires_step": 53,
    }

    (line,) = said(make_event("command", level="WARN", data=data))

    for part in ("RESYNC sent (sync_weights) with cache reset", "ESS 0.43 < 0.5", "by step 53", "[c-9]"):
        assert part in line


def test_a_command_that_the_mode_does_not_allow_is_never_called_sent():
    (line,) = said(make_event("command", data={"kind": "RESYNC", "sent": False, "reason": "x", "expires_step": 9}))

    assert "RESYNC due, NOT SENT" in line
    assert "RESYNC sent" not in line
    assert "applied" not in line


def test_a_breaker_that_was_reset_asks_for_nothing():
    (line,) = said(make_event("breaker", level="INFO", text="breaker reset by hand"))

    assert line.endswith("breaker: breaker reset by hand")


def test_a_hypothetical_command_is_called_so():
    (line,) = said(make_event("command", data={"kind": "ABORT", "outcome": "hypothetical", "reason": "x"}))

    assert "ABORT hypothetical" in line


@pytest.mark.parametrize(
    ("outcome", "shown"), [("applied", "applied at version 34"), ("refused", "| next:"), ("expired", "| next:")]
)
def test_an_ack_says_what_came_of_the_command(outcome, shown):
    (line,) = said(make_event("ack", level="INFO", data={"id": "c-9", "outcome": outcome, "version": 34, "reason": ""}))

    assert f"command {outcome}" in line
    assert "[c-9]" in line
    assert shown in line


def test_a_producer_that_is_gone_is_said_and_one_that_appears_is_not():
    gone = make_event("producer", text="engine 0 on node-1: nothing for 6 s", data={"state": "gone", "producer": "e0"})
    appeared = make_event("producer", level="INFO", data={"state": "appeared", "producer": "e1"})

    (line,) = said(gone, appeared)

    assert "producer gone: engine 0 on node-1" in line
    assert "BLIND" in line


def test_an_open_breaker_says_how_to_reset_it():
    (line,) = said(make_event("breaker", level="CRITICAL", text="3 RESYNCs without effect"))

    assert "3 RESYNCs without effect" in line
    assert "dlc-sentinel actions reset" in line


def test_steps_and_mere_notes_say_nothing_and_a_warning_note_does():
    assert said(make_event("step"), make_event("note", level="INFO", text="hello")) == []
    assert "disk full" in said(make_event("note", text="disk full"))[0]


def test_a_pipe_gets_no_colour_and_no_bell():
    text = "\n".join(said(finding(level="CRITICAL")))

    assert "\x1b" not in text
    assert "\a" not in text


def test_a_terminal_gets_a_bell_for_what_is_critical_only():
    assert "\a" in "".join(said(finding(level="CRITICAL"), stream=Tty()))
    warned = "".join(said(finding(level="WARN"), stream=Tty()))
    assert "\a" not in warned
    assert "\x1b[" in warned


def test_no_color_takes_colour_and_bell_from_a_terminal_too():
    text = "".join(said(finding(level="CRITICAL"), stream=Tty(), no_color=True))

    assert text.isprintable()


def test_text_from_outside_cannot_move_the_cursor_or_forge_a_line():
    hostile = "\x1b[2J\x1b]0;owned\x07\nforged line \u202e" + "z" * 10_000
    events = [
        make_event(
            "finding",
            run=hostile,
            data=make_finding(kind=hostile, advice=hostile, since_step=hostile, state="confirmed"),
        ),
        make_event(
            "command",
            run=hostile,
            text=hostile,
            data={"kind": hostile, "action": hostile, "reason": hostile, "id": hostile},
        ),
        make_event(
            "ack", run=hostile, data={"outcome": hostile, "reason": hostile, "command_id": hostile, "version": 1}
        ),
        make_event("producer", run=hostile, text=hostile, data={"state": hostile, "producer": hostile}),
        make_event("breaker", run=hostile, text=hostile),
        make_event("note", run=hostile, text=hostile),
        make_event("finding", run="e", data={"verdict": hostile, "state": "confirmed", "evidence": {hostile: hostile}}),
    ]

    lines = said(*events)

    assert len(lines) == len(events)
    assert all(line.isprintable() and len(line) < 1200 for line in lines)


def test_an_event_whose_data_is_missing_or_of_odd_types_still_gives_a_line():
    odd = [{}, {"evidence": 3, "since_step": None}, {"expires_step": "soon", "version": "new", "id": 7}]
    events = [
        make_event(kind, text=f"{kind} {i}", run=f"{kind}{i}", data=data)
        for i, data in enumerate(odd)
        for kind in ("command", "ack", "producer", "breaker", "note", "finding")
    ]

    assert len(said(*events)) == len(events)


@pytest.mark.parametrize("t_s", [float("nan"), float("inf"), -1e300])
def test_a_time_that_is_none_is_shown_as_none(t_s):
    assert said(finding(t_s=t_s))[0].startswith("--:--:--Z")


def test_a_stream_that_breaks_loses_lines_and_counts_them():
    stream = io.StringIO()
    lines = AlertLines(stream)
    stream.close()

    lines.handle(finding())
    lines.handle(finding(run="r2"))

    assert lines.num_lost == 2


def test_a_terminal_without_unicode_gets_its_line_all_the_same():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")

    AlertLines(stream).handle(finding(advice="wähle früher"))

    assert b"w?hle fr?her" in raw.getvalue()


def test_memory_is_bounded_however_many_runs_there_are():
    stream = io.StringIO()
    lines = AlertLines(stream)
    for n in range(10_000):
        lines.handle(finding(run=f"run{n}"))

    lines.handle(finding(run="run9999"))

    assert len(stream.getvalue().splitlines()) == 10_000


def test_on_a_terminal_a_line_is_folded_between_words_and_in_a_pipe_it_is_whole():
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    with open(slave, "w") as terminal, open(master, "rb", buffering=0) as screen:
        AlertLines(terminal, no_color=True).handle(finding(advice="sync the weights " * 8))
        shown = screen.read(65536).decode().splitlines()

    (whole,) = said(finding(advice="sync the weights " * 8))

    assert len(shown) > 2 and all(len(line) <= 80 for line in shown)
    assert " ".join(" ".join(shown).split()) == " ".join(whole.split())
