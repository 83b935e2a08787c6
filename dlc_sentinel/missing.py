"""What a BLIND verdict lacks, in numbers, as far as the steps alone tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dlc_sentinel.catalog import number
from dlc_sentinel.config import Window
from dlc_sentinel.records import Json
from dlc_sentinel.verdicts import text_of


def line(verdict: str, steps: Sequence[Mapping[str, Json]], window: Window | None = None, num_unused: int = 0) -> str:
    """The verdict in one line; for BLIND with the number that is missing, where that is what is missing.

    window: the settings the verdict was drawn with (None: the defaults); num_unused: lines of a file, not used.
    """
    why = _missing(steps, window or Window(), num_unused) if verdict == "BLIND" else ""
    return f"cannot say: {why}" if why else text_of(verdict).line


def _missing(steps: Sequence[Mapping[str, Json]], window: Window, num_unused: int) -> str:
    """ "" where enough is there, or it is not known how much is."""
    if not steps:
        return f"no usable line ({num_unused} not used)" if num_unused else "no step was closed"
    num_tokens = [number(step, "num_tokens") for step in steps[-window.pool_steps :]]
    total = sum(num_tokens)
    if math.isnan(total):
        return ""
    if total < window.min_tokens:
        return f"{total:,.0f} of the {window.min_tokens:,} tokens that a verdict needs"
    return "" if num_tokens[-1] else "no usable token in the newest step"
