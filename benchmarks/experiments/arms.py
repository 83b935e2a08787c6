"""Arms of testbeds A, B, D, and the expected update of each correction in closed form.

    gradient in the logits at a state = sum over its tokens of w A (e_a - q)

q = the trainer's own policy, or, centred, nu / Z with nu = mu w (as in dlc_sentinel.correction.centring). Weights of
one token depend on its state and action only, so the sums of advantages by state and action are all that is needed.
Axes: S runs, n states, V actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dlc_sentinel.records import F64

Form = Literal["one", "unclipped", "truncate", "ppo"]
CLIP = 2.0
PPO_LOW, PPO_HIGH = 0.8, 1.2
DEFAULT = 32.0
"""The rule of dlc_sentinel.config; on shorter responses it is the whole response."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train with a generator that may be old."""

    name: str
    form: Form = "truncate"
    of_total: bool = False
    """The ratio is trainer now over engine; else lag: trainer now over trainer at the generator's weights."""
    is_centred: bool = True
    horizon: float = 0.0
    """Of the sync rule, tokens; 0 = none."""
    every_step: bool = False
    like: str = ""
    """As many syncs, evenly spaced, as the run of that arm with the same seed."""


def _plain(name: str, form: Form, *, of_total: bool = False, horizon: float = 0.0) -> Arm:
    return Arm(name, form, of_total, is_centred=False, horizon=horizon)


REFERENCE = Arm("on-policy", "one", is_centred=False, every_step=True)
TABULAR: tuple[Arm, ...] = (
    Arm("synced", "one", is_centred=False, every_step=True),
    _plain("uncorrected", "one"),
    _plain("IS", "unclipped", of_total=True),
    _plain("TIS", "truncate", of_total=True),
    _plain("PPO", "ppo"),
    Arm("DLC, no resync"),
    Arm("DLC", horizon=DEFAULT),
    Arm("DLC, ESS_1", horizon=1),
)
"""Arms of every world."""
ABLATION: tuple[Arm, ...] = (
    _plain("clip + resync", "truncate", horizon=DEFAULT),
    Arm("centring + resync", "one", horizon=DEFAULT),
    Arm("centring + IS + resync", "unclipped", horizon=DEFAULT),
    _plain("resync alone", "one", horizon=DEFAULT),
    _plain("clip alone", "truncate"),
    Arm("centring alone", "one"),
)
"""The parts of DLC, with and without each other."""
FRONTIER_HORIZONS = (1.0, 8.0, 32.0, 64.0, 128.0, 512.0, math.inf)


def rule_name(horizon: float) -> str:
    """Of a rule with DLC: "ESS_32"."""
    return f"ESS_{'inf' if math.isinf(horizon) else int(horizon)}"


def frontier(length: int) -> tuple[Arm, ...]:
    """DLC with every rule whose horizon is within the response, each followed by its fixed period."""
    horizons = [h for h in FRONTIER_HORIZONS if math.isinf(h) or h < length]
    arms: list[Arm] = []
    for horizon in horizons:
        rule = "DLC" if horizon == DEFAULT else f"DLC, {rule_name(horizon)}"
        arms += [Arm(rule, horizon=horizon), Arm(f"DLC, period like {rule_name(horizon)}", like=rule)]
    return tuple(arms)


def weight(arm: Arm, log_ratio_SnV: F64, is_good: bool) -> F64:
    """[S, n, V] what a token's ratio becomes; is_good = its advantage is positive."""
    if arm.form == "one":
        return np.ones_like(log_ratio_SnV)
    ratio = np.exp(log_ratio_SnV)
    if arm.form == "truncate":
        ratio = np.minimum(ratio, CLIP)
    if arm.form == "ppo":
        ratio[ratio > PPO_HIGH if is_good else ratio < PPO_LOW] = 0.0
    return ratio


def gradient(arm: Arm, good_SnV: F64, bad_SnV: F64, now_SnV: F64, gen_SnV: F64, mu_SnV: F64) -> F64:
    """[S, n, V] gradient of the objective in the logits, to go up.

    good, bad: sums of positive and of negative advantages of the tokens of each state and action; now, gen, mu: log
    probabilities of the trainer, the trainer at the generator's weights, and the engine.
    """
    log_ratio = now_SnV - (mu_SnV if arm.of_total else gen_SnV)
    out = np.zeros_like(now_SnV)
    for sums_SnV, is_good in ((good_SnV, True), (bad_SnV, False)):
        w_SnV = weight(arm, log_ratio, is_good)
        q_SnV = np.exp(now_SnV)
        if arm.is_centred:
            nu_SnV = np.exp(mu_SnV) * w_SnV
            q_SnV = nu_SnV / nu_SnV.sum(-1, keepdims=True)
        pull_SnV = sums_SnV * w_SnV
        out += pull_SnV - pull_SnV.sum(-1, keepdims=True) * q_SnV
    return out
