"""How far the calibrated split is from the exact one on a real vLLM loop: `python -m benchmarks.bench_calibrated`.

Records (once, into --recorded) what `record_split` says, then measures per engine and lag: rmse of ESS_32, coverage of
its 90 % interval, whether a change of engine is called and not read as lag. Prints JSON; --doc FILE writes the table.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np

from benchmarks.calibrated_doc import document
from benchmarks.split_cases import LAGS, SOURCES, Case, Run, cases, load, louder
from dlc_sentinel.core.facts import no_nan
from dlc_sentinel.maths.calibrated import CalibrationPool, calibrate
from dlc_sentinel.maths.cells import drifted

ROOT = Path(__file__).resolve().parent.parent
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENGINES = ("bf16", "fp8", "e5m2", "fp32")
CHANGES = "bf16+fp8+e5m2"
LOUDER = (2.0, 4.0)
PROMISE_RMSE, PROMISE_COVERAGE, PROMISE_CELL_COVERAGE, PROMISE_BATCHES = 0.03, 0.85, 0.75, 36
Row = dict[str, object]


def record(folder: Path, *arguments: str, python: Path = ENGINE_PYTHON) -> None:
    """Returns when the recorder has written its files; raises CalledProcessError when it fails."""
    command = ["nice", "-n", "5", str(python), "-m", "benchmarks.record_split", str(folder.resolve()), *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


def of_engine(found: Sequence[Case], engine: str, lag: int) -> list[Case]:
    """The cases of an engine's runs at a lag."""
    return [case for case in found if case.run.split("-")[0] == engine and case.lag == lag]


def cell_row(engine: str, lag: int, chosen: Sequence[Case]) -> Row:
    """One line of the table."""
    truth = np.array([case.ess for case in chosen])
    row: Row = {
        "engine": engine,
        "lag": lag,
        "batches": len(chosen),
        "ess_32": {"mean": float(truth.mean()), "low": float(truth.min()), "high": float(truth.max())},
        "kappa": float(np.median([case.results["pool"].noise_rms / case.rms for case in chosen])),
        "total": {"rmse": rmse(np.array([case.total_ess for case in chosen]) - truth)},
    }
    for source in SOURCES:
        row[source] = measured(chosen, source)
    return row


def measured(chosen: Sequence[Case], source: str) -> Row:
    """rmse of ESS_32, coverage of its interval, share held valid, errors of rms and KL where they are published."""
    results = [case.results[source] for case in chosen]
    error = np.array([result.action_ess - case.ess for result, case in zip(results, chosen, strict=True)])
    inside = [r.interval[0] <= case.ess <= r.interval[1] for r, case in zip(results, chosen, strict=True)]
    rms_error = [r.rms / case.rms - 1.0 for r, case in zip(results, chosen, strict=True) if not math.isnan(r.rms)]
    return {
        "rmse": rmse(error),
        "bias": float(error.mean()),
        "coverage": float(np.mean(inside)),
        "width": float(np.mean([result.interval[1] - result.interval[0] for result in results])),
        "valid": float(np.mean([result.valid for result in results])),
        "invalid_because": sorted({result.reason.split(":")[0] for result in results if not result.valid}),
        "rms_error": rmse(np.array(rms_error)) if rms_error else math.nan,
    }


def rmse(error: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(error))))


def end_to_end(runs: Sequence[Run]) -> Row:
    """Two engines' runs one after the other: was the change called at the first step of the second?"""
    called, changes, false_alarms, steps = 0, 0, 0, 0
    for before, after in permutations(runs, 2):
        if before.name.split("-")[0] == after.name.split("-")[0]:
            continue
        pool = CalibrationPool()
        for version in range(len(before.batches)):
            pool.add(before.few_cells(version), version)
        changes += 1
        called += pool.add(after.few_cells(after.versions[0]), len(before.batches))
    for run in runs:
        pool = CalibrationPool()
        for version in range(len(run.batches)):
            false_alarms += pool.add(run.few_cells(version), version)
            steps += 1
    return {
        "changes": changes,
        "called_in_one_step": called,
        "steps_without_change": steps,
        "called_there": false_alarms,
    }


def loud(runs: Sequence[Run]) -> list[Row]:
    """The pool at lag 3 where every token's discrepancy is several times what it was."""
    rows: list[Row] = []
    for engine in ENGINES[:-1]:
        of_it = [run for run in runs if run.name.split("-")[0] == engine]
        for factor in LOUDER:
            found = [case for run in of_it for case in cases(louder(run, factor), (LAGS[1],), ("pool",))]
            if found:
                noise = np.median([case.results["pool"].noise_rms for case in found])
                kappa = np.median([case.results["pool"].noise_rms / case.rms for case in found])
                row: Row = {"engine": engine, "factor": factor, "noise_rms": float(noise), "kappa": float(kappa)}
                rows.append({**row, **measured(found, "pool")})
    return rows


def wrong_law(runs: Sequence[Run]) -> Row:
    """How often a pool of another engine is refused: by comparison with fresh rows (V1), by negative variance (V2)."""
    out: Row = {}
    for law, data in permutations(runs, 2):
        if law.name.split("-")[1:] != data.name.split("-")[1:]:
            continue
        pool = CalibrationPool()
        for version in range(len(law.batches)):
            pool.add(law.few_cells(version), version)
        refused = [not calibrate(data.stale(v, 1), pool.cells(), draws=8).valid for v in data.versions]
        seen = [drifted(pool.cells(), data.few_cells(v)) for v in data.versions]
        name = f"{law.name.split('-')[0]} on {data.name}"
        out[name] = {"v1": float(np.mean(seen)), "v2_or_v4": float(np.mean(refused))}
    return out


