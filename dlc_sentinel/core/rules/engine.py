"""Rows labelled current that differ from the trainer: the engine's numerics, or weights it does not hold."""

from __future__ import annotations

from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.core.rules.base import (
    CATASTROPHE_NATS,
    CATASTROPHE_TOKENS,
    Candidate,
    View,
    at_floor,
    engine_values,
    moved,
    rising,
)
from dlc_sentinel.records import Json

CHANGE_RATIO, CHANGE_NATS = 2.0, 5e-3
"""A change of the engine's law is a fault where its second moment doubles and is more than fp32 numerics."""
CATASTROPHE_FLOOR = 5.0
JUMP = 3.0
"""A catastrophe is there at once; what has grown step by step belongs to the rules for drift."""


def stale_engine(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    if view.stale_refuted or now.current.num < MIN_TOKENS:
        return []
    since, ratio = rising(history)
    elevated = not at_floor(now)
    has_moved = moved(history)
    reasons: dict[str, Json] = {}
    if elevated and since >= 0 and has_moved:
        reasons["rising_since_step"] = since
        reasons["rise_ratio"] = ratio
    if now.repeated_checksum and now.current.rms > 1.5 * now.floor_rms and has_moved:
        reasons["repeated_checksum"] = True
    if view.resync_without_effect and elevated:
        reasons["resync_without_effect"] = True
    if not reasons and not (view.stale_proven and elevated):
        return []
    kind = "never_delivered" if now.repeated_checksum else "stale_or_drift"
    reasons |= {"current_rms_nats": now.current.rms, "floor_rms_nats": now.floor_rms, "tokens": now.current.num}
    sure = 0.95 if view.stale_proven else 0.85 if now.repeated_checksum else 0.6
    since = since if since >= 0 else now.step
    advice = ADVICE["STALE_ENGINE", kind]
    return [Candidate("STALE_ENGINE", kind, sure, advice, reasons, since, suspected=not view.stale_proven)]


def engine(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    values = engine_values(now)
    if values.num < MIN_TOKENS or at_floor(now) or view.stale_proven:
        return []
    past = [f for f in history[:-1] if engine_values(f).num]
    before = engine_values(past[-1]).rms if past else 0.0
    at_once = not past or all(not at_floor(f) for f in past) or values.rms > JUMP * before
    catastrophic = (
        values.num >= CATASTROPHE_TOKENS
        and values.rms > max(CATASTROPHE_FLOOR * now.floor_rms, CATASTROPHE_NATS)
        and now.discrepancy.p99_abs > CATASTROPHE_NATS
        and at_once
        and not now.repeated_checksum
        and not view.stale_refuted
        and not view.resync_pending
        and rising(history)[0] < 0
    )
    if view.stale_refuted:
        kind = "drift_or_undelivered"
    elif rising(history)[0] >= 0 or now.repeated_checksum or view.resync_without_effect or view.resync_pending:
        return []  # the STALE_ENGINE rule has it until its one RESYNC is judged
    else:
        kind = "level"
    advice = ADVICE["ENGINE", kind]
    evidence = {
        "rms_nats": values.rms,
        "floor_rms_nats": now.floor_rms,
        "tokens": values.num,
        "p99_abs_nats": now.discrepancy.p99_abs,
    }
    return [Candidate("ENGINE", kind, 0.8, advice, evidence, catastrophic=catastrophic)]


def engine_changed(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """The lag-0 rows of this step are of another law than those before, at once and not as a drift."""
    now = history[-1]
    past = [f.current.rms for f in history[:-1] if f.current.num]
    doubled = now.engine_change >= CHANGE_RATIO and now.current.rms >= CHANGE_NATS
    if not doubled or not past or now.current.rms**2 < CHANGE_RATIO * past[-1] ** 2:
        return []
    if rising(history)[0] >= 0 or now.repeated_checksum or view.resync_without_effect or view.resync_pending:
        return []  # as above
    evidence = {"second_moment_ratio": now.engine_change, "rms_nats": now.current.rms, "rms_before_nats": past[-1]}
    return [Candidate("ENGINE", "changed", 0.9, ADVICE["ENGINE", "changed"], evidence, at_once=True)]
