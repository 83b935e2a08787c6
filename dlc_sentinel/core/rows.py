"""Whole sequences: as they grow from chunks (`Row`, `Generated`), and as a batch of complete ones (`Rows`).

Axes: S sequences, N tokens packed over them, K version spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from dlc_sentinel.records import F32, I64, UNKNOWN_VERSION, Bool, Json, OldIs, Train

ROW_OVERHEAD_BYTES = 400


@dataclass(frozen=True, slots=True)
class Rows:
    """Complete sequences of one (step, update): all streams of one length, masked positions still in."""

    step: int
    update: int
    version: int
    offsets_S1: I64
    cur_N: F32 | None
    old_N: F32 | None
    engine_N: F32
    mask_N: Bool | None
    span_start_K: I64
    span_version_K: I64
    old_is: OldIs
    old_version_S: I64 | None
    group_S: I64
    replica: str
    cached: bool
    """The engine took the beginning of the prompts from its prefix cache."""

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_S1[-1])


@dataclass(slots=True)
class Row:
    """One trainer sequence, growing chunk by chunk."""

    step: int
    update: int
    version: int
    id: str
    group: int
    old_is: OldIs
    old_version: int
    segments: tuple[tuple[str, int, int], ...]
    """(engine id, first token, number of tokens; -1 = all)."""
    replica: str
    cached: bool = False
    length: int = 0
    cur: list[F32] = field(default_factory=list)
    old: list[F32] = field(default_factory=list)
    engine: list[F32] = field(default_factory=list)
    mask: list[Bool] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first token, generator version); empty = not known."""
    num_bytes: int = ROW_OVERHEAD_BYTES

    def takes(self, record: Train) -> bool:
        """False for a chunk that carries other streams than the chunks before it: they would lose their places."""
        has = (record.cur_N, record.old_N, record.engine_N, record.mask_N, record.span_start_K)
        held = (self.cur, self.old, self.engine, self.mask, self.spans)
        return not self.length or all((x is not None) == bool(y) for x, y in zip(has, held, strict=True))

    def append(self, record: Train, start: int, end: int) -> None:
        """Adds the record's packed tokens start:end at the row's end, copied."""
        for stream, chunks in ((record.cur_N, self.cur), (record.old_N, self.old), (record.engine_N, self.engine)):
            if stream is not None:
                chunks.append(np.array(stream[start:end], np.float32))
                self.num_bytes += 4 * (end - start)
        if record.mask_N is not None:
            self.mask.append(np.array(record.mask_N[start:end], np.bool_))
            self.num_bytes += end - start
        if record.span_start_K is not None and record.span_version_K is not None:
            for at, version in cut_spans(record.span_start_K, record.span_version_K, start, end):
                if not self.spans or self.spans[-1][1] != version:
                    self.spans.append((at + self.length, version))
        self.length += end - start


@dataclass(slots=True)
class Generated:
    """One engine request, growing chunk by chunk."""

    born_step: int
    replica: str
    sampling: Mapping[str, Json] | None = None
    """How it was sampled, as the engine says."""
    cached: bool = False
    logprobs: list[F32] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0
    final: bool = False
    used: bool = False
    num_bytes: int = ROW_OVERHEAD_BYTES

    def array(self) -> F32:
        if len(self.logprobs) > 1:
            self.logprobs = [np.concatenate(self.logprobs)]
        return self.logprobs[0]


def group_key(name: str) -> int:
    """A stable signed 64-bit key of a prompt group's name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def cut_spans(start_K: I64, version_K: I64, start: int, end: int) -> list[tuple[int, int]]:
    """Spans [(first token counted from `start`, version)] of the packed tokens start:end; none where there are none."""
    if end <= start:
        return []
    first = int(np.searchsorted(start_K, start, side="right")) - 1
    last = int(np.searchsorted(start_K, end))
    return [(max(int(start_K[k]), start) - start, int(version_K[k])) for k in range(first, last)]


def clip_spans(spans: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Spans [(first token, version)] cut to tokens first:last; the one that covers `first` begins there."""
    kept: list[tuple[int, int]] = []
    for start, version in spans:
        if start <= first < last:
            kept = [(first, version)]
        elif first < start < last:
            kept.append((start, version))
    return kept


def is_whole(record: Train) -> bool:
    """True when every sequence of the record is all there, and one engine request each."""
    at_start = record.token_offset_S is None or not record.token_offset_S.any()
    return at_start and (record.final_S is None or bool(record.final_S.all())) and not record.segments


def pass_through(record: Train) -> Rows:
    """The record's sequences without a copy; whole, and with an engine stream."""
    assert record.engine_N is not None
    starts, versions = record.span_start_K, record.span_version_K
    if starts is None or versions is None:
        starts, versions = record.offsets_S1[:-1], np.full(len(record.ids), UNKNOWN_VERSION, np.int64)
    groups = np.array([group_key(name) for name in (record.groups or record.ids)], np.int64)
    return Rows(
        record.step, record.update, record.version, record.offsets_S1, record.cur_N, record.old_N, record.engine_N,
        record.mask_N, starts, versions, record.old_is, record.old_version_S, groups, record.replica,
        cached=False,
    )  # fmt: skip


def new_row(record: Train, index: int) -> Row:
    """An empty row for the record's sequence `index`."""
    segments = record.segments[index] if record.segments else ()
    return Row(
        step=record.step,
        update=record.update,
        version=record.version,
        id=record.ids[index],
        group=group_key(record.groups[index] if record.groups else record.ids[index]),
        old_is=record.old_is,
        old_version=UNKNOWN_VERSION if record.old_version_S is None else int(record.old_version_S[index]),
        segments=segments or ((record.ids[index], 0, -1),),
        replica=record.replica,
    )


def pack(rows: list[Row]) -> list[Rows]:
    """Complete rows as batches, one for each set of (step, update, version ...) that they share."""
    batches: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (row.step, row.update, row.version, row.old_is, bool(row.cur), bool(row.old), row.replica, row.cached)
        batches.setdefault(key, []).append(row)
    return [_pack(batch) for batch in batches.values()]


def _pack(rows: list[Row]) -> Rows:
    head = rows[0]
    offsets = np.concatenate([[0], np.cumsum([row.length for row in rows])]).astype(np.int64)
    mask = None
    if any(row.mask for row in rows):
        masks = [chunk for row in rows for chunk in row.mask or [np.ones(row.length, np.bool_)]]
        mask = np.concatenate(masks)
    spans = [
        (start + int(offsets[i]), version)
        for i, row in enumerate(rows)
        for start, version in row.spans or [(0, UNKNOWN_VERSION)]
    ]
    return Rows(
        step=head.step,
        update=head.update,
        version=head.version,
        offsets_S1=offsets,
        cur_N=np.concatenate([chunk for row in rows for chunk in row.cur]) if head.cur else None,
        old_N=np.concatenate([chunk for row in rows for chunk in row.old]) if head.old else None,
        engine_N=np.concatenate([chunk for row in rows for chunk in row.engine]),
        mask_N=mask,
        span_start_K=np.array([start for start, _ in spans], np.int64),
        span_version_K=np.array([version for _, version in spans], np.int64),
        old_is=head.old_is,
        old_version_S=np.array([row.old_version for row in rows], np.int64),
        group_S=np.array([row.group for row in rows], np.int64),
        replica=head.replica,
        cached=head.cached,
    )
