"""Which correction a recorded run needs: its tokens, step by step, through maths/corrections and maths/needs.

A step's rows are kept until newer steps show that it is over; of a step with more than MAX_TOKENS tokens a half, a
quarter ... of the rows is kept, spread evenly: memory is bounded by the open steps. Rows whose lag is not exact are
compared, by their total, only where the run has no exact row at all. PPO's clip is taken to bite by half, and a step to
be one update: recordings do not hold advantages beside the tokens that count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from dlc_sentinel.core.tokens import Tokens
from dlc_sentinel.maths.corrections import Comparison, Effect, compare_corrections
from dlc_sentinel.maths.needs import over_steps
from dlc_sentinel.maths.ratio import log_ratio
from dlc_sentinel.records import F64, I64, Bool, Json

MAX_TOKENS: Final = 2**16
"""Of one step, compared at once."""
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
OPEN_STEPS: Final = 4
"""A step this much older than the newest is over."""


@dataclass(slots=True)
class _Chunk:
    row_S: I64
    """Number of each row among those of its step."""
    length_S: I64
    total_N: F64
    lag_N: F64 | None

    def thinned(self, halvings: int) -> _Chunk:
        """The rows of which `halvings` halvings are left; a row left by more is left by fewer."""
        if not halvings:
            return self
        # multiples of the golden ratio are spread evenly, whatever pattern the rows' order has
        kept_S = (self.row_S.astype(np.uint64) * GOLDEN) >> np.uint64(64 - halvings) == 0
        kept_N = np.repeat(kept_S, self.length_S)
        lag_N = None if self.lag_N is None else self.lag_N[kept_N]
        return _Chunk(self.row_S[kept_S], self.length_S[kept_S], self.total_N[kept_N], lag_N)


@dataclass(slots=True)
class _Rows:
    """Rows of one step and one basis, thinned where they are many."""

    num_rows: int = 0
    num_tokens: int = 0
    halvings: int = 0
    chunks: list[_Chunk] = field(default_factory=list)

    def add(self, length_S: I64, total_N: F64, lag_N: F64 | None) -> None:
        row_S = np.arange(self.num_rows, self.num_rows + len(length_S))
        self.num_rows += len(length_S)
        self.num_tokens += len(total_N)
        self.chunks.append(_Chunk(row_S, length_S, total_N, lag_N).thinned(self.halvings))
        while self.num_kept > MAX_TOKENS and sum(len(chunk.row_S) for chunk in self.chunks) > 1:
            self.halvings += 1
            self.chunks = [chunk.thinned(self.halvings) for chunk in self.chunks]

    @property
    def num_kept(self) -> int:
        return sum(len(chunk.total_N) for chunk in self.chunks)

    def compare(self, horizon: int) -> Comparison:
        length_S = np.concatenate([chunk.length_S for chunk in self.chunks])
        lags = [chunk.lag_N for chunk in self.chunks if chunk.lag_N is not None]
        return compare_corrections(
            np.concatenate([chunk.total_N for chunk in self.chunks]),
            np.concatenate([[0], np.cumsum(length_S)]),
            lag_N=np.concatenate(lags) if lags else None,
            horizon=horizon,
        )


@dataclass(slots=True)
class _Basis:
    """All that was compared on one basis."""

    found: list[Comparison] = field(default_factory=list)
    num_tokens: int = 0
    num_kept: int = 0


class Corrections:
    """Takes the tokens of runs as they come, and says what each run needs."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._open: dict[tuple[str, int, bool], _Rows] = {}
        self._done: dict[tuple[str, bool], _Basis] = {}

    def take(self, run: str, tokens: Tokens) -> None:
        """A batch of tokens that the judge counts too; see `Monitor.tap`."""
        assert tokens.cur_N is not None
        total_N = log_ratio(tokens.cur_N, tokens.engine_N)
        exact_S, length_S = tokens.row_exact_S, np.diff(tokens.offsets_S1)
        if tokens.gen_N is not None and exact_S.any():
            lag_N = log_ratio(tokens.cur_N, tokens.gen_N)
            self._add((run, tokens.step, True), exact_S, length_S, total_N, lag_N)
        else:
            exact_S = np.zeros(len(exact_S), np.bool_)
        if not exact_S.all():
            self._add((run, tokens.step, False), ~exact_S, length_S, total_N, None)
        for key in [key for key in self._open if key[0] == run and key[1] <= tokens.step - OPEN_STEPS]:
            self._close(key)

    def _add(self, key: tuple[str, int, bool], which_S: Bool, length_S: I64, total_N: F64, lag_N: F64 | None) -> None:
        which_N = np.repeat(which_S, length_S)
        rows = self._open.setdefault(key, _Rows())
        rows.add(length_S[which_S], total_N[which_N], None if lag_N is None else lag_N[which_N])

    def _close(self, key: tuple[str, int, bool]) -> None:
        rows = self._open.pop(key)
        basis = self._done.setdefault((key[0], key[2]), _Basis())
        basis.found.append(rows.compare(self._horizon))
        basis.num_tokens += rows.num_tokens
        basis.num_kept += rows.num_kept

    def report(self, run: str) -> dict[str, Json]:
        """The object `corrections` of the report: numbers or None, tokens counted in full and as compared."""
        for key in sorted(key for key in self._open if key[0] == run):
            self._close(key)
        exact, other = (self._done.get((run, is_exact), _Basis()) for is_exact in (True, False))
        used, left_out = (exact, other.num_tokens) if exact.found else (other, 0)
        needs = over_steps(used.found)
        return {
            "need": needs.run.name,
            "reason": needs.run.reason,
            "basis": "exact" if exact.found else "total" if other.found else "none",
            "horizon": self._horizon,
            "num_steps": len(used.found),
            "num_tokens": used.num_tokens,
            "num_tokens_compared": used.num_kept,
            "num_tokens_left_out": left_out,
            "steps_that_need": needs.counts,
            "lag_ess": _known(needs.lag_ess_ratio),
            "lag_bias": _known(needs.lag_bias),
            "effects": _effects(needs.effects),
        }


def _effects(effects: Sequence[Effect]) -> list[Json]:
    return [
        {
            "name": effect.name,
            "ess": _known(effect.ess_ratio),
            "raw_ess": _known(effect.raw_ess_ratio),
            "clipped_share": _known(effect.clipped_share),
            "bias_left": _known(effect.bias_left),
            "variance_factor": _known(effect.variance_factor),
        }
        for effect in effects
    ]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
