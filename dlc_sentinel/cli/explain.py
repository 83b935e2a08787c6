"""explain: what a verdict means, from the words of verdicts.py."""

from __future__ import annotations

import difflib
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from dlc_sentinel.cli import screen, settings
from dlc_sentinel.verdicts import BY_NAME, VERDICTS, VerdictText

WIDTH, MAX_WIDTH = 80, 100
"""Columns where no terminal says its own; the widest text that is still read with ease."""


def explain(
    verdict: Annotated[str | None, typer.Argument(metavar="[VERDICT]", help="Name of a verdict; none: all.")] = None,
    as_json: settings.AsJson = False,
) -> None:
    """Say what a verdict means. How sure it is, what to check first, what to do."""
    if verdict is None:
        if as_json:
            screen.data_json([asdict(text) for text in VERDICTS])
        else:
            screen.table(("verdict", "in one line"), [(text.name, text.line) for text in VERDICTS])
        return
    text = _named(verdict)
    if as_json:
        screen.data_json(asdict(text))
    else:
        screen.data(_page(text))


def _named(verdict: str) -> VerdictText:
    """Raises: typer.BadParameter with the nearest name."""
    name = verdict.upper().replace("-", "_")
    if name in BY_NAME:
        return BY_NAME[name]
    near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(BY_NAME)}"
    raise typer.BadParameter(f"no verdict {verdict!r}; {hint}")


def _page(text: VerdictText) -> str:
    parts = [f"{text.name}: {text.line}", "", text.means, "", f"How sure: {text.how_sure}", "", "Check first:"]
    parts += [f"  {number}. {line}" for number, line in enumerate(text.check_first, 1)]
    parts += ["", "Do:"] + [f"  - {line}" for line in text.do]
    parts += ["", f"Ignore it when: {text.ignore_when}"]
    columns = min(screen.width() or WIDTH, MAX_WIDTH)
    indents = ["     " if line[:2] == "  " else "" for line in parts]
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=indent) for line, indent in zip(parts, indents, strict=True)
    )
