"""Streams that do not belong together, and values that are none: off by position or by row, not by size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.core.rules.base import (
    AGREEING,
    CATASTROPHE_NATS,
    CATASTROPHE_TOKENS,
    UNREPORTED,
    Candidate,
    View,
    apart,
    at_floor,
    rest_at_floor,
)
from dlc_sentinel.maths.chance import SURE_NATS, chance_nats
from dlc_sentinel.records import Json

FAULT_CAUSES = (
    "non_finite", "no_engine", "placeholder", "positive", "mis_sized", "duplicate", "out_of_order", "unmatched",
    "restarted_version",
)  # fmt: skip
"""Refusals that say the data is wrong; the others (queue_full, join_full, late, oversize) say it was lost."""
NO_VALUES = ("non_finite", "placeholder", "positive")
"""Of these so many tokens are enough in any step: a logprob that is none comes from a place or rows of one kind."""
CLASS_TOKENS = 64
DATA_SHARE = 0.01
CLASS_SHARE = 0.1
"""Of one position or class of rows."""
TORN = {"offset": "shifted_rows", "wrong_pairing": "unpaired_rows", "broken_prefix": "broken_rows"}
"""Kinds in which whole rows are off: as bad as an engine that is as far off. Noise as large as the logprobs themselves
makes some rows look like each of them, unless the streams of the other rows belong together beyond doubt. Less of it
makes some look unpaired, beside more that are as far and pairs: a row of few tokens is of neither."""
MOST = 0.5
"""More than this share of what can be affected is not chance."""
CLEARLY = 0.8
"""Correlation that leaves no doubt."""
SAME_OFFSET = 0.25
"""Noise shifts rows, too, but each by another number; short rows have few to choose from."""
ZERO_SHARE, ZERO_TOKENS = 5e-4, 4
FILLED_SHARE = 0.1
USUAL_TIMES = 5.0
FAR_SHARE = 2e-4
PLACED_SHARE = 0.6
EDGE_SHARE, EDGE_TOKENS = 0.5, 8.0
"""Longer runs from the end of a masked span belong to it: the mask ends too early."""
MISCOUNTED = 0.3
ZERO_OF_FAR = 0.3
RUN_TOKENS, RUN_SHARE = 4.0, 0.003


def refused(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """A cause for which the data itself is to blame takes 1 % of a step, or leaves 64 tokens of it without a value.

    From 1 % on, values above 0 are another verdict's: logits are above 0 at most tokens, not at one place.
    """
    now = history[-1]
    found = []
    offered, dropped = now.offered_tokens, dict(now.dropped)
    if dropped.get("no_engine", 0) > MOST * offered or dropped.get("non_finite", 0) >= DATA_SHARE * offered:
        # such an engine writes NaN in rows that it did generate, too
        dropped["non_finite"] = dropped.get("non_finite", 0) + dropped.pop("no_engine", 0)
    for cause in FAULT_CAUSES:
        tokens = dropped.get(cause, 0) - (now.missing_tokens if cause == "unmatched" else 0)
        share = tokens / offered
        if share < DATA_SHARE and not (cause in NO_VALUES and tokens >= CLASS_TOKENS):
            continue
        if cause == "positive" and share >= DATA_SHARE:
            continue
        catastrophic = cause == "non_finite" and share > DATA_SHARE and offered >= CATASTROPHE_TOKENS
        evidence = {"cause": cause, "tokens": tokens, "share": share}
        found.append(
            Candidate("DATA", cause, min(0.6 + share, 0.99), ADVICE["DATA", cause], evidence, catastrophic=catastrophic)
        )
    return found


def structure(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """What the rows themselves show: a finding by rows and one of fill-ins, else one by place."""
    now = history[-1]
    by_row = _by_row(history)
    filled = _zeros(now, alone=by_row is None)
    found = [each for each in (by_row, filled) if each] or [each for each in (_by_place(now),) if each]
    more: dict[str, Json] = {"correlation": now.profile.correlation, "rms_nats": now.discrepancy.rms}
    return [
        Candidate("DATA", kind, 0.9, ADVICE["DATA", kind], of | more, catastrophic=_is_catastrophic(now, kind))
        for kind, of in found
    ]


def _is_catastrophic(now: StepFacts, kind: str) -> bool:
    """Torn rows are, where they are what sets the streams apart; fill-ins, where they stand for so many tokens."""
    p = now.profile
    if kind in TORN:
        return apart(now) and getattr(p, TORN[kind]) > MOST * p.far_rows
    many = p.zero_tokens >= FILLED_SHARE and p.zero_tokens * p.num_tokens >= CATASTROPHE_TOKENS * FILLED_SHARE
    return kind == "exact_zeros" and many and now.discrepancy.p99_abs > CATASTROPHE_NATS


def _by_row(history: Sequence[StepFacts]) -> tuple[str, dict[str, Json]] | None:
    p = history[-1].profile
    classes = {kind: float(getattr(p, name)) for kind, name in TORN.items()}
    if sum(classes.values()) <= p.fitting_rows and not p.others_correlation >= CLEARLY:
        del classes["wrong_pairing"]
    kind = max(classes, key=lambda name: classes[name])
    if classes[kind] < DATA_SHARE:
        return None
    alike = kind == "offset" and _no_chance(p.offset_share, SAME_OFFSET, p.offset_rows)
    noise = p.near_rows < CLASS_SHARE and not p.others_correlation >= CLEARLY and not alike
    if noise and not _tore(history, TORN[kind]):
        return None
    evidence: dict[str, Json] = {"share_of_rows": classes[kind], "far_rows": p.far_rows}
    if kind == "offset":
        evidence |= {"offset": p.offset}
    if kind == "broken_prefix":
        evidence |= {"from_place": p.broken_at}
    return kind, evidence


def _tore(history: Sequence[StepFacts], name: str) -> bool:
    """True where most far rows are so, and became so at once or one by one: noise does it to all of them by degrees."""
    seen = [f.profile for f in history if f.profile.num_rows]
    if not apart(history[-1], MIN_TOKENS) or getattr(seen[-1], name) <= MOST * seen[-1].far_rows:
        return False
    while seen and seen[-1].near_rows < CLASS_SHARE and getattr(seen[-1], name) > MOST * seen[-1].far_rows:
        seen.pop()
    if not seen:
        return True
    one_by_one = seen[-1].near_rows >= CLASS_SHARE and getattr(seen[-1], name) >= DATA_SHARE
    return one_by_one or seen[-1].correlation > AGREEING


def _zeros(now: StepFacts, *, alone: bool) -> tuple[str, dict[str, Json]] | None:
    """Logprobs of exactly 0 where the other side is far from certain. Rows that are not pairs hold some by chance."""
    p = now.profile
    if p.zero_tokens < ZERO_SHARE or p.zero_tokens * p.num_tokens < ZERO_TOKENS:
        return None
    evidence: dict[str, Json] = {"share_of_tokens": p.zero_tokens, "rows_with_a_zero_at_the_end": p.last_zero}
    if p.zero_last >= MOST:
        return "last_token", evidence
    if p.zero_whole >= MOST:
        return "exact_zeros", evidence | {"in_rows_of_zeros": p.zero_whole}
    if not alone or p.zero_tokens < ZERO_OF_FAR * p.far_tokens or not rest_at_floor(now):
        return None
    if p.zero_run >= RUN_TOKENS:
        return "masked_span", evidence | {"tokens_in_a_row": p.zero_run}
    return "exact_zeros", evidence | {"in_rows_of_zeros": p.zero_whole}


def _by_place(now: StepFacts) -> tuple[str, dict[str, Json]] | None:
    p = now.profile
    ends = {"last_token": (p.last_far, p.last_usual), "first_token": (p.first_far, p.first_usual)}
    end = max(ends, key=lambda name: ends[name])
    share, usual = ends[end]
    if share >= max(CLASS_SHARE, USUAL_TIMES * usual) and _no_chance(share, usual, p.num_rows):
        return end, {"share_of_rows": share, "of_like_tokens": usual, "exactly_zero": p.last_zero}
    if p.far_tokens < FAR_SHARE:
        return None
    evidence: dict[str, Json] = {"far_tokens": p.far_tokens}
    few_wild = p.wild_tokens * p.num_tokens >= ZERO_TOKENS and not at_floor(now) and rest_at_floor(now)
    if p.wild_tokens >= DATA_SHARE or few_wild:
        return "wild_values", evidence | {"share_of_tokens": p.wild_tokens}
    if p.modulus and p.modulus_tokens >= PLACED_SHARE and _no_chance(p.modulus_tokens, 1 / p.modulus, p.modulus_seen):
        return "chunk_edge", evidence | {"modulus": p.modulus, "share_of_far_tokens": p.modulus_tokens}
    if p.place >= 0:
        return "one_place", evidence | {"place": p.place, "share_of_its_tokens": p.place_far}
    if p.edge_far >= CLASS_SHARE and p.edge_of_far >= EDGE_SHARE and p.far_run <= EDGE_TOKENS:
        return "turn_edge", evidence | {"share_of_edges": p.edge_far, "share_of_far_tokens": p.edge_of_far}
    if p.far_run >= RUN_TOKENS and p.far_tokens >= RUN_SHARE:
        return "masked_span", evidence | {"tokens_in_a_row": p.far_run}
    return None


def _no_chance(share: float, usual: float, num: int) -> bool:
    """True where so many of `num` rows would not be far at a rate of `usual`: with few rows, one of them often is.

    In one step of 10,000 they are; two of three steps are asked for beside.
    """
    return bool(chance_nats(share, usual, num) >= SURE_NATS)


def hides_lag(found: Sequence[Candidate], now: StepFacts) -> bool:
    """True where lag is known as a part of the total only, and that is spoilt: streams torn, filled in, transformed."""
    torn = any(c.verdict == "DATA" and c.kind not in FAULT_CAUSES and c.kind != "finish_reason" for c in found)
    shaped = any(c.verdict == "TRANSFORM" and c.kind != UNREPORTED for c in found)
    return now.basis != "exact" and (torn or shaped)


def finish_reason(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """The trainer counts responses as cut that the engine finished."""
    now = history[-1]
    cut = now.scalars.get("truncated_ratio", math.nan)
    if not cut + now.finished_share >= 1.0 + MISCOUNTED or not cut >= MISCOUNTED:
        return []
    evidence: dict[str, Json] = {"truncated_ratio": cut, "finished_by_the_engine": now.finished_share}
    return [Candidate("DATA", "finish_reason", 0.9, ADVICE["DATA", "finish_reason"], evidence)]
