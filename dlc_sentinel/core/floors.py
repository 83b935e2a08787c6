"""The discrepancy that this run's engine shows when nothing is wrong: what every alarm is relative to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from dlc_sentinel.config import Floor
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.maths.cells import LOGP_EDGES, PRIOR_TOKENS
from dlc_sentinel.records import F64, Json

MEAN_ABS_OF_RMS = 0.798
"""sqrt(2 / pi): mean absolute value of a normal variable of rms 1."""
TABLE_FACTOR = 2.0
MIN_TOKENS = 256
"""Fewer tokens say nothing about an rms: neither a floor nor an alarm is drawn from them."""


SHAPE_B: F64 = np.expm1([-8.0, *((a + b) / 2.0 for a, b in pairwise(LOGP_EDGES)), LOGP_EDGES[-1] / 2.0]) ** 2
"""(1 - p)^2 of each bin of the engine's logprob: what a bin without tokens is taken to be off by, up to a factor."""


class Floors:
    """Floor of rms and mean_abs: the smaller of the median of the run's first steps and twice the table's value.

    Never below `minimum` (for rms). A run that starts above twice its table is thereby judged against the table.
    Numerics move the tokens that the engine is unsure of: a step that has more of them has a larger floor, by what the
    steps that taught say of tokens as likely as its own. A step is judged against those before it. One at which
    something is wrong with engine or data teaches nothing, unless nothing else is known.
    """

    def __init__(self, config: Floor) -> None:
        self._config = config
        self._rms: list[float] = []
        self._mean_abs: list[float] = []
        self._doubtful: list[tuple[float, float]] = []
        """(rms, mean_abs) of the first steps at which something was wrong."""
        self._numerics: list[F64] = []
        """[B, 2] tokens and sums of squares by bin of the engine's logprob, of each step that taught; empty: none."""
        self.dtypes: dict[str, str] = {}

    def note_dtypes(self, dtypes: Mapping[str, str]) -> None:
        """Takes dtype names of either side; the coarsest one known rules."""
        self.dtypes.update({side: name for side, name in dtypes.items() if name})

    def of(self, facts: StepFacts) -> tuple[float, float]:
        """(rms, mean_abs) in nats that this step is judged against: its own are asked only where no step has taught."""
        rms_now, mean_abs_now = self._rms, self._mean_abs
        if not rms_now:
            own = [(facts.discrepancy.rms, facts.discrepancy.mean_abs)] if self._speaks(facts) else []
            doubtful = (self._doubtful + own)[: self._config.steps]
            rms_now, mean_abs_now = [rms for rms, _ in doubtful], [mean for _, mean in doubtful]
        table = getattr(self._config, coarsest(self.dtypes.values()))
        rms, mean_abs = table, MEAN_ABS_OF_RMS * table
        if rms_now:
            more = self._more(facts) if self._rms else [1.0] * len(rms_now)
            rms, mean_abs = _no_less(rms_now, more), _no_less(mean_abs_now, more)
        rms = min(rms, TABLE_FACTOR * table)
        return (
            max(rms, self._config.minimum),
            max(min(mean_abs, TABLE_FACTOR * MEAN_ABS_OF_RMS * table), MEAN_ABS_OF_RMS * self._config.minimum),
        )

    def learn(self, facts: StepFacts, *, doubtful: bool) -> None:
        """Takes the step's discrepancy. `doubtful`: something about engine or data is wrong, or seems to be."""
        if not self._speaks(facts) or len(self._rms) >= self._config.steps:
            return
        if not doubtful:
            self._rms.append(facts.discrepancy.rms)
            self._mean_abs.append(facts.discrepancy.mean_abs)
            self._numerics.append(np.array(facts.numerics, np.float64).reshape(-1, 2))
        elif len(self._doubtful) < self._config.steps:
            self._doubtful.append((facts.discrepancy.rms, facts.discrepancy.mean_abs))

    def _more(self, facts: StepFacts) -> list[float]:
        """For each step that taught: rms of tokens as likely as this step's over that of its own."""
        known = [own for own in self._numerics if len(own)]
        if not known or not facts.numerics:
            return [1.0] * len(self._rms)
        num_B, sum2_B = np.sum(known, axis=0).T
        scale = float(sum2_B.sum() / (num_B @ SHAPE_B))
        law_B = (sum2_B + PRIOR_TOKENS * scale * SHAPE_B) / (num_B + PRIOR_TOKENS)
        now = _expected(np.array(facts.numerics), law_B)
        return [math.sqrt(now / _expected(own, law_B)) if len(own) else 1.0 for own in self._numerics]

    def _speaks(self, facts: StepFacts) -> bool:
        return facts.discrepancy.num >= MIN_TOKENS and math.isfinite(facts.discrepancy.rms)

    def to_json(self) -> Json:
        doubtful = [list(pair) for pair in self._doubtful]
        return {
            "rms": self._rms,
            "mean_abs": self._mean_abs,
            "doubtful": doubtful,
            "dtypes": self.dtypes,
            "numerics": [own.tolist() for own in self._numerics],
        }

    def load(self, tree: Mapping[str, Json]) -> None:
        self._rms, self._mean_abs = list(tree["rms"]), list(tree["mean_abs"])
        self._doubtful = [(float(rms), float(mean)) for rms, mean in tree.get("doubtful", [])]
        self._numerics = [np.array(own, np.float64).reshape(-1, 2) for own in tree["numerics"]]
        self.dtypes = dict(tree["dtypes"])


def _expected(numerics_B2: F64, law_B: F64) -> float:
    """Second moment of so many tokens of each bin, nats^2."""
    return max(float(numerics_B2[:, 0] @ law_B / numerics_B2[:, 0].sum()), 1e-18)


def _no_less(values: Sequence[float], more: Sequence[float]) -> float:
    """Median over steps, each made to have this step's tokens; a step of surer tokens has no smaller floor."""
    return max(median(values), median(value * times for value, times in zip(values, more, strict=True)))


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
