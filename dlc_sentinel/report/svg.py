"""Line charts as SVG text: panels over one axis of steps, labels at the line ends, no script, themed by CSS classes.

Every number is written with few digits and every text is escaped; what is not finite is a gap in the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from dlc_sentinel.plaintext import plain

MAX_POINTS = 500
LINE_PX = 15.0
TOP_PX = 26.0
FOOT_PX = 22.0
GAP_PX = 14.0

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """`style` is a CSS class of the line (s-1 ...); `band`: (step, low, high), drawn behind it."""

    label: str
    points: Points
    style: str
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `rule`: a horizontal line at a value, with a word; ends: limits of y, else from the data."""

    title: str
    series: Sequence[Series]
    scale: Literal["linear", "log"] = "linear"
    rule: tuple[float, str] | None = None
    ends: tuple[float, float] | None = None
    height: float = 120.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step through all panels, with a letter on top and a text for the pointer."""

    step: float
    letter: str
    text: str
    style: str = "mark"


@dataclass(frozen=True, slots=True)
class Bar:
    """Spans of steps in one row above the panels, with a name."""

    spans: Sequence[tuple[float, float]]
    text: str
    style: str = "span"


@dataclass(frozen=True, slots=True)
class Frame:
    """Where things are: width of the picture, of the margins, limits of the step axis."""

    width: float
    first: float
    last: float
    left: float = 46.0
    right: float = 112.0

    def x(self, step: float) -> float:
        inner = self.width - self.left - self.right
        return self.left + inner * (step - self.first) / max(self.last - self.first, 1.0)


@dataclass(slots=True)
class _Paper:
    """SVG elements so far and how far down they reach."""

    frame: Frame
    y: float = 0.0
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start") -> None:
        shown = escape(plain(words, 200))
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{shown}</text>')

    def line(self, x0: float, y0: float, x1: float, y1: float, style: str) -> None:
        self.parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{style}"/>')


def figure(
    panels: Sequence[Panel], *, width: float, marks: Sequence[Mark] = (), bars: Sequence[Bar] = (), title: str = ""
) -> str:
    """The panels under one another as one <svg>; empty text where no panel has a finite value."""
    shown = [panel for panel in panels if any(math.isfinite(y) for line in panel.series for _, y in line.points)]
    steps = [x for panel in shown for line in panel.series for x, _ in line.points]
    if not steps:
        return ""
    narrow = width < 600
    frame = Frame(width, min(steps), max(steps), right=100.0 if narrow else 112.0)
    paper = _Paper(frame)
    _bars(paper, bars)
    top = paper.y + (LINE_PX + 3 if marks else 0.0)
    paper.y = top
    for panel in shown:
        _panel(paper, panel)
    _marks(paper, marks, top, paper.y - GAP_PX)
    _axis(paper)
    name = escape(plain(title or "curves", 200))
    return (
        f'<svg class="figure" viewBox="0 0 {width:.0f} {paper.y:.0f}" role="img" aria-label="{name}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(paper.parts)}</svg>'
    )


def thinned(points: Points, most: int = MAX_POINTS) -> Points:
    """At most about `most` points: the smallest and the largest of each stretch, so that no peak is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), size):
        stretch = points[at : at + size]
        known = [point for point in stretch if math.isfinite(point[1])]
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else {stretch[0]}
        kept += sorted(ends)
    return kept


def _panel(paper: _Paper, panel: Panel) -> None:
    frame = paper.frame
    paper.text(frame.left, paper.y + 15, panel.title, "title")
    top, bottom = paper.y + TOP_PX, paper.y + TOP_PX + panel.height
    low, high = panel.ends or _ends(panel)
    is_log = panel.scale == "log"

    def at(value: float) -> float:
        if is_log:
            share = (math.log(max(value, low)) - math.log(low)) / (math.log(high) - math.log(low))
        else:
            share = (value - low) / (high - low)
        return bottom - panel.height * min(max(share, 0.0), 1.0)

    right = frame.width - frame.right
    for tick in _log_ticks(low, high) if is_log else _ticks(low, high):
        paper.line(frame.left, at(tick), right, at(tick), "grid")
        paper.text(frame.left - 6, at(tick) + 4, _short(tick), "tick", "end")
    if panel.rule is not None:
        paper.line(frame.left, at(panel.rule[0]), right, at(panel.rule[0]), "rule")
    ends: list[tuple[float, str, str]] = []
    if panel.rule is not None and panel.rule[1]:
        ends.append((at(panel.rule[0]), panel.rule[1], "tick"))
    for line in panel.series:
        pixels = [(frame.x(x), at(y) if math.isfinite(y) else y) for x, y in thinned(line.points)]
        paper.parts += _band(frame, line, at)
        paper.parts += _paths(pixels, line.style)
        last = next((y for _, y in reversed(pixels) if math.isfinite(y)), None)
        if last is not None:
            ends.append((last, line.label, f"end {line.style}"))
    for y, words, style in _spread(ends, top, bottom):
        paper.text(right + 8, y + 4, words, style)
    paper.y = bottom + GAP_PX


