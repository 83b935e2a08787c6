"""Streams that do not belong together, and values that are none: off by position or by row, not by size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.core.profile import Profile
from dlc_sentinel.core.rules.base import CATASTROPHE_TOKENS, Candidate, View, apart, disagree
from dlc_sentinel.records import Json

FAULT_CAUSES = (
    "non_finite", "placeholder", "mis_sized", "duplicate", "out_of_order", "unmatched", "restarted_version",
)  # fmt: skip
"""Refusals that say the data is wrong; the others (queue_full, join_full, late, oversize) say it was lost."""
DATA_SHARE = 0.01
CLASS_SHARE = 0.1
"""Of one position or class of rows."""
TORN = ("offset", "wrong_pairing", "broken_prefix")
"""Kinds in which whole rows are off: as bad as an engine that is as far off."""
ZERO_SHARE, ZERO_TOKENS = 1e-3, 4
REST_FLOORS = 3.0
USUAL_TIMES = 5.0
MIN_RATE, SURE_NATS = 1e-4, 9.0
"""A chance of 1e-4 in a step; two of three steps are asked for beside."""
PLACED_SHARE = 0.6
FAR_SHARE = 2e-4
EDGE_SHARE = 0.5
MISCOUNTED = 0.3
ZERO_OF_FAR = 0.3
RUN_TOKENS, RUN_SHARE = 4.0, 0.003


def refused(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """A cause for which the data itself is to blame takes 1 % of a step."""
    now = history[-1]
    found = []
    offered = now.offered_tokens
    for cause in FAULT_CAUSES:
        share = now.dropped.get(cause, 0) / offered
        if share < DATA_SHARE:
            continue
        catastrophic = cause == "non_finite" and share > DATA_SHARE and offered >= CATASTROPHE_TOKENS
        evidence = {"cause": cause, "tokens": now.dropped[cause], "share": share}
        found.append(
            Candidate("DATA", cause, min(0.6 + share, 0.99), ADVICE["DATA", cause], evidence, catastrophic=catastrophic)
        )
    return found


def structure(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """What the rows themselves show: one finding by rows, else one by place."""
    now = history[-1]
    kind, evidence = _by_row(now, disagree(history, MIN_TOKENS)) or _by_place(now.profile) or ("", {})
    if not kind:
        return []
    evidence |= {"correlation": now.profile.correlation, "rms_nats": now.discrepancy.rms}
    return [Candidate("DATA", kind, 0.9, ADVICE["DATA", kind], evidence, catastrophic=apart(now) and kind in TORN)]


def _by_row(now: StepFacts, at_once: bool) -> tuple[str, dict[str, Json]] | None:
    p = now.profile
    rest_at_floor = p.zero_tokens >= ZERO_OF_FAR * p.far_tokens and p.rest_rms <= REST_FLOORS * now.floor_rms
    if rest_at_floor and p.zero_tokens >= ZERO_SHARE and p.zero_tokens * p.num_tokens >= ZERO_TOKENS:
        return _zeros(p)
    classes = {"offset": p.shifted_rows, "wrong_pairing": p.unpaired_rows, "broken_prefix": p.broken_rows}
    kind = max(classes, key=lambda name: classes[name])
    if classes[kind] < DATA_SHARE:
        return None
    # Noise as large as the logprobs themselves unpairs rows too, but then all of them, and not at once.
    if kind == "wrong_pairing" and p.near_rows < CLASS_SHARE and not (at_once and p.unpaired_rows > 0.5):
        return None
    evidence: dict[str, Json] = {"share_of_rows": classes[kind], "far_rows": p.far_rows}
    if kind == "offset":
        evidence |= {"offset": p.offset}
    if kind == "broken_prefix":
        evidence |= {"from_place": p.broken_at}
    return kind, evidence


def _zeros(p: Profile) -> tuple[str, dict[str, Json]]:
    """Logprobs of exactly 0 where the other side is far from certain."""
    at_end = p.place >= 0 and p.last_zero >= CLASS_SHARE
    evidence: dict[str, Json] = {"share_of_tokens": p.zero_tokens, "rows_with_a_zero_at_the_end": p.last_zero}
    if p.far_run >= RUN_TOKENS:
        return "masked_span", evidence | {"tokens_in_a_row": p.far_run}
    return ("last_token" if at_end else "exact_zeros"), evidence


def _by_place(p: Profile) -> tuple[str, dict[str, Json]] | None:
    ends = {"last_token": p.last_far, "first_token": p.first_far}
    end = max(ends, key=lambda name: ends[name])
    if ends[end] >= max(CLASS_SHARE, USUAL_TIMES * p.ends_usual) and _no_chance(ends[end], p.ends_usual, p.num_rows):
        return end, {"share_of_rows": ends[end], "of_all_tokens": p.ends_usual, "exactly_zero": p.last_zero}
    if p.far_tokens < FAR_SHARE:
        return None
    evidence: dict[str, Json] = {"far_tokens": p.far_tokens}
    if p.wild_tokens >= DATA_SHARE:
        return "wild_values", evidence | {"share_of_tokens": p.wild_tokens}
    if p.place >= 0:
        return "one_place", evidence | {"place": p.place}
    if p.modulus and p.modulus_tokens >= PLACED_SHARE:
        return "chunk_edge", evidence | {"modulus": p.modulus, "share_of_far_tokens": p.modulus_tokens}
    if p.edge_far >= CLASS_SHARE and p.edge_of_far >= EDGE_SHARE:
        return "turn_edge", evidence | {"share_of_edges": p.edge_far, "share_of_far_tokens": p.edge_of_far}
    if p.far_run >= RUN_TOKENS and p.far_tokens >= RUN_SHARE:
        return "masked_span", evidence | {"tokens_in_a_row": p.far_run}
    return None


def _no_chance(share: float, usual: float, num: int) -> bool:
    """True where so many of `num` rows would not be far at a rate of `usual`: with few rows, one of them often is.

    Source: Chernoff's bound, P(share or more) <= exp(-num KL(share || usual)).
    """
    rate = min(max(usual, MIN_RATE), 0.5)
    rest = (1.0 - share) * math.log((1.0 - share) / (1.0 - rate)) if share < 1.0 else 0.0
    return num * (share * math.log(share / rate) + rest) >= SURE_NATS


def finish_reason(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """The trainer counts responses as cut that the engine finished."""
    now = history[-1]
    cut = now.scalars.get("truncated_ratio", math.nan)
    if not cut + now.finished_share >= 1.0 + MISCOUNTED or not cut >= MISCOUNTED:
        return []
    evidence: dict[str, Json] = {"truncated_ratio": cut, "finished_by_the_engine": now.finished_share}
    return [Candidate("DATA", "finish_reason", 0.9, ADVICE["DATA", "finish_reason"], evidence)]
