"""Rows of JSON lines: a run is one row, its name unique; what is there is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dlc_sentinel.records import F64, Json

Row: TypeAlias = dict[str, Json]
Job: TypeAlias = tuple[Sequence[str], Callable[[], Sequence[Row]]]
"""(names of the rows it makes, what makes them)."""

DIGITS = 5


def rows_of(path: Path) -> list[Row]:
    """Every row of a file, in its order; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def play(path: Path, seconds: float, jobs: Iterable[Job]) -> bool:
    """Runs jobs of which a row is missing until the time is up; True when none is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + seconds
    done = {row["name"] for row in rows_of(path)}
    with path.open("a", encoding="utf-8") as file:
        for names, job in jobs:
            if done.issuperset(names):
                continue
            if time.monotonic() > end_s:
                return False
            for row in job():
                if row["name"] not in done:
                    file.write(json.dumps(row) + "\n")
            file.flush()
    return True


def rounded(values_K: F64) -> list[float | None]:
    """Floats of few digits for JSON; what is not finite becomes null."""
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values_K.tolist()]


def array(values: Sequence[float | None]) -> F64:
    """The inverse of `rounded`: null becomes nan."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
