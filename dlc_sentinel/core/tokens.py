"""From complete rows to usable tokens: masks applied, bad values refused by cause, each token's basis settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dlc_sentinel.core.rows import Rows
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.ratio import compress, remap
from dlc_sentinel.records import F32, I64, UNKNOWN_VERSION, Bool

POSITIVE_NATS = 1e-3
"""A logprob above this is none; below it is rounding."""
PLACEHOLDER_NATS = -9999.0
"""Engines and stacks write -9999, -1e9 or -3.4e38 where they have no value."""
MAX_VERSIONS = 256
"""Distinct generator versions told apart: labels that are noise must cost neither time nor memory."""
COPY_SHARE = 0.99
COPY_TOKENS = 64
INFORMATIVE_NATS = -1e-3
"""Tokens nearer to certainty than this are equal in any numerics and prove no copy."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Usable tokens of one (step, update), gaps closed, sequences without any left out."""

    step: int
    update: int
    version: int
    offsets_S1: I64
    group_S: I64
    cur_N: F32 | None
    gen_N: F32 | None
    """Trainer logprob at the generator's weights; meaningful only where the span is exact."""
    engine_N: F32
    rescored_N: F32 | None
    """The engine's logprobs of the same tokens at the trainer's present version."""
    span_start_K: I64
    span_version_K: I64
    span_exact_K: Bool
    span_row_K: I64
    span_length_K: I64
    span_age_K: I64
    """Trainer version minus token version; UNKNOWN_AGE where one of them is not known."""
    row_exact_S: Bool
    """A block's lag needs all its tokens: a row is as exact as its weakest span."""
    copied_from: str
    replica: str
    cached: bool
    keep_N: Bool | None
    """Which places of the rows as sent are usable; None = all ..."""
    sent_start_S: I64
    """... and where each row begins in it ..."""
    sent_end_S: I64
    """... and ends."""

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_S1[-1])

    def places(self, row: int) -> I64:
        """Place of each usable token of a row in the response as it was sent, masked positions counted."""
        start, end = int(self.sent_start_S[row]), int(self.sent_end_S[row])
        return np.arange(end - start) if self.keep_N is None else np.flatnonzero(self.keep_N[start:end])


def usable(rows: Rows, refuse: Callable[[int, str, int], None]) -> Tokens | None:
    """The rows' usable tokens, or None when none is left. Refused tokens are told to `refuse(step, cause, tokens)`."""
    streams = [stream for stream in (rows.cur_N, rows.old_N, rows.engine_N) if stream is not None]
    keep = rows.mask_N
    if keep is not None and keep.all():
        keep = None
    if keep is not None or not all(_is_clean(stream) for stream in streams):
        keep = _kept(streams, keep, rows, refuse)
        if not keep.any():
            return None
    offsets, group_S = rows.offsets_S1, rows.group_S
    sent_start_S, sent_end_S = rows.offsets_S1[:-1], rows.offsets_S1[1:]
    starts, versions, old_versions = rows.span_start_K, rows.span_version_K, rows.old_version_S
    cur, old, engine = rows.cur_N, rows.old_N, rows.engine_N
    if keep is not None:
        starts = remap(keep, starts)
        offsets, kept = compress(keep, offsets, *streams)
        engine = kept[-1]
        cur = None if cur is None else kept[0]
        old = None if old is None else kept[-2]
    lengths = offsets[1:] - offsets[:-1]
    span_length = np.concatenate((starts[1:], offsets[-1:])) - starts
    if not span_length.all():
        filled = span_length > 0
        starts, versions, span_length = starts[filled], versions[filled], span_length[filled]
    if not lengths.all():
        filled = lengths > 0
        offsets = np.concatenate([[0], offsets[1:][filled]])
        group_S, sent_start_S, sent_end_S = group_S[filled], sent_start_S[filled], sent_end_S[filled]
        old_versions = None if old_versions is None else old_versions[filled]
    if len(group_S) == 0:
        return None
    row_K = np.searchsorted(offsets, starts, side="right") - 1
    gen, exact, copied = _middle(rows, cur, old, engine, versions, row_K, old_versions)
    row_exact = np.ones(len(group_S), np.bool_)
    row_exact[row_K[~exact]] = False
    versions = _bounded(versions)
    rescored = old if rows.old_is == "rescored" else None
    return Tokens(
        rows.step, rows.update, rows.version, offsets, group_S, cur, gen, engine, rescored, starts, versions, exact,
        row_K, span_length, _ages(versions, rows.version), row_exact, copied, rows.replica, rows.cached, keep,
        sent_start_S, sent_end_S,
    )  # fmt: skip


