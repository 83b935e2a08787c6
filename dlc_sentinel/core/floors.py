"""The discrepancy that this run's engine shows when nothing is wrong: what every alarm is relative to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from dlc_sentinel.config import Floor
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.records import Json

MEAN_ABS_OF_RMS = 0.798
"""sqrt(2 / pi): mean absolute value of a normal variable of rms 1."""
TABLE_FACTOR = 2.0
MIN_TOKENS = 256
"""Fewer tokens say nothing about an rms: neither a floor nor an alarm is drawn from them."""


class Floors:
    """Floor of rms and mean_abs: the smaller of the median of the run's first steps and twice the table's value.

    Never below `minimum` (for rms). A run that starts above twice its table is thereby judged against the table.
    """

    def __init__(self, config: Floor) -> None:
        self._config = config
        self._rms: list[float] = []
        self._mean_abs: list[float] = []
        self.dtypes: dict[str, str] = {}

    def note_dtypes(self, dtypes: Mapping[str, str]) -> None:
        """Takes dtype names of either side; the coarsest one known rules."""
        self.dtypes.update({side: name for side, name in dtypes.items() if name})

    def update(self, facts: StepFacts) -> tuple[float, float]:
        """(rms, mean_abs) in nats, this step included."""
        values = facts.discrepancy
        if values.num >= MIN_TOKENS and len(self._rms) < self._config.steps and math.isfinite(values.rms):
            self._rms.append(values.rms)
            self._mean_abs.append(values.mean_abs)
        table = getattr(self._config, coarsest(self.dtypes.values()))
        rms = min(median(self._rms) if self._rms else table, TABLE_FACTOR * table)
        mean_abs = median(self._mean_abs) if self._mean_abs else MEAN_ABS_OF_RMS * table
        return (
            max(rms, self._config.minimum),
            max(min(mean_abs, TABLE_FACTOR * MEAN_ABS_OF_RMS * table), MEAN_ABS_OF_RMS * self._config.minimum),
        )

    def to_json(self) -> Json:
        return {"rms": self._rms, "mean_abs": self._mean_abs, "dtypes": self.dtypes}

    def load(self, tree: Mapping[str, Json]) -> None:
        self._rms, self._mean_abs = list(tree["rms"]), list(tree["mean_abs"])
        self.dtypes = dict(tree["dtypes"])


def coarsest(names: Iterable[str]) -> str:
    """The table key of the coarsest dtype named; bfloat16, the field's usual one, where nothing is known."""
    rank = {"float32": 0, "float16": 1, "bfloat16": 2, "moe": 3, "float8": 4}
    known = {
        "float32": "float32", "fp32": "float32", "float": "float32", "float64": "float32",
        "float16": "float16", "fp16": "float16", "half": "float16",
        "bfloat16": "bfloat16", "bf16": "bfloat16", "moe": "moe",
    }  # fmt: skip
    found = []
    for name in names:
        short = name.lower().removeprefix("torch.")
        eight = any(part in short for part in ("fp8", "float8", "e4m3", "e5m2", "int8"))
        key = "float8" if eight else known.get(short)
        if key is not None:
            found.append(key)
    return max(found, key=rank.__getitem__, default="bfloat16")
