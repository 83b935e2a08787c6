"""What every part of the view may read, and how numbers and lines are written in all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from dlc_sentinel.catalog import OPEN_STATES, number
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json, RunSnapshot
from dlc_sentinel.ui.charts import DIM, TITLE, Glyphs
from dlc_sentinel.verdicts import text_of


@dataclass(frozen=True, slots=True)
class Page:
    """What every section may read; see view.RunView."""

    run: RunSnapshot
    now_s: float
    stale: str
    others: str
    glyphs: Glyphs

    @property
    def is_trusted(self) -> bool:
        """False where the numbers prove nothing: BLIND, UNWIRED, an old picture, no usable split."""
        basis = (self.run.step or {}).get("basis")
        return text_of(self.run.verdict).is_known and not self.stale and basis not in ("mixed", "none")


def headline(page: Page) -> Mapping[str, Json] | None:
    """The open finding behind the run's verdict: the header carries its advice."""
    is_it = (f for f in page.run.findings if f.get("verdict") == page.run.verdict and f.get("state") in OPEN_STATES)
    return next(is_it, None)


def forecast(page: Page) -> str:
    """How long until the action horizon's ESS is below one half; "" where nothing is forecast."""
    if number(page.run.step, "lag_ess", str(page.run.action_horizon)) < 0.5:
        return "ESS is below 1/2 now"
    low, mid, high = (number(page.run.step, "forecast_steps", bound) for bound in ("low", "mid", "high"))
    if not math.isfinite(mid):
        return ""
    span = ""
    if math.isfinite(low):
        until = f"to {short(high, 2)}" if math.isfinite(high) else "at the earliest"
        span = f" ({short(low, 2)} {until})"
    return f"about {short(mid, 2)} steps until ESS < 1/2{span}"


def title(page: Page, text: str, width: int) -> Text:
    trust = "" if page.is_trusted or not text.startswith(("lag", "mismatch", "discrepancy")) else " NOT TRUSTED"
    line = Text(f"{page.glyphs.rule * 2} {text}{trust} ", style=TITLE, no_wrap=True)
    return fit(line.append(page.glyphs.rule * max(width - cell_len(line.plain), 0), style=DIM), width)


def fit(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis")
    return line


def wrap(text: Text, width: int, num_lines: int) -> list[Text]:
    """The text on at most `num_lines` lines; what does not fit ends in an ellipsis."""
    found: list[Text] = []
    rest, indent = text.plain, ""
    while rest.strip() and len(found) < num_lines:
        is_last = len(found) == num_lines - 1
        cut = (
            len(rest)
            if is_last or cell_len(indent + rest) <= width
            else max(rest.rfind(" ", 0, width - len(indent)), 1)
        )
        found.append(fit(Text(indent + rest[:cut]), width))
        rest, indent = rest[cut:].strip(), "    " if text.plain.startswith("do:") else "         "
    return found


def cut(found: list[Text], num_lines: int, width: int) -> list[Text]:
    """At most `num_lines`; the last one says how many more there are."""
    if len(found) <= num_lines:
        return found
    if num_lines <= 2:
        return found[:num_lines]
    num_more = len(found) - num_lines + 1
    return [*found[: num_lines - 1], fit(Text(f"... {num_more} more lines", style=DIM), width)]


def word(value: Json) -> str:
    """A number in three digits, a list of them, or inert text."""
    if isinstance(value, (list, tuple)):
        return " to ".join(map(word, value)) if len(value) == 2 else ", ".join(map(word, value[:8]))
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(key, 20)} {word(item)}" for key, item in list(value.items())[:8])
    return short(value) if isinstance(value, float) else "-" if value is None else plain(value, 40)


def short(value: float, digits: int = 3) -> str:
    """Three significant digits; a dash where nothing is known."""
    return f"{value:.{digits}g}" if not math.isnan(value) else "-"


def count(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= size:
            return f"{value / (1e3 if suffix == ' k' else size):.3g}{suffix}"
    return f"{value:,.0f}"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:.1f} MiB"


def ago(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0.0):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.0f} h ago"