def _ages(version_K: I64, trainer_version: int) -> I64:
    if trainer_version < 0:
        return np.full(len(version_K), UNKNOWN_AGE)
    return np.where(version_K == UNKNOWN_VERSION, UNKNOWN_AGE, trainer_version - version_K)


def _bounded(version_K: I64) -> I64:
    """The versions; those older than the newest MAX_VERSIONS as the oldest of these, unknown as unknown."""
    distinct = np.unique(version_K)
    if len(distinct) <= MAX_VERSIONS:
        return version_K
    return np.where(version_K == UNKNOWN_VERSION, UNKNOWN_VERSION, np.maximum(version_K, distinct[-MAX_VERSIONS]))


def _is_clean(stream: F32) -> bool:
    if not len(stream):
        return True
    low, high = stream.min(), stream.max()
    return bool(low > PLACEHOLDER_NATS and high <= POSITIVE_NATS)


def _kept(streams: list[F32], mask: Bool | None, rows: Rows, refuse: Callable[[int, str, int], None]) -> Bool:
    keep = np.ones(rows.num_tokens, np.bool_) if mask is None else mask.copy()
    finite = np.logical_and.reduce([np.isfinite(stream) for stream in streams])
    # a placeholder in any stream outranks a positive: -9999 against 0.0 is one missing value, not two faults
    with np.errstate(invalid="ignore"):
        placeholder = np.logical_or.reduce([stream <= PLACEHOLDER_NATS for stream in streams]) & finite
        positive = np.logical_or.reduce([stream > POSITIVE_NATS for stream in streams]) & finite & ~placeholder
    causes = {"no_engine": _ungenerated(rows, keep), "non_finite": ~finite}
    for cause, bad in (causes | {"placeholder": placeholder, "positive": positive}).items():
        lost = int((keep & bad).sum())
        if lost:
            refuse(rows.step, cause, lost)
            keep &= ~bad
    return keep


def _ungenerated(rows: Rows, keep: Bool) -> Bool:
    """Tokens of rows in which the engine has no value at all (NaN): demonstrations, that nobody generated."""
    nan_N = np.isnan(rows.engine_N)
    if not nan_N.any():
        return nan_N
    lengths_S = rows.offsets_S1[1:] - rows.offsets_S1[:-1]
    row_N = np.repeat(np.arange(len(lengths_S)), lengths_S)
    with_value_S = np.bincount(row_N[keep & ~nan_N], minlength=len(lengths_S)) > 0
    without: Bool = ~with_value_S[row_N]
    return without


def _middle(
    rows: Rows,
    cur: F32 | None,
    old: F32 | None,
    engine: F32,
    versions: I64,
    row_K: I64,
    old_versions: I64 | None,
) -> tuple[F32 | None, Bool, str]:
    """(trainer logprobs at the generator's weights, which spans are exact, what `old` is a copy of)."""
    known = versions != UNKNOWN_VERSION
    current = (versions == rows.version) & known
    none = np.zeros(len(versions), np.bool_)
    old_is, copied = rows.old_is, ""
    if old is not None and old_is in ("generator", "proximal"):
        if _is_copy(old, engine, engine):
            copied, old_is = "engine", "engine"
        elif cur is not None and _is_copy(old, cur, engine):
            if old_is == "proximal" or (rows.update > 0 and not (known & ~current).any()):
                copied = "current"
            if old_is == "proximal":
                old_is = "reused"
    if old is None or old_is in ("absent", "engine", "reused", "rescored"):
        if rows.update == 0 and cur is not None:
            return cur, current, copied
        return None, none, copied
    if old_versions is not None and (old_versions[row_K] != UNKNOWN_VERSION).any():
        return old, (old_versions[row_K] == versions) & known, copied
    if old_is == "generator":
        return old, ~none, copied
    return old, current, copied


def _is_copy(stream: F32, other: F32, engine: F32) -> bool:
    """True when 99 % of the tokens that could differ are bit-equal."""
    probe = slice(None, None, max(len(stream) // 512, 1))
    if (stream[probe] == other[probe]).mean() < COPY_SHARE - 0.05:
        return False
    informative = engine < INFORMATIVE_NATS
    num = int(informative.sum())
    return num >= COPY_TOKENS and float((stream == other)[informative].sum()) >= COPY_SHARE * num
