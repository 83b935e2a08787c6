"""The bench's picture: confusion, severity from which kinds are found, leads and false alarms beside the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.detection.grid import VERDICTS
from dlc_sentinel.records import Json

Found: TypeAlias = Mapping[str, Json]
Axes: TypeAlias = Any
"""matplotlib has no types here."""
OURS, OTHERS, BAD = "#2a7f62", "#8a8f98", "#b5532a"


def draw(found: Found, path: Path) -> None:
    """Writes a PNG of four panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(13, 10), layout="constrained")
    _confusion(panels[0][0], found["labelled"]["confusion"])
    _curves(panels[0][1], found["labelled"]["kinds"])
    _leads(panels[1][0], found["demo"]["rules"])
    _courses(panels[1][1], found["demo"]["runs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _confusion(axes: Axes, confusion: Mapping[str, Mapping[str, int]]) -> None:
    called = (*VERDICTS, "HEALTHY")
    shares = [
        [confusion.get(true, {}).get(name, 0) / max(sum(confusion.get(true, {}).values()), 1) for name in called]
        for true in VERDICTS
    ]
    axes.imshow(shares, cmap="Greens", vmin=0, vmax=1, aspect="auto")
    for row, true in enumerate(VERDICTS):
        for column, name in enumerate(called):
            num = confusion.get(true, {}).get(name, 0)
            if num:
                colour = "white" if shares[row][column] > 0.5 else "black"
                axes.text(column, row, str(num), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(called)), called, rotation=35, ha="right", fontsize=8)
    axes.set_yticks(range(len(VERDICTS)), VERDICTS, fontsize=8)
    axes.set_xlabel("called")
    axes.set_ylabel("true")
    axes.set_title("Labelled runs at visible severity", loc="left", fontsize=11)


def _curves(axes: Axes, kinds: Mapping[str, Found]) -> None:
    """A row per kind: its severities in the grid's order, mildest first, shaded by the share of runs found."""
    names = [name for name in kinds if len(kinds[name]["curve"]) > 1]
    for row, name in enumerate(names):
        curve = kinds[name]["curve"]
        milder_first = curve[::-1] if name.startswith("TRANSFORM") else curve
        for column, (severity, share, _) in enumerate(milder_first):
            axes.scatter(
                column, row, s=150, c=[share], cmap="Greens", vmin=0, vmax=1, edgecolors=OTHERS, linewidths=0.6
            )
            axes.annotate(f"{severity:g}", (column, row), xytext=(9, -3), textcoords="offset points", fontsize=7)
    axes.set_yticks(range(len(names)), [name.split("/")[1] for name in names], fontsize=7)
    axes.set_xticks([])
    axes.set_xlim(-0.5, 5)
    axes.invert_yaxis()
    axes.set_xlabel("severity, milder to the left; the darker, the more runs were found")
    axes.set_title("From which severity a fault is found", loc="left", fontsize=11)


def _leads(axes: Axes, rules: Mapping[str, Found]) -> None:
    names = list(rules)
    leads = [rules[name]["median_lead_steps"] or 0.0 for name in names]
    axes.barh(range(len(names)), leads, color=[OURS if "sentinel" in name else OTHERS for name in names])
    for row, name in enumerate(names):
        rule = rules[name]
        never = " never in time" if rule["median_lead_steps"] is None else f" {leads[row]:.0f} steps"
        text = f"{never}, {rule['in_time']}/{rule['of']} runs, false alarms {rule['false_alarms']}"
        colour = BAD if rule["false_alarms"] else "black"
        axes.annotate(text, (max(leads[row], 0.0), row), va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.9 * max([*leads, 1.0]))
    axes.set_xlabel("median lead before the true reward stays below half of its peak, steps")
    axes.set_title("Real tiny RL runs whose syncs stop", loc="left", fontsize=11)


def _courses(axes: Axes, runs: list[Found]) -> None:
    for run in runs:
        if not run["stops"]:
            continue
        steps, values = zip(*run["true_reward"], strict=True)
        axes.plot(steps, values, color=OTHERS, linewidth=1, alpha=0.8)
        first = run["rules"]["dlc-sentinel"]["first"]
        if first is not None:
            near = min(run["true_reward"], key=lambda pair: abs(pair[0] - first))
            axes.plot(first, near[1], "o", color=OURS, markersize=5)
        if run["halved_at"] is not None:
            axes.plot(run["halved_at"], dict(run["true_reward"])[run["halved_at"]], "x", color=BAD, markersize=7)
    axes.axvline(100, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(" syncs stop", (100, 0.02), fontsize=8)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("step")
    axes.set_ylabel("true reward")
    axes.set_title("First alarm (dot) and halving (cross) of each run", loc="left", fontsize=11)
