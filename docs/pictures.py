"""The pictures of the README, taken of a recorded demo: terminal, page and report, light and dark, desktop and phone.

    python -m dlc_sentinel demo --out out/demo && python docs/pictures.py out/demo/tape docs/img

Needs chromium and Pillow. A page that is wider than its window is refused.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

from PIL import Image
from rich.console import Console

from dlc_sentinel import browser
from dlc_sentinel.cli.watch import last_picture
from dlc_sentinel.config import Config
from dlc_sentinel.offline.postmortem import gather
from dlc_sentinel.records import Snapshot
from dlc_sentinel.report import html
from dlc_sentinel.ui import picture
from dlc_sentinel.ui.browse import Place
from dlc_sentinel.ui.view import view
from dlc_sentinel.web.sink import PageSink

SIZES = {"desktop": (1200, 1000, 1.0), "phone": (390, 844, 1.5)}
COLOURS = 128
RUN = "unwatched"


def main(tape: Path, out: Path) -> None:
    """Writes all pictures into `out` and prints their names."""
    out.mkdir(parents=True, exist_ok=True)
    snapshot = last_picture(tape, Config())
    terminal(snapshot, out)
    pages(snapshot, out)
    report(tape, out)
    for path in sorted(out.iterdir()):
        sys.stdout.write(f"{path}  {path.stat().st_size / 1e3:.0f} kB\n")


def terminal(snapshot: Snapshot, out: Path) -> None:
    """The view at both sizes, and one finding opened, as SVG."""
    run = next(run for run in snapshot.runs if run.run == RUN)
    for name, width, height, place in (
        ("watch-80x24", 80, 24, Place()),
        ("watch-200x60", 200, 60, Place()),
        ("watch-finding", 100, 34, Place("finding")),
        ("watch-worst", 100, 34, Place("worst")),
    ):
        console = Console(
            width=width, height=height, file=io.StringIO(), record=True, force_terminal=True,
            color_system="truecolor", legacy_windows=False, _environ={},
        )  # fmt: skip
        console.print(view(run, now_s=snapshot.t_s, place=place, has_keys=True), height=height)
        svg = console.export_svg(title=f"dlc-sentinel watch: {RUN}", code_format=picture.FORMAT, unique_id="dlc")
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")


def pages(snapshot: Snapshot, out: Path) -> None:
    """The page as a browser shows it, of the run that went wrong."""
    sink = PageSink()
    sink.publish(replace(snapshot, runs=tuple(run for run in snapshot.runs if run.run == RUN)))
    try:
        shoot(sink.url, "document.querySelector('canvas') && document.querySelector('svg.strip')", "page", out)
    finally:
        sink.close()


def report(tape: Path, out: Path) -> None:
    """The post-mortem of the same run, and the two arms compared."""
    lost, watched = (gather(tape, Config(), run=name) for name in (RUN, "watched"))
    for name, text in (("report", html.page(lost)), ("compared", html.page(watched, lost))):
        file = out / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        shoot(file.resolve().as_uri(), "document.querySelector('svg.figure')", name, out)
        file.unlink()


def shoot(address: str, ready: str, name: str, out: Path) -> None:
    """Four pictures of one address."""
    with browser.tab(name) as tab:
        for size, (width, height, scale) in SIZES.items():
            for theme in ("light", "dark"):
                tab.open(address, width, height, scale=scale, dark=theme == "dark")
                tab.until(ready)
                wide = tab.run("document.documentElement.scrollWidth")
                assert wide <= width, f"{name} is {wide} pixels wide at {width}"
                image = Image.open(io.BytesIO(tab.picture())).convert("RGB").quantize(COLOURS)
                image.save(out / f"{name}-{size}-{theme}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
