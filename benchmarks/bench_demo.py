"""The demo over several seeds: is the control healthy, does the unwatched arm fail, is the watched arm saved?

`run()` returns one dict of plain numbers; `python benchmarks/bench_demo.py [SEED ...]` prints it as JSON. Each seed is
one `dlc-sentinel demo` with a sentinel of its own, as a user starts it: about 80 s on two free cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SEEDS = (1, 2, 3, 4, 5)
HEALTHY = 0.7
"""Least true reward of a healthy control; chance is 1/12."""
KEEPS_RATIO, BEATS_RATIO, WANTED_SEEDS = 0.9, 1.3, 4


def one_seed(seed: int, out: Path) -> dict[str, object]:
    """The demo's JSON object of one seed, with its wall time and the two ratios."""
    command = [
        sys.executable,
        "-m",
        "dlc_sentinel",
        "demo",
        "--plain",
        "--json",
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    started_s = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    control, unwatched, watched = (float(str(found[arm])) for arm in ("control", "unwatched", "watched"))
    ratios = {"watched_to_control": watched / control, "watched_to_unwatched": watched / unwatched}
    return {
        **found,
        **{name: round(value, 3) for name, value in ratios.items()},
        "wall_s": time.monotonic() - started_s,
    }


def run(seeds: Sequence[int] = SEEDS, out: Path | None = None) -> dict[str, object]:
    """Every seed's object, and how many controls were healthy and how many watched arms were saved.

    Args: out: folder for tapes and pictures, kept; None = a temporary one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        rows = [one_seed(seed, (out or Path(temporary)) / f"seed-{seed}") for seed in seeds]
    num_healthy = sum(float(str(row["control"])) >= HEALTHY for row in rows)
    num_saved = sum(
        float(str(row["watched_to_control"])) >= KEEPS_RATIO and float(str(row["watched_to_unwatched"])) >= BEATS_RATIO
        for row in rows
    )
    wanted_saved = min(WANTED_SEEDS, len(rows))
    return {
        "seeds": rows,
        "num_healthy_controls": num_healthy,
        "num_saved": num_saved,
        "holds": num_healthy == len(rows) and num_saved >= wanted_saved,
    }


def draw(found: dict[str, object], path: Path) -> Path:
    """Writes a PNG of the three arms' true reward by seed; returns `path`."""
    from matplotlib.figure import Figure

    rows: list[dict[str, float]] = found["seeds"]  # type: ignore[assignment]  # run() above put it there
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    colours = {"control": "#4c72b0", "unwatched": "#c44e52", "watched": "#2e8b57"}
    for place, (arm, colour) in enumerate(colours.items()):
        at = [number + (place - 1) * 0.27 for number in range(len(rows))]
        axes.bar(at, [row[arm] for row in rows], 0.25, label=arm, color=colour)
    axes.set(xlabel="seed", ylabel="true reward, last quarter", ylim=(0, 1))
    axes.set_xticks(range(len(rows)), [str(row["seed"]) for row in rows])
    axes.legend(ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    print(json.dumps(run([int(text) for text in sys.argv[1:]] or SEEDS), indent=1))
