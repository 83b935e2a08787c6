"""Whether the two streams of a row belong together: as they stand, some places apart, up to a token, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from dlc_sentinel.core.probe import WholeRow
from dlc_sentinel.records import F64

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
UNSURE_NATS, WHOLE_FLOORS = -0.05, 2.0
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


def classify(row: WholeRow, floor_rms: float) -> Found:
    """The class of a row that is far from the floor (nats)."""
    engine_T = np.maximum(row.engine_T.astype(np.float64), CLIP_NATS)
    trainer_T = np.maximum(row.trainer_T.astype(np.float64), CLIP_NATS)
    if len(engine_T) < MIN_TOKENS:
        return Found("unknown")
    as_it_is = _correlation(engine_T, trainer_T, 0)
    # a logprob of exactly 0 in one stream is a fill-in: of the other tokens the row may fit all the same
    real_T = (engine_T == 0.0) == (trainer_T == 0.0)
    real = _correlation(engine_T[real_T], trainer_T[real_T], 0) if real_T.sum() >= MIN_TOKENS else 1.0
    at = _break(row.x_T, floor_rms)
    if at is not None and _correlation(engine_T[at:], trainer_T[at:], 0) < HALF_FITS and real < TOGETHER_REAL:
        return Found("broken", place=int(row.place_T[at]), correlation=as_it_is)
    if as_it_is >= TOGETHER:
        throughout = unsure_median(row) > WHOLE_FLOORS * floor_rms
        return Found("fitting" if throughout else "unknown", correlation=as_it_is)
    offset, best = _best_offset(engine_T, trainer_T)
    if best >= max(FITS, as_it_is + FITS_BY):
        return Found("shifted", offset=offset, correlation=as_it_is)
    if as_it_is < APART and real < TOGETHER:
        return Found("unpaired", correlation=as_it_is)
    return Found("unknown", correlation=as_it_is)


def unsure_median(row: WholeRow) -> float:
    """Median |x| of the tokens that one side is not sure of, nats; 0 without any."""
    unsure_T = np.minimum(row.engine_T, row.trainer_T) < UNSURE_NATS
    return float(np.median(np.abs(row.x_T[unsure_T]))) if unsure_T.any() else 0.0


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


def _break(x_T: F64, floor_rms: float) -> int | None:
    """The token from which on the row is off, where it is fine before; None where there is no such token."""
    off_T = np.abs(x_T) > max(OFF_FLOORS * floor_rms, OFF_NATS)
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
    fine, bad = before_T[at] / at, after_T[at] / (num - at)
    return at if fine <= FINE_SHARE and bad >= BAD_SHARE else None
