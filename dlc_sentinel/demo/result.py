"""What a demo ends with: the summary object, a table for the terminal, a picture.

Arms are found by name: control, unwatched, watched. NaN (an arm or a measurement that is missing) becomes null in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlc_sentinel.demo.spec import ArmResult
from dlc_sentinel.records import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARMS = ("control", "unwatched", "watched")
COLOURS = {"control": "#4c72b0", "unwatched": "#c44e52", "watched": "#2e8b57"}
HORIZON = "32"
THRESHOLD = 0.5
KEEPS_RATIO = 0.9
"""The watched arm is saved when its true reward is at least this share of the control's, ..."""
BEATS_RATIO = 1.3
"""... and at least this many times the unwatched arm's."""


def by_name(results: Sequence[ArmResult]) -> dict[str, ArmResult]:
    """The results by arm name."""
    return {result.spec.name: result for result in results}


def identity_max_error(results: Sequence[ArmResult]) -> float:
    """Largest identity error, nats, over all snapshots of all arms (see snapshots.py); NaN if there is none."""
    from dlc_sentinel.demo.snapshots import identity_error

    errors = [identity_error(Path(path)) for result in results for path in result.snapshots]
    return max(errors, default=math.nan)


def summary(
    results: Sequence[ArmResult],
    *,
    verdicts: Sequence[str] = (),
    lag_ess_min: Mapping[str, Mapping[str, float]] | None = None,
    identity_error: float = math.nan,
) -> dict[str, Json]:
    """The demo's JSON object: true rewards (mean of the last quarter), resyncs, verdicts, smallest lag ESS, identity.

    Args: verdicts: the unwatched arm's, in order of first appearance, from the sentinel; lag_ess_min: per arm and
    horizon, from the sentinel; None = as the trainers computed them; identity_error: of identity_max_error.
    """
    arms = by_name(results)
    seed = results[0].spec.seed if results else None
    ess = lag_ess_min or {name: arms[name].lag_ess_min() for name in ("unwatched", "watched") if name in arms}
    return {
        "seed": seed,
        **{name: _rounded(arms[name].true_reward()) if name in arms else None for name in ARMS},
        "resyncs": arms["watched"].num_resyncs if "watched" in arms else None,
        "verdicts": list(verdicts),
        "lag_ess_min": {arm: {rung: _rounded(value) for rung, value in rungs.items()} for arm, rungs in ess.items()},
        "identity_max_error": None if math.isnan(identity_error) else identity_error,
    }


def saved(results: Sequence[ArmResult]) -> bool:
    """Whether the watched arm kept up with the control and beat the unwatched one, by KEEPS_RATIO and BEATS_RATIO."""
    arms = by_name(results)
    if not set(ARMS) <= arms.keys():
        return False
    control, unwatched, watched = (arms[name].true_reward() for name in ARMS)
    return watched >= KEEPS_RATIO * control and watched >= BEATS_RATIO * unwatched


def table(results: Sequence[ArmResult]) -> str:
    """A plain text table, one line per arm; about 90 columns."""
    head = ("arm", "true reward", "of control", "reward shown", "least ESS_32", "resyncs", "pushes", "wall")
    arms = by_name(results)
    control = arms["control"].true_reward() if "control" in arms else math.nan
    rows = [head]
    for name in (*ARMS, *(name for name in arms if name not in ARMS)):
        if name not in arms:
            continue
        result = arms[name]
        true = result.true_reward()
        shown = [step.reward for step in result.steps[len(result.steps) * 3 // 4 :]]
        cells = (
            name,
            f"{true:.3f}",
            f"{true / control:.0%}" if control > 0 else "-",
            f"{np.mean(shown):.3f}" if shown else "-",
            f"{result.lag_ess_min().get(HORIZON, math.nan):.3f}",
            str(result.num_resyncs),
            str(sum(step.synced for step in result.steps)),
            f"{result.wall_s:.0f} s" + (f" ({result.ended})" if result.ended else ""),
        )
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    note = "last quarter of the steps; true reward: fresh samples from the trainer's weights; shown: the generator's"
    return "\n".join([*lines, note])


def picture(results: Sequence[ArmResult], path: Path) -> Path:
    """Writes a PNG: true reward and shown reward of the arms, their lag ESS_32 against 1/2, pushes; returns `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    known = by_name(results)
    order = (*ARMS, *(name for name in known if name not in ARMS))
    arms = {name: known[name] for name in order if name in known and known[name].steps}
    figure = Figure(figsize=(9, 8), layout="constrained")
    truth, ess, pushes = figure.subplots(3, 1, sharex=True, height_ratios=(5, 4, 1.5))
    for place, (name, arm) in enumerate(arms.items()):
        _draw_arm(truth, ess, pushes, arm, place, COLOURS.get(name, "#777777"))
    truth.set(ylabel="reward (share of right tokens)", ylim=(0, 1), title=_title(results))
    truth.legend(loc="upper left", fontsize=8, ncols=2)
    ess.axhline(THRESHOLD, color="black", linewidth=1, linestyle="--")
    ess.annotate("1/2", (1.005, THRESHOLD), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    ess.set(ylabel=f"lag ESS, h = {HORIZON}", ylim=(0, 1.03))
    pushes.set(ylabel="pushes", xlabel="step", yticks=range(len(arms)), yticklabels=list(arms), ylim=(-0.6, len(arms)))
    for axes in (truth, ess, pushes):
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _draw_arm(truth: Axes, ess: Axes, pushes: Axes, arm: ArmResult, place: int, colour: str) -> None:
    name = arm.spec.name
    known = [step for step in arm.steps if not math.isnan(step.true_reward)]
    steps = [step.step for step in arm.steps]
    true = [step.true_reward for step in known]
    truth.plot([step.step for step in known], true, color=colour, linewidth=2, label=f"{name}, true")
    truth.plot(steps, [s.reward for s in arm.steps], color=colour, linewidth=0.8, alpha=0.6, label=f"{name}, shown")
    ess.plot(steps, [step.lag_ess[HORIZON] for step in arm.steps], color=colour, linewidth=1.2)
    at = [step.step for step in arm.steps if step.synced]
    pushes.plot(at, [place] * len(at), linestyle="", marker="|", markersize=9, color=colour)


def _title(results: Sequence[ArmResult]) -> str:
    arms = by_name(results)
    values = ", ".join(f"{name} {arms[name].true_reward():.2f}" for name in ARMS if name in arms)
    seed = results[0].spec.seed if results else "-"
    resyncs = f"; {arms['watched'].num_resyncs} resyncs" if "watched" in arms else ""
    return f"seed {seed}: true reward, last quarter: {values}{resyncs}"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)
