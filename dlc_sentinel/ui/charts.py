"""Charts of text cells: history charts with a floor line, and bars with a half mark. Pure, no colour needed to read.

Shapes carry the meaning: a full block is a value, a hatched one a value that proves nothing, a dot is no data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

GOOD = "cyan"
WARN = "bold yellow"
BAD = "bold #ffffff on #aa3377"
UNKNOWN = "bold reverse"
DIM = "dim"
TITLE = "bold"

_TALL = 4


@dataclass(frozen=True, slots=True)
class Glyphs:
    rise: str
    """From just above empty to a full cell, for columns that grow upwards."""
    grow: str
    """The same for bars that grow to the right."""
    hatch: str
    threshold: str
    """A full cell at the floor's height: the floor stays visible through the columns."""
    line: str
    mark: str
    gap: str
    rule: str
    pointer: str
    dash: str
    arrow: str
    dot: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "▒", "▓", "┈", "│", "·", "─", "►", "—", "→", "·")
ASCII = Glyphs("_:#", "#", "?", "=", "-", "|", ".", "-", ">", "-", "->", "|")


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def scale_top(values: Sequence[float], floor: float) -> float:
    """Upper end of a chart's scale: every value fits, and the floor line lies inside; NaN without data."""
    shown = finite(values)
    return max(*shown, *(1.25 * f for f in finite([floor])), 1e-12) if shown else math.nan


def chart(values: Sequence[float], width: int, height: int, floor: float, glyphs: Glyphs, style: str) -> list[Text]:
    """`height` lines of `width` cells, the newest value at the right; linear from 0 to `scale_top`.

    The floor is a dashed line behind the columns. A missing value (NaN) is a dot at the bottom, a true 0 is empty.
    """
    shown = list(values)[-width:]
    top = scale_top(shown, floor)
    floor_row = math.floor(floor / top * height) if math.isfinite(floor) and math.isfinite(top) else -1
    lines: list[Text] = []
    for row in reversed(range(height)):
        line = Text(no_wrap=True)
        for value in [None] * (width - len(shown)) + shown:
            line.append(*_cell(value, top, row, height, floor_row, glyphs, style))
        lines.append(line)
    return lines


def _cell(
    value: float | None, top: float, row: int, height: int, floor_row: int, glyphs: Glyphs, style: str
) -> tuple[str, str]:
    empty = (glyphs.line, DIM) if row == floor_row else (" ", "")
    if value is None:
        return empty
    if not math.isfinite(value):
        return (glyphs.gap, DIM) if row == 0 else empty
    filled = min(max(value / top, 0.0), 1.0) * height - row
    if filled <= 0.0:
        return empty
    level = min(math.ceil(filled * len(glyphs.rise)), len(glyphs.rise))
    if row == floor_row and level == len(glyphs.rise) and height >= _TALL:
        return glyphs.threshold, style
    return glyphs.rise[level - 1], style


def bar(value: float, width: int, glyphs: Glyphs, style: str, *, is_trusted: bool, mark: float = 0.5) -> Text:
    """A bar of `width` cells for a ratio in 0..1, with a tick at `mark`; hatched where it is not trusted."""
    cells = [(" ", "")] * width
    if math.isfinite(value):
        filled = min(max(value, 0.0), 1.0) * width
        whole = int(filled)
        block = glyphs.grow[-1] if is_trusted else glyphs.hatch
        cells[:whole] = [(block, style)] * whole
        part = math.floor((filled - whole) * len(glyphs.grow))
        if is_trusted and part > 0 and whole < width:
            cells[whole] = (glyphs.grow[part - 1], style)
    at = min(int(mark * width), width - 1)
    # The tick stays visible through a bar: it is what the bar is read against.
    cells[at] = (glyphs.mark, f"{style} reverse" if is_trusted and cells[at][0] != " " else "bold")
    line = Text(no_wrap=True)
    for cell in cells:
        line.append(*cell)
    return line
