"""What people watch today, worked out step by step from the same tape, each with the line its users draw.

Axes: N tokens of a step. total = trainer now - engine, nats (what stacks log as the mismatch); cur, engine: logprobs.
An alarm needs 2 of the last 3 steps, as the sentinel's own findings do: raw thresholds would cry more often.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dlc_sentinel.demo.spec import StepReport
from dlc_sentinel.records import F64, Rollout, Train
from dlc_sentinel.tape.replay import read_tape
from dlc_sentinel.wire.codec import decode

Dials: TypeAlias = dict[str, list[float]]
"""Name -> value at each step; nan where it was not measured."""
Rule: TypeAlias = Callable[[Mapping[str, Sequence[float]], int], bool]

WINDOW, NEEDED = 3, 2
Z_STEPS, Z_LINE = 20, 4.0
WARM_UP = 5


def dials_of(tape: Path, run: str, steps: Sequence[StepReport]) -> Dials:
    """Every dial at every step of a run."""
    engine, rows = _streams(tape, run)
    out: Dials = defaultdict(list)
    for report in steps:
        whole = [(cur_T, old_T, engine[name]) for name, cur_T, old_T in rows.get(report.step, []) if name in engine]
        values = _values(*(np.concatenate(side) for side in zip(*whole, strict=True))) if whole else {}
        for name in VALUES:
            out[name].append(values.get(name, math.nan))
        out["grad_norm"].append(report.grad_norm)
        out["entropy"].append(report.entropy)
    return dict(out)


def _streams(tape: Path, run: str) -> tuple[dict[str, F64], dict[int, list[tuple[str, F64, F64]]]]:
    """({id: engine logprobs}, {step: [(id, cur, old)]}) of a run; either side may come first."""
    engine: dict[str, F64] = {}
    rows: dict[int, list[tuple[str, F64, F64]]] = defaultdict(list)
    for frame in read_tape(tape):
        if frame.channel == "tick":
            continue
        record, _ = decode(bytes(frame.frame))
        if record.source.run != run or not isinstance(record, (Rollout, Train)):
            continue
        ends = zip(record.ids, record.offsets_S1[:-1].tolist(), record.offsets_S1[1:].tolist(), strict=True)
        if isinstance(record, Rollout):
            engine |= {name: record.logprobs_N[start:end].astype(np.float64) for name, start, end in ends}
        elif record.cur_N is not None and record.old_N is not None:
            cur_N, old_N = record.cur_N.astype(np.float64), record.old_N.astype(np.float64)
            rows[record.step] += [(name, cur_N[start:end], old_N[start:end]) for name, start, end in ends]
    return engine, rows


VALUES = ("kl", "mean_abs", "probs_diff", "verl_ess", "token_ess", "mult_prob_error", "ppo_kl", "clip_fraction")


def _values(cur_N: F64, old_N: F64, engine_N: F64) -> dict[str, float]:
    total_N = cur_N - engine_N
    ratio_N = np.exp(np.clip(total_N, -20.0, 20.0))
    clamped_N = np.minimum(ratio_N, 2.0)
    step_N = np.exp(np.clip(cur_N - old_N, -20.0, 20.0))
    return {
        "kl": float(np.mean(ratio_N - total_N - 1.0)),
        "mean_abs": float(np.mean(np.abs(total_N))),
        "probs_diff": float(np.mean(np.abs(np.exp(cur_N) - np.exp(engine_N)))),
        "verl_ess": _ess(clamped_N),
        "token_ess": _ess(ratio_N),
        "mult_prob_error": float(np.mean(np.exp(np.clip(np.abs(total_N), 0.0, 20.0)))),
        "ppo_kl": float(np.mean(old_N - cur_N)),
        "clip_fraction": float(np.mean((step_N < 0.8) | (step_N > 1.2))),
    }


def _ess(w_N: F64) -> float:
    return float(w_N.mean() ** 2 / np.mean(w_N**2))


def _above(name: str, line: float) -> Rule:
    return lambda dials, at: dials[name][at] > line


def _below(name: str, line: float) -> Rule:
    return lambda dials, at: dials[name][at] < line


def _grad_norm(dials: Mapping[str, Sequence[float]], at: int) -> bool:
    """More than 4 standard deviations above the mean of the 20 steps before."""
    before = np.array(dials["grad_norm"][max(at - Z_STEPS, 0) : at])
    if len(before) < Z_STEPS:
        return False
    return bool(dials["grad_norm"][at] > before.mean() + Z_LINE * max(float(before.std()), 1e-9))


def _entropy(dials: Mapping[str, Sequence[float]], at: int) -> bool:
    """Below a tenth of where it began."""
    return at >= WARM_UP and dials["entropy"][at] < 0.1 * float(np.median(dials["entropy"][:WARM_UP]))


BASELINES: dict[str, Rule] = {
    "KL (k3) of the total > 0.1": _above("kl", 0.1),
    "mean |diff| > 0.1": _above("mean_abs", 0.1),
    "probs diff > 0.005": _above("probs_diff", 0.005),
    "verl's clamped ESS < 1/2": _below("verl_ess", 0.5),
    "token ESS < 1/2": _below("token_ess", 0.5),
    "token_mult_prob_error > 1.05": _above("mult_prob_error", 1.05),
    "ppo_kl > 0.1": _above("ppo_kl", 0.1),
    "clip fraction > 0.2": _above("clip_fraction", 0.2),
    "gradient norm, z > 4": _grad_norm,
    "entropy < 0.1 x start": _entropy,
}


def alarms(rule: Rule, dials: Dials) -> list[int]:
    """Steps at which the rule holds in 2 of the last 3."""
    hits = [rule(dials, at) for at in range(len(dials["entropy"]))]
    return [at for at in range(len(hits)) if hits[at] and sum(hits[max(at - WINDOW + 1, 0) : at + 1]) >= NEEDED]
