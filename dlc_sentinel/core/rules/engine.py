"""Rows labelled current that differ from the trainer: the engine's numerics, or weights it does not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.core.rules.base import (
    CATASTROPHE_NATS,
    CATASTROPHE_TOKENS,
    FIRST_STEP,
    GROWS,
    MIN_ENGINE_NATS,
    RESUMED_STEPS,
    RISE_BEGUN,
    SAME_TEXT,
    Candidate,
    View,
    at_floor,
    disagree,
    engine_values,
    has_moved,
    is_jump,
    is_noise,
    level_values,
    moved,
    on_old_cache,
    resumed,
    rising,
    skipping,
    tail_alone,
)
from dlc_sentinel.core.rules.data import DATA_SHARE
from dlc_sentinel.core.rules.label import NEAR_SHARE
from dlc_sentinel.records import Json

CHANGE_RATIO, CHANGE_NATS = 2.0, 5e-3
"""A change of the engine's law is a fault where its second moment doubles and is more than fp32 numerics."""
CHANGE_STEPS, CHANGE_SHOWN = 5, 2
CHANGE_KNOWN, CHANGE_EARLY = 3, 4.0
"""Rows of one step share their weights: from fewer than so many steps before, a change has to be larger."""
CATASTROPHE_FLOOR, CATASTROPHE_P99 = 5.0, 2.0
SELF_NATS = 0.1
KEYED = (0.02, 0.8)
FAR_TAIL, FAR_TOKENS, FAR_TAIL_FLOORS = 0.005, 64, 1.25
"""More tokens than this beyond eight times what is usual of their like are no numerics, where the rms is above even a
floor that they have lifted: that is twice the table's at most."""
FEW_VALUES = 0.05
"""Distinct values of the engine, over the trainer's."""
STALE_KINDS = {
    "repeated_checksum": "never_delivered",
    "first_step_after_a_resume": "after_resume",
    "one_replica_differs": "one_replica",
    "only_cached_prefixes": "cached_prefix",
    "comes_and_goes_since_step": "some_syncs",
}
"""Kind by what speaks for it, the surer ones first."""
STALE_KV = "stale_kv"
STALE_KV_FLOORS, STALE_KV_NATS = 5.0, 0.1
"""Weights that change by one step leave a cache of the old ones that is off by little: that is no fault."""
STILL = 1.5
DRIFT_WINDOWS, DRIFT_STEPS = 4, 5
DRIFT_FLOORS, DRIFT_BEGUN, DRIFT_RISE = 1.5, 1.25, 1.4
JUMP = 3.0
"""A catastrophe is there at once; what has grown step by step belongs to the rules for drift."""


