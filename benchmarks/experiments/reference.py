"""On-policy reference runs of testbeds A, B, D, and the KL of other runs from them, exact.

Axes: S runs, R reference runs, n states, V actions, K features.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.experiments.worlds import World, log_softmax
from dlc_sentinel.records import F64

SAME = 1e-12
"""Below this many nats two references have not parted yet (step 0), and a ratio is nan."""


class Distances(NamedTuple):
    """Of S runs at one step; each KL of a policy is a mean over references, nats per response."""

    full_S: F64
    """KL(run || on) over the run's own prefixes, over that between references."""
    reverse_S: F64
    """KL(on || run) over the reference's prefixes, over the same."""
    prefix_S: F64
    """KL(run || on) over the generator's prefixes, over that between references there."""


class Moment:
    """The references at one step."""

    def __init__(self, world: World, weights_RKV: F64) -> None:
        self._geometry = world.geometry
        self._logp_RnV = log_softmax(world.logits(weights_RKV))
        p_RnV = np.exp(self._logp_RnV)
        self._mass_RnV = world.geometry.visits(p_RnV)[..., None] * p_RnV
        num = len(p_RnV)
        self._own_R = _dots(self._mass_RnV, self._logp_RnV).diagonal()
        cross_RR = self._own_R[:, None] - _dots(self._mass_RnV, self._logp_RnV)
        self.apart = float(cross_RR.sum() / (num * (num - 1)))
        """Mean KL between two references, over ordered pairs, prefixes of the first."""
        others_RnV = self._logp_RnV.sum(0) - self._logp_RnV
        self._apart_n = (p_RnV * ((num - 1) * self._logp_RnV - others_RnV)).sum((0, 2)) / (num * (num - 1))

    def distances(self, now_SnV: F64, mu_SnV: F64) -> Distances:
        """now: log probabilities of S policies; mu: those of the generators whose prefixes are asked about."""
        p_SnV = np.exp(now_SnV)
        full_S = self._from(self._geometry.visits(p_SnV)[..., None] * p_SnV, now_SnV)
        seen_Sn = self._geometry.visits(np.exp(mu_SnV))
        prefix_S = self._from(seen_Sn[..., None] * p_SnV, now_SnV)
        reverse_S = (self._own_R - _dots(now_SnV, self._mass_RnV)).mean(1)
        apart = self.apart if self.apart > SAME else np.nan
        seen_S = seen_Sn @ self._apart_n
        return Distances(full_S / apart, reverse_S / apart, prefix_S / np.where(seen_S > SAME, seen_S, np.nan))

    def _from(self, mass_SnV: F64, now_SnV: F64) -> F64:
        own_S = (mass_SnV * now_SnV).sum((1, 2))
        out: F64 = own_S - _dots(mass_SnV, self._logp_RnV).mean(1)
        return out


def _dots(left_SnV: F64, right_RnV: F64) -> F64:
    """[S, R] sums of products."""
    out: F64 = left_SnV.reshape(len(left_SnV), -1) @ right_RnV.reshape(len(right_RnV), -1).T
    return out
