"""Real tiny RL runs with a known fault: weights stop going out at a known step, or rows wait in a survivable queue.

Each run is the demo's job, deaf to commands, with a sentinel that only observes and writes a tape. `record` plays one
run into a folder of its own and can be called again; `judge` reads the tape back: the sentinel's alarms, and those of
every baseline, by one clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.detection.baselines import BASELINES, alarms, dials_of
from dlc_sentinel.cli.sentinel import Sentinel
from dlc_sentinel.config import Config, resolve
from dlc_sentinel.core.facts import no_nan
from dlc_sentinel.demo.arms import run_demo
from dlc_sentinel.demo.spec import ArmResult, ArmSpec, StepReport, report_from_dict, report_to_dict
from dlc_sentinel.records import Event, Json
from dlc_sentinel.runtime import replay

KNOWN_STEP = 100
"""Up to here every run is synced after each step; an alarm before is false."""
COLLAPSE_STEPS, CALM_STEPS = 280, 150
EVALUATIONS = 5
HALF = 0.5
OWN, OWN_LEARNING = "dlc-sentinel", "dlc-sentinel, LEARNING too"


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run: `stops` = syncs stop at KNOWN_STEP; else rows wait that many batches from then on."""

    seed: int
    stops: bool
    waits: int = 3

    @property
    def name(self) -> str:
        return f"stops-{self.seed}" if self.stops else f"queue{self.waits}-{self.seed}"

    def spec(self) -> ArmSpec:
        """The job, with the demo's own falling learning rate."""
        common = ArmSpec(name=self.name, seed=self.seed, obeys=False)
        if self.stops:
            return _changed(common, syncs_every_step=False, synced_steps=KNOWN_STEP, num_steps=COLLAPSE_STEPS)
        return _changed(
            common, syncs_every_step=True, fault="queue", fault_from_step=KNOWN_STEP, queue_batches=self.waits,
            num_steps=CALM_STEPS,
        )  # fmt: skip


def _changed(spec: ArmSpec, **changes: Json) -> ArmSpec:
    from dataclasses import replace

    return replace(spec, **changes)


def planned(num_stops: int, num_calm: int, *, seeds_from: int = 1011) -> list[DemoRun]:
    stops = [DemoRun(seeds_from + i, stops=True) for i in range(num_stops)]
    calm = [DemoRun(seeds_from + 500 + i, stops=False, waits=2 + i % 3) for i in range(num_calm)]
    return [run for pair in _alternating(stops, calm) for run in pair]


def _alternating(left: Sequence[DemoRun], right: Sequence[DemoRun]) -> list[list[DemoRun]]:
    return [[*left[i : i + 1], *right[i : i + 1]] for i in range(max(len(left), len(right)))]


def is_recorded(run: DemoRun, out: Path) -> bool:
    return (out / run.name / "steps.json").exists()


def record(runs: Sequence[DemoRun], out: Path, *, parallel: int = 2) -> None:
    """Plays the runs; each leaves OUT/<name>/steps.json and a tape."""
    for run in runs:
        (out / run.name).mkdir(parents=True, exist_ok=True)
    where = out / f"sentinel-{runs[0].name}"
    tape = "tape-" + "-".join(run.name for run in runs)
    config, _ = resolve(
        flags={
            "act.mode": "observe",
            "serve.address": f"ipc://{where}.sock",
            "serve.metrics_port": 0,
            "serve.page": False,
            "tape.dir": str(out / tape),
        }
    )
    with Sentinel(config, alerts=False) as sentinel:
        sentinel.start()
        told = {run.name: {"DLC_SENTINEL": str(sentinel.address)} for run in runs}
        for item in run_demo([run.spec() for run in runs], out, env=told, parallel=parallel):
            if isinstance(item, ArmResult):
                body = {"tape": tape, "wall_s": item.wall_s, "steps": [report_to_dict(step) for step in item.steps]}
                (out / item.spec.name / "steps.json").write_text(json.dumps(body), encoding="utf-8")


def judged(run: DemoRun, out: Path) -> dict[str, Json]:
    """What `judge` found, from the run's folder where it was judged before."""
    path = out / run.name / "judged.json"
    if not path.exists():
        path.write_text(json.dumps(no_nan(judge(run, out))), encoding="utf-8")
    found: dict[str, Json] = json.loads(path.read_text(encoding="utf-8"))
    return found


