"""How unlikely a share is by chance: Chernoff's bound for a binomial count.

    P(share or more of num | rate) <= exp(-num KL(share || rate)),   KL of two coins, nats

Source: H. Chernoff, A measure of asymptotic efficiency for tests of a hypothesis, 1952.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dlc_sentinel.maths.arrays import F64

MIN_RATE = 1e-4
SURE_NATS = 9.0
"""A chance of 1e-4."""


def chance_nats(share: ArrayLike, rate: ArrayLike, num: ArrayLike) -> F64:
    """num KL(share || rate), nats; 0 where the share is not above the rate, nan where it is nan.

    share, rate: 0..1; the rate is kept within 1e-4 (what was never seen may come) .. 1 - 1e-4. num: trials. Any shapes
    that broadcast.
    """
    s, n = np.asarray(share, np.float64), np.asarray(num, np.float64)
    r = np.clip(np.asarray(rate, np.float64), MIN_RATE, 1.0 - MIN_RATE)
    found: F64 = np.where(s <= r, 0.0, n * _coins(s, r))
    return found


def _coins(share: F64, rate: F64) -> F64:
    """KL(share || rate), nats."""
    rest, least = 1.0 - share, np.finfo(np.float64).tiny
    kl: F64 = share * np.log(np.maximum(share, least) / rate) + rest * np.log(np.maximum(rest, least) / (1.0 - rate))
    return kl
