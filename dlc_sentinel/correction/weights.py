"""Weights of the lag ratio: which tokens share one (horizon), and what is done to a large or a small one (form).

    log w = sum of log ratios over the token's block; w = form(exp(log w))

Block rule, as for the ESS: a row's tokens are cut from the start into blocks of h; tokens left over take the weight of
the row's last h tokens. h = 1 is the token level, h = inf the whole row. The form is one function of (log ratio, sign
of advantage), so that the centring can apply it to every token of the vocabulary, not only to the sampled one.
Axes: S rows, N packed tokens, V vocabulary, "..." any axes that broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from dlc_sentinel.errors import ConfigError, ShapeError

__all__ = ["HORIZONS", "Form", "Weight", "block_log_weight", "ess_ladder", "rung_name"]

Form = Literal["one", "unclipped", "truncate", "mask", "ppo"]

HORIZONS: Final = (1.0, 8.0, 32.0, 128.0, 512.0, math.inf)
"""Rungs of the ESS ladder, in tokens; inf is the whole row."""


@dataclass(frozen=True, slots=True)
class Weight:
    """How a log ratio becomes a weight. Default: token ratio, truncated at 2.

    form: `one` (1, whatever the ratio), `unclipped` (r), `truncate` (min(r, high)), `mask` (r inside [low, high], else
    0), `ppo` (r, but 0 where A > 0 and r > high, or A < 0 and r < low: the gradient of PPO's clipped objective).
    low, high are bounds of the ratio itself, not of its log. horizon in tokens: 1, any whole number, or inf.
    A hard clip (`mask`, `ppo`) around a generator that is never resynced can stall training while the ESS looks well.
    Raises: ConfigError for bounds or a horizon that make no sense.
    """

    form: Form = "truncate"
    low: float = 0.0
    high: float = 2.0
    horizon: float = 1.0

    def __post_init__(self) -> None:
        if self.form not in ("one", "unclipped", "truncate", "mask", "ppo"):
            raise ConfigError(f"Weight: form is {self.form!r}; use one, unclipped, truncate, mask or ppo")
        if not 0.0 <= self.low <= 1.0 <= self.high:
            raise ConfigError(
                f"Weight: bounds are ratios around 1, got low={self.low}, high={self.high}; "
                f"wanted 0 <= low <= 1 <= high. PPO's epsilon 0.2 is low=0.8, high=1.2"
            )
        if not self.horizon >= 1.0 or (not math.isinf(self.horizon) and self.horizon != int(self.horizon)):
            raise ConfigError(f"Weight: horizon={self.horizon}; wanted a whole number of tokens >= 1, or math.inf")

    @property
    def largest(self) -> float:
        """The largest weight this form can give; inf if it has none."""
        if self.form == "one":
            return 1.0
        return self.high if self.form in ("truncate", "mask") else math.inf

    def of(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Weights of log ratios (nats), [...]; advantage broadcasts against them and matters to `ppo` only.

        An infinite log ratio (a token the generator could not produce) is clipped like any other where the form clips.
        """
        if self.form == "one":
            return torch.ones_like(log_ratio)
        if self.form == "unclipped":
            return log_ratio.exp()
        if self.form == "truncate":
            return log_ratio.clamp(max=math.log(self.high)).exp()
        return log_ratio.exp().masked_fill(self.clipped(log_ratio, advantage), 0.0)

    def clipped(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """True where the form changes the weight, [...] bool: what the clip share counts."""
        above = log_ratio > math.log(self.high)
        if self.form == "truncate":
            return above
        if self.form == "mask":
            return above | (log_ratio < _log(self.low))
        if self.form == "ppo":
            return (above & (advantage > 0)) | ((log_ratio < _log(self.low)) & (advantage < 0))
        return torch.zeros_like(above)


def block_log_weight(log_ratio_N: Tensor, offsets_S1: Tensor, horizon: float) -> Tensor:
    """Log weight of each token, [N], nats, in the dtype given: the sum of log ratios over its block (module docstring).

    offsets_S1 [S+1] int64 from 0 to N. Sums run in float64. Raises: ShapeError if the offsets do not end at N.
    """
    _check_offsets(log_ratio_N, offsets_S1)
    if horizon == 1.0:
        return log_ratio_N
    first_N, last_N, _ = _blocks(offsets_S1, horizon)
    before_N1 = torch.nn.functional.pad(log_ratio_N.double().cumsum(0), (1, 0))
    return (before_N1[last_N] - before_N1[first_N]).to(log_ratio_N.dtype)


def ess_ladder(log_ratio_N: Tensor, offsets_S1: Tensor) -> dict[str, Tensor]:
    """ESS ratio (0..1) of unclipped block weights per horizon, {"1": ..., "inf": ...}, 0-d float64; nan if no token.

    Source: (sum w)^2 / (n sum w^2), Kish 1965, over all blocks of the batch.
    """
    _check_offsets(log_ratio_N, offsets_S1)
    ladder = {}
    for horizon in HORIZONS:
        first_N, last_N, opens_N = _blocks(offsets_S1, horizon)
        before_N1 = torch.nn.functional.pad(log_ratio_N.double().cumsum(0), (1, 0))
        logw_B = (before_N1[last_N] - before_N1[first_N])[opens_N]
        ladder[rung_name(horizon)] = _ess_ratio(logw_B)
    return ladder


def rung_name(horizon: float) -> str:
    """Name of a horizon in metrics: "32", or "inf"."""
    return "inf" if math.isinf(horizon) else str(int(horizon))


def _ess_ratio(logw_B: Tensor) -> Tensor:
    if not len(logw_B):
        return torch.full((), math.nan, dtype=torch.float64, device=logw_B.device)
    log_ess = 2.0 * logw_B.logsumexp(0) - (2.0 * logw_B).logsumexp(0)
    return (log_ess.exp() / len(logw_B)).clamp(max=1.0)


def _blocks(offsets_S1: Tensor, horizon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(first_N, last_N, opens_N): tokens first:last share the token's weight; opens marks one token per block."""
    length_S = offsets_S1.diff()
    row_N = torch.repeat_interleave(torch.arange(len(length_S), device=length_S.device), length_S)
    position_N = torch.arange(len(row_N), device=length_S.device) - offsets_S1[row_N]
    h = int(min(horizon, max(len(row_N), 1)))
    size_N = length_S[row_N].clamp(max=h)
    first_N = offsets_S1[row_N] + torch.minimum(position_N // h * h, length_S[row_N] - size_N)
    return first_N, first_N + size_N, position_N % h == 0


def _check_offsets(log_ratio_N: Tensor, offsets_S1: Tensor) -> None:
    if log_ratio_N.ndim != 1 or offsets_S1.ndim != 1 or int(offsets_S1[-1]) != len(log_ratio_N):
        raise ShapeError(
            f"block weights: offsets end at {int(offsets_S1[-1])} but the log ratios have shape "
            f"{tuple(log_ratio_N.shape)}; pass packed tokens [N] and their cu_seqlens [S+1]"
        )


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0.0 else -math.inf
