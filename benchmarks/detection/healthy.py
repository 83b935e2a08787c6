"""Long runs with nothing wrong: how often is anything said or sent?

Every precision meets every quirk: rows of 16k tokens, tools' output masked, rows a few versions old (survivably, exact
or without the middle stream), several updates a step, entropy that falls, wild tokens now and then, creeping numerics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.detection.play import MOVES, Job
from benchmarks.detection.streams import FLOORS, Streams, make_noise, make_streams, moved
from dlc_sentinel.records import Json, Train

RUN_STEPS = 125
QUIRKS = (
    "plain", "long_rows", "tools", "aged", "aged_no_middle", "updates", "entropy", "spikes", "creep", "loud_rows",
)  # fmt: skip
SURVIVABLE_RMS = 0.035
"""Of the lag for each version of age: ESS_32 is about 0.85 over all rows, 0.65 at age 3."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """One healthy run."""

    quirk: str
    floor: str
    seed: int
    num_steps: int = RUN_STEPS


@dataclass(slots=True)
class Alarms:
    """What was said and sent though nothing was wrong."""

    num_steps: int = 0
    num_tokens: int = 0
    findings: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    @property
    def num(self) -> int:
        return len(self.findings) + len(self.commands)


def runs(num_steps: int, *, seeds_from: int) -> Iterator[Healthy]:
    """Runs of together at least so many steps, every quirk with every precision in turn."""
    pairs = [(quirk, floor) for floor in FLOORS for quirk in QUIRKS]
    for number in range(-(-num_steps // RUN_STEPS)):
        quirk, floor = pairs[(number * 11) % len(pairs)]
        yield Healthy(quirk, floor, seeds_from + number)


def play(run: Healthy) -> Alarms:
    """The run's alarms: findings that opened, and commands."""
    job = Job(FLOORS[run.floor][1])
    alarms = Alarms(run.num_steps)
    for step in range(run.num_steps):
        records, scalars = RECORDS[run.quirk](run, job, step)
        alarms.num_tokens += sum(len(record.cur_N) for record in records if record.cur_N is not None)
        job.step(step, records, scalars, f"c{step}")
    name = f"{run.quirk}-{run.floor}-{run.seed}"
    for event in job.events:
        if event.kind == "finding" and event.data["state"] in ("suspected", "confirmed"):
            alarms.findings.append(f"{event.data['verdict']}/{event.data['kind']} at {event.step} of {name}")
        elif event.kind == "command":
            alarms.commands.append(f"{event.data['kind']} at {event.step} of {name}")
    return alarms