def judge(run: DemoRun, out: Path) -> dict[str, Json]:
    """Step of the halving, and per rule (ours and each baseline): first alarm after the known step, false alarms."""
    body = json.loads((out / run.name / "steps.json").read_text(encoding="utf-8"))
    steps = [report_from_dict(step) for step in body["steps"]]
    tape = out / body["tape"]
    events, _, report = replay(tape, Config(), run.name)
    dials = dials_of(tape, run.name, steps)
    halved = halving(steps) if run.stops else None
    alarms_at = [event.step for event in events if event.run == run.name and _is_alarm(event, learning=False)]
    with_learning = [event.step for event in events if event.run == run.name and _is_alarm(event, learning=True)]
    rules = {OWN: alarms_at, OWN_LEARNING: with_learning} | {
        name: alarms(rule, dials) for name, rule in BASELINES.items()
    }
    return {
        "name": run.name,
        "stops": run.stops,
        "halved_at": halved,
        "verdict": report["verdict"] if report else None,
        "true_reward": [[s.step, s.true_reward] for s in steps if s.true_reward == s.true_reward],
        "lag_ess_32": [[s.step, s.lag_ess["32"]] for s in steps],
        "findings": [
            f"{e.data['verdict']}/{e.data['kind']}@{e.step}"
            for e in events
            if e.run == run.name and e.kind == "finding"
        ],
        "rules": {name: _score(at, run, halved) for name, at in rules.items()},
        "forecast": _forecast(report["steps"] if report else []) if run.stops else None,
    }


def _is_alarm(event: Event, *, learning: bool) -> bool:
    """A command, or a finding that opened; LEARNING ones, which say nothing of the engine, where asked for."""
    if event.kind == "command":
        return True
    opened = event.kind == "finding" and event.data["state"] in ("suspected", "confirmed")
    return opened and (learning or event.data["verdict"] != "LEARNING")


def halving(steps: Sequence[StepReport]) -> int | None:
    """The first of 5 evaluations in a row with the true reward below half of its running peak; None = it held."""
    seen = [(s.step, s.true_reward) for s in steps if s.true_reward == s.true_reward]
    peak, since, low = 0.0, -1, 0
    for step, value in seen:
        peak = max(peak, value)
        low = low + 1 if value < HALF * peak else 0
        since = step if low == 1 else since
        if low == EVALUATIONS:
            return since
    return None


def _forecast(steps: Sequence[dict[str, Json]]) -> dict[str, int]:
    """Steps after the known one with a forecast of ESS_32 < 1/2, and how many of their intervals held the true one."""
    below = [step["step"] for step in steps if step["step"] > KNOWN_STEP and (step["lag_ess"]["32"] or 1.0) < HALF]
    crossed = min(below, default=None)
    made = [
        step
        for step in steps
        if KNOWN_STEP < step["step"] < (crossed or 0) and step["forecast_steps"]["mid"] is not None
    ]
    inside = [
        step
        for step in made
        if (step["forecast_steps"]["low"] or 0.0)
        <= (crossed or 0) - step["step"]
        <= (step["forecast_steps"]["high"] or float("inf"))
    ]
    return {"made": len(made), "inside": len(inside)}


def _score(at: Sequence[int], run: DemoRun, halved: int | None) -> dict[str, Json]:
    """An alarm before the known step is false; on a survivable run every alarm is. Runs of alarms count once."""
    late = [step for step in at if step > KNOWN_STEP]
    first = min(late, default=None)
    wrong = [step for step in at if step <= KNOWN_STEP or not run.stops]
    episodes = (1 if wrong else 0) + sum(b - a > 5 for a, b in pairwise(sorted(wrong)))
    lead = None if first is None or halved is None else halved - first
    return {"first": first, "lead": lead, "false_alarms": episodes}


def table(found: Sequence[dict[str, Json]]) -> dict[str, dict[str, Json]]:
    """Per rule: on how many collapsing runs it spoke in time, its median lead there, false alarms of all runs."""
    collapsed = [row for row in found if row["halved_at"] is not None]
    out: dict[str, dict[str, Json]] = {}
    for name in found[0]["rules"] if found else ():
        leads = [row["rules"][name]["lead"] for row in collapsed]
        # a rule that never spoke has no lead: it counts as the worst of all, at -inf
        known = sorted(-1e9 if lead is None else lead for lead in leads)
        middle = median(known) if known else None
        out[name] = {
            "in_time": sum(lead is not None and lead > 0 for lead in leads),
            "of": len(leads),
            "median_lead_steps": None if middle is None or middle < -1e8 else middle,
            "false_alarms": sum(row["rules"][name]["false_alarms"] for row in found),
        }
    return out
