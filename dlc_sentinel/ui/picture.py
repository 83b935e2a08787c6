"""The terminal view as a picture file, for documents: SVG by rich, PNG by a headless browser."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from dlc_sentinel import browser
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import RunSnapshot
from dlc_sentinel.ui.view import view

_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# A picture in a document must load nothing from elsewhere: the web font of rich's template is left out.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", _FONTS
)


def svg(run: RunSnapshot, *, width: int = 100, height: int = 30, now_s: float = math.nan) -> str:
    """The view as SVG text, `width` x `height` cells. Same snapshot, same text."""
    console = Console(
        width=width, height=height, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor",
        legacy_windows=False, _environ={},
    )  # fmt: skip
    console.print(view(run, now_s=now_s), height=height)
    return console.export_svg(title=f"dlc-sentinel watch: {plain(run.run, 60)}", code_format=FORMAT, unique_id="dlc")


def write(run: RunSnapshot, path: str | Path, *, width: int = 100, height: int = 30, now_s: float = math.nan) -> None:
    """Writes the picture; the ending decides: .svg or .png. Raises: OSError where a PNG has no browser."""
    path, text = Path(path), svg(run, width=width, height=height, now_s=now_s)
    if path.suffix == ".svg":
        path.write_text(text, encoding="utf-8")
    elif path.suffix == ".png":
        _write_png(text, path)
    else:
        raise ValueError(f"{path}: got ending {path.suffix!r}, wanted .svg or .png")


def _write_png(text: str, path: Path) -> None:
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None
    width, height = (math.ceil(float(side)) for side in size.groups())
    page = f"<!doctype html><meta charset=utf-8><style>body{{margin:0}}</style>{text}"
    browser.shoot(page, path, width, height)
