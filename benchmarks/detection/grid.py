"""The grid of labelled runs: which kind at which severity, on which shape and precision, from which seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import tomllib

GRID = Path(__file__).with_name("grid.toml")
VERDICTS = ("DATA", "TRANSFORM", "ENGINE", "STALE_ENGINE", "LABEL", "LAG", "LEARNING", "UNWIRED", "BLIND")
SMALL_TOKENS, LARGE_TOKENS = 40_000, 100_000
"""Long runs (drift, undelivered weights, learning) take the shapes up to the first many tokens a step only; of those
beyond the second, which cost most, every other severity is played."""
SHORT_ROWS = 64
"""Of them no chunk has an edge inside."""
LONG_RUNS = ("drift", "tail", "entropy", "reward", "truncation", "never_delivered", "never_delivered_unproven",
             "never_delivered_measured")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """One labelled run."""

    verdict: str
    kind: str
    severity: float
    length: int
    rows: int
    floor: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.severity:g}-{self.length}x{self.rows}-{self.floor}-{self.seed}"


def plans(*, test: bool = True, thin: int = 1, verdict: str = "") -> Iterator[Plan]:
    """Every run of the grid, or every `thin`-th; seeds from the test range, or from the tuning one."""
    tree = tomllib.loads(GRID.read_text(encoding="utf-8"))
    low, high = tree["tuning_seeds"]
    serial = count()
    for name in VERDICTS:
        for kind, severities in tree[name].items():
            for shape_at, (length, rows) in enumerate(tree["shapes"]):
                if kind == "chunk_edge" and length <= SHORT_ROWS:
                    continue
                if kind in LONG_RUNS and length * rows > SMALL_TOKENS:
                    continue
                every = 2 if length * rows > LARGE_TOKENS else 1
                for severity_at, severity in enumerate(severities):
                    if (severity_at + shape_at) % every:
                        continue
                    number = next(serial)
                    if number % thin or verdict not in ("", name):
                        continue
                    floor = tree["floors"][(shape_at + severity_at + len(kind)) % len(tree["floors"])]
                    seed = tree["test_seeds_from"] + number if test else low + number % (high - low)
                    yield Plan(name, kind, float(severity), length, rows, floor, seed)