def replaced(run: Run) -> Row:
    """One job whose engine is replaced on the way: calls, and the error of ESS_32 at lag 3 around them."""
    pool = CalibrationPool()
    steps: list[Row] = []
    for version in range(len(run.batches)):
        called = pool.add(run.few_cells(version), version)
        if version not in run.versions:
            continue
        for lag in run.lags:
            law = pool.law(version - lag, version - lag)
            truth = run.truth(version, lag).ess()["32"]
            result = None if law is None else calibrate(run.stale(version, lag), law, seed=version)
            steps.append(
                {
                    "version": version,
                    "lag": lag,
                    "engine": run.engines[version],
                    "changed": run.engines[version] != run.engines[version - 1],
                    "called": called,
                    "ess_32": truth,
                    "calibrated": math.nan if result is None else result.action_ess,
                    "read_as_lag": bool(result and result.valid and result.interval[1] < 0.5 <= truth),
                }
            )
    of_lag = [step for step in steps if step["lag"] == LAGS[0]]
    errors = np.array([step["calibrated"] for step in steps], dtype=float) - [step["ess_32"] for step in steps]
    return {
        "changes": sum(bool(step["changed"]) for step in of_lag),
        "called_in_one_step": sum(bool(step["changed"] and step["called"]) for step in of_lag),
        "called_elsewhere": sum(bool(step["called"] and not step["changed"]) for step in of_lag),
        "read_as_lag": sum(bool(step["read_as_lag"]) for step in steps),
        "rmse": float(np.sqrt(np.nanmean(errors**2))),
        "largest_error": float(np.nanmax(np.abs(errors))),
        "without_a_law": float(np.mean(np.isnan(errors))),
    }


def promises(rows: Sequence[Row], changes: Row) -> dict[str, bool]:
    """What is promised of the pool, and whether it holds here."""
    kept = [row for row in rows if row["engine"] != "fp32"]
    weights = [value(row, "batches") for row in kept]
    coverage = [value(row, "pool", "coverage") for row in kept]
    worst = max(value(row, "pool", "rmse") for row in kept)
    return {
        f"rmse of ESS_32 <= {PROMISE_RMSE} in each cell": worst <= PROMISE_RMSE,
        f"coverage >= {PROMISE_COVERAGE} over all": bool(np.average(coverage, weights=weights) >= PROMISE_COVERAGE),
        f"coverage >= {PROMISE_CELL_COVERAGE} in each cell": min(coverage) >= PROMISE_CELL_COVERAGE,
        f">= {PROMISE_BATCHES} batches in each cell": min(weights) >= PROMISE_BATCHES,
        "every engine change called in one step": changes["called_in_one_step"] == changes["changes"],
    }


def value(row: Row, *names: str) -> float:
    """The number at a path of names."""
    found: object = row
    for name in names:
        assert isinstance(found, dict)
        found = found[name]
    assert isinstance(found, (int, float))
    return float(found)


def evaluate(folder: Path) -> Row:
    """All numbers from a folder of recorded runs."""
    runs = [load(path) for path in sorted(folder.glob("*-*.npz")) if not path.stem.startswith("pretrained")]
    plain = [run for run in runs if "+" not in run.name]
    found = [case for run in plain for case in cases(run)]
    per_engine = [
        cell_row(engine, lag, chosen) for engine in ENGINES for lag in LAGS if (chosen := of_engine(found, engine, lag))
    ]
    per_run = [
        cell_row(run.name, lag, [case for case in found if case.run == run.name and case.lag == lag])
        for run in plain
        for lag in run.lags
    ]
    young = [run for run in plain if run.train_lag == LAGS[1]]
    trained = [case for run in young for case in cases(run, (LAGS[2],))]
    changes = end_to_end([run for run in young if not run.name.startswith("fp32")])
    return {
        "tokens": sum(run.num_tokens for run in runs),
        "rounded_cache": sorted({name for run in runs for name in run.rounded}),
        "cells": per_engine,
        "runs": per_run,
        "trained_before": [cell_row(e, LAGS[2], of) for e in ENGINES if (of := of_engine(trained, e, LAGS[2]))],
        "louder": loud(young),
        "end_to_end": changes,
        "replaced": {run.name: replaced(run) for run in runs if "+" in run.name},
        "wrong_law": wrong_law([run for run in young if not run.name.startswith("fp32")]),
        "promises": promises(per_engine, changes),
    }


def run(folder: Path = ROOT / "bench-out" / "split") -> Row:
    """Records what is missing in the folder and evaluates it; says why not where there is no vLLM environment."""
    if not ENGINE_PYTHON.exists():
        return {"skipped": f"{ENGINE_PYTHON} is missing: `make test` builds it"}
    started_s = time.monotonic()
    rates = ("--rates", "5e-4", "2e-4", "1e-4")
    record(folder, "--engines", "bf16", "fp8", "e5m2", *rates)
    record(folder, "--engines", "bf16", "fp8", "e5m2", *rates, "--train-lag", "6", "--versions", "24")
    record(folder, "--engines", CHANGES, "--rates", "5e-4", "--versions", "30")
    record(folder, "--engines", "fp32", "--rates", "5e-4")
    record(folder, "--engines", "fp32", "--rates", "5e-4", "--train-lag", "6", "--versions", "24")
    recorded_s = time.monotonic() - started_s
    found = no_nan({"recording_s": recorded_s, **evaluate(folder)})
    assert isinstance(found, dict)
    return found


def main() -> None:
    """Prints the numbers as JSON; writes the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, default=ROOT / "bench-out" / "split")
    parser.add_argument("--doc", type=Path)
    asked = parser.parse_args()
    results = run(asked.recorded)
    if asked.doc and "skipped" not in results:
        asked.doc.write_text(document(results))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
