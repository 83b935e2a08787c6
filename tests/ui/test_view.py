"""The view, printed on consoles of fixed size and read as text."""

from __future__ import annotations

import io
import math

import pytest
from factories_snapshots import NOW_S, make_command, make_event, make_finding, make_producer, make_run, make_step
from rich.console import Console

from dlc_sentinel.ui.view import view
from dlc_sentinel.verdicts import VERDICTS

SIZES = [(80, 24), (200, 60), (120, 30), (100, 24), (72, 24), (60, 20), (40, 10)]
HOSTILE = "\x1b[2J\x1b]0;owned\x07\n[bold red]markup[/] :smile: <script>alert(1)</script>\u202e" + "W" * 10_000


def shown(run, width=80, height=24, encoding="utf-8", **settings):
    """The lines on a console without colour."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(width=width, height=height, file=file, color_system=None, legacy_windows=False, _environ={})
    console.print(view(run, now_s=NOW_S, **settings), height=height)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


def page(run, *size, **settings):
    return "\n".join(shown(run, *size, **settings))


def row(lines, start):
    """The line that starts with this text, blanks aside."""
    return next(line for line in lines if line.replace("►", " ").strip().startswith(start))


def lagging(**changes):
    history = tuple(make_step(n, lag={"rms": 0.01 * n}) for n in range(40))
    step = make_step(
        40,
        lag_ess={"32": 0.41, "128": 0.2},
        half_horizon=8,
        lag={"rms": 0.4},
        lag_ess_interval=[0.38, 0.45],
        kl={"gen_now_full": 1.4, "reliability": "low"},
        version_age={"mean": 3.1, "max": 6},
    )
    settings = {
        "verdict": "LAG",
        "step": step,
        "history": (*history, step),
        "last_step": 40,
        "findings": (
            make_finding(since_step=38, advice="sync the weights now"),
            make_finding("ENGINE", state="closed"),
        ),
        "commands": (
            make_command(step=20),
            make_command(step=40, outcome="refused", version=-1, reason="no sync hook"),
        ),
    }
    return make_run(**{**settings, **changes})


RUNS = {
    "healthy": make_run(),
    "lag": lagging(),
    "no step": make_run(step=None, history=(), last_step=-1, verdict="BLIND", producers=(), engines=()),
    "hostile": lagging(
        run=HOSTILE,
        model_name=HOSTILE,
        engines=(HOSTILE,) * 9,
        mode=HOSTILE,
        breaker_open=True,
        findings=(make_finding(kind=HOSTILE, advice=HOSTILE, evidence={HOSTILE: HOSTILE}, since_step=HOSTILE),) * 9,
        commands=(make_command(kind=HOSTILE, action=HOSTILE, reason=HOSTILE, outcome=HOSTILE),) * 9,
        producers=(make_producer(role=HOSTILE, rank=HOSTILE, replica=HOSTILE, host=HOSTILE, state=HOSTILE),) * 9,
        events=(make_event(text=HOSTILE),) * 9,
        dropped_tokens={HOSTILE: 10**15},
    ),
    "all null": make_run(
        step=dict.fromkeys(make_step()),
        history=(dict.fromkeys(make_step()),),
        findings=({},),
        commands=({},),
        producers=({},),
    ),
    "all nan": make_run(step=dict.fromkeys(make_step(), math.nan), verdict_latency_s=math.nan),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_every_picture_fits_its_console_and_holds_printable_text_only(run, size):
    lines = shown(run, *size)

    assert len(lines) <= size[1]
    assert all(len(line) <= size[0] and line.isprintable() for line in lines)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_a_terminal_without_unicode_gets_an_ascii_picture(run):
    text = page(run, encoding="ascii")

    assert text.isascii()
    assert run.verdict in text


def test_an_80_by_24_screen_shows_every_part():
    text = page(lagging())

    for part in (
        "run r1",
        "Qwen3-0.6B",
        "engine 0",
        "mode resync",
        "step 40",
        "discrepancy 0.0121",
        "floor 0.0118",
        "lag         0.4",
        "lag ESS",
        "KL, nats",
        "reliability LOW",
        "age 3.1, max 6",
        "dropped",
        "findings: 1 open",
        "commands",
        "producers: 2 of 2 alive",
    ):
        assert part in text, part


def test_the_verdict_is_said_in_words_with_state_since_when_and_what_to_do():
    lines = shown(lagging())

    assert "[!!] LAG" in lines[1]
    assert "confirmed, since step 38" in lines[1]
    assert "old weights" in lines[2]
    assert "do: sync the weights now" in lines[3]


def test_healthy_says_that_it_says_nothing_about_learning():
    lines = shown(make_run())

    assert "[ok] HEALTHY" in lines[1]
    assert "nothing about learning" in lines[2]


@pytest.mark.parametrize("verdict", [v.name for v in VERDICTS if v.name != "HEALTHY"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_other_verdict_looks_healthy(verdict, size):
    text = page(make_run(verdict=verdict), *size)

    assert "[ok]" not in text
    assert "HEALTHY" not in text
    assert verdict in text


@pytest.mark.parametrize(
    "run",
    [make_run(verdict="BLIND"), make_run(verdict="UNWIRED"), make_run(verdict="FROM_THE_FUTURE")],
    ids=lambda run: run.verdict,
)
def test_numbers_that_prove_nothing_are_marked_hatched_and_called_unsure(run):
    lines = shown(run)

    assert "[??]" in lines[1]
    assert "NOT KNOWN" in lines[1]
    assert "NOT TRUSTED" in row(lines, "── lag ESS")
    assert "▒" in row(lines, "32 ")
    assert row(lines, "32 ")[:40].rstrip().endswith("unsure")
    assert "proves nothing" in "\n".join(lines)


def test_an_old_picture_says_so_first_and_is_never_healthy():
    lines = shown(make_run(), stale="12 s without an answer")

    assert "PICTURE IS OLD: 12 s without an answer" in lines[0]
    assert "NOT KNOWN, last seen HEALTHY" in lines[2]
    assert "▒" in row(lines, "32 ")
    assert "[ok]" not in "\n".join(lines)


@pytest.mark.parametrize("basis", ["mixed", "none"])
def test_a_basis_that_does_not_separate_the_terms_is_not_trusted(basis):
    assert "NOT TRUSTED" in page(make_run(step=make_step(basis=basis)))


def test_an_open_breaker_is_a_banner_with_the_way_out():
    assert "dlc-sentinel actions reset" in shown(make_run(breaker_open=True))[0]


def test_the_ladder_marks_the_action_horizon_and_says_which_rungs_are_below_one_half():
    lines = shown(lagging())

    assert row(lines, "32 ").startswith("►  32  0.410")
    assert "BELOW" in row(lines, "32 ")
    assert "below" in row(lines, "128 ")
    assert row(lines, "8 ")[:40].rstrip().endswith("ok")
    assert "above 1/2 to 8" in row(lines, "── lag ESS")


def test_another_action_horizon_is_marked_and_put_into_the_ladder():
    step = make_step(lag_ess={**make_step()["lag_ess"]})
    step["lag_ess"]["64"] = 0.3

    lines = shown(make_run(step=step, action_horizon=64))

    assert row(lines, "64 ").startswith("►  64  0.300")
    assert row(lines, "32 ").startswith("   32")


def test_a_rung_with_few_full_blocks_is_called_short_and_not_ok():
    lines = shown(make_run(step=make_step(coverage={"512": 0.1})))

    assert row(lines, "512 ")[:40].rstrip().endswith("short")


def test_a_term_that_is_not_resolved_says_so():
    assert "lag         unresolved" in page(make_run(step=make_step(lag={"rms": None})))


def test_commands_are_marked_under_the_chart_at_their_step():
    lines = shown(lagging())

    chart, sent = row(lines, "lag  "), row(lines, "R resync")
    newest = len(chart.rstrip()) - len(" 0.4")
    assert sent[24:].count("R") == 2
    assert sent.rstrip()[-1] == "R"
    assert len(sent.rstrip()) == newest
    assert sent.rstrip().rindex("R") - sent.index("R", 24) == 20


def test_commands_say_what_came_of_them_newest_first():
    lines = shown(lagging())

    assert row(lines, "40 RESYNC").startswith("40 RESYNC sync_weights → REFUSED")
    assert "→ applied v34" in row(lines, "20 RESYNC")
    assert lines.index(row(lines, "40 RESYNC")) < lines.index(row(lines, "20 RESYNC"))


def test_a_finding_says_what_the_job_was_asked_for():
    assert "asked for a RESYNC" in page(lagging(findings=(make_finding(acted=True),)))


def test_drops_are_named_by_cause_largest_first():
    text = page(make_run(dropped_tokens={"late": 204, "unmatched": 12_000}))

    assert "dropped 1.4 %: unmatched 12 k, late 204" in text


def test_silent_and_gone_producers_come_first_in_capitals_with_their_age():
    run = make_run(producers=(make_producer(), make_producer("engine", state="silent", last_seen_s=NOW_S - 14)))

    text = page(run)

    assert "producers: 1 of 2 alive" in text
    assert text.index("engine replica 0 SILENT 14 s ago") < text.index("trainer rank 0 alive 1 s ago")


def test_a_wide_screen_adds_interval_feedback_ess_by_age_and_events():
    run = lagging(events=(make_event(text="LAG opened"),))
    text = page(run, 200, 60)

    for part in (
        "90 % interval 0.38 to 0.45",
        "loop gain 0.4",
        "ESS h=32 by age: 0:1 1:0.95",
        "LAG opened",
        "ESS is below 1/2 now",
    ):
        assert part in text, part


def test_the_time_left_is_shown_while_the_horizon_is_still_above_one_half():
    text = page(make_run(step=make_step(forecast_steps={"low": 4.0, "mid": 7.0, "high": 12.0})))

    assert "about 7 steps until ESS < 1/2 (4 to 12)" in text


def test_a_forecast_whose_end_is_open_says_the_earliest():
    text = page(make_run(step=make_step(forecast_steps={"low": 4.0, "mid": 7.0, "high": math.inf})))

    assert "about 7 steps until ESS < 1/2 (4 at the earliest)" in text


def test_open_findings_beyond_the_verdict_carry_their_own_advice():
    run = lagging(findings=(make_finding(), make_finding("DATA", kind="shift", advice="look at the last token")))

    text = page(run, 120, 40)

    assert "DATA (shift)" in text
    assert "do: look at the last token" in text


def test_markup_and_emoji_codes_from_outside_are_shown_and_not_obeyed():
    text = page(lagging(run="[bold]x[/] :smile:"), 200, 60)

    assert "[bold]x[/] :smile:" in text


def test_colour_is_never_the_only_difference():
    assert page(make_run(verdict="HEALTHY")) != page(make_run(verdict="BLIND"))
    assert "\x1b" not in page(make_run())


def test_blind_says_how_many_tokens_are_missing():
    step = make_step(0, num_tokens=160)

    text = page(make_run(verdict="BLIND", step=step, history=(step,), last_step=0))

    assert "cannot say: 160 of the 1,000 tokens that a verdict needs" in text
