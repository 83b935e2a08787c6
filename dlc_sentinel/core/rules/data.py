"""Streams that do not belong together, and values that are none."""

from __future__ import annotations

from collections.abc import Sequence

from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.core.rules.base import (
    CATASTROPHE_CORRELATION,
    CATASTROPHE_NATS,
    CATASTROPHE_TOKENS,
    Candidate,
    View,
    at_floor,
)

FAULT_CAUSES = (
    "non_finite", "positive", "placeholder", "mis_sized", "duplicate", "out_of_order", "unmatched",
    "restarted_version",
)  # fmt: skip
"""Refusals that say the data is wrong; the others (queue_full, join_full, late, oversize) say it was lost."""
DATA_SHARE = 0.01
AGREEING = 0.95


def data(history: Sequence[StepFacts], view: View) -> list[Candidate]:
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
    past = [f.correlation for f in history[:-1] if f.correlation_tokens >= CATASTROPHE_TOKENS]
    low = now.correlation < CATASTROPHE_CORRELATION and now.correlation_tokens >= CATASTROPHE_TOKENS
    # Where all tokens are about as likely, noise at the floor alone decorrelates the streams.
    apart = not at_floor(now) and now.discrepancy.p99_abs > CATASTROPHE_NATS
    if low and apart and (not past or past[-1] > AGREEING or all(c < CATASTROPHE_CORRELATION for c in past)):
        evidence = {
            "correlation": now.correlation,
            "tokens": now.correlation_tokens,
            "rms_nats": now.discrepancy.rms,
        }
        advice = ADVICE["DATA", "streams_disagree"]
        found.append(Candidate("DATA", "streams_disagree", 0.9, advice, evidence, catastrophic=True))
    return found
