"""A run judged by its log alone: no token is at hand, so little is sure, and what is not known stays null.

Exact: mean and k3 of the total log-ratio, and its token-level ESS. It is the discrepancy where every row was trained by
the weights that made it; with older rows it is discrepancy and lag in one, which no log tells apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from dlc_sentinel.config import Config
from dlc_sentinel.core.detect import Findings
from dlc_sentinel.core.facts import NAN, Basis, StepFacts, Values, no_nan
from dlc_sentinel.core.floors import MEAN_ABS_OF_RMS, TABLE_FACTOR
from dlc_sentinel.core.learning import Learning
from dlc_sentinel.core.rules.base import ABOVE_FLOOR, MIN_ENGINE_NATS, SEVERITY, Candidate, View
from dlc_sentinel.core.rules.learning import learning
from dlc_sentinel.core.rules.wiring import BOUND_SAFE
from dlc_sentinel.offline.metrics import MetricLog, MetricStep
from dlc_sentinel.records import UNKNOWN_VERSION, Json

KEPT_STEPS = 64
UNKNOWN = ("num_tokens", "num_groups", "num_blocks", "dropped")

ADVICE: Mapping[tuple[str, str], str] = {
    ("ENGINE", "level"): "Same weights, different numbers: compare dtypes, kernels, quantisation and sampling settings "
    "of engine and trainer. Record a tape for the kind.",
    ("ENGINE", "drift_or_undelivered"): "Rows of the newest weights drift from the trainer: compare one parameter's "
    "checksum on both sides; equal = drift of numerics, else the weights do not arrive.",
    ("LAG", "old_weights"): "Fresh rows agree, old ones do not: sync more often, shorten the queue or lower the "
    "learning rate. Record a tape to be sure.",
    ("BLIND", "mixed_basis"): "The log holds discrepancy and lag in one number. Record a tape with the versions of the "
    "rows, or say --on-policy if every row was trained by the weights that made it.",
}
UNLOGGED: Mapping[str, str] = {
    "verl": "The log says nothing of engine against trainer (verl logs none in bypass mode): record a tape.",
    "trl": "The log says nothing of engine against trainer (TRL logs it only with use_vllm and "
    "vllm_importance_sampling_correction): record a tape.",
}
"""Advice for BLIND/no_mismatch_metrics, by stack."""


def judge(log: MetricLog, config: Config, *, on_policy: bool = False) -> dict[str, Json]:
    """verdict, findings, steps and commands of the file format; steps also hold total_ess: {"1": token level}.

    `on_policy`: every row was trained by the weights that made it, where the log does not say.
    """
    findings, starts = Findings(), Learning()
    done: list[MetricStep] = []
    history: list[StepFacts] = []
    steps: list[Json] = []
    for now in log.steps:
        done.append(now)
        basis, floor = _basis(now, on_policy), _floor(done, on_policy, config)
        facts = replace(_facts(now, basis, floor), learning=starts.update(now.scalars))
        history = [*history, facts][-KEPT_STEPS:]
        found = _candidates(done, basis, floor, config, on_policy, log.stack) + learning(history, View(config))
        findings.update(now.step, sorted(found, key=lambda c: SEVERITY.index(c.verdict)))
        steps.append(_public(facts, now))
    worst = min(findings.open(), key=lambda finding: finding.rank, default=None)
    quiet = "HEALTHY" if history[-1].basis == "exact" or _excludes_lag(done[-1], config) else "BLIND"
    return {
        "verdict": worst.verdict if worst else quiet,
        "findings": [f.to_public() for f in sorted(findings.items, key=lambda f: (not f.is_open, f.rank))],
        "steps": steps,
        "commands": [],
    }


def notes(log: MetricLog, *, on_policy: bool = False) -> list[str]:
    """What can and cannot be known from this log, in sentences."""
    said = [
        "a log of numbers, no tokens: ESS over blocks, quantiles, KL of whole responses and effects of a RESYNC "
        "cannot be known"
    ]
    bases = {_basis(step, on_policy) for step in log.steps}
    if bases == {"none"}:
        return [*said, "nothing is logged of engine against trainer"]
    if any(not math.isnan(step.total_ess) for step in log.steps):
        said.append("exact: mean, k3 KL and token-level ESS of trainer against engine, before any mask or cut")
    elif any(not math.isnan(step.mean_abs) for step in log.steps):
        said.append("known: mean |difference| of the logprobs only, no ESS")
    if "mixed" in bases:
        oldest = max((step.age_max for step in log.steps if not math.isnan(step.age_max)), default=NAN)
        why = "ages are not logged" if math.isnan(oldest) else f"rows are up to {oldest:g} versions old"
        said.append(f"{why}: discrepancy and lag are one number there (basis mixed)")
    return said


def _basis(now: MetricStep, on_policy: bool) -> Basis:
    if not now.has_mismatch:
        return "none"
    return "exact" if now.age_max == 0.0 or (on_policy and not now.age_max > 0.0) else "mixed"


def _level(now: MetricStep) -> float:
    return now.mean_abs / MEAN_ABS_OF_RMS if math.isnan(now.total_rms) else now.total_rms


def _floor(done: Sequence[MetricStep], on_policy: bool, config: Config) -> float:
    """Rms in nats, as the sentinel's own: the smaller of the first exact steps' median and twice the bf16 table."""
    first = [_level(s) for s in done if _basis(s, on_policy) == "exact" and not math.isnan(_level(s))]
    table = TABLE_FACTOR * config.floor.bfloat16
    return max(min(median(first[: config.floor.steps]), table) if first else table, config.floor.minimum)


def _guessed_ess(done: Sequence[MetricStep], config: Config) -> float:
    """ESS_h* of the lag, if tokens move independently and the engine does what it does on fresh rows; nan = no clue.

    The smaller of k3 and -mean is taken: one wild token makes k3 as large as it likes.
    """
    fresh = [s.k3_kl for s in done if s.age_max == 0.0 and s.k3_kl >= 0.0]
    if not fresh or not done[-1].age_max > 0.0:
        return NAN
    return math.exp(-2.0 * config.ess.horizon * max(min(done[-1].k3_kl, done[-1].kl) - median(fresh), 0.0))


def _excludes_lag(now: MetricStep, config: Config) -> bool:
    """True when ESS_h* of the total cannot be low even if the tokens of a block all move together."""
    worst = math.exp(-2.0 * now.k3_kl * config.ess.horizon**2) if now.k3_kl >= 0.0 else NAN
    return worst >= BOUND_SAFE


def _candidates(
    done: Sequence[MetricStep], basis: Basis, floor: float, config: Config, on_policy: bool, stack: str
) -> list[Candidate]:
    now = done[-1]
    evidence: dict[str, Json] = {
        "total_ess_1": now.total_ess, "kl": now.kl, "k3_kl": now.k3_kl, "rms_nats_about": _level(now),
        "floor_rms_nats": floor, "age_mean": now.age_mean, "age_max": now.age_max, "basis": basis,
    }  # fmt: skip
    if basis == "none":
        return [Candidate("BLIND", "no_mismatch_metrics", 0.9, UNLOGGED[stack], {"step": now.step})]
    if basis == "exact":
        high = _level(now) > max(ABOVE_FLOOR * floor, MIN_ENGINE_NATS)
        exact = [_level(s) for s in done if _basis(s, on_policy) == "exact"]
        kind = "drift_or_undelivered" if min(exact) * ABOVE_FLOOR < _level(now) else "level"
        return [_found("ENGINE", kind, 0.7, evidence)] if high else []
    guess = _guessed_ess(done, config)
    if guess < config.ess.threshold:
        horizon = config.ess.horizon
        return [_found("LAG", "old_weights", 0.6, evidence | {f"lag_ess_{horizon}_about": guess}, suspected=True)]
    return [] if _excludes_lag(now, config) else [_found("BLIND", "mixed_basis", 0.8, evidence)]


def _found(verdict: str, kind: str, sure: float, evidence: Mapping[str, Json], suspected: bool = False) -> Candidate:
    return Candidate(verdict, kind, sure, ADVICE[verdict, kind], evidence, suspected=suspected)


def _facts(now: MetricStep, basis: Basis, floor: float) -> StepFacts:
    moments = Values(mean=-now.kl)
    return StepFacts(
        step=now.step,
        version=UNKNOWN_VERSION,
        basis=basis,
        age_mean=now.age_mean,
        age_max=now.age_max,
        discrepancy=moments if basis == "exact" else Values(),
        total=moments,
        floor_rms=floor,
        scalars=dict(now.scalars),
    )


def _public(facts: StepFacts, now: MetricStep) -> dict[str, Json]:
    """The step object, with null for the counts that a log does not hold."""
    public = facts.to_public()
    for name in UNKNOWN:
        public[name] = dict.fromkeys(public[name]) if isinstance(public[name], dict) else None
    ess = no_nan(now.total_ess)
    return public | {"version": None, "updates": [None, None], "total_ess": {"1": ess}}
