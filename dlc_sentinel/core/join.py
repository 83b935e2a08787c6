"""Pairs what the trainer saw with what the engine generated, by (run, id, token); bounded, and every loss is counted.

A train record that carries its own engine stream and versions passes straight through. Anything else waits here:
chunks of a long sequence for their rest, trainer rows for their rollouts, rollouts for their trainer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from dlc_sentinel.records import F32, I64, UNKNOWN_VERSION, Bool, OldIs, Rollout, Train

ROW_OVERHEAD_BYTES = 400
CONFLICT_NATS = 1e-6

Refuse = Callable[[int, str, int], None]
"""refuse(step, cause, tokens); step -1 = no step known."""


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

    @property
    def num_tokens(self) -> int:
        return int(self.offsets_S1[-1])


@dataclass(slots=True)
class _Row:
    """One trainer sequence, growing chunk by chunk."""

    step: int
    update: int
    version: int
    id: str
    group: int
    old_is: OldIs
    old_version: int | None
    segments: tuple[tuple[str, int, int], ...]
    replica: str
    length: int = 0
    cur: list[F32] = field(default_factory=list)
    old: list[F32] = field(default_factory=list)
    engine: list[F32] = field(default_factory=list)
    mask: list[Bool] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    num_bytes: int = ROW_OVERHEAD_BYTES


@dataclass(slots=True)
class _Generated:
    """One engine request, growing chunk by chunk."""

    logprobs: list[F32] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0
    final: bool = False
    used: bool = False
    born_step: int = -1
    num_bytes: int = ROW_OVERHEAD_BYTES
    replica: str = ""

    def array(self) -> F32:
        if len(self.logprobs) > 1:
            self.logprobs = [np.concatenate(self.logprobs)]
        return self.logprobs[0] if self.logprobs else np.empty(0, np.float32)


class Join:
    """Bounded two-sided join of one run.

    feed_* return the rows that became complete. What falls out is told to `refuse` by cause: join_full (bytes),
    unmatched (age, or its step closed), mis_sized, out_of_order, duplicate.
    """

    def __init__(self, refuse: Refuse, *, max_bytes: int, max_age_steps: int) -> None:
        self._refuse = refuse
        self._max_bytes = max_bytes
        self._max_age_steps = max_age_steps
        self._partial: dict[tuple[str, int, int, str], _Row] = {}
        self._waiting: dict[tuple[int, int, str], _Row] = {}
        self._wanted_by: dict[str, list[tuple[int, int, str]]] = {}
        self._generated: dict[str, _Generated] = {}
        self._seen: dict[int, set[tuple[int, str]]] = {}
        self._engine_seen = False
        self.num_bytes = 0
        self.unused_tokens = 0
        """Tokens of rollouts that no trainer ever asked for (dropped groups are normal): run-level, never a fault."""

    # -- trainer side ------------------------------------------------------------------------------------------------

    def feed_train(self, record: Train) -> list[Rows]:
        """Rows that are complete now. Rows of one call share step, update and version."""
        seen = self._seen.setdefault(record.step, set())
        names = {(record.update, name) for name in record.ids}
        fresh = len(names) == len(record.ids) and seen.isdisjoint(names)
        if fresh and _is_whole(record) and record.engine_N is not None and not self._needs_rollout(record):
            seen |= names
            return [_pass_through(record)]
        complete = [row for row in self._assemble(record) if not self._hold(row)]
        self._trim()
        return self._emit(complete)

    def _needs_rollout(self, record: Train) -> bool:
        if record.span_start_K is None and self._engine_seen:
            return True
        return bool(self._generated) and any(name in self._generated for name in record.ids)

    def _assemble(self, record: Train) -> Iterator[_Row]:
        """Rows of the record that have all their chunks; the others are kept until they have."""
        seen = self._seen[record.step]
        for index, name in enumerate(record.ids):
            start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
            at = 0 if record.token_offset_S is None else int(record.token_offset_S[index])
            final = True if record.final_S is None else bool(record.final_S[index])
            key = (record.source.producer, record.step, record.update, name)
            row = self._partial.pop(key, None)
            if row is None:
                row = _new_row(record, index)
            else:
                self.num_bytes -= row.num_bytes
            if (record.update, name) in seen or at < row.length:
                self._refuse(record.step, "duplicate", end - start)
            elif at > row.length:
                self._refuse(record.step, "out_of_order", end - start)
            else:
                _append(row, record, start, end)
                if final:
                    seen.add((record.update, name))
                    yield row
                    continue
            if row.length:
                self._partial[key] = row
                self.num_bytes += row.num_bytes

    def _hold(self, row: _Row) -> bool:
        """True when the row has to wait for its rollouts."""
        segments = row.segments or ((row.id, 0, -1),)
        if row.engine and row.spans and not any(name in self._generated for name, _, _ in segments):
            return False
        if row.engine and not row.spans and not self._engine_seen:
            return False
        if all(name in self._generated and self._generated[name].final for name, _, _ in segments):
            return not self._complete(row, segments)
        key = (row.step, row.update, row.id)
        self._waiting[key] = row
        self.num_bytes += row.num_bytes
        for name, _, _ in segments:
            self._wanted_by.setdefault(name, []).append(key)
        return True

    def _complete(self, row: _Row, segments: Sequence[tuple[str, int, int]]) -> bool:
        """Fills engine logprobs and spans from the rollouts; False (and counted) when the sizes or values disagree."""
        pieces: list[F32] = []
        spans: list[tuple[int, int]] = []
        for name, first, num in segments:
            rollout = self._generated[name]
            rollout.used = True
            logprobs = rollout.array()
            last = rollout.length if num < 0 else first + num
            at = sum(map(len, pieces)) - first
            spans += [(max(start, first) + at, version) for start, version in _clip(rollout.spans, first, last)]
            pieces.append(logprobs[first:last])
            row.replica = row.replica or rollout.replica
        engine = np.concatenate(pieces)
        mask = np.concatenate(row.mask) if row.mask else None
        if len(engine) != row.length:
            if mask is None or len(engine) != int(mask.sum()):
                self._refuse(row.step, "mis_sized", row.length)
                return False
            at_N = np.flatnonzero(mask)
            full = np.full(row.length, np.nan, np.float32)
            full[at_N] = engine
            spans = [(0 if i == 0 else int(at_N[start]), version) for i, (start, version) in enumerate(spans)]
            engine = full
        if row.engine:
            own = np.concatenate(row.engine)
            keep = (
                np.isfinite(own) & np.isfinite(engine)
                if mask is None
                else mask & np.isfinite(own) & np.isfinite(engine)
            )
            wrong = int((np.abs(own - engine)[keep] > CONFLICT_NATS).sum())
            if wrong:
                self._refuse(row.step, "unmatched", wrong)
                engine = np.where(np.abs(own - engine) > CONFLICT_NATS, np.float32(np.nan), own)
                row.mask = [keep & np.isfinite(engine)]
        row.engine = [engine]
        row.spans = row.spans or spans or [(0, UNKNOWN_VERSION)]
        return True

    # -- engine side -------------------------------------------------------------------------------------------------

    def feed_rollout(self, record: Rollout, step: int) -> list[Rows]:
        """Rows whose last missing rollout this was. `step` is the newest trainer step seen: the rollout's age clock."""
        self._engine_seen = True
        finished: list[str] = []
        starts, versions = record.span_start_K, record.span_version_K
        for index, name in enumerate(record.ids):
            start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
            rollout = self._generated.get(name)
            if rollout is None:
                rollout = self._generated[name] = _Generated(born_step=step, replica=record.source.replica)
                self.num_bytes += rollout.num_bytes
            at = int(record.token_offset_S[index])
            if rollout.final or at != rollout.length:
                self._refuse(-1, "duplicate" if rollout.final or at < rollout.length else "out_of_order", end - start)
                continue
            piece = np.array(record.logprobs_N[start:end], np.float32)
            rollout.logprobs.append(piece)
            first, last = np.searchsorted(starts, [start, end])
            if first == len(starts) or int(starts[first]) != start:
                first -= 1
            for k in range(int(first), int(last)):
                rollout.spans.append((max(int(starts[k]), start) - start + at, int(versions[k])))
            rollout.length += end - start
            rollout.num_bytes += piece.nbytes
            self.num_bytes += piece.nbytes
            rollout.final = bool(record.final_S[index])
            if rollout.final:
                finished.append(name)
        complete = list(self._released(finished))
        self._trim()
        return self._emit(complete)

    def _released(self, names: Iterable[str]) -> Iterator[_Row]:
        for name in names:
            for key in self._wanted_by.pop(name, ()):
                row = self._waiting.get(key)
                if row is None:
                    continue
                segments = row.segments or ((row.id, 0, -1),)
                if not all(part in self._generated and self._generated[part].final for part, _, _ in segments):
                    continue
                del self._waiting[key]
                self.num_bytes -= row.num_bytes
                if self._complete(row, segments):
                    yield row

    # -- bounds ------------------------------------------------------------------------------------------------------

    def num_waiting(self, step: int) -> int:
        """Trainer rows of `step` that still wait for a rollout or for their last chunk."""
        return sum(key[0] == step for key in self._waiting) + sum(key[1] == step for key in self._partial)

    def close_step(self, step: int) -> list[Rows]:
        """Ends the waiting of a step: rows with an engine stream of their own go on, the others are `unmatched`."""
        rescued: list[_Row] = []
        for key in [key for key in self._waiting if key[0] <= step]:
            row = self._waiting.pop(key)
            self.num_bytes -= row.num_bytes
            if row.engine and not row.segments:
                row.spans = row.spans or [(0, UNKNOWN_VERSION)]
                rescued.append(row)
            else:
                self._refuse(row.step, "unmatched", row.length)
        for part in [part for part in self._partial if part[1] <= step]:
            row = self._partial.pop(part)
            self.num_bytes -= row.num_bytes
            self._refuse(row.step, "unmatched", row.length)
        for old in [old for old in self._seen if old <= step]:
            del self._seen[old]
        for name in [name for name, r in self._generated.items() if step - r.born_step > self._max_age_steps]:
            self._forget(name, "unmatched")
        self._wanted_by = {
            name: keys for name, keys in self._wanted_by.items() if any(k in self._waiting for k in keys)
        }
        return self._emit(rescued)

    def restart(self, version: int) -> None:
        """Drops what belongs to a life of the run that is over: all that waits, and rollouts newer than `version`."""
        for row in [*self._waiting.values(), *self._partial.values()]:
            self._refuse(-1, "restarted_version", row.length)
            self.num_bytes -= row.num_bytes
        self._waiting.clear()
        self._partial.clear()
        self._wanted_by.clear()
        self._seen.clear()
        for name in [n for n, r in self._generated.items() if any(v > version for _, v in r.spans)]:
            self._forget(name, "restarted_version")

    def _forget(self, name: str, cause: str) -> None:
        rollout = self._generated.pop(name)
        self.num_bytes -= rollout.num_bytes
        if rollout.used:
            return
        if cause == "unmatched":
            self.unused_tokens += rollout.length
        else:
            self._refuse(-1, cause, rollout.length)

    def _trim(self) -> None:
        while self.num_bytes > self._max_bytes and self._generated:
            self._forget(next(iter(self._generated)), "join_full")
        while self.num_bytes > self._max_bytes and self._waiting:
            self._overflow(self._waiting.pop(next(iter(self._waiting))))
        while self.num_bytes > self._max_bytes and self._partial:
            self._overflow(self._partial.pop(next(iter(self._partial))))

    def _overflow(self, row: _Row) -> None:
        self.num_bytes -= row.num_bytes
        self._refuse(row.step, "join_full", row.length)

    def _emit(self, complete: list[_Row]) -> list[Rows]:
        batches: dict[tuple[object, ...], list[_Row]] = {}
        for row in complete:
            key = (row.step, row.update, row.version, row.old_is, bool(row.cur), bool(row.old), row.replica)
            batches.setdefault(key, []).append(row)
        return [_pack(rows) for rows in batches.values()]


