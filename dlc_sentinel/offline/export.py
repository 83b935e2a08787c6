"""Writes a tape as the open file format: every line whole, whatever the wire cut into frames and sides."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import FrameError, TapeError
from dlc_sentinel.records import UNKNOWN_VERSION, Hello, Json, Record, Rollout, Scalars, Synced, Train
from dlc_sentinel.tape.replay import read_tape
from dlc_sentinel.wire.codec import decode

MAX_HELD_TOKENS = 64 * 2**20
"""Generated tokens kept for trainer rows that have not come yet; beyond that the oldest are forgotten."""

Spans = list[tuple[int, int]]
"""(first token, version)."""


@dataclass(slots=True)
class _Generated:
    """One engine request."""

    logprobs: list[float] = field(default_factory=list)
    spans: Spans = field(default_factory=list)
    final: bool = False
    facts: dict[str, Json] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    """One trainer sequence: its line, and what is not in it yet."""

    line: dict[str, Json]
    segments: tuple[tuple[str, int, int], ...]
    spans: Spans = field(default_factory=list)
    num_tokens: int = 0


class Joiner:
    """Turns the records of one run into lines. `feed` gives the lines that are whole now, `rest` the others."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int, str], _Row] = {}
        self._wanted: dict[str, list[_Row]] = {}
        self._generated: dict[str, _Generated] = {}
        self._num_held = 0

    def feed(self, record: Record) -> Iterator[dict[str, Json]]:
        """Lines, as JSON objects."""
        if isinstance(record, Scalars):
            yield {"type": "scalars", "step": record.step, "values": dict(record.values)}
        elif isinstance(record, Synced):
            yield _synced(record)
        elif isinstance(record, Train):
            for row in self._train(record):
                yield from self._settle(row)
        elif isinstance(record, Rollout):
            for name in self._rollout(record):
                for row in self._wanted.pop(name, ()):
                    yield from self._settle(row)

    def rest(self) -> Iterator[dict[str, Json]]:
        """Rows whose other half or last chunk never came, as far as they are known."""
        waiting = {id(row): row for rows in self._wanted.values() for row in rows}
        for row in [*waiting.values(), *self._open.values()]:
            yield _finished(row)

    def _settle(self, row: _Row) -> Iterator[dict[str, Json]]:
        """The line, if nothing it needs is missing; else it waits for the first request that is."""
        if "engine" in row.line and (row.spans or not self._generated):
            yield _finished(row)
            return
        for name, _, _ in row.segments:
            if name not in self._generated or not self._generated[name].final:
                self._wanted.setdefault(name, []).append(row)
                return
        self._complete(row)
        yield _finished(row)

    def _complete(self, row: _Row) -> None:
        engine: list[float] = []
        spans: Spans = []
        for name, first, num in row.segments:
            generated = self._generated[name]
            last = len(generated.logprobs) if num < 0 else first + num
            at = len(engine) - first
            begun = [version for start, version in generated.spans if start <= first]
            inside = [(start + at, version) for start, version in generated.spans if first < start < last]
            spans += [(first + at, begun[-1] if begun else UNKNOWN_VERSION), *inside]
            engine += generated.logprobs[first:last]
            row.line.update(generated.facts)
        mask = row.line.get("mask")
        if len(engine) != row.num_tokens and mask is not None and len(engine) == sum(mask):
            at_T = np.flatnonzero(mask)
            full = np.full(row.num_tokens, np.nan)
            full[at_T] = engine
            engine = full.tolist()
            spans = [(0 if i == 0 else int(at_T[start]), version) for i, (start, version) in enumerate(spans)]
        row.line.setdefault("engine", engine)
        row.spans = row.spans or spans

    def _train(self, record: Train) -> Iterator[_Row]:
        for index, name in enumerate(record.ids):
            key = (record.source.producer, record.step, record.update, name)
            row = self._open.pop(key, None) or _new_row(record, index)
            _append(row, record, index)
            if record.final_S is None or bool(record.final_S[index]):
                yield row
            else:
                self._open[key] = row

    def _rollout(self, record: Rollout) -> Iterator[str]:
        """Names of the requests that are whole now."""
        for index, name in enumerate(record.ids):
            start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
            generated = self._generated.setdefault(name, _Generated())
            if generated.final or int(record.token_offset_S[index]) != len(generated.logprobs):
                continue
            generated.spans += _spans(record, start, end, len(generated.logprobs))
            generated.logprobs += record.logprobs_N[start:end].tolist()
            generated.facts |= _facts(record, index)
            self._num_held += end - start
            generated.final = bool(record.final_S[index])
            if generated.final:
                yield name
        while self._num_held > MAX_HELD_TOKENS:
            self._num_held -= len(self._generated.pop(next(iter(self._generated))).logprobs)


