"""The main figure: ESS, mismatch, KL, age and what was learned, with findings above and commands through all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlc_sentinel.catalog import number
from dlc_sentinel.report import story as told
from dlc_sentinel.report import svg
from dlc_sentinel.report.story import Story
from dlc_sentinel.report.svg import Bar, Mark, Panel, Series

WIDE, NARROW = 940.0, 440.0
_MAX_BARS = 8
_BAD = ("STALE_ENGINE", "DATA", "LAG", "ENGINE")


def one(story: Story, width: float = WIDE) -> str:
    """The figure of one run as SVG; empty text where no step was closed."""
    return svg.figure(
        _panels(story), width=width, marks=_marks(story), bars=_bars(story), title=f"curves of run {story.run}"
    )


def two(first: Story, second: Story, width: float = WIDE) -> str:
    """Both runs over one axis of steps: the first solid, the second dashed."""
    return svg.figure(_both(first, second), width=width, title=f"curves of {first.run} and {second.run}")


def _panels(story: Story) -> list[Panel]:
    own = str(story.horizon)
    ladder = [Series(f"h = {h}", told.curve(story, "lag_ess", h), f"ess-{_rank(h, own)}") for h in _rungs(own)]
    ladder.append(Series(f"h* = {own}", told.curve(story, "lag_ess", own), "ess-own", _interval(story)))
    floor = told.curve(story, "floor", "rms")
    found = [
        Panel("ESS of the lag ratio, by block length", ladder, "linear", (0.5, "one half"), (0, 1)),
        Panel(
            "Mismatch per token, rms in nats",
            [
                Series("lag", told.curve(story, "lag", "rms"), "lag"),
                Series("discrepancy", told.curve(story, "discrepancy", "rms"), "disc"),
                Series("floor", floor, "floor"),
            ],
            "log",
        ),
        Panel(
            "KL per trajectory, nats",
            [
                Series("gen to now", told.curve(story, "kl", "gen_now_full"), "kl-a"),
                Series("now to gen", _reliable(story), "kl-b"),
            ],
            "log",
            height=90,
        ),
        Panel(
            "Age of the rows, versions",
            [
                Series("mean", told.curve(story, "version_age", "mean"), "age-a"),
                Series("oldest", told.curve(story, "version_age", "max"), "age-b"),
            ],
            height=80,
        ),
    ]
    for name in told.scalar_names(story):
        found.append(Panel(f"{name}, as the stack reports it", [Series("", told.scalar_curve(story, name), "learn")],
                           height=80))  # fmt: skip
    return found


def _both(first: Story, second: Story) -> list[Panel]:
    names = (first.run, second.run) if first.run != second.run else ("A", "B")
    short = [name if len(name) <= 11 else f"{name[:10]}…" for name in names]

    def pair(*keys: str) -> list[Series]:
        return [
            Series(short[0], told.curve(first, *keys), "run-a"),
            Series(short[1], told.curve(second, *keys), "run-b"),
        ]

    own = str(first.horizon)
    found = [
        Panel(f"ESS of the lag ratio, h* = {own}", pair("lag_ess", own), "linear",
              (0.5, "one half"), (0, 1)),
        Panel("Lag per token, rms in nats", pair("lag", "rms"), "log", height=100),
        Panel("Discrepancy per token, rms in nats", pair("discrepancy", "rms"), "log", height=100),
        Panel("KL per trajectory, generator to current policy, nats", pair("kl", "gen_now_full"), "log", height=90),
        Panel("Mean age of the rows, versions", pair("version_age", "mean"), height=80),
    ]  # fmt: skip
    for name in told.scalar_names(first):
        lines = [
            Series(short[0], told.scalar_curve(first, name), "run-a"),
            Series(short[1], told.scalar_curve(second, name), "run-b"),
        ]
        found.append(Panel(f"{name}, as the stack reports it", lines, height=80))
    return found


def _rungs(own: str) -> list[str]:
    return [horizon for horizon in ("1", "8", "128") if horizon != own]


def _rank(horizon: str, own: str) -> str:
    return {"1": "a", "8": "b", "128": "c"}.get(horizon, "c")


def _interval(story: Story) -> list[tuple[float, float, float]]:
    found = []
    for step in story.steps:
        low, high = [*(step["lag_ess_interval"] or ()), None, None][:2]
        found.append((float(step["step"]), number(low), number(high)))
    return found


def _reliable(story: Story) -> list[tuple[float, float]]:
    """KL from the current policy to the generator; a gap where too few samples carry it."""
    return [
        (float(step["step"]), number(step, "kl", "now_gen_full") if step["kl"]["reliability"] != "none" else math.nan)
        for step in story.steps
    ]


def _marks(story: Story) -> Sequence[Mark]:
    return [
        Mark(each.step, each.kind[:1] or "?", f"step {each.step}: {each.kind} {each.action}, {each.outcome}",
             "mark-abort" if each.kind == "ABORT" else "mark")
        for each in told.sent(story)
    ]  # fmt: skip


def _bars(story: Story) -> Sequence[Bar]:
    """One row a verdict and kind: a run that syncs every few steps opens and closes the same one many times."""
    end = float(story.steps[-1]["step"]) if story.steps else 0.0
    rows: dict[str, list[tuple[float, float]]] = {}
    for span in told.spans(story):
        rows.setdefault(span.verdict, []).append((span.first, end if span.last is None else span.last))
    return [
        Bar(spans, verdict, "span-bad" if verdict in _BAD else "span")
        for verdict, spans in list(rows.items())[:_MAX_BARS]
    ]


def height(svg: str) -> int:
    """Pixels a wide figure is tall when it is shown at its own width."""
    return int(svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
