"""Is the verdict right, early and quiet? Labelled runs, healthy runs, real tiny RL runs: `run()` returns all figures.

    python -m benchmarks.bench_detection --out DIR [--part labelled|healthy|demo|page] [--seconds 200]

Every run's result goes to a file of DIR as it ends, and a second call goes on from there: in pieces of `--seconds`, or
whole (about 40 minutes on two cores). `page` writes detection.json, the picture and docs/detection.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.detection import demo_runs, healthy, labelled, score
from benchmarks.detection.grid import Plan, plans
from dlc_sentinel.core.facts import no_nan
from dlc_sentinel.records import Json

ROOT = Path(__file__).resolve().parent.parent
HEALTHY_STEPS = 20_000
HEALTHY_SEEDS_FROM = 2000
NUM_STOPS, NUM_CALM = 18, 10
OUT = Path("bench-out/detection").resolve()
FOREVER = 1e9


def run(
    out: Path = OUT, *, stops: int = NUM_STOPS, calm: int = NUM_CALM, steps: int = HEALTHY_STEPS
) -> dict[str, Json]:
    """Plays what `out` does not hold yet, and the figures of all three parts."""
    play_labelled(out, FOREVER)
    play_healthy(out, FOREVER, steps)
    play_demo(out, FOREVER, stops, calm)
    return found_in(out)


def play_labelled(out: Path, seconds: float) -> bool:
    """Every run of the grid at test seeds; True when none is left."""
    path = out / "labelled.jsonl"
    done = {row["name"] for row in _rows(path)}
    todo = [plan for plan in plans() if plan.name not in done]
    return _append(path, seconds, (partial(_labelled, plan) for plan in todo))


def play_healthy(out: Path, seconds: float, steps: int = HEALTHY_STEPS) -> bool:
    """So many healthy steps; True when none is left."""
    path = out / "healthy.jsonl"
    done = {row["seed"] for row in _rows(path)}
    todo = [run for run in healthy.runs(steps, seeds_from=HEALTHY_SEEDS_FROM) if run.seed not in done]
    return _append(path, seconds, (partial(_healthy, run) for run in todo))


def play_demo(out: Path, seconds: float, stops: int = NUM_STOPS, calm: int = NUM_CALM) -> bool:
    """Real runs, two at a time, about two minutes each pair; True when none is left."""
    end_s = time.monotonic() + seconds
    folder = out / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    todo = [each for each in demo_runs.planned(stops, calm) if not demo_runs.is_recorded(each, folder)]
    while todo and time.monotonic() < end_s:
        demo_runs.record(todo[:2], folder)
        todo = todo[2:]
    return not todo


def found_in(out: Path) -> dict[str, Json]:
    """The figures of what `out` holds."""
    judged = [
        demo_runs.judged(each, out / "demo")
        for each in demo_runs.planned(NUM_STOPS, NUM_CALM)
        if demo_runs.is_recorded(each, out / "demo")
    ]
    found = {
        "labelled": score.summary(_rows(out / "labelled.jsonl")),
        "healthy": healthy.summary(_rows(out / "healthy.jsonl")),
        "demo": {"rules": demo_runs.table(judged), "runs": judged},
    }
    clean = no_nan(found)
    assert isinstance(clean, dict)
    return clean


def _labelled(plan: Plan) -> Json:
    return labelled.play(plan).to_json()


def _healthy(run: healthy.Healthy) -> Json:
    return healthy.to_json(run, healthy.play(run))


def _append(path: Path, seconds: float, jobs: Iterable[Callable[[], Json]]) -> bool:
    """Runs jobs until the time is up, a line of JSON each; True when all are through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + seconds
    with path.open("a", encoding="utf-8") as file:
        for job in jobs:
            if time.monotonic() > end_s:
                return False
            file.write(json.dumps(job()) + "\n")
            file.flush()
    return True


def _rows(path: Path) -> Sequence[dict[str, Json]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--part", choices=("labelled", "healthy", "demo", "page", "all"), default="all")
    parser.add_argument("--seconds", type=float, default=FOREVER)
    chosen = parser.parse_args()
    chosen.out = chosen.out.resolve()
    parts = {"labelled": play_labelled, "healthy": play_healthy, "demo": play_demo}
    for name, part in parts.items():
        if chosen.part in (name, "all"):
            print(f"{name}: {'all done' if part(chosen.out, chosen.seconds) else 'more to do'}", file=sys.stderr)
    if chosen.part in ("page", "all"):
        from benchmarks.detection.page import write

        write(found_in(chosen.out), chosen.out, ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