def to_json(run: Healthy, alarms: Alarms) -> dict[str, Json]:
    return {
        "quirk": run.quirk, "floor": run.floor, "seed": run.seed, "steps": alarms.num_steps,
        "tokens": alarms.num_tokens, "findings": alarms.findings, "commands": alarms.commands,
    }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Totals of runs as `to_json` gives them, and alarms per 1000 steps; nan without runs."""
    steps = sum(row["steps"] for row in rows)
    findings, commands = ([text for row in rows for text in row[name]] for name in ("findings", "commands"))
    num = len(findings) + len(commands)
    quirks = {
        quirk: [sum(row["steps"] for row in rows if row["quirk"] == quirk),
                sum(len(row["findings"]) + len(row["commands"]) for row in rows if row["quirk"] == quirk)]
        for quirk in QUIRKS
    }  # fmt: skip
    return {
        "steps": steps,
        "tokens": sum(row["tokens"] for row in rows),
        "findings": findings,
        "commands": commands,
        "steps_and_alarms": quirks,
        "per_1000_steps": 1000.0 * num / steps if steps else float("nan"),
    }


# -- what is sent at each step ----------------------------------------------------------------------------------------

Sent = tuple[list[Train], Mapping[str, float]]


def _streams(run: Healthy, step: int, *, rows: int = 16, length: int = 240, **changes: float) -> Streams:
    """`changes`: as make_streams takes them."""
    return make_streams(step, rows=rows, length=length, floor=run.floor, seed=run.seed, **changes)  # type: ignore[arg-type]  # numbers all


def _plain(run: Healthy, job: Job, step: int) -> Sent:
    rows, length = ((16, 240), (48, 64), (8, 512))[run.seed % 3]
    return [_streams(run, step, rows=rows, length=length).train(job.source)], MOVES


def _long_rows(run: Healthy, job: Job, step: int) -> Sent:
    """One step in ten has rows of 16k tokens, the others 4k."""
    s = _streams(run, step, rows=4, length=16384) if step % 10 == 0 else _streams(run, step, rows=4, length=1024)
    return [s.train(job.source)], MOVES


def _loud_rows(run: Healthy, job: Job, step: int) -> Sent:
    """Rows so long that numerics alone bring the sequence ESS to 0.05 (bf16 and coarser)."""
    return [_streams(run, step, rows=6, length=1500, rms=1.3 * FLOORS[run.floor][0]).train(job.source)], MOVES


def _tools(run: Healthy, job: Job, step: int) -> Sent:
    """A third of each row is a tool's output: masked, 0 on the engine's side."""
    s = _streams(run, step, length=320)
    inside_N = (s.place_N >= 60) & (s.place_N < 160)
    s.mask_N = ~inside_N
    s.engine_N = np.where(inside_N, 0.0, s.engine_N)
    s.old_N = np.where(inside_N, -8.0 * s.rng.standard_exponential(len(s.old_N)), s.old_N)
    s.cur_N = s.old_N.copy()
    return [s.train(job.source)], MOVES


def _aged(run: Healthy, job: Job, step: int) -> Sent:
    """Async: rows of ages 0 to 3, each as far off as survivable training makes it."""
    s = _streams(run, step)
    age_S = np.minimum(s.rng.integers(0, 4, s.num_rows), step)
    age_N = np.repeat(age_S, s.lengths_S)
    s.cur_N = moved(s.old_N, make_noise(s.old_N, SURVIVABLE_RMS, s.rng) * age_N)
    return [s.train(job.source, gen_version=step - age_S)], MOVES


def _aged_no_middle(run: Healthy, job: Job, step: int) -> Sent:
    """The same without a middle stream: numbers come from rows without lag."""
    records, scalars = _aged(run, job, step)
    return [replace(record, old_is="absent", old_N=None) for record in records], scalars


def _updates(run: Healthy, job: Job, step: int) -> Sent:
    """Four updates a step; the last is a little off-policy."""
    records = []
    for update in range(4):
        s = _streams(run, step, rows=8, length=160, lag=0.02 * update, part=update)
        ids = tuple(f"s{step}-{update}-{i}" for i in range(s.num_rows))
        records.append(s.train(job.source, update=update, ids=ids, groups=ids))
    return records, MOVES


def _entropy(run: Healthy, job: Job, step: int) -> Sent:
    """The policy grows surer: entropy falls to a third, rewards rise."""
    part = step / run.num_steps
    s = _streams(run, step, certain=0.55 + 0.35 * part)
    return [s.train(job.source)], {**MOVES, "entropy": 0.6 * (1 - 0.67 * part), "reward": 0.3 + 0.4 * part}


def _spikes(run: Healthy, job: Job, step: int) -> Sent:
    """In one step of 15 three tokens are wild."""
    s = _streams(run, step)
    if step % 15 == 7:
        s.engine_N[s.rng.choice(len(s.engine_N), 3, replace=False)] = -9.0
    return [s.train(job.source)], {**MOVES, "grad_norm": 3.0 if step % 15 == 7 else 0.7}


def _creep(run: Healthy, job: Job, step: int) -> Sent:
    """Numerics grow by a fifth as the policy moves, as bf16 and MoE ones do."""
    times = 1.0 + 0.2 * step / run.num_steps
    return [_streams(run, step, rms=times * FLOORS[run.floor][0]).train(job.source)], MOVES


RECORDS: dict[str, Callable[[Healthy, Job, int], Sent]] = {
    "plain": _plain,
    "long_rows": _long_rows,
    "tools": _tools,
    "aged": _aged,
    "aged_no_middle": _aged_no_middle,
    "updates": _updates,
    "entropy": _entropy,
    "spikes": _spikes,
    "creep": _creep,
    "loud_rows": _loud_rows,
}
