"""What a BLIND verdict lacks, in numbers, as far as the steps, and the picture of a live run, tell it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from dlc_sentinel.catalog import number, part
from dlc_sentinel.config import Window
from dlc_sentinel.records import Json, RunSnapshot
from dlc_sentinel.verdicts import text_of


def line(
    verdict: str,
    steps: Sequence[Mapping[str, Json]],
    window: Window | None = None,
    num_unused: int = 0,
    run: RunSnapshot | None = None,
) -> str:
    """The verdict in one line; for BLIND with the number that is missing, where that is what is missing.

    window: the settings the verdict was drawn with (None: the defaults); num_unused: lines of a file, not used;
    run: the run of the steps where it is live: who has sent what.
    """
    why = _missing(steps, window or Window(), num_unused, run) if verdict == "BLIND" else ""
    return f"cannot say: {why}" if why else text_of(verdict).line


def _missing(steps: Sequence[Mapping[str, Json]], window: Window, num_unused: int, run: RunSnapshot | None) -> str:
    """ "" where enough is there, or it is not known how much is."""
    if not steps:
        if run is not None:
            return f"no step was closed: {_unclosed(run)}"
        return f"no usable row of tokens ({num_unused} lines not used)" if num_unused else "no step was closed"
    pooled = steps[-window.pool_steps :]
    num_tokens = [number(step, "num_tokens") for step in pooled]
    total = sum(num_tokens)
    if math.isnan(total):
        return ""
    if total < window.min_tokens:
        return f"{total:,.0f} of the {window.min_tokens:,} tokens that a verdict needs{_lost_in(pooled, run)}"
    return "" if num_tokens[-1] else f"no usable token in the newest step{_lost_in(steps[-1:], run)}"


def _unclosed(run: RunSnapshot) -> str:
    """Why no step of a live run was closed."""
    roles = {producer.get("role") for producer in run.producers}
    num_trained = max(run.num_tokens.get(stream, 0) for stream in ("cur", "old"))
    if lost := _worst(run.dropped_tokens):
        below = ", with a step below 0" if lost == "late" and run.last_step < 0 else ""
        return f"{run.dropped_tokens[lost]:,} tokens were lost as {lost}{below}"
    if "trainer" not in roles:
        return "only an engine has connected, no trainer" if roles else "nobody has connected"
    if not num_trained:
        return "the trainer has sent no logprobs yet"
    return f"the first one is open, with {num_trained:,} tokens; it ends with `hook.poll(step)`"


def _lost_in(steps: Sequence[Mapping[str, Json]], run: RunSnapshot | None) -> str:
    """The cause under which most tokens of the steps were lost; "" where none were."""
    if run is not None and not run.num_tokens.get("engine", 0):
        return "; no engine logprobs have come, from trainer or engine"
    counts: Counter[str] = Counter()
    for step in steps:
        counts.update({cause: int(num) for cause, num in part(step, "dropped").items()})
    lost = _worst(counts)
    return f"; {counts[lost]:,} were lost as {lost}" if lost else ""


def _worst(dropped: Mapping[str, int]) -> str:
    """The cause with the most tokens; "" where no token was lost."""
    cause = max(dropped, key=lambda each: dropped[each], default="")
    return cause if cause and dropped[cause] else ""
