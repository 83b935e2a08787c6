"""What the far rows of a step have in common: replicas, prompts, the prefix cache, or that they are long.

Axes: S rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from dlc_sentinel.core.pairing import Usual
from dlc_sentinel.core.probe import RowTable, WholeRow
from dlc_sentinel.core.rowfloor import FAR_NATS, NEAR_FLOORS
from dlc_sentinel.records import Bool, Json

MIN_ROWS = 3
"""Of a replica, or of those that are far."""
MOST_FAR, HARDLY_FAR = 0.5, 0.1
SPLIT = 0.9
MIN_CACHED, MIN_FRESH, CACHED_TIMES = 8, 3, 3.0
"""Of a group of 8, one request fills the cache and 7 come from it."""


def keys_of(table: RowTable, far_S: Bool, sample: Sequence[WholeRow], usual: Usual) -> dict[str, Json]:
    """What `Profile` says of it. `sample`: a random sample of whole rows."""
    return {
        "replica": _replicas(table, far_S),
        "keyed_groups": _groups(table, far_S),
        "long_from": _long(table, far_S),
        "cached_alone": _cached(sample, usual),
    }


def _replicas(table: RowTable, far_S: Bool) -> str:
    """The replicas that are far, at most half of all, while the others are not; "" where there is no such thing."""
    shares = {name: far_S[table.replica_S == i] for i, name in enumerate(table.replicas)}
    far = [name for name, of in shares.items() if len(of) >= MIN_ROWS and of.mean() > MOST_FAR]
    rest = [of for name, of in shares.items() if name not in far and len(of)]
    if not far or 2 * len(far) > len(shares) or not rest or np.concatenate(rest).mean() > HARDLY_FAR:
        return ""
    return ", ".join(sorted(far))


def _cached(sample: Sequence[WholeRow], usual: Usual) -> bool:
    """True where rows whose prompts came from the prefix cache are off, and by more than the others, by and large."""
    cached, fresh = ([row for row in sample if row.cached == kind] for kind in (True, False))
    times, usually = ([t for t in map(usual.times, rows) if not math.isnan(t)] for rows in (cached, fresh))
    if len(times) < MIN_CACHED or len(usually) < MIN_FRESH or median(times) <= CACHED_TIMES * median(usually):
        return False
    return median(row.rms for row in cached) > max(NEAR_FLOORS * usual.floor_rms, FAR_NATS)


def _groups(table: RowTable, far_S: Bool) -> float:
    """Share of the groups (of two rows or more) that are far as a whole, where hardly any is so in part."""
    _, index_S = np.unique(table.group_S, return_inverse=True)
    size_G, far_G = np.bincount(index_S), np.bincount(index_S, far_S)
    many_G = size_G >= 2
    if not many_G.any():
        return 0.0
    whole, part = (far_G == size_G) & many_G, (far_G > 0) & (far_G < size_G) & many_G
    return float(whole.sum() / many_G.sum()) if whole.sum() > 4 * part.sum() else 0.0


def _long(table: RowTable, far_S: Bool) -> int:
    """Tokens from which on a row is far, where all but a few are so told apart; 0 where they are not."""
    num_far, num = int(far_S.sum()), len(far_S)
    if num_far < MIN_ROWS or num - num_far < MIN_ROWS:
        return 0
    at = int(np.quantile(table.num_S[far_S], 1.0 - SPLIT))
    told = float((table.num_S[far_S] >= at).mean()), float((table.num_S[~far_S] < at).mean())
    return at if min(told) >= SPLIT else 0