def group_key(name: str) -> int:
    """A stable signed 64-bit key of a prompt group's name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _is_whole(record: Train) -> bool:
    at_start = record.token_offset_S is None or not record.token_offset_S.any()
    return at_start and (record.final_S is None or bool(record.final_S.all())) and not record.segments


def _group_keys(record: Train) -> I64:
    return np.array([group_key(name) for name in (record.groups or record.ids)], np.int64)


def _pass_through(record: Train) -> Rows:
    assert record.engine_N is not None
    starts, versions = record.span_start_K, record.span_version_K
    if starts is None or versions is None:
        starts, versions = record.offsets_S1[:-1], np.full(len(record.ids), UNKNOWN_VERSION, np.int64)
    return Rows(
        record.step, record.update, record.version, record.offsets_S1, record.cur_N, record.old_N, record.engine_N,
        record.mask_N, starts, versions, record.old_is, record.old_version_S, _group_keys(record), record.replica,
    )  # fmt: skip


def _new_row(record: Train, index: int) -> _Row:
    return _Row(
        step=record.step,
        update=record.update,
        version=record.version,
        id=record.ids[index],
        group=group_key(record.groups[index] if record.groups else record.ids[index]),
        old_is=record.old_is,
        old_version=None if record.old_version_S is None else int(record.old_version_S[index]),
        segments=record.segments[index] if record.segments else (),
        replica=record.replica,
    )


def _append(row: _Row, record: Train, start: int, end: int) -> None:
    for stream, chunks in ((record.cur_N, row.cur), (record.old_N, row.old), (record.engine_N, row.engine)):
        if stream is not None:
            chunks.append(np.array(stream[start:end], np.float32))
            row.num_bytes += 4 * (end - start)
    if record.mask_N is not None:
        row.mask.append(np.array(record.mask_N[start:end], np.bool_))
        row.num_bytes += end - start
    if record.span_start_K is not None and record.span_version_K is not None:
        first = int(np.searchsorted(record.span_start_K, start, side="right")) - 1
        last = int(np.searchsorted(record.span_start_K, end))
        for k in range(max(first, 0), last):
            at = max(int(record.span_start_K[k]), start) - start + row.length
            version = int(record.span_version_K[k])
            if not row.spans or row.spans[-1][1] != version:
                row.spans.append((at, version))
    row.length += end - start


def _clip(spans: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Spans [(start, version)] cut to tokens first..last; the one that covers `first` begins there."""
    kept: list[tuple[int, int]] = []
    for start, version in spans:
        if start <= first:
            kept = [(first, version)]
        elif start < last:
            kept.append((start, version))
    return kept


