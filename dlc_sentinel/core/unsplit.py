"""Rows whose lag is not known apart from the discrepancy, and what a pool of lag-0 rows makes of them.

Rows are kept apart by the versions they were generated at, because the engine's law may change between two of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, TypeAlias

import numpy as np

from dlc_sentinel.core.tokens import Tokens
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.calibrated import Calibrated, CalibrationPool, calibrate, ess_without, noise_of
from dlc_sentinel.maths.cells import DiscrepancyCells, row_positions
from dlc_sentinel.maths.ess import RUNGS, pooled_ess, rung_name
from dlc_sentinel.maths.stale import StaleRows
from dlc_sentinel.records import F32, F64, I64, UNKNOWN_VERSION, Bool

NAN = math.nan
MAX_KINDS = 64
Versions: TypeAlias = tuple[int, int, int]
"""(age of the row's oldest token, its version, the row's newest version)."""
_UNKNOWN: Versions = (UNKNOWN_AGE, UNKNOWN_VERSION, UNKNOWN_VERSION)


@dataclass(frozen=True, slots=True)
class SplitLag:
    """The lag of rows that a calibration could split; nan where it could not."""

    num_tokens: int = 0
    num_rows: int = 0
    num_left: int = 0
    """Tokens that no valid law was at hand for."""
    num_blocks: Mapping[str, int] = field(default_factory=dict)
    ess: Mapping[str, float] = field(default_factory=dict)
    action_ess: float = NAN
    interval: tuple[float, float] = (NAN, NAN)
    by_age: Mapping[int, float] = field(default_factory=dict)
    second_moment: float = NAN
    """Mean lag^2, nats^2; nan where the discrepancy is too large to resolve it."""
    kl: float = NAN
    """KL(generator || now), nats per token; nan as above."""
    reason: str = ""
    """Why tokens were left."""


class UnsplitRows:
    """Mergeable totals of whole rows by the versions that generated them. Raises nothing but its maths' errors."""

    def __init__(self, action_horizon: int) -> None:
        self._horizon = action_horizon
        self._kinds: dict[Versions, StaleRows] = {}

    def add(self, tokens: Tokens, total_N: F64, which_S: Bool) -> None:
        """Takes the chosen rows of `tokens`, whose total = trainer now - engine is `total_N`, nats."""
        kinds = _kinds(tokens)
        for kind in {kinds[row] for row in np.flatnonzero(which_S)}:
            rows_S = which_S & np.fromiter((k == kind for k in kinds), np.bool_, len(kinds))
            streams = _rows_of(tokens, total_N, rows_S)
            self._of(kind).add(*streams, tokens.group_S[rows_S])

    def _of(self, kind: Versions) -> StaleRows:
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = _UNKNOWN
        return self._kinds.setdefault(kind, StaleRows(self._horizon))

    def merge(self, other: UnsplitRows) -> Self:
        """Self, which now also holds what `other` holds; `other` keeps its values."""
        for kind in sorted(other._kinds):
            self._of(kind).merge(other._kinds[kind])
        return self

    def groups(self) -> I64:
        """Keys of the prompt groups, those left out of the bootstrap excepted."""
        kept = [rows.kept().group_S for rows in self._kinds.values()]
        return np.unique(np.concatenate(kept)) if kept else np.zeros(0, np.int64)

    def bound(self) -> tuple[int, float]:
        """(blocks, ESS) of the total at the action horizon: a nearly safe lower bound of the lag's."""
        rung = rung_name(self._horizon)
        sketches = [rows.sketch(rung) for rows in self._kinds.values()]
        nums = [sketch.num for sketch in sketches]
        return sum(nums), pooled_ess(nums, [sketch.ess(1.0) for sketch in sketches])

    def split(self, pool: CalibrationPool, seed: int) -> SplitLag:
        """The lag of all rows that the pool has a valid law for. Depends on the data and the seed only."""
        left, reasons = 0, []
        by_law: dict[int, tuple[DiscrepancyCells, StaleRows]] = {}
        laws: dict[Versions, DiscrepancyCells] = {}
        for kind in sorted(self._kinds):
            rows = self._kinds[kind]
            law = None if kind == _UNKNOWN else pool.law(kind[1], kind[2])
            if law is None:
                left += rows.num_tokens
                changed = "the engine's law changed between their versions"
                reasons.append("their versions are not known" if kind == _UNKNOWN else changed)
                continue
            laws[kind] = law
            era = int(kind[1] >= pool.since_version)
            by_law.setdefault(era, (law, StaleRows(self._horizon)))[1].merge(rows)
        parts: list[tuple[StaleRows, Calibrated]] = []
        for era in sorted(by_law):
            law, rows = by_law[era]
            made = calibrate(rows, law, seed=seed)
            if made.valid:
                parts.append((rows, made))
                continue
            left += rows.num_tokens
            reasons.append(made.reason)
            laws = {kind: law for kind, law in laws.items() if int(kind[1] >= pool.since_version) != era}
        return self._joined(parts, self._by_age(laws), left, "; ".join(dict.fromkeys(reasons)))

    def _by_age(self, laws: Mapping[Versions, DiscrepancyCells]) -> dict[int, float]:
        rung = rung_name(self._horizon)
        parts: dict[int, list[tuple[int, float]]] = {}
        for kind, law in laws.items():
            rows = self._kinds[kind]
            ess = ess_without(rows, rung, noise_of(rows, law))
            parts.setdefault(kind[0], []).append((rows.sketch(rung).num, ess))
        return {age: pooled_ess(*zip(*parts[age], strict=True)) for age in sorted(parts)}

    def _joined(
        self, parts: list[tuple[StaleRows, Calibrated]], by_age: Mapping[int, float], left: int, reason: str
    ) -> SplitLag:
        if not parts:
            return SplitLag(num_left=left, reason=reason)
        tokens = sum(rows.num_tokens for rows, _ in parts)
        action = [rows.sketch(rung_name(self._horizon)).num for rows, _ in parts]
        blocks = {rung: [rows.sketch(rung).num for rows, _ in parts] for rung in RUNGS}
        ends = [pooled_ess(action, [made.interval[end] for _, made in parts]) for end in (0, 1)]
        return SplitLag(
            num_tokens=tokens,
            num_rows=sum(rows.num_rows for rows, _ in parts),
            num_left=left,
            num_blocks={rung: sum(nums) for rung, nums in blocks.items()},
            ess={rung: pooled_ess(blocks[rung], [made.ess[rung] for _, made in parts]) for rung in RUNGS},
            action_ess=pooled_ess(action, [made.action_ess for _, made in parts]),
            interval=(ends[0], ends[1]),
            by_age=by_age,
            second_moment=sum(rows.num_tokens * made.rms**2 for rows, made in parts) / tokens,
            kl=sum(rows.num_tokens * made.kl for rows, made in parts) / tokens,
            reason=reason,
        )

    def blocks(self) -> tuple[dict[str, int], dict[str, int]]:
        """({rung: blocks}, {rung: of those, blocks as long as the rung asks})."""
        pooled = StaleRows(self._horizon)
        for rows in self._kinds.values():
            pooled.merge(rows)
        nums, shares = pooled.num_blocks(), pooled.coverage()
        return nums, {rung: round(num * shares[rung]) if num else 0 for rung, num in nums.items()}


