"""Whether the two streams of a row belong together: as they stand, some places apart, up to a token, or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.core.probe import UNSURE_NATS, WholeRow
from dlc_sentinel.core.rowfloor import ENOUGH_UNSURE
from dlc_sentinel.maths.cells import LOGP_EDGES, logp_bin
from dlc_sentinel.maths.chance import SURE_NATS, chance_nats
from dlc_sentinel.records import F64, Bool

RowClass: TypeAlias = Literal["fitting", "shifted", "broken", "unpaired", "unknown"]
MAX_OFFSET = 8
MIN_TOKENS = 16
CLIP_NATS = -8.0
FITS, FITS_BY = 0.7, 0.3
"""Correlation at an offset, and how much better than as the row stands."""
TOGETHER, APART = 0.4, 0.25
TOGETHER_REAL = 0.9
"""Without its fill-ins a row that fits to its end; a broken one fits up to a token."""
MIN_SIDE = 12
HALF_FITS = 0.5
QUIET_SHARE, QUIET_SIGMA = 0.3, 0.385
"""The quieter 30 % of tokens tell what is usual, so that damaged rows do not: of a normal law they are within 0.385."""
OFF_SIGMAS, OFF_RATE = 1.35, 0.18
"""A token is off beyond so many sigmas of those about as likely; so many are in a healthy row."""
MIN_BIN_TOKENS = 20
FINE_SHARE, BAD_SHARE = 0.03, 0.3
OFF_FLOORS, OFF_NATS = 6.0, 0.1


@dataclass(frozen=True, slots=True)
class Found:
    """`place`: of the first token that does not fit."""

    kind: RowClass
    offset: int = 0
    place: int = -1
    correlation: float = 0.0
    """Of the two streams as they stand."""


@dataclass(frozen=True, slots=True)
class Usual:
    """What tokens and rows of this step are off by, where nothing is wrong with them."""

    floor_rms: float
    """Of a row, nats ..."""
    noise: float
    """... and the same, or the middle unsure token's |x| where an engine is as noisy as that."""
    sigma_B: F64
    """Of tokens by logp bin, nats."""

    def times(self, row: WholeRow) -> float:
        """rms of the row's unsure tokens over what is usual of their like; nan where they are too few to say."""
        unsure_T = _unsure(row)
        if unsure_T.sum() < ENOUGH_UNSURE:
            return math.nan
        usual_T = self.sigma_B[_bins(row)][unsure_T]
        return math.sqrt(float(np.mean(row.x_T[unsure_T] ** 2) / np.mean(usual_T**2)))

    def is_off_throughout(self, row: WholeRow) -> bool:
        """True where more of the unsure tokens are off than in one healthy row of 10,000."""
        unsure_T = _unsure(row)
        num = int(unsure_T.sum())
        off = np.abs(row.x_T) > OFF_SIGMAS * self.sigma_B[_bins(row)]
        share = float(off[unsure_T].mean()) if num else 0.0
        return bool(chance_nats(share, OFF_RATE, num) >= SURE_NATS)


def usual_of(sample: Sequence[WholeRow], floor_rms: float) -> Usual:
    """Told by the quieter tokens and rows of a random sample."""
    medians = [unsure_median(row) for row in sample]
    noise = max(floor_rms, float(np.quantile(medians, QUIET_SHARE)))
    size_N = np.concatenate([np.abs(row.x_T) for row in sample])
    bin_N = np.concatenate([_bins(row) for row in sample])
    sigma_B = np.zeros(len(LOGP_EDGES) + 1)
    for index in range(len(sigma_B)):
        of_bin = size_N[bin_N == index]
        quiet = float(np.quantile(of_bin, QUIET_SHARE)) / QUIET_SIGMA if len(of_bin) >= MIN_BIN_TOKENS else 0.0
        sigma_B[index] = max(quiet, floor_rms)
    return Usual(floor_rms, noise, sigma_B)