def _pack(rows: list[_Row]) -> Rows:
    head = rows[0]
    offsets = np.concatenate([[0], np.cumsum([row.length for row in rows])]).astype(np.int64)
    any_mask = any(row.mask for row in rows)
    masks = (
        [np.concatenate(row.mask) if row.mask else np.ones(row.length, np.bool_) for row in rows] if any_mask else []
    )
    spans = [
        (start + int(offsets[i]), version)
        for i, row in enumerate(rows)
        for start, version in row.spans or [(0, UNKNOWN_VERSION)]
    ]
    any_old_version = any(row.old_version is not None for row in rows)
    return Rows(
        step=head.step,
        update=head.update,
        version=head.version,
        offsets_S1=offsets,
        cur_N=np.concatenate([chunk for row in rows for chunk in row.cur]) if head.cur else None,
        old_N=np.concatenate([chunk for row in rows for chunk in row.old]) if head.old else None,
        engine_N=np.concatenate([chunk for row in rows for chunk in row.engine]),
        mask_N=np.concatenate(masks) if any_mask else None,
        span_start_K=np.array([start for start, _ in spans], np.int64),
        span_version_K=np.array([version for _, version in spans], np.int64),
        old_is=head.old_is,
        old_version_S=np.array(
            [UNKNOWN_VERSION if row.old_version is None else row.old_version for row in rows], np.int64
        )
        if any_old_version
        else None,
        group_S=np.array([row.group for row in rows], np.int64),
        replica=head.replica,
    )
