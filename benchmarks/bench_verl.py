"""What watching costs a real verl job on a CPU: the same job, watched in every other step.

Of the actor rank: CPU and wall time of its updates with and without our code, paired step by step, and the CPU of our
own code, of the sender thread alone and with what it adds to the training thread, as a share of the process's CPU from
one step to the next. Half way the sentinel is stopped (SIGSTOP): the job must not notice.
Run alone: `python -m benchmarks.bench_verl`. Needs .venv-verl.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dlc_sentinel.records import RunSnapshot
from dlc_sentinel.sinks import snapshot_json

ROOT = Path(__file__).parent.parent
PAIRS = 100
SKIPPED = 2
"""Pairs at the start that are not counted and are watched whole: first calls, caches, the allocator."""
MAX_SHARE = 0.02
JOB_S = 3600.0
DRAWS = 1000


@dataclass(frozen=True)
class Watched:
    """A job that ended, and what was seen of it."""

    exit_code: int
    stopped_at: int
    """Step after which the sentinel was stopped, 0 = never."""
    lines: Sequence[Mapping[str, Any]]
    """The meter's, one per optimizer update."""
    seen: RunSnapshot | None
    """What the sentinel had found until it was stopped."""
    logged: Mapping[int, Mapping[str, float]]
    """Step -> verl's own metrics."""


def run(pairs: int = PAIRS) -> dict[str, object]:
    """The figures; `kept` says whether our own thread stays under 2 % of the step's CPU and the job ended well."""
    jobs = support()
    if not jobs.PYTHON.exists():
        return {"skipped": f"no verl at {jobs.PYTHON}"}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name)
        command = [str(jobs.PYTHON), str(jobs.SUPPORT / "make_model.py"), name]
        subprocess.run(command, env=jobs.environment(model, model, "model"), check=True, capture_output=True)
        size = jobs.Size(prompts=8, samples=4, mini_batch=8, response=64, lr=1e-4)
        watched = watched_job(model, model / "job", size, pairs, *jobs.FLOAT32)
    return figures(watched) | {"exit_code": watched.exit_code, "pairs": pairs}


def support() -> Any:
    """The module that starts verl jobs: the tests' own."""
    sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("stacks.verl.support.job")


def watched_job(
    model: Path,
    folder: Path,
    size: Any,
    pairs: int,
    *overrides: str,
    env: Mapping[str, str] | None = None,
    warm: str = "",
) -> Watched:
    """Runs it to its end under a sentinel of its own, with the model of `make_model` in folder `model`."""
    jobs = support()
    serve = [sys.executable, "-m", "dlc_sentinel", "serve", "--json", "--observe"]
    serve += ["--set", "serve.address=tcp://127.0.0.1:0", "--set", "serve.metrics_port=0"]
    steps = 2 * (pairs + SKIPPED)
    meter = folder / "meter.jsonl"
    with subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sentinel:
        assert sentinel.stdout is not None
        where = json.loads(sentinel.stdout.readline())
        told = {"DLC_SENTINEL": where["data"], "DLC_SENTINEL_METRICS": where["metrics"]}
        told |= {"VERL_CPU_METER": str(meter), "VERL_CPU_METER_AFTER": str(2 * SKIPPED)}
        size = jobs.Size(**{**vars(size), "steps": steps})
        job = jobs.start(folder, model, size, *overrides, env=told | dict(env or {}), warm=warm)
        stopped_at, seen = 0, None
        try:
            deadline_s = time.monotonic() + JOB_S
            while job.process.poll() is None and time.monotonic() < deadline_s:
                if not stopped_at and max(job.metrics(), default=0) >= steps // 2:
                    seen = snapshot_json.fetch(where["metrics"]).runs[0]
                    os.kill(sentinel.pid, signal.SIGSTOP)
                    stopped_at = max(job.metrics())
                time.sleep(0.2)
            code = job.wait(1.0)
        finally:
            job.stop()
            os.kill(sentinel.pid, signal.SIGCONT)
            sentinel.terminate()
    lines = [json.loads(line) for line in meter.read_text().splitlines()]
    return Watched(code, stopped_at, lines, seen, job.metrics())


def figures(watched: Watched) -> dict[str, object]:
    """Differences are watched minus unwatched, per step, with a 90 % bootstrap interval over pairs of steps."""
    by_step = _steps(watched.lines)
    pairs = [(by_step[s], by_step[s + 1]) for s in by_step if s % 2 == 0 and s > 2 * SKIPPED and s + 1 in by_step]
    on, off = ({name: np.array([pair[i][name] for pair in pairs]) for name in pairs[0][i]} for i in (0, 1))
    cpu, wall = on["cpu_s"] - off["cpu_s"], on["wall_s"] - off["wall_s"]
    after = [by_step[s]["wall_s"] for s in by_step if s > watched.stopped_at > 0]
    before = [by_step[s]["wall_s"] for s in by_step if 2 * SKIPPED < s <= watched.stopped_at]
    share = float(on["sender_s"].sum() / on["step_cpu_s"].sum())
    return {
        "thread_share_of_cpu": share,
        "own_share_of_cpu": float((on["sender_s"] + on["record_s"]).sum() / on["step_cpu_s"].sum()),
        "thread_per_step_s": float(np.median(on["sender_s"])),
        "own_per_step_s": float(np.median(on["sender_s"] + on["record_s"])),
        "cpu_per_step_s": float(np.median(off["step_cpu_s"])),
        "update_cpu_s": float(np.median(off["cpu_s"])),
        "update_cpu_difference_s": float(np.median(cpu)),
        "update_cpu_difference_interval_s": interval(cpu),
        "update_wall_s": float(np.median(off["wall_s"])),
        "update_wall_difference_s": float(np.median(wall)),
        "update_wall_difference_interval_s": interval(wall),
        "wall_after_over_before_sigstop": float(np.median(after) / np.median(before)) if after and before else None,
        "kept": share <= MAX_SHARE and watched.exit_code == 0,
    }


def _steps(lines: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Step -> its updates summed; sender_s and step_cpu_s run on to the next step's first update."""
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        entry = steps.setdefault(int(line["step"]), {name: line[name] for name in ("cpu_from_s", "sender_from_s")})
        for name in ("wall_s", "cpu_s", "record_s"):
            entry[name] = entry.get(name, 0.0) + line[name]
    for now, then in pairwise(steps.values()):
        now["sender_s"] = then["sender_from_s"] - now["sender_from_s"]
        now["step_cpu_s"] = then["cpu_from_s"] - now["cpu_from_s"]
    return {step: entry for step, entry in steps.items() if "sender_s" in entry}


def interval(x: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """90 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(x, (DRAWS, len(x))), axis=1)
    return [float(value) for value in np.quantile(medians, (0.05, 0.95))]


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS), indent=1))