def classify(row: WholeRow, usual: Usual) -> Found:
    """The class of a row that is far from the floor."""
    engine_T = np.maximum(row.engine_T.astype(np.float64), CLIP_NATS)
    trainer_T = np.maximum(row.trainer_T.astype(np.float64), CLIP_NATS)
    if len(engine_T) < MIN_TOKENS:
        return Found("unknown")
    as_it_is = _correlation(engine_T, trainer_T, 0)
    # a logprob of exactly 0 in one stream is a fill-in: of the other tokens the row may fit all the same
    real_T = (engine_T == 0.0) == (trainer_T == 0.0)
    real = _correlation(engine_T[real_T], trainer_T[real_T], 0) if real_T.sum() >= MIN_TOKENS else 1.0
    at = _break(row.x_T, usual)
    if at is not None and _correlation(engine_T[at:], trainer_T[at:], 0) < HALF_FITS and real < TOGETHER_REAL:
        return Found("broken", place=int(row.place_T[at]), correlation=as_it_is)
    if as_it_is >= TOGETHER:
        return Found("fitting" if usual.is_off_throughout(row) else "unknown", correlation=as_it_is)
    offset, best = _best_offset(engine_T, trainer_T)
    if best >= max(FITS, as_it_is + FITS_BY):
        return Found("shifted", offset=offset, correlation=as_it_is)
    if as_it_is < APART and real < TOGETHER:
        return Found("unpaired", correlation=as_it_is)
    return Found("unknown", correlation=as_it_is)


def unsure_median(row: WholeRow) -> float:
    """Median |x| of the tokens that one side is not sure of, nats; 0 without any."""
    unsure_T = _unsure(row)
    return float(np.median(np.abs(row.x_T[unsure_T]))) if unsure_T.any() else 0.0


def _unsure(row: WholeRow) -> Bool:
    """True for the tokens that one side is not sure of."""
    unsure_T: Bool = np.minimum(row.engine_T, row.trainer_T) < UNSURE_NATS
    return unsure_T


def _bins(row: WholeRow) -> NDArray[np.intp]:
    """Bin of each token by the likelier side, so that a wrong value stands out."""
    return logp_bin(np.maximum(row.engine_T, row.trainer_T))


def _best_offset(engine_T: F64, trainer_T: F64) -> tuple[int, float]:
    offsets = [k for k in range(-MAX_OFFSET, MAX_OFFSET + 1) if k and len(engine_T) - abs(k) >= MIN_TOKENS]
    values = {k: _correlation(engine_T, trainer_T, k) for k in offsets}
    best = max(values, key=lambda k: (values[k], -abs(k)), default=0)
    return best, values.get(best, 0.0)


def _correlation(engine_T: F64, trainer_T: F64, offset: int) -> float:
    """Of engine[t] with trainer[t + offset]; 0 where one stream is constant."""
    num = len(engine_T)
    a = engine_T[max(-offset, 0) : num - max(offset, 0)]
    b = trainer_T[max(offset, 0) : num - max(-offset, 0)]
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0.0 else 0.0


def _break(x_T: F64, usual: Usual) -> int | None:
    """The token from which on the row is off, where it is fine before; None where there is no such token.

    Against the noise of the other rows, and where all are damaged, against the floor.
    """
    at = _best_break(x_T, usual.noise)
    return _best_break(x_T, usual.floor_rms) if at is None else at


def _best_break(x_T: F64, noise: float) -> int | None:
    off_T = np.abs(x_T) > max(OFF_FLOORS * noise, OFF_NATS)
    num = len(off_T)
    if num < 2 * MIN_SIDE or not off_T.any():
        return None
    before_T = np.concatenate([[0], np.cumsum(off_T)[:-1]])
    size_T = np.arange(num)
    after_T = off_T.sum() - before_T
    # a token with nothing off before it and much after: the best separation of the two shares
    inner = slice(MIN_SIDE, num - MIN_SIDE + 1)
    gain_T = after_T[inner] / (num - size_T[inner]) - before_T[inner] / size_T[inner]
    at = int(np.argmax(gain_T)) + MIN_SIDE
    found = before_T[at] <= FINE_SHARE * at and after_T[at] >= BAD_SHARE * (num - at)
    return at if found else None