def stale_engine(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Rows off at the weights of their label as weights that stay behind make them: from the floor on, more and more.

    Where a stack never trains on current rows, those of any age tell it: their label's weights are known, too.
    """
    now = history[-1]
    values = engine_values(now)
    if view.stale_refuted or values.num < MIN_TOKENS:
        return []
    reasons = _reasons(history, view)
    if not reasons and not (view.stale_proven and not at_floor(now)):
        return []
    kind = next((kind for reason, kind in STALE_KINDS.items() if reason in reasons), "stale_or_drift")
    starts = [reasons[name] for name in ("comes_and_goes_since_step", "rising_since_step") if name in reasons]
    evidence = reasons | {"current_rms_nats": values.rms, "floor_rms_nats": now.floor_rms, "tokens": values.num}
    sure = 0.95 if view.stale_proven else 0.85 if "repeated_checksum" in reasons else 0.6
    first = "first_step_after_the_first_update" in reasons and values.num >= CATASTROPHE_TOKENS
    return [
        Candidate(
            "STALE_ENGINE", kind, sure, ADVICE["STALE_ENGINE", kind], evidence,
            int(starts[0]) if starts else now.step,
            suspected=not view.stale_proven, at_once=first or "first_step_after_a_resume" in reasons,
        )
    ]  # fmt: skip


def _reasons(history: Sequence[StepFacts], view: View) -> dict[str, Json]:
    """What speaks for weights that stay behind, by name."""
    now, p = history[-1], history[-1].profile
    is_off = not at_floor(now)
    reasons: dict[str, Json] = {}
    if is_off:
        if resumed(history, view):
            reasons["first_step_after_a_resume"] = next(f.step for f in history if f.step >= view.resumed_step)
        if _first_update(history):
            reasons["first_step_after_the_first_update"] = now.step
        if view.resync_without_effect:
            reasons["resync_without_effect"] = True
        if view.stale_untested:
            reasons["resync_not_answered"] = True
    if not moved(history):
        return reasons
    (since, ratio), comes_since = rising(history), skipping(history)
    if is_off and since >= 0:
        reasons |= {"rising_since_step": since, "rise_ratio": ratio}
    if is_off and comes_since >= 0:
        reasons["comes_and_goes_since_step"] = comes_since
    if _repeats(history) and engine_values(now).rms > 1.5 * now.floor_rms:
        reasons["repeated_checksum"] = True
    if p.replica:
        reasons["one_replica_differs"] = p.replica
    if p.cached_alone:
        reasons["only_cached_prefixes"] = True
    return reasons


def stale_cache(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Tokens after a change of weights in flight are far off: generated on what the old weights had cached."""
    now = history[-1]
    kv = now.stale_kv
    if view.stale_refuted or kv.num < MIN_TOKENS or not kv.rms > max(STALE_KV_FLOORS * now.floor_rms, STALE_KV_NATS):
        return []
    evidence: dict[str, Json] = {"rms_nats": kv.rms, "floor_rms_nats": now.floor_rms, "tokens": kv.num}
    return [Candidate("STALE_ENGINE", STALE_KV, 0.8, ADVICE["STALE_ENGINE", STALE_KV], evidence, suspected=True)]


def _first_update(history: Sequence[StepFacts]) -> bool:
    """A broken delivery shows for the first time: after a run's first step, or once the learning rate is not 0."""
    first, later = history[0], history[1:]
    off = first.step <= FIRST_STEP and at_floor(first) and not any(map(at_floor, later))
    off = off and engine_values(history[-1]).rms >= RISE_BEGUN * engine_values(first).rms
    if off and 0 < len(later) <= RESUMED_STEPS and history[-1].profile.correlation >= SAME_TEXT:
        return True
    rates = [f.scalars.get("lr", math.nan) for f in history]
    still = next((i for i, rate in enumerate(rates) if rate != 0.0), len(rates))
    return still >= 2 and len(rates) - 2 <= still < len(rates) and all(at_floor(f) for f in history[:still])


def engine(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    now = history[-1]
    values = level_values(now)
    replica, part = now.profile.replica, _part(now, view)
    if values.num < MIN_TOKENS or (at_floor(now) and not part) or view.stale_proven:
        return []
    evidence = {
        "rms_nats": values.rms,
        "floor_rms_nats": now.floor_rms,
        "tokens": values.num,
        "p99_abs_nats": now.discrepancy.p99_abs,
    }
    if view.stale_refuted:
        # what is refuted takes the place of the other finding in the same step, or the run looks healthy between them
        kind = part if replica or now.profile.cached_alone else "drift_or_undelivered"
        return [Candidate("ENGINE", kind, 0.8, ADVICE["ENGINE", kind], evidence, at_once=True)]
    if _stale_engine_has_it(history, view):
        return []
    kind = _kind(history, part)
    catastrophic = not replica and _is_catastrophic(history, view)
    return [Candidate("ENGINE", kind, 0.8, ADVICE["ENGINE", kind], evidence, catastrophic=catastrophic)]


def _is_catastrophic(history: Sequence[StepFacts], view: View) -> bool:
    """Far off at once, in the middle as in the tail, and not as the first steps of a process or an update are."""
    now, values = history[-1], level_values(history[-1])
    past = [f for f in history[:-1] if engine_values(f).num]
    before = engine_values(past[-1]).rms if past else 0.0
    at_once = not past or all(not at_floor(f) for f in past) or values.rms > JUMP * before
    wild = values.rms > max(CATASTROPHE_FLOOR * now.floor_rms, CATASTROPHE_NATS)
    return (
        values.num >= CATASTROPHE_TOKENS
        and (wild or disagree(history))
        and now.discrepancy.p99_abs > _catastrophic_p99(past)
        and at_once
        and not resumed(history, view)
        and not _first_update(history)
    )


def _stale_engine_has_it(history: Sequence[StepFacts], view: View) -> bool:
    """True until that rule's one RESYNC is judged."""
    tried = view.resync_without_effect or view.resync_pending or view.stale_untested
    comes = rising(history)[0] >= 0 or skipping(history) >= 0
    # Of a level that is not above the line, a repeated checksum is doubt enough to say nothing.
    repeats = _repeats(history) or (history[-1].repeated_checksum and at_floor(history[-1]))
    return tried or repeats or comes


def _repeats(history: Sequence[StepFacts]) -> bool:
    """An engine says of new weights that they are the old ones; of a trainer that has not moved they rightly are."""
    return history[-1].repeated_checksum and has_moved(history[:-1])


def _catastrophic_p99(past: Sequence[StepFacts]) -> float:
    """A few wild tokens make no catastrophe: one token of a hundred has to be far, for this run as well."""
    usual = [f.discrepancy.p99_abs for f in past if at_floor(f)]
    return max(CATASTROPHE_NATS, CATASTROPHE_P99 * median(usual)) if usual else CATASTROPHE_NATS


def _part(now: StepFacts, view: View) -> str:
    """Kind of a fault that rows or tokens show, however small in the whole step or lifted its floor is; "" = none."""
    p = now.profile
    if on_old_cache(now):
        return ""
    shown = {
        "replica": bool(p.replica),
        "prompt_keyed": KEYED[0] <= p.keyed_groups <= KEYED[1],
        "long_rows": p.long_from > 0,
        "some_requests": p.cached_alone or (view.rows_off_from_start and p.near_rows >= NEAR_SHARE),
        "level": view.rows_off_from_start,
        "tail": _has_tail(now),
    }
    return next((kind for kind, seen in shown.items() if seen), "")


def _has_tail(now: StepFacts) -> bool:
    p = now.profile
    many = p.far_tokens >= FAR_TAIL and p.far_tokens * p.num_tokens >= FAR_TOKENS
    return many and now.discrepancy.rms > FAR_TAIL_FLOORS * now.floor_rms


def _kind(history: Sequence[StepFacts], part: str) -> str:
    """What about the engine is off, where the rows show it; compared with the oldest step that is remembered."""
    p, old = history[-1].profile, history[0]
    # rows that are torn at some token are worse at their end, which says nothing of the engine
    grows = p.place_ratio >= GROWS and not old.profile.place_ratio >= GROWS and p.broken_rows < DATA_SHARE
    shown = {
        "quantised": p.distinct < FEW_VALUES,
        "position": grows,
        "low_probability": at_floor(old) and p.likely_rms <= STILL * old.profile.likely_rms,
        "tail": at_floor(old) and tail_alone(history),
    }
    if part and (part not in ("tail", "level") or at_floor(history[-1])):
        return part
    return next((kind for kind, seen in shown.items() if seen), "level")


def engine_changed(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """The lag-0 rows of this step are of another law than those before, at once and not as a drift.

    The step after it has to show it, too: a few wild tokens, or one bad step, double the second moment as well.
    """
    seen = [f for f in history if f.current.num]
    before, shown = seen[:-CHANGE_SHOWN], seen[-CHANGE_SHOWN:]
    if not before or shown[-1] is not history[-1] or not shown[0].engine_change >= CHANGE_RATIO:
        return []
    # as if all steps had today's tokens
    times = {f.step: history[-1].floor_rms / f.floor_rms for f in seen}
    usual = max(f.current.rms * times[f.step] for f in before[-CHANGE_STEPS:])
    least = min(f.current.rms * times[f.step] for f in shown)
    wanted = CHANGE_RATIO if len(before) >= CHANGE_KNOWN else CHANGE_EARLY
    if least < CHANGE_NATS or least**2 < wanted * usual**2:
        return []
    if _stale_engine_has_it(history, view):
        return []
    evidence: dict[str, Json] = {
        "second_moment_ratio": shown[0].engine_change, "rms_nats": shown[-1].current.rms, "rms_before_nats": usual
    }  # fmt: skip
    advice = ADVICE["ENGINE", "changed"]
    return [Candidate("ENGINE", "changed", 0.9, advice, evidence, shown[0].step, at_once=True)]


def trainer_noise(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """The trainer's two passes over the same rows at the same weights disagree."""
    now = history[-1]
    shows = now.unmoved.num >= MIN_TOKENS or is_noise(now)
    loud = now.noise_rms > max(SELF_NATS, now.floor_rms)
    if not shows or not (loud or now.passes_apart):
        return []
    rms = now.noise_rms if loud else now.lag.rms
    evidence: dict[str, Json] = {"rms_nats": rms, "lag_rms_nats": now.lag.rms, "tokens": now.lag.num}
    return [Candidate("ENGINE", "trainer_noise", 0.9, ADVICE["ENGINE", "trainer_noise"], evidence)]


def drift(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Current rows move away from the floor slowly, and have stayed above it for three windows of steps."""
    now = history[-1]
    # of steps whose tokens are surer, numerics are smaller: as if all steps had today's
    known = [(engine_values(f), now.floor_rms / f.floor_rms) for f in history]
    seen = [values.rms * times for values, times in known if values.num >= MIN_TOKENS]
    judged_elsewhere = view.stale_proven or view.resync_pending or view.stale_untested or skipping(history) >= 0
    if len(seen) < DRIFT_WINDOWS * DRIFT_STEPS or judged_elsewhere:
        return []
    last = seen[-DRIFT_WINDOWS * DRIFT_STEPS :]
    levels = [
        median(seen[:DRIFT_STEPS]),
        *(median(last[i : i + DRIFT_STEPS]) for i in range(0, len(last), DRIFT_STEPS)),
    ]
    above = min(levels[2:]) >= DRIFT_BEGUN * now.floor_rms
    if not above or levels[-1] < max(DRIFT_FLOORS * now.floor_rms, MIN_ENGINE_NATS, DRIFT_RISE * levels[0]):
        return []
    evidence: dict[str, Json] = {"rms_nats": levels[-1], "rms_before_nats": levels[0], "floor_rms_nats": now.floor_rms}
    whole = [median(seen[i : i + DRIFT_STEPS]) for i in range(0, len(seen) - DRIFT_STEPS + 1, DRIFT_STEPS)]
    shape = "tail" if tail_alone(history) else "level" if is_jump(whole) else "drift"
    kind = _part(now, view) or shape
    return [Candidate("ENGINE", kind, 0.8, ADVICE["ENGINE", kind], evidence)]
