"""Is trainer - engine a function of the logprob? That is what a sampling transform on one side makes of it.

    kept mass:    E_engine[exp(trainer - engine)] = the trainer's mass on what the engine could sample; 1 without a cut
    temperature:  log-odds(trainer) = a + T log-odds(engine), or the same of plain logprobs divided by T

Source: theory of importance weights for the first; the second is exact for two outcomes and close for many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlc_sentinel.records import F64

NAN = math.nan
MIN_TOKENS = 64
UNSURE_NATS = -0.02
RARE_NATS = -12.0
CLIP = 50.0
PLACEHOLDER_NATS = -1.0
"""A logprob of exactly 0 in one stream, where the other is below this, was put there by hand: no transform makes it."""


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


def function_of_logp(engine_N: F64, trainer_N: F64) -> FunctionOfLogp:
    """The shape of trainer - engine over sampled tokens, fill-ins left out; nan with fewer than 64 unsure ones."""
    filled_N = (engine_N == 0.0) != (trainer_N == 0.0)
    if (np.minimum(engine_N, trainer_N)[filled_N] < PLACEHOLDER_NATS).any():
        engine_N, trainer_N = engine_N[~filled_N], trainer_N[~filled_N]
    unsure_N = (engine_N < UNSURE_NATS) & (trainer_N < UNSURE_NATS) & (np.minimum(engine_N, trainer_N) > RARE_NATS)
    e_N, t_N = engine_N[unsure_N], trainer_N[unsure_N]
    if len(e_N) < MIN_TOKENS:
        return FunctionOfLogp()
    x_N = trainer_N - engine_N
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
