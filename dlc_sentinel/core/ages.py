"""Which versions a step's tokens are of, how old they are, and log ratios by age; bounded whatever the labels are.

Axes: K version spans.
"""

from __future__ import annotations

import math

import numpy as np

from dlc_sentinel.core.tokens import MAX_VERSIONS, Tokens
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.running import SquareSum
from dlc_sentinel.records import F64, UNKNOWN_VERSION, Bool

MAX_AGES = 8
"""Ages whose ratio is kept: the youngest, on which the effect of a RESYNC is judged."""


class VersionTally:
    """Tokens and groups of one step by generator version, and the mean and largest age."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._groups: dict[int, set[int]] = {}
        self._num_known = 0
        self._age_sum = 0.0
        self._age_max = -math.inf
        self.num_negative = 0
        """Tokens labelled newer than the trainer."""

    def add(self, tokens: Tokens) -> None:
        length_K, age_K = tokens.span_length_K, tokens.span_age_K
        known_K = age_K != UNKNOWN_AGE
        if known_K.any():
            ages, lengths = age_K[known_K].astype(np.float64), length_K[known_K]
            self._num_known += int(lengths.sum())
            self._age_sum += float(ages @ lengths)
            self._age_max = max(self._age_max, float(ages.max()))
            self.num_negative += int(lengths[ages < 0].sum())
        group_K = tokens.group_S[tokens.span_row_K]
        for version in np.unique(tokens.span_version_K).tolist():
            at = tokens.span_version_K == version
            self._put(version, int(length_K[at].sum()), set(group_K[at].tolist()))
        self._lump()

    def _put(self, version: int, num_tokens: int, groups: set[int]) -> None:
        self._tokens[version] = self._tokens.get(version, 0) + num_tokens
        self._groups.setdefault(version, set()).update(groups)

    def _lump(self) -> None:
        if len(self._tokens) <= MAX_VERSIONS:
            return
        oldest = sorted(self._tokens)[-MAX_VERSIONS]
        for version in [v for v in self._tokens if UNKNOWN_VERSION < v < oldest]:
            self._put(oldest, self._tokens.pop(version), self._groups.pop(version))

    @property
    def num_unknown(self) -> int:
        """Tokens without a version."""
        return self._tokens.get(UNKNOWN_VERSION, 0)

    def age_mean_and_max(self) -> tuple[float, float]:
        """In versions, over tokens whose age is known; nan without any."""
        if not self._num_known:
            return math.nan, math.nan
        return self._age_sum / self._num_known, self._age_max

    def by_version(self) -> dict[str, tuple[int, int]]:
        """Version -> (tokens, groups)."""
        return {str(v): (num, len(self._groups[v])) for v, num in self._tokens.items()}


class FirstByAge:
    """A log ratio by age over the step's lowest update only: the state right after a sync shows there."""

    def __init__(self) -> None:
        self._update: int | None = None
        self._by_age: dict[int, SquareSum] = {}

    def add(self, tokens: Tokens, x_N: F64, which_K: Bool | None = None) -> None:
        """`which_K`: spans that count (None: all)."""
        if self._update is not None and self._update < tokens.update:
            return
        if self._update != tokens.update:
            self._update, self._by_age = tokens.update, {}
        age_K = tokens.span_age_K if which_K is None else np.where(which_K, tokens.span_age_K, UNKNOWN_AGE)
        for age in np.unique(age_K[age_K != UNKNOWN_AGE])[:MAX_AGES].tolist():
            at_K = age_K == age
            part = x_N if at_K.all() else x_N[np.repeat(at_K, tokens.span_length_K)]
            self._by_age.setdefault(age, SquareSum()).add(part)
        for age in sorted(self._by_age)[MAX_AGES:]:
            del self._by_age[age]

    def public(self) -> dict[str, tuple[int, float]]:
        """Age -> (tokens, rms in nats), youngest first."""
        return {str(age): (stats.num, stats.rms) for age, stats in sorted(self._by_age.items())}
