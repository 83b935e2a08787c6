"""How every picture of the experiments looks: colours that the colour-blind tell apart, one way to save.

Colours: Okabe and Ito 2008. A colour always means the same arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.experiments.judge import BAND
from dlc_sentinel.records import F64

Axes: TypeAlias = Any
"""matplotlib has no types here."""
Figure: TypeAlias = Any

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6b6b6b",
)  # fmt: skip
COLOURS = {
    "uncorrected": GREY, "IS": PURPLE, "TIS": ORANGE, "PPO": SKY, "DLC, no resync": RED, "DLC": BLUE, "synced": GREEN,
    "DLC, ESS_1": PURPLE, "resync alone": ORANGE,
}  # fmt: skip
DASHES = {"uncorrected": ":", "DLC, no resync": "--", "TIS": "-.", "synced": (0, (1, 1))}


def sheet(columns: int, *, rows: int = 1, width: float = 5.2, height: float = 3.9) -> tuple[Figure, Any]:
    """(figure, [rows][columns] panels)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * columns, height * rows)
    figure, panels = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, panels


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def curve(axes: Axes, steps: F64, courses: Sequence[F64], name: str) -> None:
    """Mean over runs, and the range between the lowest and the highest."""
    held = np.array(courses)
    colour = COLOURS.get(name, GREY)
    axes.plot(steps, held.mean(0), color=colour, linestyle=DASHES.get(name, "-"), linewidth=1.8, label=name)
    axes.fill_between(steps, held.min(0), held.max(0), color=colour, alpha=0.15, linewidth=0)


def band_line(axes: Axes) -> None:
    """The line at twice the distance between two on-policy runs."""
    axes.axhline(BAND, color="black", linewidth=0.9)


def log_scale(axis: Any) -> None:
    """A log axis whose labels are plain numbers: 1, 2, 5, 10 ..."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def title(axes: Axes, text: str) -> None:
    """Left, as everywhere here."""
    axes.set_title(text, loc="left", fontsize=10.5)


def legend(axes: Axes, **where: Any) -> None:
    """A small one without a frame, where there is something to tell apart."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, **where)
