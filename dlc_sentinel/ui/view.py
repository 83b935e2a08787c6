"""One run as a picture of text: pure, from RunSnapshot to a rich renderable that fits the width and height it gets.

Reading order = order of need: what is wrong, what to do, how long is left; then the evidence; then what was sent.
All text from outside passes `plain` and is put into Text objects: neither escapes nor markup in it are obeyed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dlc_sentinel.records import RunSnapshot
from dlc_sentinel.ui import detail, head, numbers, traffic
from dlc_sentinel.ui.browse import FOOTER, START, Place
from dlc_sentinel.ui.charts import ASCII, DIM, UNICODE
from dlc_sentinel.ui.page import Page, fit

_WIDE = 120
_TWO_COLUMNS = 72
_MIN_WIDTH = 40
_NATURAL_HEIGHT = 44
_WORST = 8
"""Lines of the worst tokens on a screen that is wide and tall."""


@dataclass(frozen=True, slots=True)
class RunView:
    """The renderable. Every line is exactly as wide as the console; there are never more lines than its height.

    now_s: time of the snapshot, for ages (NaN = none shown);
    stale: says why the picture is old ("" = it is not); a stale picture is never shown as healthy.
    others: one line about other runs ("" = none); fills_screen: fit the console's height even where rich, which forgets
    the height of nested renderables, names none.
    place: what of the run is looked at; has_keys: the last line says which keys there are.
    """

    run: RunSnapshot
    now_s: float = math.nan
    stale: str = ""
    others: str = ""
    fills_screen: bool = False
    place: Place = START
    has_keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        glyphs = ASCII if options.ascii_only else UNICODE
        page = Page(self.run, self.now_s, self.stale, self.others, glyphs)
        height = options.height or (console.height if self.fills_screen else None)
        for line in self._lines(page, max(options.max_width, _MIN_WIDTH), height):
            if options.ascii_only:
                line.plain = line.plain.replace("…", "~").encode("ascii", "replace").decode()
            line.truncate(options.max_width, overflow="crop")
            yield line

    def _lines(self, page: Page, width: int, height: int | None) -> list[Text]:
        foot = [fit(Text(FOOTER, style=DIM), width)] if self.has_keys else []
        room = None if height is None else height - len(foot)
        if self.place.sight == "run":
            found = lines(page, width, room)
        else:
            top = head.header(page, width, advice_lines=1)
            found = top + detail.lines(page, self.place, width, max((room or _NATURAL_HEIGHT) - len(top), 1))
        if foot and room is not None:
            found = [*found[:room], *([Text()] * (room - len(found)))]
        return found + foot


def view(
    run: RunSnapshot,
    *,
    now_s: float = math.nan,
    stale: str = "",
    others: str = "",
    fills_screen: bool = False,
    place: Place = START,
    has_keys: bool = False,
) -> RunView:
    """The renderable for one run; see RunView."""
    return RunView(run, now_s, stale, others, fills_screen, place, has_keys)


def lines(page: Page, width: int, height: int | None) -> list[Text]:
    """The lines of the picture, at most `height` of them (None = as many as the content needs)."""
    room = height or _NATURAL_HEIGHT
    top = head.header(page, width, advice_lines=2 if room < 30 else 3)
    if width >= _WIDE:
        body = _wide(page, width, room - len(top))
    elif width >= _TWO_COLUMNS:
        body = _two_columns(page, width, room - len(top))
    else:
        body = _narrow(page, width, room - len(top))
    found = top + body
    if height is None:
        while found and not found[-1].plain.strip():
            found.pop()
        return found
    return found[:height]


def _two_columns(page: Page, width: int, room: int) -> list[Text]:
    left, right = _split(width, 2)
    figures = _beside([numbers.ladder(page, left), numbers.divergence(page, right)], (left, right))
    chart_height = min(max((room - len(figures) - 7) // 2, 1), 4) if page.run.history else 1
    terms = numbers.terms(page, width, chart_height)
    spare = room - len(figures) - len(terms)
    findings = head.findings(page, width, max(spare - 5, 1))
    num_bottom = max(spare - len(findings) - 1, 2)
    bottom = [traffic.commands(page, left, num_bottom), traffic.producers(page, right, num_bottom)]
    return terms + figures + findings + _beside(bottom, (left, right))


def _wide(page: Page, width: int, room: int) -> list[Text]:
    left, right = _split(width, 2)
    three = _split(width, 3)
    figures = _beside(
        [numbers.ladder(page, three[0]), numbers.divergence(page, three[1]), numbers.more(page, three[2])], three
    )
    chart_height = min(max((room - len(figures) - 12) // 2, 2), 14)
    charts = _beside([numbers.term(page, left, chart_height, name) for name in ("discrepancy", "lag")], (left, right))
    spare = room - len(charts) - len(figures)
    findings = head.findings(page, width, max(spare // 2, 2))
    worst = list(detail.worst_table(page))[:_WORST] if spare - len(findings) >= 2 * _WORST else []
    worst = [fit(line, width) for line in worst]
    num_bottom = max(spare - len(findings) - len(worst) - 1, 2)
    bottom = [
        traffic.commands(page, three[0], num_bottom),
        traffic.producers(page, three[1], num_bottom),
        traffic.events(page, three[2], num_bottom),
    ]
    return charts + figures + findings + worst + _beside(bottom, three)


def _narrow(page: Page, width: int, room: int) -> list[Text]:
    parts: Iterable[list[Text]] = (
        numbers.ladder(page, width),
        numbers.terms(page, width, 1),
        head.findings(page, width, 4),
        numbers.divergence(page, width),
        traffic.commands(page, width, 4),
        traffic.producers(page, width, 4),
    )
    return [line for part in parts for line in part]


def _split(width: int, num: int) -> tuple[int, ...]:
    """Widths of `num` columns with two cells between them."""
    free = width - 2 * (num - 1)
    return tuple(free // num + (1 if i < free % num else 0) for i in range(num))


def _beside(columns: Sequence[list[Text]], widths: Sequence[int]) -> list[Text]:
    """Columns of lines side by side."""
    found: list[Text] = []
    for row in range(max(len(column) for column in columns)):
        line = Text(no_wrap=True)
        for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
            cell = column[row].copy() if row < len(column) else Text()
            cell.truncate(width, overflow="ellipsis", pad=i < len(columns) - 1)
            line.append_text(cell)
            if i < len(columns) - 1:
                line.append("  ")
        found.append(line)
    return found
