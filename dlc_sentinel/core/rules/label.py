"""The version tag is wrong: rows fit other weights than those their label names, or come from the future."""

from __future__ import annotations

from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import GROWS, Candidate, View, on_old_cache, rising
from dlc_sentinel.records import Json

FUTURE_SHARE = 0.01
ROW_SHARE, MIN_ROWS, ROW_STEPS = 0.035, 2, 3
NEAR_SHARE = 0.3
"""Where fewer rows are fine, it is not some of them that are off."""


def label(history: Sequence[StepFacts], view: View) -> list[Candidate]:
    """Rows newer than the trainer; rows that fit its present weights; or some of one version that do not fit it."""
    now = history[-1]
    p = now.profile
    share = now.num_negative_age / max(now.num_tokens, 1)
    if share >= FUTURE_SHARE:
        evidence: dict[str, Json] = {"share_of_tokens": share, "trainer_version": now.version}
        return [Candidate("LABEL", "future_version", 0.95, ADVICE["LABEL", "future_version"], evidence)]
    evidence = {"far_rows": p.far_rows, "near_rows": p.near_rows, "rms_nats": now.discrepancy.rms}
    if p.mislabelled_rows >= ROW_SHARE and _rows(history, "mislabelled_rows") >= MIN_ROWS:
        evidence["rows_at_the_floor_at_present_weights"] = p.mislabelled_rows
        return [Candidate("LABEL", "other_version", 0.9, ADVICE["LABEL", "other_version"], evidence)]
    some = p.fitting_rows >= ROW_SHARE and _rows(history, "fitting_rows") >= MIN_ROWS and p.near_rows >= NEAR_SHARE
    others = p.broken_rows + p.shifted_rows + p.unpaired_rows
    keyed = bool(p.replica) or p.cached_alone or p.keyed_groups > 0.0 or p.long_from > 0 or view.rows_off_from_start
    # a label stands for a whole row: what grows along it is none
    keyed = keyed or p.place_ratio >= GROWS
    if some and p.fitting_rows > others and not keyed and not on_old_cache(now) and rising(history)[0] < 0:
        evidence["far_rows_whose_streams_fit"] = p.fitting_rows
        return [Candidate("LABEL", "some_rows", 0.7, ADVICE["LABEL", "some_rows"], evidence)]
    return []


def _rows(history: Sequence[StepFacts], name: str) -> float:
    """Rows of that kind in the last steps together: of a small step one row may be all there is."""
    recent = [f.profile for f in history[-ROW_STEPS:]]
    return float(sum(getattr(p, name) * p.num_rows for p in recent))
