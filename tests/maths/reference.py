"""A second, slow implementation of what the maths floor publishes: loops and plain formulas, to compare with."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp


def ess(logw):
    """(sum w)^2 / (n sum w^2) by logsumexp."""
    logw = np.asarray(logw, dtype=float)
    if not len(logw):
        return math.nan
    return float(np.exp(2 * logsumexp(logw) - logsumexp(2 * logw)) / len(logw))


def row_blocks(length, horizon):
    """(first, last) of the blocks of one row: cut from the start; what is left over is covered by the last h tokens."""
    if length == 0:
        return []
    if length <= horizon:
        return [(0, length)]
    horizon = int(horizon)
    cuts = [(first, first + horizon) for first in range(0, length - horizon + 1, horizon)]
    if length % horizon:
        cuts.append((length - horizon, length))
    return cuts


def block_logw(rows, horizon):
    """Log weights of all blocks of all rows."""
    return [math.fsum(row[a:b]) for row in rows for a, b in row_blocks(len(row), horizon)]


def now_gen_full(rows):
    """sum_t (sum_i W_<=t lag_t) / (sum_i W_<=t) with finished rows kept at their last weight."""
    rows = [np.asarray(row, dtype=float) for row in rows if len(row)]
    if not rows:
        return math.nan
    longest = max(map(len, rows))
    logw = np.array([np.concatenate((np.cumsum(r), np.full(longest - len(r), r.sum()))) for r in rows])
    x = np.array([np.concatenate((r, np.zeros(longest - len(r)))) for r in rows])
    w = np.exp(logw - logw.max(axis=0))
    return float(((w * x).sum(axis=0) / w.sum(axis=0)).sum())


def k3(x):
    return math.expm1(x) - x


def j3(x):
    return x * math.expm1(x) - (math.expm1(x) - x)


def packed(rows):
    """(values, offsets) of ragged rows."""
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    values = np.concatenate([np.asarray(row, dtype=np.float64) for row in rows]) if rows else np.zeros(0)
    return values, offsets
