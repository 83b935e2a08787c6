"""What a row may be off by: the run's floor, and more where it has more unsure tokens than others.

Axes: S rows. nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlc_sentinel.core.probe import UNSURE_NATS, RowTable, WholeRow
from dlc_sentinel.records import F64, I64, Bool

FAR_FLOORS, FAR_NATS = 4.0, 0.02
"""A row is far where its rms is beyond both."""
NEAR_FLOORS = 2.0
QUIET_ROWS, MAX_LIFT = 0.3, 3.0
ENOUGH_UNSURE = 8
"""A row of fewer unsure tokens tells no floor: numerics move hardly any other."""


@dataclass(frozen=True, slots=True)
class RowFloor:
    """The rms that a row with the step's share of unsure tokens shows when nothing is wrong."""

    rms: float
    unsure_share: float
    """Of all tokens of the step."""

    def far(self, table: RowTable) -> Bool:
        """[S] True where a row is far."""
        limit_S = np.maximum(FAR_FLOORS * self._own(table.num_S, table.unsure_S), FAR_NATS)
        return table.mean_sq_S > limit_S**2

    def near(self, table: RowTable) -> Bool:
        """[S] True where a row is no further off than healthy ones are."""
        return table.mean_sq_S < (NEAR_FLOORS * self._own(table.num_S, table.unsure_S)) ** 2

    def is_far(self, row: WholeRow) -> bool:
        """The same of a row that is at hand."""
        num, unsure = np.array([len(row.engine_T)]), np.array([int((row.engine_T < UNSURE_NATS).sum())])
        limit = max(FAR_FLOORS * float(self._own(num, unsure)[0]), FAR_NATS)
        return row.rms > limit

    def _own(self, num_S: I64, unsure_S: I64) -> F64:
        more_S = np.maximum(unsure_S / np.maximum(num_S, 1) / max(self.unsure_share, 1e-12), 1.0)
        own_S: F64 = self.rms * np.sqrt(more_S)
        return own_S


def row_floor(table: RowTable, floor_rms: float) -> RowFloor:
    """The floor that rows are held against: the quiet ones' own, where others have lifted the run's (to its third)."""
    share = float(table.unsure_S.sum() / max(int(table.num_S.sum()), 1))
    tells_S = table.unsure_S >= ENOUGH_UNSURE
    if tells_S.sum() < QUIET_ROWS * len(tells_S):
        return RowFloor(floor_rms, share)
    usual_S = table.mean_sq_S[tells_S] * share * table.num_S[tells_S] / table.unsure_S[tells_S]
    quiet = math.sqrt(float(np.quantile(usual_S, QUIET_ROWS)))
    return RowFloor(min(max(quiet, floor_rms / MAX_LIFT), floor_rms), share)
