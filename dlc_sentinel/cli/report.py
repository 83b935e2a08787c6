"""report: the post-mortem of a recorded run, as a page, a picture, Markdown; one run, or two compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import screen, settings
from dlc_sentinel.cli.judge import RunName, others
from dlc_sentinel.plaintext import plain

MAX_BYTES = 5 * 10**6
PNG_WIDTH = 980


def report(
    path: Annotated[Path, typer.Argument(metavar="A", help="A tape folder, a .jsonl or a .jsonl.gz file.")],
    other: Annotated[Path | None, typer.Argument(metavar="[B]", help="A second one to compare with.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    png: Annotated[bool, typer.Option("--png", help="The main figure, too; needs chromium.")] = False,
    dark: Annotated[bool, typer.Option("--dark", help="The picture on a dark ground.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for an issue tracker, too.")] = False,
    run: RunName = None,
    run_b: Annotated[str | None, typer.Option("--run-b", metavar="NAME", help="Which run of B; else the worst.")] = (
        None
    ),
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    as_json: settings.AsJson = False,
) -> None:
    """Write a post-mortem that opens anywhere, offline.

    Timeline, verdicts with evidence, curves, what was sent and what it did, worst tokens, versions, settings: one HTML
    file without scripts. A and B may be one tape, with --run and --run-b. Files written are named on stdout.
    """
    from dlc_sentinel.offline.postmortem import gather
    from dlc_sentinel.report import html
    from dlc_sentinel.report import markdown as marked

    chosen = settings.load(config, sets)
    first = gather(path, chosen.config, chosen.origins, run)
    if run is None and first.report["other_runs"]:
        screen.say(f"this is run {plain(first.run, 60)}{others(first.report['other_runs'])}")
    second = None
    if other is not None or run_b is not None:
        second = gather(other or path, chosen.config, chosen.origins, run_b)
    written = [_write(out, html.page(first, second))]
    if markdown:
        written.append(_write(out.with_suffix(".md"), marked.text(first, second)))
    if png:
        written.append(_picture(out.with_suffix(".png"), first, second, dark=dark))
    if as_json:
        screen.data_json({"verdict": first.verdict.name, "run": first.run, "files": [str(file) for file in written]})
    else:
        for file in written:
            screen.data(str(file))


def _write(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    if len(text.encode()) > MAX_BYTES:
        screen.say(f"{file} is larger than {MAX_BYTES} bytes")
    return file


def _picture(file: Path, first: object, second: object, *, dark: bool) -> Path:
    from dlc_sentinel import browser
    from dlc_sentinel.report import figure, html
    from dlc_sentinel.report.story import Story

    assert isinstance(first, Story)
    svg = figure.two(first, second) if isinstance(second, Story) else figure.one(first)
    if not svg:
        screen.say(f"{file} is not written: no step was closed")
        return file
    browser.shoot(html.picture_page(svg, dark=dark), file, PNG_WIDTH, figure.height(svg) + 24, scale=2.0)
    return file
