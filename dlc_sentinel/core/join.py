"""Pairs what the trainer saw with what the engine generated, by (run, id, token); bounded, and every loss is counted.

A train record that carries its own engine stream and versions passes straight through. Anything else waits here:
chunks of a long sequence for their rest, trainer rows for their rollouts, rollouts for their trainer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from dlc_sentinel.core.rows import Generated, Row, Rows, clip_spans, cut_spans, is_whole, new_row, pack, pass_through
from dlc_sentinel.core.strides import STRIDE_STEPS, Silence, stride
from dlc_sentinel.records import F32, Bool, Json, Rollout, Train

CONFLICT_NATS = 1e-6
MAX_SAMPLINGS = 16

Refuse = Callable[[int, str, int], None]
"""refuse(step, cause, tokens); step -1 = no step known."""


class Join:
    """Bounded two-sided join of one run.

    feed_* return the rows that became complete. What falls out is told to `refuse` by cause: join_full (bytes),
    unmatched (age, or its step closed), mis_sized, out_of_order, duplicate.
    """

    def __init__(self, refuse: Refuse, *, max_bytes: int, max_age_steps: int) -> None:
        self._refuse = refuse
        self._max_bytes = max_bytes
        self._max_age_steps = max_age_steps
        self._closed: list[int] = []
        self._partial: dict[tuple[str, int, int, str], Row] = {}
        self._waiting: dict[tuple[int, int, str], Row] = {}
        self._wanted_by: dict[str, list[tuple[int, int, str]]] = {}
        self._generated: dict[str, Generated] = {}
        self._seen: dict[int, set[tuple[int, str]]] = {}
        self._engine_seen = False
        self._silence = Silence()
        """Of the engines."""
        self.missing_tokens = 0
        """Unmatched tokens of the step closed last, where no rollouts come any more: no fault of the ids."""
        self.num_bytes = 0
        self.unused_tokens = 0
        """Tokens of rollouts that no trainer ever asked for (dropped groups are normal): run-level, never a fault."""
        self._sampling: dict[str, Mapping[str, Json]] = {}

    # -- trainer side ------------------------------------------------------------------------------------------------

    def feed_train(self, record: Train) -> list[Rows]:
        """Rows that are complete now. Rows of one call share step, update and version."""
        seen = self._seen.setdefault(record.step, set())
        names = {(record.update, name) for name in record.ids}
        fresh = len(names) == len(record.ids) and seen.isdisjoint(names)
        if fresh and is_whole(record) and record.engine_N is not None and not self._needs_rollout(record):
            seen |= names
            return [pass_through(record)]
        complete = [row for row in self._assemble(record) if not self._hold(row)]
        self._trim()
        return pack(complete)

    def _needs_rollout(self, record: Train) -> bool:
        if record.span_start_K is None and self._engine_seen:
            return True
        return bool(self._generated) and any(name in self._generated for name in record.ids)

    def _assemble(self, record: Train) -> Iterator[Row]:
        """Rows of the record that have all their chunks; the others are kept until they have."""
        seen = self._seen[record.step]
        for index, name in enumerate(record.ids):
            start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
            at = 0 if record.token_offset_S is None else int(record.token_offset_S[index])
            final = True if record.final_S is None else bool(record.final_S[index])
            key = (record.source.producer, record.step, record.update, name)
            row = self._partial.pop(key, None)
            if row is None:
                row = new_row(record, index)
            else:
                self.num_bytes -= row.num_bytes
            if (record.update, name) in seen or at < row.length:
                self._refuse(record.step, "duplicate", end - start)
            elif at > row.length:
                self._refuse(record.step, "out_of_order", end - start)
            elif not row.takes(record):
                self._refuse(record.step, "mis_sized", end - start)
            else:
                row.append(record, start, end)
                if final:
                    seen.add((record.update, name))
                    if row.length:
                        yield row
                    continue
            if row.length:
                self._partial[key] = row
                self.num_bytes += row.num_bytes

    def _hold(self, row: Row) -> bool:
        """True when the row is not complete: it waits for its rollouts, or was refused with them."""
        if row.engine and row.spans and not any(name in self._generated for name, _, _ in row.segments):
            return False
        if row.engine and not row.spans and not self._engine_seen:
            return False
        if self._all_generated(row):
            return not self._complete(row)
        key = (row.step, row.update, row.id)
        self._waiting[key] = row
        self.num_bytes += row.num_bytes
        for name, _, _ in row.segments:
            self._wanted_by.setdefault(name, []).append(key)
        return True

    def _all_generated(self, row: Row) -> bool:
        return all(name in self._generated and self._generated[name].final for name, _, _ in row.segments)

    def _complete(self, row: Row) -> bool:
        """Fills engine logprobs and spans from the rollouts; False (and counted) when the sizes disagree."""
        mask = np.concatenate(row.mask) if row.mask else np.ones(row.length, np.bool_)
        gathered = self._gather(row)
        if gathered is None or len(gathered[0]) not in (row.length, int(mask.sum())):
            self._refuse(row.step, "mis_sized", row.length)
            return False
        engine, spans = gathered
        if len(engine) != row.length:
            # tool tokens lie between: the engine has logprobs for the unmasked positions only
            at_N = np.flatnonzero(mask)
            full = np.full(row.length, np.nan, np.float32)
            full[at_N] = engine
            engine, spans = full, [(int(at_N[start]) if start else 0, version) for start, version in spans]
        if row.engine:
            engine = self._reconcile(row, engine, mask)
        row.engine = [engine]
        row.spans = row.spans or spans
        return True

    def _gather(self, row: Row) -> tuple[F32, list[tuple[int, int]]] | None:
        """(engine logprobs, version spans) of the row's segments in order; None where one reaches past its rollout."""
        pieces: list[F32] = []
        spans: list[tuple[int, int]] = []
        length = 0
        for name, first, num in row.segments:
            rollout = self._generated[name]
            last = rollout.length if num < 0 else first + num
            if last > rollout.length:
                return None
            rollout.used = True
            if rollout.sampling and len(self._sampling) < MAX_SAMPLINGS:
                self._sampling[repr(rollout.sampling)] = rollout.sampling
            row.replica, row.cached = row.replica or rollout.replica, row.cached or rollout.cached
            spans += [(start - first + length, version) for start, version in clip_spans(rollout.spans, first, last)]
            pieces.append(rollout.array()[first:last])
            length += last - first
        return np.concatenate(pieces), spans

    def _reconcile(self, row: Row, engine: F32, mask: Bool) -> F32:
        """The trainer's own copy of the engine stream, its holes filled; where both differ, neither (and counted)."""
        own = np.concatenate(row.engine)
        both = mask & np.isfinite(own) & np.isfinite(engine)
        with np.errstate(invalid="ignore"):
            wrong = both & (np.abs(own - engine) > CONFLICT_NATS)
        if wrong.any():
            self._refuse(row.step, "unmatched", int(wrong.sum()))
            row.mask = [mask & ~wrong]
        return np.where(np.isfinite(own), own, engine)

    # -- engine side -------------------------------------------------------------------------------------------------

    def feed_rollout(self, record: Rollout, step: int) -> list[Rows]:
        """Rows whose last missing rollout this was. `step` is the newest trainer step seen: the rollout's age clock."""
        self._engine_seen = True
        self._silence.heard(step)
        finished: list[str] = []
        for index, name in enumerate(record.ids):
            start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
            rollout = self._generated.get(name)
            if rollout is None:
                sampling = record.sampling[index] if record.sampling else None
                rollout = self._generated[name] = Generated(step, record.source.replica, sampling)
                self.num_bytes += rollout.num_bytes
            rollout.cached |= record.cached_tokens_S is not None and bool(record.cached_tokens_S[index] > 0)
            at = int(record.token_offset_S[index])
            if rollout.final or at != rollout.length:
                self._refuse(-1, "duplicate" if rollout.final or at < rollout.length else "out_of_order", end - start)
                continue
            piece = np.array(record.logprobs_N[start:end], np.float32)
            rollout.logprobs.append(piece)
            spans = cut_spans(record.span_start_K, record.span_version_K, start, end)
            rollout.spans += [(first + at, version) for first, version in spans]
            rollout.length += end - start
            rollout.num_bytes += piece.nbytes
            self.num_bytes += piece.nbytes
            rollout.final = bool(record.final_S[index])
            if rollout.final:
                finished.append(name)
        complete = list(self._released(finished))
        self._trim()
        return pack(complete)

    def _released(self, names: Iterable[str]) -> Iterator[Row]:
        for name in names:
            for key in self._wanted_by.pop(name, ()):
                row = self._waiting.get(key)
                if row is None or not self._all_generated(row):
                    continue
                del self._waiting[key]
                self.num_bytes -= row.num_bytes
                if self._complete(row):
                    yield row

    def take_sampling(self) -> list[Mapping[str, Json]]:
        """How rows trained on since the last call were sampled, each way once; others (evaluation) do not count."""
        found = list(self._sampling.values())
        self._sampling.clear()
        return found

    # -- bounds ------------------------------------------------------------------------------------------------------

    def num_waiting(self, step: int) -> int:
        """Trainer rows of `step` that still wait for a rollout or for their last chunk."""
        return sum(key[0] == step for key in self._waiting) + sum(key[1] == step for key in self._partial)

    def close_step(self, step: int) -> list[Rows]:
        """Ends the waiting of a step: rows with an engine stream of their own go on, the others are refused."""
        self._silence.closed(step)
        self.missing_tokens = 0
        rescued: list[Row] = []
        for key in [key for key in self._waiting if key[0] <= step]:
            row = self._waiting.pop(key)
            self.num_bytes -= row.num_bytes
            if row.engine:
                rescued.append(row)
            else:
                self._refuse(row.step, "unmatched", row.length)
                self.missing_tokens += row.length if self._is_missing(row) else 0
        for part in [part for part in self._partial if part[1] <= step]:
            row = self._partial.pop(part)
            self.num_bytes -= row.num_bytes
            self._refuse(row.step, "unmatched", row.length)
        for old in [old for old in self._seen if old <= step]:
            del self._seen[old]
        self._forget_old(step)
        self._wanted_by = {
            name: keys for name, keys in self._wanted_by.items() if any(k in self._waiting for k in keys)
        }
        return pack(rescued)

    def _is_missing(self, row: Row) -> bool:
        """True where no rollout named the row and none comes any more: its other half is lost, not of another id."""
        unnamed = not any(name in self._generated for name, _, _ in row.segments)
        return unnamed and (self._silence.is_unusual or not self._engine_seen)

    def _forget_old(self, step: int) -> None:
        self._closed = [*self._closed, step][-STRIDE_STEPS - 1 :]
        oldest = step - self._max_age_steps * stride(self._closed)
        for name, rollout in list(self._generated.items()):
            if rollout.born_step < 0:
                rollout.born_step = step
            elif rollout.born_step < oldest:
                self._forget(name, "unmatched")

    def restart(self, version: int) -> None:
        """Drops what belongs to a life of the run that is over: all that waits, and rollouts newer than `version`."""
        for row in [*self._waiting.values(), *self._partial.values()]:
            self._refuse(-1, "restarted_version", row.length)
            self.num_bytes -= row.num_bytes
        self._waiting.clear()
        self._partial.clear()
        self._wanted_by.clear()
        self._seen.clear()
        self._closed.clear()
        self._silence = Silence()
        for name in [n for n, r in self._generated.items() if any(v > version for _, v in r.spans)]:
            self._forget(name, "restarted_version")
        for rollout in self._generated.values():
            rollout.born_step = -1

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

    def _overflow(self, row: Row) -> None:
        self.num_bytes -= row.num_bytes
        self._refuse(row.step, "join_full", row.length)
