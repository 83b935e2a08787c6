"""One step's rows whose discrepancy is known, as a calibration of the others: fresh, re-scored, or exact and old.

Taken from first updates. Axes: S rows.
"""

from __future__ import annotations

import numpy as np

from dlc_sentinel.core.facts import NAN, Values
from dlc_sentinel.core.probe import thinned
from dlc_sentinel.core.tokens import Tokens
from dlc_sentinel.core.unsplit import cells_of
from dlc_sentinel.maths.arrays import UNKNOWN_AGE, dot
from dlc_sentinel.maths.calibrated import CalibrationPool
from dlc_sentinel.maths.cells import DiscrepancyCells, by_logp, mixed
from dlc_sentinel.maths.ratio import log_ratio
from dlc_sentinel.maths.running import SquareSum
from dlc_sentinel.records import F64, UNKNOWN_VERSION

CALIBRATION_TOKENS = 1 << 16
"""Tokens that a step gives to the calibration, where there are many more."""
MIN_ROWS = 3
"""Fewer rows without lag do not prove that the engine changed."""


class StepCalibration:
    """`thin`: of the rows one in 2**thin is taken; which, their own content says."""

    def __init__(self, thin: int) -> None:
        self._thin = thin
        self._lag0 = DiscrepancyCells()
        self._older = DiscrepancyCells()
        self._older_version = UNKNOWN_VERSION
        self._rescored = SquareSum()
        self._shared = 0.0

    def add_exact(self, tokens: Tokens, disc_N: F64) -> None:
        """Takes exact rows of one version each: those without lag, and older ones in case there are none."""
        age_S = np.full(len(tokens.group_S), UNKNOWN_AGE)
        age_S[tokens.span_row_K] = tokens.span_age_K
        whole_S = tokens.row_exact_S & (np.bincount(tokens.span_row_K, minlength=len(age_S)) == 1)
        if self._thin and whole_S.any():
            last_S = tokens.engine_N[tokens.offsets_S1[1:] - 1].view(np.uint32).astype(np.uint64)
            whole_S &= mixed(last_S ^ tokens.group_S.view(np.uint64)) >> np.uint64(64 - self._thin) == 0
        lag0_S = whole_S & (age_S == 0)
        if lag0_S.any():
            self._lag0.merge(cells_of(tokens, disc_N, lag0_S))
        older_S = whole_S & (age_S > 0) & (age_S != UNKNOWN_AGE)
        if older_S.any():
            self._older.merge(cells_of(tokens, disc_N, older_S))
            self._older_version = max(self._older_version, tokens.version - int(age_S[older_S].min()))

    def add_rescored(self, tokens: Tokens) -> None:
        """Takes rows that the engine scored once more: their discrepancy at present weights."""
        assert tokens.rescored_N is not None and tokens.cur_N is not None
        now_N = log_ratio(tokens.cur_N, tokens.rescored_N)
        moved_N = log_ratio(tokens.rescored_N, tokens.engine_N)
        self._lag0.merge(cells_of(tokens, now_N, np.ones(len(tokens.group_S), np.bool_)))
        self._rescored.add(now_N)
        self._shared += 2.0 * dot(now_N, moved_N)

    def settle(self, law: CalibrationPool, version: int) -> float:
        """Adds the step's rows to the law; the ratio by which they changed it, nan where they did not."""
        cells = self._lag0
        if cells.num_rows < MIN_ROWS and self._older.num_rows:
            cells, version = self._older, self._older_version
        law.add(cells, version)
        return law.change_ratio if cells.num_rows >= MIN_ROWS else NAN

    @property
    def by_logp(self) -> tuple[tuple[float, float], ...]:
        """(tokens, sum of squares in nats^2) by bin of the engine's logprob, of rows without lag, else of old ones."""
        cells = self._lag0 if self._lag0.num_rows else self._older
        count_C, sum2_C = cells.count_C, cells.sum2_RC.sum(0)
        return tuple(zip(by_logp(count_C).tolist(), by_logp(sum2_C).tolist(), strict=True)) if cells.num_rows else ()

    @property
    def rescored(self) -> Values:
        """Discrepancy at present weights of the rows scored once more."""
        return Values(rms=self._rescored.rms, num=self._rescored.num)

    @property
    def interaction(self) -> float:
        """Twice its mean product with what moved in the engine, nats^2: what the other order of terms adds."""
        return self._shared / self._rescored.num if self._rescored.num else NAN

    @property
    def thin_next(self) -> int:
        """`thin` with which a step like this one gives about CALIBRATION_TOKENS."""
        return thinned(max(self._lag0.num_tokens, self._older.num_tokens) << self._thin, CALIBRATION_TOKENS)