def cells_of(tokens: Tokens, disc_N: F64, which_S: Bool) -> DiscrepancyCells:
    """The discrepancy of the chosen rows as a calibration takes it."""
    cells = DiscrepancyCells()
    d_N, engine_N, position_N, offsets_S1 = _rows_of(tokens, disc_N, which_S)
    cells.add(engine_N, position_N, d_N, offsets_S1)
    return cells


def _rows_of(tokens: Tokens, x_N: F64, which_S: Bool) -> tuple[F64, F32, I64, I64]:
    """(values, engine logprobs, places in the response, offsets) of the chosen rows."""
    position_N, lengths = row_positions(tokens.offsets_S1), np.diff(tokens.offsets_S1)
    if which_S.all():
        return x_N, tokens.engine_N, position_N, tokens.offsets_S1
    keep_N = np.repeat(which_S, lengths)
    offsets_S1 = np.concatenate([[0], np.cumsum(lengths[which_S])])
    return x_N[keep_N], tokens.engine_N[keep_N], position_N[keep_N], offsets_S1


def _kinds(tokens: Tokens) -> list[Versions]:
    """The kind of each row; rows with a token of unknown version, or newer than the trainer, are of the unknown one."""
    first_S = np.searchsorted(tokens.span_row_K, np.arange(len(tokens.group_S)))
    oldest_S = np.minimum.reduceat(tokens.span_version_K, first_S)
    newest_S = np.maximum.reduceat(tokens.span_version_K, first_S)
    known_S = (oldest_S != UNKNOWN_VERSION) & (tokens.version >= newest_S)
    return [
        (tokens.version - old, old, new) if known else _UNKNOWN
        for old, new, known in zip(oldest_S.tolist(), newest_S.tolist(), known_S.tolist(), strict=True)
    ]