def _band(frame: Frame, line: Series, at: object) -> list[str]:
    assert callable(at)
    known = [(x, low, high) for x, low, high in line.band if math.isfinite(low) and math.isfinite(high)]
    if len(known) < 2 or len(known) > MAX_POINTS:
        return []
    upper = " ".join(f"{frame.x(x):.1f},{at(high):.1f}" for x, _, high in known)
    lower = " ".join(f"{frame.x(x):.1f},{at(low):.1f}" for x, low, _ in reversed(known))
    return [f'<polygon points="{upper} {lower}" class="band {line.style}"/>']


def _paths(pixels: Points, style: str) -> list[str]:
    """One path, with a gap wherever a value is missing; a value alone between gaps is a dot."""
    path, found, previous = "", [], False
    for i, (x, y) in enumerate(pixels):
        if not math.isfinite(y):
            previous = False
            continue
        alone = not previous and (i + 1 == len(pixels) or not math.isfinite(pixels[i + 1][1]))
        if alone:
            found.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" class="dot {style}"/>')
        path += f"{'L' if previous else 'M'}{x:.1f} {y:.1f}"
        previous = True
    return [f'<path d="{path}" class="curve {style}"/>', *found] if path else []


def _spread(ends: list[tuple[float, str, str]], top: float, bottom: float) -> list[tuple[float, str, str]]:
    """The labels pushed apart so that none covers another, as near to their lines as that allows."""
    placed: list[tuple[float, str, str]] = []
    for y, words, style in sorted(ends):
        placed.append((max(y, placed[-1][0] + LINE_PX if placed else top), words, style))
    over = max((placed[-1][0] if placed else 0.0) - bottom, 0.0)
    limit = math.inf
    for i in reversed(range(len(placed))):
        y, words, style = placed[i]
        y = min(y, limit) if limit < math.inf else y - over
        placed[i] = (y, words, style)
        limit = y - LINE_PX
    return placed


def _bars(paper: _Paper, bars: Sequence[Bar]) -> None:
    frame = paper.frame
    right = frame.width - frame.right
    for bar in bars:
        name = escape(plain(bar.text, 200))
        for first, last in bar.spans:
            x0 = min(max(frame.x(first), frame.left), right - 3)
            x1 = min(frame.x(last), right)
            paper.parts.append(
                f'<rect x="{x0:.1f}" y="{paper.y + 3:.1f}" width="{max(x1 - x0, 3):.1f}" height="10" rx="2" '
                f'class="{bar.style}"><title>{name}, steps {first:.0f} to {last:.0f}</title></rect>'
            )
        paper.text(right + 8, paper.y + 12, bar.text, "tick")
        paper.y += LINE_PX + 2


def _marks(paper: _Paper, marks: Sequence[Mark], top: float, bottom: float) -> None:
    free_from = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.step):
        x = paper.frame.x(mark.step)
        paper.parts.append(
            f'<g class="{mark.style}"><line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
            f"<title>{escape(plain(mark.text, 200))}</title></g>"
        )
        if x - free_from >= 10.0:
            paper.text(x, top - 2, mark.letter, f"letter {mark.style}", "middle")
            free_from = x


def _axis(paper: _Paper) -> None:
    frame = paper.frame
    num = 4 if frame.width < 600 else 8
    y = paper.y + 4
    for tick in _ticks(frame.first, frame.last, num):
        if tick == int(tick):
            paper.text(frame.x(tick), y, f"{tick:.0f}", "tick", "middle")
    paper.text(frame.width - frame.right + 8, y, "step", "tick")
    paper.y += FOOT_PX


def _ends(panel: Panel) -> tuple[float, float]:
    values = [y for line in panel.series for _, y in line.points if math.isfinite(y)]
    if panel.rule is not None and math.isfinite(panel.rule[0]):
        values.append(panel.rule[0])
    if panel.scale == "log":
        above = [value for value in values if value > 0.0]
        if not above:
            return 1e-6, 1.0
        low = 10 ** math.floor(math.log10(max(min(above), max(above) * 1e-6)))
        return low, max(10 ** math.ceil(math.log10(max(above) * 1.0001)), low * 10)
    low, high = min(values), max(values)
    if low >= 0.0 and low < 0.5 * high:
        low = 0.0
    pad = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return (low - pad if low else 0.0), high + pad


def _ticks(low: float, high: float, num: int = 4) -> list[float]:
    span = high - low
    if not span > 0.0:
        return [low]
    raw = span / num
    base = 10.0 ** math.floor(math.log10(raw))
    size = next(base * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if base * factor >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    every = max(math.ceil((last - first) / 4), 1)
    return [10.0**exponent for exponent in range(first, last + 1, every)]


def _short(value: float) -> str:
    if value and (abs(value) < 1e-2 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:g}"
