"""The evidence: both terms over time, the ESS ladder, KL, ages, drops."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.cells import cell_len
from rich.text import Text

from dlc_sentinel.catalog import HORIZONS, number, part
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.ui.charts import DIM, GOOD, TITLE, WARN, bar, chart, scale_top
from dlc_sentinel.ui.page import Page, count, fit, forecast, mebibytes, short, title

_LABEL_WIDTH = 24
_SCALE_WIDTH = 8
_ROOMY = 48


def terms(page: Page, width: int, height: int) -> list[Text]:
    """Both terms under one title, charts to the right of their numbers; then where commands were sent."""
    num_shown = min(len(page.run.history), width - _LABEL_WIDTH - _SCALE_WIDTH)
    heading = title(page, f"mismatch per token, rms in nats, last {num_shown} steps", width)
    return [
        heading,
        *_term(page, width, height, "discrepancy"),
        *_term(page, width, height, "lag"),
        _sent_line(page, width),
    ]


def term(page: Page, width: int, height: int, name: str) -> list[Text]:
    """One term under its own title."""
    meaning = {
        "discrepancy": "discrepancy: trainer against engine, same weights",
        "lag": "lag: trainer now against the generator's weights",
    }[name]
    return [title(page, meaning, width), *_term(page, width, height, name), _sent_line(page, width)]


def ladder(page: Page, width: int) -> list[Text]:
    """The ESS ladder: a bar per block length against one half, the action horizon marked."""
    half = number(page.run.step, "half_horizon")
    reach = (
        ""
        if math.isnan(half) or not page.is_trusted
        else ", all above 1/2"
        if math.isinf(half)
        else ", none above 1/2"
        if half == 0
        else f", above 1/2 to {half:.0f}"
    )
    found = [title(page, f"lag ESS by block{reach}", width)]
    if page.run.step is None:
        return [*found, Text("no step closed yet", style=DIM)]
    found += [_rung(page, width, horizon) for horizon in _rungs(page)]
    low, high = _pair(page.run.step.get("lag_ess_interval"))
    if width < _ROOMY or not math.isfinite(low + high):
        return found
    legend = f"{page.glyphs.pointer} acts below 1/2; 90 % interval {short(low)} to {short(high)}"
    return [*found, fit(Text(legend, style=DIM), width)]


def divergence(page: Page, width: int) -> list[Text]:
    """KL on prefixes against full trajectories, version ages, drops."""
    kl = part(page.run.step, "kl")
    reliability = {"ok": "ok", "low": "LOW: probably too small", "none": "NONE: do not use"}.get(
        str(kl.get("reliability")), "not known"
    )
    if not page.is_trusted:
        reliability = "NOT TRUSTED"
    found = [title(page, _columns("KL, nats", "per token", "trajectory", width - 4), width)]
    for label, direction in (("gen", "gen_now"), ("now", "now_gen")):
        other = "now" if label == "gen" else "gen"
        row = _columns(
            f"{label} {page.glyphs.arrow} {other}",
            short(number(kl, f"{direction}_prefix")),
            short(number(kl, f"{direction}_full")),
            width - 4,
        )
        found.append(fit(Text(row), width))
    style = "" if reliability == "ok" else WARN
    found.append(fit(Text(f"reliability {reliability}", style=style), width))
    return [*found, _age_line(page, width), *_drop_lines(page, width)]


def more(page: Page, width: int) -> list[Text]:
    """What a wide screen has room for: forecast, feedback, ESS by age, sizes behind the numbers."""
    step = part(page.run.step)
    by_age = part(step, "lag_ess_by_age")
    blocks = number(step, "num_blocks", str(page.run.action_horizon))
    latency_ms = 1000.0 * page.run.verdict_latency_s
    rows = [
        f"time left: {forecast(page) or 'no crossing forecast'}",
        f"loop gain {short(number(step, 'loop_gain'))}  (above 1: lag feeds itself)",
        f"blind spot {short(number(step, 'kl', 'blind_spot'))}  (1: prefixes show everything)",
        f"ESS h={page.run.action_horizon} by age: " + (_by_age(by_age) or "not known"),
        ", ".join(f"{count(number(step, f'num_{what}'))} {what}" for what in ("tokens", "groups"))
        + f", {count(blocks)} blocks",
        f"basis {plain(step.get('basis') or 'none', 20)}, updates {plain(step.get('updates') or 'not known', 20)}",
        f"verdict {count(latency_ms)} ms after the last frame, {mebibytes(page.run.join_bytes)} wait in the join",
    ]
    return [title(page, "feedback and sample", width), *(fit(Text(row), width) for row in rows)]


def _term(page: Page, width: int, height: int, name: str) -> list[Text]:
    values = [number(step, name, "rms") for step in page.run.history]
    now = number(page.run.step, name, "rms")
    # the floor is the engine's; lag has none: it is 0 right after a sync
    floor = math.nan if name == "lag" else number(page.run.step, "floor", "rms")
    chart_width = max(width - _LABEL_WIDTH - _SCALE_WIDTH, 8)
    shown = values[-chart_width:]
    is_high = page.run.verdict == "LAG" if name == "lag" else now > 3.0 * floor
    rows = chart(
        shown, chart_width, height, floor, page.glyphs, (WARN if is_high else GOOD) if page.is_trusted else DIM
    )
    value = short(now) if math.isfinite(now) else "unresolved" if page.run.step else "no data"
    ratio = f", now {short(now / floor, 2)}x" if now >= 0 and floor > 0 else ""
    beside = f"floor {short(floor)}{ratio}" if name != "lag" else f"mean age {short(_mean_age(page))} vers."
    labels = [Text().append(f"{name:<12}{value}", style=TITLE), Text().append(beside, style=DIM)]
    scale = _scale(scale_top(shown, floor), floor, height)
    for i, row in enumerate(rows):
        left = labels[i] if i < len(labels) else Text()
        left.truncate(_LABEL_WIDTH - 1, overflow="ellipsis", pad=True)
        rows[i] = fit(left.append(" ").append_text(row).append(f" {scale[i]}", style=DIM), width)
    return rows


def _mean_age(page: Page) -> float:
    return number(page.run.step, "version_age", "mean")


def _scale(top: float, floor: float, height: int) -> list[str]:
    """What stands to the right of each chart row, top row first: upper end, floor, 0."""
    words = [""] * height
    if math.isfinite(top):
        if height > 1:
            words[-1] = "0"
        words[0] = short(top, 2)
        at = height - 1 - math.floor(floor / top * height) if math.isfinite(floor) else 0
        if 0 < at < height - 1:
            words[at] = "floor"
    return words


def _sent_line(page: Page, width: int) -> Text:
    """Under the charts: R and A where commands were sent."""
    chart_width = max(width - _LABEL_WIDTH - _SCALE_WIDTH, 8)
    steps = [step.get("step") for step in page.run.history][-chart_width:]
    sent = {command.get("step"): (plain(command.get("kind"), 10) or "?")[:1] for command in page.run.commands}
    axis = "".join(sent.get(step, " ") for step in steps).rjust(chart_width)
    found = Text().append(f"{'R resync, A abort sent':<{_LABEL_WIDTH}}", style=DIM)
    return fit(found.append(axis, style=TITLE), width)


def _rungs(page: Page) -> list[str]:
    """The ladder, with the action horizon put in where it is none of the usual rungs."""
    own = str(page.run.action_horizon)
    if own in HORIZONS:
        return list(HORIZONS)
    return sorted((*HORIZONS, own), key=lambda horizon: math.inf if horizon == "inf" else int(horizon))


def _rung(page: Page, width: int, horizon: str) -> Text:
    step = page.run.step
    value, coverage = number(step, "lag_ess", horizon), number(step, "coverage", horizon)
    shown = f"{value:.3f}" if math.isfinite(value) else "-"
    is_action = horizon == str(page.run.action_horizon)
    if not math.isfinite(value):
        word, style = "no data", DIM
    elif not page.is_trusted:
        word, style = "unsure", DIM
    elif coverage < 0.5:
        word, style = "short", DIM
    elif value < 0.5:
        word, style = ("BELOW", WARN) if is_action else ("below", "")
    else:
        word, style = "ok", GOOD
    line = Text(
        f"{page.glyphs.pointer if is_action else ' '}{horizon:>4} {shown:>6} ",
        no_wrap=True,
    )
    line.stylize(TITLE if is_action else "")
    width_left = max(width - cell_len(line.plain) - 8, 4)
    line.append_text(bar(value, width_left, page.glyphs, style, is_trusted=page.is_trusted))
    return fit(line.append(f" {word}", style=style), width)


def _age_line(page: Page, width: int) -> Text:
    step = part(page.run.step)
    by_age = part(step, "lag_ess_by_age")
    text = f"age {short(number(step, 'version_age', 'mean'))}, max {short(number(step, 'version_age', 'max'))}"
    shown = _by_age(by_age, 6 if width >= _ROOMY else 2)
    return fit(Text(text + (f"; ESS by age {shown}" if shown else "")), width)


def _by_age(by_age: Mapping[str, Json], limit: int = 6) -> str:
    """The youngest and the oldest ages: "0:1 1:0.91 6:0.3"."""
    ages = sorted(by_age, key=lambda age: (len(str(age)), str(age)))
    ages = ages if len(ages) <= limit else [*ages[: limit - 1], ages[-1]]
    return " ".join(f"{plain(age, 8)}:{short(number(by_age, age), 2)}" for age in ages)


def _drop_lines(page: Page, width: int) -> list[Text]:
    run = page.run
    causes = sorted(((n, cause) for cause, n in run.dropped_tokens.items() if n), reverse=True)
    num_dropped, num_seen = sum(run.dropped_tokens.values()), max(run.num_tokens.values(), default=0)
    share = f" {100.0 * num_dropped / num_seen:.2g} %" if num_seen and num_dropped else f" {count(num_dropped)} tokens"
    named = ", ".join(f"{plain(cause, 20)} {count(n)}" for n, cause in causes)
    dropped = Text(f"dropped{share}" + (f": {named}" if named else ""))
    num_refused = sum(run.refused_frames.values())
    frames = Text(f"frames {count(run.num_frames)}, refused {count(num_refused)}, missing {count(run.sequence_gaps)}")
    frames.stylize(WARN if num_refused or run.sequence_gaps else DIM)
    dropped.stylize(WARN if num_seen and num_dropped > 0.01 * num_seen else "" if num_dropped else DIM)
    return [fit(dropped, width), fit(frames, width)]


def _columns(label: str, first: str, second: str, width: int) -> str:
    return f"{label:<10}{first:>12}{second:>{max(min(width - 22, 14), 10)}}"


def _pair(value: Json) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return math.nan, math.nan
    return number(value[0]), number(value[1])
