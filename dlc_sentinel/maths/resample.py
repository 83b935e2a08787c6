"""Joint bootstrap behind the interval of a calibrated ESS: prompt groups of stale rows, and calibration rows.

Axes: S rows, B blocks, C cells, G groups or lots of them, K nodes, R calibration rows, D draws; draw 0 is the data.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from dlc_sentinel.maths.arrays import F64
from dlc_sentinel.maths.cells import DiscrepancyCells, Places, binned, mixed, second_moments
from dlc_sentinel.maths.stale import Kept

__all__ = ["resampled_ess", "resampled_noise", "x_ess"]

MAX_GROUPS: Final = 16384
"""More groups are put together in this many lots, told by their keys: still a bootstrap of independent clusters."""
NUM_NODES: Final = 3
"""The sums of exp(s b) are had exactly at this many s, and their logarithms read between by a parabola."""
_TINY: Final = 1e-300


def x_ess(ess_scaled: float, scale: float, length: float, total: float, noise: float) -> float:
    """ESS (0..1) of the lag from W = ESS of the scaled blocks; second moments per token in nats^2, length in tokens.

    Source: estimator X, module docstring of `calibrated`.
    """
    share = 1.0 - scale * scale
    return math.exp((1.0 - share) * math.log(ess_scaled) - share * length * max(total - noise, 0.0))


def scale_of(variance: float, length: float, noise: float) -> float:
    """s (0..1), by which block sums of this variance are to be shrunk to have the lag's."""
    return math.sqrt(max(1.0 - noise * length / variance, 0.0)) if variance > 0.0 else 0.0


def resampled_noise(cells: DiscrepancyCells, mix_C: F64, draws: int, rng: np.random.Generator) -> F64:
    """[1 + D] second moment per token, nats^2, of a mix of cells, over resampled calibration rows.

    Few rows resampled spread too little, by sqrt((R - 1) / R): made good.
    """
    count_RC, sum2_RC = cells.count_RC, cells.sum2_RC
    num = len(count_RC)
    times_DR = np.ones((draws + 1, num))
    for draw in range(1, draws + 1):
        times_DR[draw] = np.bincount(rng.integers(0, num, num), minlength=num)
    moments_DC = second_moments(np.einsum("dr,rc->dc", times_DR, count_RC), np.einsum("dr,rc->dc", times_DR, sum2_RC))
    noise_D: F64 = np.add.reduce(moments_DC * mix_C, axis=1)
    if num > 1:
        noise_D = noise_D[0] + (noise_D - noise_D[0]) * math.sqrt(num / (num - 1))
    return np.maximum(noise_D, 0.0)


def resampled_ess(kept: Kept, horizon: int, noise_D: F64, rng: np.random.Generator) -> F64:
    """[1 + D] calibrated ESS over resampled groups, each draw with its own noise from `resampled_noise`."""
    place_S, num_groups = _lots(kept)
    place_B = np.repeat(place_S, kept.num_blocks_S)
    block_B = kept.block_B.astype(np.float64)
    full_S = kept.num_tokens_S >= horizon
    length_S = np.where(full_S, kept.num_blocks_S * horizon, kept.num_tokens_S)
    by_group = np.stack(
        [
            binned(place_B, None, num_groups),
            binned(place_B, block_B, num_groups),
            binned(place_B, block_B * block_B, num_groups),
            binned(place_S, length_S.astype(np.float64), num_groups),
            binned(place_S, kept.num_tokens_S.astype(np.float64), num_groups),
            binned(place_S, kept.sum_sq_S, num_groups),
        ]
    )
    times_DG = np.ones((len(noise_D), num_groups))
    for draw in range(1, len(noise_D)):
        times_DG[draw] = np.bincount(rng.integers(0, num_groups, num_groups), minlength=num_groups)
    num_D, sum_D, square_D, tokens_in_blocks_D, tokens_D, total_D = np.einsum("xg,dg->xd", by_group, times_DG)
    length_D, total_D = tokens_in_blocks_D / num_D, total_D / tokens_D
    variance_D = np.maximum(square_D / num_D - (sum_D / num_D) ** 2, 0.0)
    scale_D = np.array([scale_of(*args) for args in zip(variance_D, length_D, noise_D, strict=True)])
    log1_DG, log2_DG = _log_sums(block_B, place_B, num_groups, scale_D)
    s1_D = np.add.reduce(times_DG * np.exp(log1_DG), axis=1)
    s2_D = np.add.reduce(times_DG * np.exp(log2_DG), axis=1)
    scaled_D = np.minimum(s1_D * s1_D / np.maximum(num_D * s2_D, _TINY), 1.0)
    args_D = zip(np.maximum(scaled_D, _TINY), scale_D, length_D, total_D, noise_D, strict=True)
    return np.array([x_ess(*(float(arg) for arg in args)) for args in args_D])


def _lots(kept: Kept) -> tuple[Places, int]:
    """(place of each row's group, number of places)."""
    keys, place_S = np.unique(kept.group_S, return_inverse=True)
    if len(keys) <= MAX_GROUPS:
        return place_S, len(keys)
    lots = mixed(keys.view(np.uint64)) % MAX_GROUPS
    return lots.astype(np.intp)[place_S], MAX_GROUPS


def _log_sums(block_B: F64, place_B: Places, num: int, scale_D: F64) -> tuple[F64, F64]:
    """([D, G] log of each group's sum of exp(s b), and of exp(2 s b)), up to a constant each, at each draw's s."""
    low, high = float(scale_D.min()), float(scale_D.max())
    nodes_K = np.linspace(low, high, NUM_NODES) if high - low > 1e-9 else np.array([low])
    log1_KG, log2_KG = np.empty((len(nodes_K), num)), np.empty((len(nodes_K), num))
    top = float(block_B.max())
    for k, node in enumerate(nodes_K):
        w_B = np.exp(node * (block_B - top))
        log1_KG[k] = np.log(np.maximum(binned(place_B, w_B, num), _TINY))
        log2_KG[k] = np.log(np.maximum(binned(place_B, w_B * w_B, num), _TINY))
    weight_DK = np.ones((len(scale_D), len(nodes_K)))
    for k, node in enumerate(nodes_K):
        for other in np.delete(nodes_K, k):
            weight_DK[:, k] *= (scale_D - other) / (node - other)
    return np.einsum("dk,kg->dg", weight_DK, log1_KG), np.einsum("dk,kg->dg", weight_DK, log2_KG)
