"""Testbeds A, B, D: which arms a world gets, and their jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.experiments.arms import ABLATION, REFERENCE, TABULAR, Arm, frontier
from benchmarks.experiments.loop import Runs, name_of, reference_weights
from benchmarks.experiments.store import Job, Row, play, rows_of
from benchmarks.experiments.worlds import World, a_worlds, d_worlds, trap
from dlc_sentinel.records import F64

REFERENCE_SEEDS = tuple(range(8))
SEEDS = (100, 101, 102, 103)
SHORT, LONG = 64, 256


def worlds_of(part: str) -> list[World]:
    """The worlds of testbed a, b or d."""
    return {"a": a_worlds, "b": lambda: [trap()], "d": d_worlds}[part]()


def arms_of(world: World) -> list[Arm]:
    """Every world gets the plain arms; A at T = 6 and D at T = 256 the ablation; long ones the frontier."""
    length = world.geometry.length
    arms = [*TABULAR, *(ABLATION if length in (5, 6, LONG) else ()), *(frontier(length) if length > SHORT else ())]
    return list({arm.name: arm for arm in arms}.values())


def play_tabular(part: str, out: Path, seconds: float) -> bool:
    """Every arm of every world of a testbed; True when none is left."""
    return play(out / f"{part}.jsonl", seconds, _jobs(part, out))


def _jobs(part: str, out: Path) -> Iterator[Job]:
    for world in worlds_of(part):
        held: list[F64] = []
        for arm in arms_of(world):
            names = [name_of(world, arm, seed) for seed in SEEDS]
            yield names, partial(_rows, world, arm, held, out / f"{part}.jsonl")


def _rows(world: World, arm: Arm, held: list[F64], path: Path) -> Sequence[Row]:
    if not held:  # made by the first arm that runs: seconds, and nothing to keep
        held.append(reference_weights(world, REFERENCE, REFERENCE_SEEDS))
    syncs: list[int] = []
    if arm.like:
        rows = {row["name"]: row for row in rows_of(path)}
        syncs = [len(rows[f"{world.name}/{arm.like}/{seed}"]["syncs"]) for seed in SEEDS]
    runs = Runs(world, arm, SEEDS, syncs)
    runs.run(held[0])
    return runs.rows()