def _new_row(record: Train, index: int) -> _Row:
    name = record.ids[index]
    line: dict[str, Json] = {"type": "seq", "step": record.step, "update": record.update}
    line |= {"version": record.version, "id": name, "old_is": record.old_is}
    if record.groups:
        line["group"] = record.groups[index]
    if record.old_version_S is not None:
        line["old_version"] = int(record.old_version_S[index])
    if record.advantage_S is not None:
        line["advantage"] = float(record.advantage_S[index])
    if record.replica:
        line["replica"] = record.replica
    return _Row(line, (record.segments[index] if record.segments else ()) or ((name, 0, -1),))


def _append(row: _Row, record: Train, index: int) -> None:
    start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
    arrays: Mapping[str, NDArray[Any] | None] = {
        "engine": record.engine_N,
        "old": record.old_N,
        "cur": record.cur_N,
        "mask": None if record.mask_N is None else record.mask_N.astype(np.int8),
        "tokens": record.tokens_N,
    }
    for name, array in arrays.items():
        if array is not None:
            row.line[name] = row.line.get(name, []) + array[start:end].tolist()
    row.spans += _spans(record, start, end, row.num_tokens)
    row.num_tokens += end - start


def _spans(record: Train | Rollout, start: int, end: int, at: int) -> Spans:
    """Version spans of packed tokens start..end, with `start` moved to `at`."""
    if record.span_start_K is None or record.span_version_K is None or start == end:
        return []
    first = int(np.searchsorted(record.span_start_K, start, side="right")) - 1
    last = int(np.searchsorted(record.span_start_K, end))
    pairs = zip(record.span_start_K[first:last].tolist(), record.span_version_K[first:last].tolist(), strict=True)
    return [(max(begin, start) - start + at, version) for begin, version in pairs]


def _facts(record: Rollout, index: int) -> dict[str, Json]:
    facts: dict[str, Json] = {"replica": record.source.replica}
    if record.finish and record.finish[index]:
        facts["finish"] = record.finish[index]
    if record.cached_tokens_S is not None:
        facts["cached_tokens"] = int(record.cached_tokens_S[index])
    return facts


def _finished(row: _Row) -> dict[str, Json]:
    if row.spans:
        merged = [pair for i, pair in enumerate(row.spans) if i == 0 or pair[1] != row.spans[i - 1][1]]
        row.line["versions"] = merged[0][1] if len(merged) == 1 else [[version, start] for start, version in merged]
    return row.line


def _synced(record: Synced) -> dict[str, Json]:
    line: dict[str, Json] = {"type": "synced", "step": record.step, "version": record.version}
    line |= {key: value for key, value in (("checksum", record.checksum), ("label", record.label)) if value}
    if not np.isnan(record.norm):
        line["norm"] = record.norm
    return line | ({"tensors": record.tensors} if record.tensors >= 0 else {})


def _records(path: str | Path) -> Iterator[Record]:
    for frame in read_tape(path):
        if frame.channel != "tick":
            try:
                yield decode(frame.frame)[0]
            except FrameError:
                continue


def _meta(path: str | Path, run: str | None) -> dict[str, Json]:
    """The meta line of `run`, or of the run that trained last."""
    metas: dict[str, dict[str, Json]] = {}
    last = run
    for record in _records(path):
        if isinstance(record, Train) and run is None:
            last = record.source.run
        if isinstance(record, Hello):
            meta = metas.setdefault(record.source.run, {})
            meta |= {"model_name": record.model_name} if record.model_name else {}
            meta |= {f"{side}_dtype": name for side, name in record.dtypes.items() if side in ("engine", "trainer")}
            meta |= dict(record.sampling)
    if last is None:
        raise TapeError(f"{path}: no trainer has sent anything to this tape; nothing to export")
    return {"type": "meta", "run": last} | metas.get(last, {})


def export(path: str | Path, out: str | Path, run: str | None = None) -> int:
    """Number of lines written to `out` (gzip if it ends in .gz), of `run` (default: the run that trained last).

    Raises: TapeError if `path` is no tape or holds no such run; OSError if `out` cannot be written.
    """
    meta = _meta(path, run)
    joiner = Joiner()
    target = gzip.open(out, "wb") if str(out).endswith(".gz") else Path(out).open("wb")  # noqa: SIM115  closed below
    num_lines = 1
    with closing(target) as file:
        file.write(msgspec.json.encode(meta) + b"\n")
        for record in _records(path):
            if record.source.run != meta["run"]:
                continue
            for line in joiner.feed(record):
                file.write(msgspec.json.encode(line) + b"\n")
                num_lines += 1
        for line in joiner.rest():
            file.write(msgspec.json.encode(line) + b"\n")
            num_lines += 1
    return num_lines
