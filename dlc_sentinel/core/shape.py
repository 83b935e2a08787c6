"""Is trainer - engine a function of the logprob? That is what a sampling transform on one side makes of it.

    kept mass:    E_engine[exp(trainer - engine)] = the trainer's mass on what the engine could sample; 1 without a cut
    temperature:  log-odds(trainer) = a + T log-odds(engine), or the same of plain logprobs divided by T

Source: theory of importance weights for the first; the second is exact for two outcomes and close for many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlc_sentinel.maths.cells import logp_bin
from dlc_sentinel.records import F64, I64, Bool

NAN = math.nan
MIN_TOKENS = 64
SHAPE_NATS = -0.02
"""Likelier tokens show no shape."""
RARE_NATS = -12.0
CLIP = 50.0
STRAY_TIMES, STRAY_NATS = 8.0, 1.0
"""A token is damaged by something else where x is off from that of tokens about as likely by so many times what these
are, and by more than a cut moves it: that by as much as it leaves out, hardly ever 63 %."""
STRAY_SHARE, MOST = 0.03, 0.5
"""A row with more of them is damaged where it shows less, too; unless most rows are so."""
TOGETHER = 0.9
KEPT_Z, CUT_MASS, ONE_SIDED = 8.0, 0.005, 0.93
EXPLAINED, BENT = 0.5, 0.07


@dataclass(frozen=True, slots=True)
class FunctionOfLogp:
    """What is left of trainer - engine, and in which shape."""

    correlation: float = NAN
    """Of the two logprobs, where both are unsure."""
    kept_mass: float = NAN
    """Mean of exp(trainer - engine) over sampled tokens; below 1 where the engine sampled from a cut distribution."""
    kept_z: float = NAN
    """(1 - kept mass) over its standard error."""
    below: float = NAN
    """Share of the sum of squares that lies below 0."""
    slope: float = NAN
    """Trainer over engine, of whichever of the two forms explains more."""
    explained: float = NAN
    """Share of the sum of squares that this line takes away, beyond what a constant does."""

    @property
    def is_cut(self) -> bool:
        """True where the engine sampled from a cut distribution and reports that one."""
        return self.kept_z >= KEPT_Z and 1.0 - self.kept_mass >= CUT_MASS and self.below >= ONE_SIDED

    @property
    def is_tempered(self) -> bool:
        """True where one side has divided its logits by a temperature."""
        return self.explained >= EXPLAINED and abs(self.slope - 1.0) >= BENT

    @property
    def is_transform(self) -> bool:
        """True where a sampling transform stands on one side only."""
        return self.correlation >= TOGETHER and (self.is_cut or self.is_tempered)


def function_of_logp(engine_N: F64, trainer_N: F64, row_N: I64) -> FunctionOfLogp:
    """The shape of trainer - engine over sampled tokens of rows `row_N`: of the unsure ones, without damaged ones.

    nan with fewer than 64 of them.
    """
    if len(engine_N) < MIN_TOKENS:
        return FunctionOfLogp()
    unsure_N = (engine_N < SHAPE_NATS) & (trainer_N < SHAPE_NATS) & (np.minimum(engine_N, trainer_N) > RARE_NATS)
    kept_N = unsure_N & ~_damaged(engine_N, trainer_N, row_N)
    e_N, t_N = engine_N[kept_N], trainer_N[kept_N]
    if len(e_N) < MIN_TOKENS:
        return FunctionOfLogp()
    x_N = t_N - e_N
    w_N = np.expm1(np.minimum(x_N, CLIP))
    error = float(w_N.std()) / math.sqrt(len(w_N))
    square = float(np.sum(x_N * x_N))
    slope, explained = max((_line(e_N, t_N), _line(_odds(e_N), _odds(t_N))), key=lambda fit: fit[1])
    return FunctionOfLogp(
        correlation=float(np.corrcoef(e_N, t_N)[0, 1]) if e_N.std() > 0.0 and t_N.std() > 0.0 else NAN,
        kept_mass=1.0 + float(w_N.mean()),
        kept_z=-float(w_N.mean()) / error if error > 0.0 else NAN,
        below=float(np.sum(x_N[x_N < 0.0] ** 2)) / square if square > 0.0 else NAN,
        slope=slope,
        explained=explained,
    )


def _damaged(engine_N: F64, trainer_N: F64, row_N: I64) -> Bool:
    """True where x is far from that of tokens as likely on the likelier side, and in rows that have many of those."""
    x_N = trainer_N - engine_N
    bin_N = logp_bin(np.maximum(engine_N, trainer_N))
    stray_N = np.zeros(len(x_N), np.bool_)
    for index in np.unique(bin_N):
        of_bin = bin_N == index
        off_N = np.abs(x_N[of_bin] - np.median(x_N[of_bin]))
        stray_N[of_bin] = off_N > max(STRAY_TIMES * float(np.median(off_N)), STRAY_NATS)
    share_R = np.bincount(row_N, stray_N) / np.maximum(np.bincount(row_N), 1)
    torn_N = (share_R > STRAY_SHARE)[row_N]
    return stray_N | torn_N if torn_N.mean() < MOST else stray_N


def _odds(logp_N: F64) -> F64:
    odds_N: F64 = logp_N - np.log(-np.expm1(logp_N))
    return odds_N


def _line(x_N: F64, y_N: F64) -> tuple[float, float]:
    """(slope of y on x, share of the variance of y - x that the line takes away)."""
    dx_N, dy_N = x_N - x_N.mean(), y_N - y_N.mean()
    spread, apart = float(dx_N @ dx_N), float(np.sum((dy_N - dx_N) ** 2))
    if spread <= 0.0 or apart <= 0.0:
        return NAN, 0.0
    slope = float(dx_N @ dy_N) / spread
    return slope, 1.0 - float(np.sum((dy_N - slope * dx_N) ** 2)) / apart
