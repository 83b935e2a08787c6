"""The rms of the discrepancy by probability, place and replica: where in a step it sits. nats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from dlc_sentinel.core.probe import Probe
from dlc_sentinel.records import F64, I64

PROBABILITIES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99)
PLACES = (0, 32, 128, 512, 2048, 8192)
MIN_TOKENS = 20
MAX_REPLICAS = 64

Parts = Mapping[str, Mapping[str, float]]


def discrepancy_by(probe: Probe) -> Parts:
    """{"probability" | "position" | "replica": {bin: rms}} of exact rows, {} of others.

    Bins with too few tokens are left out; they are named by their range, "0.9..0.99" or "32..127". The probability is
    the engine's.
    """
    rows = probe.sample()
    if not rows or not probe.exact:
        return {}
    x_N = np.concatenate([row.x_T for row in rows])
    probability_N = np.exp(np.concatenate([row.engine_T for row in rows]).astype(np.float64))
    place_N = np.concatenate([row.place_T for row in rows])
    probabilities = [f"{low:g}..{high:g}" for low, high in pairwise((*PROBABILITIES, 1.0))]
    places = [f"{low}..{high - 1}" for low, high in pairwise(PLACES)] + [f"{PLACES[-1]}.."]
    return {
        "probability": _binned(x_N, np.searchsorted(PROBABILITIES, probability_N, side="right") - 1, probabilities),
        "position": _binned(x_N, np.searchsorted(PLACES, place_N, side="right") - 1, places),
        "replica": _replicas(probe),
    }


def _binned(x_N: F64, bin_N: I64, names: Sequence[str]) -> dict[str, float]:
    num_B = np.bincount(bin_N, minlength=len(names))
    square_B = np.bincount(bin_N, x_N * x_N, minlength=len(names))
    bins = zip(names, num_B.tolist(), square_B.tolist(), strict=True)
    return {name: math.sqrt(square / num) for name, num, square in bins if num >= MIN_TOKENS}


def _replicas(probe: Probe) -> dict[str, float]:
    table = probe.table()
    named = {name: index for index, name in enumerate(table.replicas[:MAX_REPLICAS]) if name}
    out = {}
    for name, index in named.items():
        at = table.replica_S == index
        if table.num_S[at].sum() >= MIN_TOKENS:
            out[name] = math.sqrt(float(np.average(table.mean_sq_S[at], weights=table.num_S[at])))
    return out
