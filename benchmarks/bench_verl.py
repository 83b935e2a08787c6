"""What watching costs a real verl job on a CPU: the same job, watched in every other step.

Per optimizer update of the actor rank: CPU and wall time with and without our code, paired step by step, and the CPU
of our own code, sender thread included. Half way the sentinel is stopped (SIGSTOP): the job must not notice.
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
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
PAIRS = 100
SKIPPED = 2
"""Pairs at the start that are not counted: first calls, caches, the allocator."""
MAX_SHARE = 0.02
JOB_S = 3600.0
DRAWS = 1000


def run(pairs: int = PAIRS) -> dict[str, object]:
    """The figures; `kept` says whether our own CPU stays under 2 % of the step's and the job ended well."""
    sys.path.insert(0, str(ROOT / "tests"))
    jobs: Any = importlib.import_module("stacks.verl.support.job")
    if not jobs.PYTHON.exists():
        return {"skipped": f"no verl at {jobs.PYTHON}"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = jobs.environment(folder, folder, "model")
        command = [str(jobs.PYTHON), str(jobs.SUPPORT / "make_model.py"), name]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        code, stopped_at, lines = _watched_job(jobs, folder, 2 * (pairs + SKIPPED))
    return figures(lines, stopped_at) | {"exit_code": code, "pairs": pairs}


def _watched_job(jobs: Any, folder: Path, steps: int) -> tuple[int, int, list[dict[str, Any]]]:
    """(exit code, step at which the sentinel was stopped, the meter's lines)."""
    serve = [sys.executable, "-m", "dlc_sentinel", "serve", "--json", "--observe"]
    serve += ["--set", "serve.address=tcp://127.0.0.1:0", "--set", "serve.metrics_port=0"]
    size = jobs.Size(steps=steps, prompts=8, samples=4, mini_batch=8, response=64, lr=1e-4)
    meter = folder / "meter.jsonl"
    with subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sentinel:
        assert sentinel.stdout is not None
        where = json.loads(sentinel.stdout.readline())
        env = {"DLC_SENTINEL": where["data"], "DLC_SENTINEL_METRICS": where["metrics"], "VERL_CPU_METER": str(meter)}
        job = jobs.start(folder / "job", folder, size, *jobs.FLOAT32, env=env)
        try:
            stopped_at = 0
            deadline_s = time.monotonic() + JOB_S
            while job.process.poll() is None and time.monotonic() < deadline_s:
                if not stopped_at and max(job.metrics(), default=0) >= steps // 2:
                    os.kill(sentinel.pid, signal.SIGSTOP)
                    stopped_at = max(job.metrics())
                time.sleep(0.5)
            code = job.wait(1.0)
        finally:
            job.stop()
            os.kill(sentinel.pid, signal.SIGCONT)
            sentinel.terminate()
    return code, stopped_at, [json.loads(line) for line in meter.read_text().splitlines()]


def figures(lines: Sequence[Mapping[str, Any]], stopped_at: int) -> dict[str, object]:
    """Differences are watched minus unwatched, per update, with a 90 % bootstrap interval over pairs of steps."""
    by_step = {int(line["step"]): line for line in lines}
    pairs = [(by_step[s], by_step[s + 1]) for s in by_step if s % 2 == 0 and s > 2 * SKIPPED and s + 1 in by_step]
    own = np.array([on["record_s"] + on["sender_s"] for on, _ in pairs])
    cpu_on, cpu_off = (np.array([pair[i]["cpu_s"] for pair in pairs]) for i in (0, 1))
    wall = np.array([on["wall_s"] - off["wall_s"] for on, off in pairs])
    after = [by_step[s]["wall_s"] for s in by_step if s > stopped_at > 0]
    before = [by_step[s]["wall_s"] for s in by_step if 2 * SKIPPED < s <= stopped_at]
    share = float(own.sum() / cpu_on.sum())
    return {
        "own_share_of_cpu": share,
        "cpu_per_update_s": float(np.median(cpu_off)),
        "cpu_difference_s": float(np.median(cpu_on - cpu_off)),
        "cpu_difference_interval_s": interval(cpu_on - cpu_off),
        "wall_difference_s": float(np.median(wall)),
        "wall_difference_interval_s": interval(wall),
        "wall_after_over_before_sigstop": float(np.median(after) / np.median(before)) if after and before else None,
        "kept": share <= MAX_SHARE,
    }


def interval(x: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """90 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(x, (DRAWS, len(x))), axis=1)
    return [float(value) for value in np.quantile(medians, (0.05, 0.95))]


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS), indent=1))
