"""What a loss reports of its batch. Values stay on the device until `as_dict` reads them all at once.

Axes: M kept tokens, S rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dlc_sentinel.correction.weights import ess_ladder

__all__ = ["CENTRING_CODES", "Metrics", "measure"]

CENTRING_CODES: Final = {"none": 0.0, "nu=mu": 0.5, "nu": 1.0}
"""`as_dict` gives numbers only, for loggers that take nothing else: how the score was centred, as a number.

1: with the weights that the tokens get; 0.5: without them (the engine's part came without its gen_logp), which is exact
at zero lag only; 0: not at all (no engine's part came, or the loss is a neighbour).
"""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one call, 0-d tensors without gradient; nan where there was nothing to measure."""

    centring: str
    """"nu": with the weights the tokens get; "nu=mu": without them; "none": not centred."""
    num_tokens: int
    weight_ess_ratio: dict[str, Tensor]
    """ESS ratio of the unclipped weights per horizon, "1" to "inf": below 1/2 a resync is due, not a clip."""
    clip_share: Tensor
    """Share of tokens whose weight the form changed."""
    mean_weight: Tensor
    log_ratio_rms: Tensor
    """Root mean square of the token log ratio that the weights are made of, nats."""
    centred_bias_l1: Tensor
    """Mean over tokens of the L1 norm, in the logits, of the mean score that centring removed (twice a TV distance)."""
    tail_mass: Tensor
    """Mean engine mass outside the list; 0 for a full distribution, nan without one."""
    tail_bound: Tensor
    """Mean bound of the L1 error of the centring that the tail model can cause; nan without a list."""

    def as_dict(self, prefix: str = "dlc/") -> dict[str, float]:
        """Plain numbers by name, for a logger; one transfer from the device."""
        named = {f"weight_ess_ratio/{rung}": value for rung, value in self.weight_ess_ratio.items()}
        named |= {
            "clip_share": self.clip_share,
            "mean_weight": self.mean_weight,
            "log_ratio_rms_nats": self.log_ratio_rms,
            "centred_bias_l1": self.centred_bias_l1,
            "tail_mass": self.tail_mass,
            "tail_bound": self.tail_bound,
        }
        values = torch.stack([value.double() for value in named.values()]).tolist()
        out = {prefix + name: value for name, value in zip(named, values, strict=True)}
        out[prefix + "num_tokens"] = float(self.num_tokens)
        out[prefix + "centring"] = CENTRING_CODES[self.centring]
        return out


@torch.no_grad()
def measure(
    *,
    centring: str,
    log_ratio_M: Tensor,
    offsets_S1: Tensor,
    weight_M: Tensor,
    clipped_M: Tensor,
    bias_l1_M: Tensor,
    tail_mass_M: Tensor,
    tail_bound_M: Tensor,
) -> Metrics:
    """Metrics of kept tokens; a mean over no token is nan."""
    return Metrics(
        centring=centring,
        num_tokens=len(log_ratio_M),
        weight_ess_ratio=ess_ladder(log_ratio_M, offsets_S1),
        clip_share=_mean(clipped_M),
        mean_weight=_mean(weight_M),
        log_ratio_rms=_mean(log_ratio_M.double().square()).sqrt(),
        centred_bias_l1=_mean(bias_l1_M),
        tail_mass=_mean(tail_mass_M),
        tail_bound=_mean(tail_bound_M),
    )


def _mean(x_M: Tensor) -> Tensor:
    if not len(x_M):
        return torch.full((), math.nan, dtype=torch.float64, device=x_M.device)
    return x_M.double().mean()
