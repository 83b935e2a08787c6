"""Testbed C: what its runs are told. The demo's job (dlc_sentinel.demo.spec), with fewer steps and shorter responses.

A rule of horizon h syncs when the batch's ESS_h is below 1/2; `like` = as many syncs, evenly spaced, as the run of that
arm with the same seed had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlc_sentinel.demo.spec import ArmSpec

Loss = Literal["plain", "is", "tis", "dlc"]

SPEC = ArmSpec(num_steps=100, response_tokens=48)
INIT_SEED = 1
"""All runs start from these weights, as runs of one pretrained model do."""
EVERY, EVAL_ROWS = 10, 64
REFERENCE_SEEDS = (0, 1, 2, 3)
SEEDS = (100, 101, 102, 103)
WARM_UP_STEPS = SPEC.num_steps // 10


@dataclass(frozen=True, slots=True)
class TinyArm:
    """One arm. loss: plain = no correction; is, tis = total ratio; dlc = centred, lag ratio truncated at 2."""

    name: str
    loss: Loss = "dlc"
    horizon: float = 0.0
    """Of the rule, tokens; 0 = none."""
    every_step: bool = False
    like: str = ""
    trainer_numerics: bool = False


REFERENCE = TinyArm("on-policy", "plain", every_step=True, trainer_numerics=True)
ARMS = (
    TinyArm("uncorrected", "plain"),
    TinyArm("DLC, no resync"),
    TinyArm("DLC", horizon=32),
    TinyArm("DLC, period like ESS_32", like="DLC"),
    TinyArm("synced", "plain", every_step=True),
    TinyArm("TIS", "tis"),
    TinyArm("DLC, ESS_8", horizon=8),
    TinyArm("DLC, ESS_1", horizon=1),
    TinyArm("resync alone", "plain", horizon=32),
)
"""In the order of need: a machine that is short of time ends with fewer arms, not with fewer seeds."""


def spread(num_syncs: int, num_steps: int) -> frozenset[int]:
    """Steps, evenly spaced and never the last, after which a fixed period syncs."""
    return frozenset(round((k + 1) * num_steps / (num_syncs + 1)) - 1 for k in range(num_syncs))
