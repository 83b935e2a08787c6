"""What is wrong and what to do: banners, name, verdict in words, findings."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.cells import cell_len
from rich.text import Text

from dlc_sentinel import missing
from dlc_sentinel.catalog import OPEN_STATES, number
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.ui.charts import BAD, DIM, GOOD, TITLE, UNKNOWN, WARN, finite
from dlc_sentinel.ui.page import Page, ago, cut, fit, forecast, headline, title, word, wrap
from dlc_sentinel.verdicts import asked, text_of

_ROOMY = 96


def header(page: Page, width: int, advice_lines: int) -> list[Text]:
    """Name line, verdict in words, what to do; above them banners that must not be missed."""
    found = [_banner(f"PICTURE IS OLD: {plain(page.stale)}", width)] if page.stale else []
    if page.run.breaker_open:
        found.append(_banner("BREAKER OPEN: no RESYNC is sent until `dlc-sentinel actions reset`", width))
    found += [_name_line(page, width), *_verdict_lines(page, width, advice_lines)]
    return found + ([fit(Text(plain(page.others), style=DIM), width)] if page.others else [])


def findings(page: Page, width: int, num_lines: int) -> list[Text]:
    """Open findings with evidence and advice, most severe first; closed ones where there is room."""
    is_open = [f for f in page.run.findings if f.get("state") in OPEN_STATES]
    closed = [f for f in page.run.findings if f.get("state") not in OPEN_STATES]
    found = [title(page, f"findings: {len(is_open)} open, {len(closed)} closed", width)]
    if not is_open:
        found.append(
            Text(
                "none open" if page.is_trusted else "none open, which proves nothing while health is not known",
                style=DIM,
            )
        )
    for finding in is_open:
        found += _finding_lines(page, finding, width, is_short=num_lines < 3 * len(is_open))
    found += [fit(Text(finding_name(f), style=DIM), width) for f in closed[: max(num_lines + 1 - len(found), 0)]]
    return cut(found, num_lines + 1, width)


def _banner(text: str, width: int) -> Text:
    line = Text(f" !! {text}", style=UNKNOWN, no_wrap=True)
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def _name_line(page: Page, width: int) -> Text:
    run, dot = page.run, f" {page.glyphs.dot} "
    engines = plain(", ".join(run.engines[:4]) + (" ..." if len(run.engines) > 4 else ""), 24) or "none"
    seen_s = [page.now_s - number(producer, "last_seen_s") for producer in run.producers]
    silence_s = min(finite(seen_s), default=math.nan)
    right = (f"step {run.last_step}" if run.last_step >= 0 else "no step yet") + (
        f"{dot}heard {ago(silence_s)}" if math.isfinite(silence_s) else ""
    )
    parts = (
        f"run {plain(run.run, 40)}",
        plain(run.model_name, 40) or "model unknown",
        f"engine {engines}",
        f"mode {plain(run.mode, 12)}",
    )
    left = dot.join(parts if width >= _ROOMY else parts[:3])
    line = Text(left, style=TITLE, no_wrap=True)
    line.truncate(max(width - cell_len(right) - 2, 0), overflow="ellipsis", pad=True)
    return fit(line.append(f"  {right}"), width)


def _verdict_lines(page: Page, width: int, advice_lines: int) -> list[Text]:
    """Badge with state and time left, the meaning (beside the badge where it fits), what to do."""
    mark, style, name, meaning, advice = _headline_words(page)
    finding = headline(page)
    line = Text(no_wrap=True)
    line.append(f" {mark} {name} ", style=style)
    if finding is not None:
        line.append(
            f" {plain(finding.get('state'), 12)}, since step {plain(finding.get('since_step'), 12)}", style=TITLE
        )
    found = [line]
    time_left = forecast(page) if page.is_trusted else ""
    if cell_len(line.plain) + len(meaning) + 3 + len(time_left) + 2 <= width:
        line.append(f" {page.glyphs.dash} {meaning}")
    else:
        found.append(fit(Text(f"      {meaning}"), width))
    if time_left and cell_len(line.plain) + len(time_left) + 2 <= width:
        line.append(time_left.rjust(width - cell_len(line.plain)))
    return [*(fit(part, width) for part in found), *wrap(Text(advice), width, advice_lines)]


def _headline_words(page: Page) -> tuple[str, str, str, str, str]:
    """Mark, style, name, meaning and advice of the verdict."""
    text = text_of(page.run.verdict)
    name = plain(page.run.verdict, 24) or "BLIND"
    advice = f"do: {plain((headline(page) or {}).get('advice') or text.do[0], 400)}"
    if page.stale:
        check = "do: see whether the sentinel and the way to it are alive; the job trains on without it"
        return "[??]", UNKNOWN, f"NOT KNOWN, last seen {name}", "below is the last picture that arrived", check
    if not text.is_known:
        return "[??]", UNKNOWN, f"{name}, health NOT KNOWN", missing.line(name, page.run.history, run=page.run), advice
    if name == "HEALTHY":
        return "[ok]", f"bold {GOOD}", name, text.line, "do: nothing; this says nothing about learning"
    return "[!!]", BAD, name, text.line, advice


def finding_name(finding: Mapping[str, Json]) -> str:
    """Verdict, kind, state, since when, how sure; one line."""
    kind = plain(finding.get("kind") or "", 30)
    confidence = number(finding, "confidence")
    return (
        f"{plain(finding.get('verdict'), 24)}{f' ({kind})' if kind else ''} {plain(finding.get('state'), 14)}, "
        f"since step {plain(finding.get('since_step'), 12)}"
        + (f", {100 * confidence:.0f} % sure" if math.isfinite(confidence) else "")
        + (f", {what}" if (what := asked(finding)) else "")
    )


def _finding_lines(page: Page, finding: Mapping[str, Json], width: int, *, is_short: bool) -> list[Text]:
    evidence = finding.get("evidence")
    numbers = (
        ", ".join(f"{plain(k, 30)} {word(v)}" for k, v in evidence.items()) if isinstance(evidence, Mapping) else ""
    )
    mark = "[!!] " if text_of(str(finding.get("verdict"))).is_known else "[??] "
    mark += "catastrophic " if finding.get("catastrophic") is True else ""
    line = Text().append(mark, style=WARN)
    line.append(finding_name(finding), style=TITLE)
    if numbers:
        line.append(f"; {numbers}")
    advice = plain(finding.get("advice") or text_of(str(finding.get("verdict"))).do[0], 400)
    if finding is headline(page):
        return [fit(line, width)]
    return [fit(line, width), *wrap(Text(f"     do: {advice}"), width, 1 if is_short else 2)]
