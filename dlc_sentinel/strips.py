"""One sequence with a large difference, as it is kept and as it is shown: a window of tokens with every stream."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import F32, I32, UNKNOWN_VERSION, Bool, Json, Train

WINDOW = 96
"""Tokens of one sequence that are kept, around its worst one."""
BEFORE = 60
MAX_NATS = 1000.0
"""A difference beyond this is a placeholder, not a probability."""

Strip = Mapping[str, Json]
"""step, update, id, group, replica, version (generator's), trainer_version, length, first, at, score, engine [W],
gen [W] or None, cur [W], tokens [W] or None, mask [W] or None. Window positions first..first+W; `at` is the worst
token's position in the response; score in nats; gen = the trainer's logprob at the generator's weights."""


@dataclass(slots=True)
class Kept:
    """One sequence as it is kept; made into a strip only where somebody looks."""

    score: float
    facts: Mapping[str, Json]
    engine: F32 | None
    gen: F32 | None
    cur: F32 | None
    tokens: I32 | None
    mask: Bool | None
    made: dict[str, Json] | None = None

    def strip(self) -> Strip:
        if self.made is None:
            self.made = {
                **self.facts,
                "score": round(self.score, 5),
                "engine": None if self.engine is None else _values(self.engine),
                "gen": None if self.gen is None else _values(self.gen),
                "cur": None if self.cur is None else _values(self.cur),
                "tokens": None if self.tokens is None else self.tokens.tolist(),
                "mask": None if self.mask is None else self.mask.astype(int).tolist(),
            }
        return self.made


def keep(record: Train, index: int, at: int, score: float, engine: F32 | None) -> Kept:
    start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
    first = max(min(at - BEFORE, end - start - WINDOW), 0)
    window = slice(start + first, min(start + first + WINDOW, end))
    offset = 0 if record.token_offset_S is None else int(record.token_offset_S[index])
    version = _version_at(record, start + at)
    gen = _at_generator(record, index, version)
    facts = {
        "step": record.step,
        "update": record.update,
        "id": plain(record.ids[index], 120),
        "group": plain(record.groups[index], 120) if record.groups else "",
        "replica": plain(record.replica, 40),
        "version": None if version == UNKNOWN_VERSION else version,
        "trainer_version": None if record.version == UNKNOWN_VERSION else record.version,
        "length": offset + end - start,
        "first": offset + first,
        "at": offset + at,
    }
    return Kept(
        score,
        facts,
        None if engine is None else engine[first : first + WINDOW].copy(),
        None if gen is None else gen[window].copy(),
        None if record.cur_N is None else record.cur_N[window].copy(),
        None if record.tokens_N is None else record.tokens_N[window].copy(),
        None if record.mask_N is None else record.mask_N[window].copy(),
    )


def _version_at(record: Train, token: int) -> int:
    if record.span_start_K is None or record.span_version_K is None or not len(record.span_start_K):
        return UNKNOWN_VERSION
    return int(record.span_version_K[max(int(np.searchsorted(record.span_start_K, token, side="right")) - 1, 0)])


def _at_generator(record: Train, index: int, version: int) -> F32 | None:
    """The stream that is the trainer at the generator's weights, if one is; by the label of the worst token."""
    if record.old_N is not None and record.old_is in ("generator", "proximal"):
        told = UNKNOWN_VERSION if record.old_version_S is None else int(record.old_version_S[index])
        if told == version != UNKNOWN_VERSION or (told == UNKNOWN_VERSION and record.old_is == "generator"):
            return record.old_N
    if record.update == 0 and version == record.version != UNKNOWN_VERSION:
        return record.cur_N
    return None


def _values(stream: F32) -> list[float | None]:
    """Four decimals; None where there is no usable logprob."""
    return [round(x, 4) if math.isfinite(x) and x > -MAX_NATS else None for x in stream.tolist()]
