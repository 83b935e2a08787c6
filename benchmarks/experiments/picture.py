"""The pictures of docs/claims.md: one a claim, drawn from the rows and from what claims.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.experiments.claims import NEVER, whole_arms
from benchmarks.experiments.judge import warm_up
from benchmarks.experiments.store import Row, array, rows_of
from benchmarks.experiments.style import BLUE, COLOURS, ORANGE, band_line, curve, legend, log_scale, save, sheet, title
from dlc_sentinel.records import F64, Json

Found = Mapping[str, Json]


def draw(found: Found, out: Path, docs: Path) -> None:
    """Every picture, from the rows in `out` and the figures made of them, into `docs`."""
    rows = {part: whole_arms(rows_of(out / f"{part}.jsonl")) for part in "abcd"}
    _constant(rows["c"], docs / "claims-constant.png")
    _crossing(found["crossing"], docs / "claims-crossing.png")
    _band(rows, docs / "claims-band.png")
    _trap(rows["b"], docs / "claims-trap.png")
    _frontier(found["frontier"], docs / "claims-frontier.png")


def _of(rows: Sequence[Row], arm: str, world: str = "") -> list[Row]:
    return [row for row in rows if row["arm"] == arm and row["world"].startswith(world)]


def _series(rows: Sequence[Row], key: str) -> list[F64]:
    return [array(row[key]) for row in rows]


def _steps(row: Row, key: str) -> F64:
    every = row["num_steps"] // len(row[key])
    out: F64 = np.arange(len(row[key]), dtype=np.float64) * every
    return out


def _constant(rows: Sequence[Row], path: Path) -> None:
    figure, panels = sheet(2)
    for axes, key, text in (
        (panels[0][0], "discrepancy_rms", "C: discrepancy, rms of a step's tokens"),
        (panels[0][1], "lag_rms", "C: lag, rms of a step's tokens"),
    ):
        for arm in ("uncorrected", "DLC, no resync", "DLC", "synced"):
            of = _of(rows, arm)
            if of and not (key == "lag_rms" and arm == "synced"):
                curve(axes, _steps(of[0], key), _series(of, key), arm)
        axes.set(xlabel="step", ylabel="nats")
        axes.set_ylim(bottom=0.0)
        legend(axes)
        title(axes, text)
    save(figure, path)


def _crossing(found: Found, path: Path) -> None:
    """Each run's failure minus its crossing, by response length; the arms of one length side by side."""
    figure, panels = sheet(1, width=9.0, height=4.4)
    axes = panels[0][0]
    lengths = sorted({line["length"] for line in found["table"]})
    arms = [arm for arm in NEVER if arm != "uncorrected"]
    for place, arm in enumerate(arms):
        for line in found["table"]:
            if line["arm"] == arm:
                at = lengths.index(line["length"]) + 0.17 * (place - 1.5)
                spread = np.linspace(-0.05, 0.05, max(len(line["gaps"]), 1))[: len(line["gaps"])]
                axes.scatter(at + spread, line["gaps"], s=16, color=COLOURS[arm], alpha=0.8, linewidths=0)
                missing = line["failed_uncrossed"]
                if missing:
                    axes.annotate(f"{missing}", (at, 1.0), xycoords=("data", "axes fraction"), xytext=(0, -11),
                                  textcoords="offset points", ha="center", fontsize=8, color=COLOURS[arm])  # fmt: skip
        axes.scatter([], [], s=20, color=COLOURS[arm], label=arm)
    axes.axhline(0.0, color="black", linewidth=0.9)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.margins(y=0.12)
    axes.set(xlabel="tokens of a response", ylabel="failure minus crossing of token ESS, steps")
    legend(axes, ncols=4, loc="lower left")
    title(axes, "Above 0: token ESS warned in time. Numbers at the top: runs that failed and never crossed")
    save(figure, path)


def _band(rows: Mapping[str, Sequence[Row]], path: Path) -> None:
    figure, panels = sheet(2, rows=2, height=3.6)
    shown = (("a", "A V=4 T=6, world 0"), ("d", "D T=256, world 0"), ("d", "D T=1024"), ("c", "C"))
    for axes, (part, world) in zip(panels.flat, shown, strict=True):
        for arm in ("uncorrected", "TIS", "DLC, no resync", "DLC", "synced"):
            of = [row for row in _of(rows[part], arm, world) if "noise" not in row["world"]]
            if of:
                first = warm_up(of[0])
                curve(axes, _steps(of[0], "ratio")[first:], [each[first:] for each in _series(of, "ratio")], arm)
        band_line(axes)
        log_scale(axes.yaxis)
        axes.set(xlabel="step", ylabel="KL ratio, log scale")
        title(axes, world if part != "c" else "C, tiny transformer")
    legend(panels[0][0])
    save(figure, path)


def _trap(rows: Sequence[Row], path: Path) -> None:
    figure, panels = sheet(3, width=4.6)
    for axes, key, text in (
        (panels[0][0], "return", "B: true return on prompt B"),
        (panels[0][1], "prefix", "B: KL ratio, generator's prefixes"),
        (panels[0][2], "ratio", "B: KL ratio, whole responses"),
    ):
        for arm in ("TIS", "DLC, no resync", "DLC, ESS_1", "DLC"):
            of = _of(rows, arm)
            if of:
                first = 0 if key == "return" else warm_up(of[0])
                curve(axes, _steps(of[0], key)[first:], [each[first:] for each in _series(of, key)], arm)
        if key != "return":
            band_line(axes)
            log_scale(axes.yaxis)
        seen = _of(rows, "DLC, no resync")
        if key == "return" and seen:
            axes.plot(_steps(seen[0], key), np.mean(_series(seen, "seen_return"), axis=0), color="black",
                      linewidth=1.2, linestyle=":", label="what the old generator earns")  # fmt: skip
            legend(axes, loc="center right")
        axes.set(xlabel="step")
        title(axes, text)
    save(figure, path)


def _frontier(found: Found, path: Path) -> None:
    lengths = sorted({line["length"] for line in found["table"]})
    figure, panels = sheet(max(len(lengths), 1))
    for axes, length in zip(panels[0], lengths, strict=False):
        lines = [line for line in found["table"] if line["length"] == length]
        # the period a little to the right, so that both intervals can be seen
        for key, colour, marker, text, shift in (
            ("rule", BLUE, "o", "rule: ESS_h < 1/2", 1.0),
            ("period", ORANGE, "s", "fixed period, as many syncs", 1.03),
        ):
            known = [line for line in lines if line[key][0] is not None]
            syncs = [line["syncs"][0] * shift for line in known]
            means = [line[key][0] for line in known]
            below = [line[key][0] - line[key][1] for line in known]
            above = [line[key][2] - line[key][0] for line in known]
            axes.errorbar(syncs, means, (below, above), color=colour, marker=marker, capsize=2, linewidth=1.2,
                          markersize=5, label=text)  # fmt: skip
        for line in lines:
            axes.annotate(f"h = {line['horizon']}", (line["syncs"][0], 0.02), xycoords=("data", "axes fraction"),
                          rotation=90, ha="center", va="bottom", fontsize=8, color=BLUE)  # fmt: skip
        band_line(axes)
        log_scale(axes.xaxis)
        log_scale(axes.yaxis)
        axes.margins(x=0.1, y=0.2)
        axes.set_ylim(bottom=0.8 * axes.get_ylim()[0])
        axes.set(xlabel="syncs in a run", ylabel="mean KL ratio")
        title(axes, f"D, T = {length}: syncs against KL")
    if lengths:
        legend(panels[0][0])
    save(figure, path)
