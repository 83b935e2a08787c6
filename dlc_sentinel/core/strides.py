"""Counts steps that had data. The trainer's own numbers may skip: some jobs log every tenth, some count samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median

STRIDE_STEPS = 8
NEVER = 10**9


def num_since(steps: Sequence[int], step: int) -> int:
    """How many of `steps`, the numbers in order, came after `step`; NEVER for a step below 0."""
    return len(steps) - bisect_right(steps, step) if step >= 0 else NEVER


def stride(steps: Sequence[int]) -> int:
    """By how much the numbers `steps` grow: the median of their newest differences; 1 while that is unknown."""
    newest = steps[-STRIDE_STEPS - 1 :]
    return ceil(median(after - before for before, after in pairwise(newest))) if len(newest) > 1 else 1


def last_number(steps: Sequence[int], step: int, num: int) -> int:
    """The number of the step `num` steps after `step`, by the stride of `steps`; -1 where that is unknown."""
    return step + num * stride(steps) if len(steps) > 1 else -1


def num_steps(numbers: Sequence[int], distance: float) -> int:
    """How many steps `distance` is, where `numbers` is what it is counted in, at each step; 0 for nan or below 0."""
    return ceil(distance / max(stride(numbers), 1)) if distance >= 0 else 0


@dataclass(slots=True)
class Silence:
    """Steps that closed since something came last, held against the most it has stayed away for before."""

    _at_step: int = -1
    """The newest step when it came last."""
    _num: int = 0
    """Later ones that closed since."""
    _usual: int = 1

    def heard(self, step: int) -> None:
        self._usual = max(self._usual, self._num)
        self._at_step, self._num = step, 0

    def closed(self, step: int) -> None:
        self._num = self._num + 1 if step > self._at_step else 0

    @property
    def is_unusual(self) -> bool:
        return self._num > self._usual
