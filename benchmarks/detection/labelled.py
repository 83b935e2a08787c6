"""Every labelled run of the grid, played and scored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from benchmarks.detection.courses import COURSES
from benchmarks.detection.faults import DAMAGES, MADE, Truth, play_damage
from benchmarks.detection.grid import Plan
from benchmarks.detection.play import Job, Outcome, outcome
from benchmarks.detection.streams import FLOORS
from dlc_sentinel.records import Json


@dataclass(frozen=True, slots=True)
class Labelled:
    """A run, what is true of it and what it was called."""

    plan: Plan
    truth: Truth
    outcome: Outcome

    @property
    def is_right(self) -> bool:
        found = self.outcome.verdict
        kinds = [name for name in self.outcome.kinds if name in self.truth.right]
        return found in self.truth.right or (bool(kinds) and found == kinds[-1].split("/")[0])

    def to_json(self) -> dict[str, Json]:
        out = self.outcome
        return asdict(self.plan) | {
            "name": self.plan.name, "start": self.truth.start, "visible": out.visible, "catastrophic": out.catastrophic,
            "called": out.verdict, "right": self.is_right, "kinds": list(out.kinds), "delay": out.delay,
            "early": out.early, "commands": list(out.commands),
        }  # fmt: skip


def play(plan: Plan) -> Labelled:
    """The run of one plan, from its seed alone."""
    job = Job(FLOORS[plan.floor][1])
    if plan.kind in COURSES:
        truth = COURSES[plan.kind](plan, job)
    else:
        damage = DAMAGES.get(plan.kind) or MADE[plan.kind](plan)
        truth = play_damage(plan, job, damage)
    made = outcome(job, truth.start, truth.right, visible=truth.visible, catastrophic=truth.catastrophic)
    return Labelled(plan, truth, made)


def play_all(chosen: Iterable[Plan]) -> list[Labelled]:
    return [play(plan) for plan in chosen]
