"""What a key opens: one finding with all its evidence, the worst sequences token by token, the history, the help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from dlc_sentinel.catalog import number
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.ui import browse
from dlc_sentinel.ui.browse import Place
from dlc_sentinel.ui.charts import DIM, GOOD, TITLE, WARN
from dlc_sentinel.ui.head import finding_name
from dlc_sentinel.ui.page import Page, fit, short, title, word
from dlc_sentinel.verdicts import text_of

_DARK_NATS = 8.0
_LABEL = 14
_MAX_STRIPS = 8


def lines(page: Page, place: Place, width: int, room: int) -> list[Text]:
    """At most `room` lines of what is opened, from `place.scroll` on; the last one says how many are below."""
    found = list(_sights(page, place, width))
    first = min(place.scroll, max(len(found) - room, 0))
    shown = found[first : first + room]
    num_below = len(found) - first - len(shown)
    if num_below and shown:
        shown[-1] = Text(f"... {num_below + 1} more lines below (j)", style=DIM)
    return [fit(line, width) for line in shown]


def _sights(page: Page, place: Place, width: int) -> Iterator[Text]:
    match place.sight:
        case "finding":
            yield from _finding(page, place.index, width)
        case "worst":
            yield title(page, "worst sequences of the newest steps", width)
            yield from _worst(page, width)
        case "history":
            yield title(page, "history, newest first", width)
            yield from _history(page)
        case _:
            yield title(page, "keys", width)
            yield from (Text(f"{keys:<16}{what}") for keys, what in browse.KEYS)


def _finding(page: Page, index: int, width: int) -> Iterator[Text]:
    findings = page.run.findings
    if index >= len(findings):
        yield title(page, "this finding is no longer here", width)
        return
    finding = findings[index]
    text = text_of(plain(finding.get("verdict"), 24))
    yield title(page, f"finding {index + 1} of {len(findings)}", width)
    yield Text(finding_name(finding), style=TITLE)
    yield from _folded(text.means, width)
    yield from _folded(f"do: {plain(finding.get('advice') or text.do[0], 400)}", width, "    ")
    yield title(page, "evidence", width)
    evidence = finding.get("evidence")
    pairs = list(evidence.items()) if isinstance(evidence, Mapping) else []
    yield from _pairs([(plain(key, 30), word(value)) for key, value in pairs], width)
    yield from worst_table(page)
    yield title(page, "how sure", width)
    yield from _folded(text.how_sure, width)
    yield title(page, "check first", width)
    for line in text.check_first:
        yield from _folded(f"- {line}", width, "  ")
    yield title(page, "ignore it when", width)
    yield from _folded(text.ignore_when, width)


def _pairs(pairs: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    """Key and value, as many columns as fit."""
    if not pairs:
        yield Text("none given", style=DIM)
        return
    cell = max(max(len(key) + len(value) for key, value in pairs) + 5, 24)
    columns = max(width // cell, 1)
    for row in range(0, len(pairs), columns):
        line = Text()
        for key, value in pairs[row : row + columns]:
            line.append(f"{key} ", style=DIM).append(value).append(" " * max(cell - len(key) - len(value) - 1, 1))
        yield line


def worst_table(page: Page) -> Iterator[Text]:
    """The worst token of each kept sequence: where it is, what each side thought of it; no line where none is kept."""
    if not page.run.worst:
        return
    yield Text("worst tokens    (p = probability)   w shows them in their sequence", style=TITLE)
    yield Text(f"{'step':>6} {'token':>6} {'id':>7} {'p engine':>9} {'p then':>9} {'p now':>9} {'disc.':>8} {'lag':>8}"
               "  sequence", style=DIM)  # fmt: skip
    for strip in page.run.worst[:_MAX_STRIPS]:
        engine, gen, cur = (_at(strip, key) for key in ("engine", "gen", "cur"))
        token = _at(strip, "tokens")
        yield Text(
            f"{plain(strip.get('step'), 6):>6} {plain(strip.get('at'), 6):>6} {short(token, 6):>7} "
            f"{_probability(engine):>9} {_probability(gen):>9} {_probability(cur):>9} "
            f"{short(gen - engine):>8} {short(cur - gen):>8}  {plain(strip.get('id'), 40)}"
        )


def _worst(page: Page, width: int) -> Iterator[Text]:
    if not page.run.worst:
        yield Text("none kept: no sequence with two streams has come yet", style=DIM)
        return
    yield Text("higher: less probable, or a larger difference; v: the worst token", style=DIM)
    for strip in page.run.worst[:_MAX_STRIPS]:
        yield Text(
            f"step {plain(strip.get('step'), 8)}, sequence {plain(strip.get('id'), 60)}: token "
            f"{plain(strip.get('at'), 8)} of {plain(strip.get('length'), 8)}, {short(number(strip, 'score'))} nats, "
            f"version {plain(strip.get('version'), 12)}",
            style=TITLE,
        )
        yield from _strip(page, strip, width)


def _strip(page: Page, strip: Mapping[str, Json], width: int) -> Iterator[Text]:
    num = len(strip.get("cur") or strip.get("engine") or ())
    worst = _worst_place(strip)
    room = max(width - _LABEL, 8)
    start = max(min(worst - room // 2, num - room), 0)
    shown = range(start, min(start + room, num))
    yield Text(" " * _LABEL + "".join("v" if i == worst else " " for i in shown), style=TITLE)
    for label, key in (("engine", "engine"), ("trainer then", "gen"), ("trainer now", "cur")):
        values = [-_at(strip, key, i) / _DARK_NATS for i in shown]
        yield _row(page, label, values, GOOD)
    split = (("discrepancy", "gen", "engine", GOOD), ("lag", "cur", "gen", WARN))
    for label, later, earlier, style in split if strip.get("gen") else (("total", "cur", "engine", WARN),):
        sizes = [abs(_at(strip, later, i) - _at(strip, earlier, i)) for i in shown]
        top = max((size for size in sizes if math.isfinite(size)), default=0.0) or 1.0
        yield _row(page, f"|{label}|", [size / top for size in sizes], style)


def _row(page: Page, label: str, shares: Sequence[float], style: str) -> Text:
    """One cell a token; a dot where nothing is known."""
    rise = page.glyphs.rise
    line = Text().append(f"{label:<{_LABEL}}", style=DIM)
    for share in shares:
        if math.isfinite(share):
            line.append(rise[min(int(min(max(share, 0.0), 1.0) * len(rise)), len(rise) - 1)], style=style)
        else:
            line.append(page.glyphs.gap, style=DIM)
    return line


def _history(page: Page) -> Iterator[Text]:
    if not page.run.events:
        yield Text("nothing to tell", style=DIM)
    for event in reversed(page.run.events):
        line = Text().append(f"{event.step if event.step >= 0 else '':>6} ", style=DIM)
        line.append(f"{event.kind:<9} ", style=WARN if event.level != "INFO" else "")
        yield line.append(plain(event.text, 300))


def _at(strip: Mapping[str, Json], key: str, i: int | None = None) -> float:
    """The value of the strip's token i (default: its worst one); NaN where none is known."""
    values = strip.get(key)
    place = _worst_place(strip) if i is None else i
    return number(values[place]) if isinstance(values, Sequence) and 0 <= place < len(values) else math.nan


def _worst_place(strip: Mapping[str, Json]) -> int:
    """Where in the window the worst token is; -1 where that is not known."""
    place = number(strip, "at") - number(strip, "first")
    return int(place) if math.isfinite(place) else -1


def _probability(logprob: float) -> str:
    return short(math.exp(min(logprob, 0.0)), 2) if math.isfinite(logprob) else "-"


def _folded(text: str, width: int, indent: str = "") -> Iterator[Text]:
    """The whole text, on as many lines as it needs."""
    line = ""
    for piece in plain(text, 2000).split():
        if line and len(line) + 1 + len(piece) > width:
            yield Text(line)
            line = indent + piece
        else:
            line = f"{line} {piece}" if line else piece
    if line:
        yield Text(line)
