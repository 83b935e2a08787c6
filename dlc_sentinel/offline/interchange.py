"""The open file format (README, "File format"), read line by line into the records a hook would have sent.

Two passes: the first notes where each line is and what step it belongs to, the second reads the lines in the order of
(step, update). Memory holds one small batch of lines and 32 bytes per line of the file, whatever the file's size.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline import lines
from dlc_sentinel.offline.lines import MAX_LINE_BYTES, Bytes, MetaLine, ScalarsLine, SeqLine, SyncedLine, Unpacked
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import (
    F32,
    I64,
    UNKNOWN_VERSION,
    Heartbeat,
    Hello,
    Record,
    Scalars,
    Source,
    StepEnd,
    Synced,
    Train,
)
from dlc_sentinel.wire.tensors import DTYPE_NAMES, is_known_dtype

BATCH_TOKENS = 2**15
BATCH_ROWS = 512
PRODUCER = "file"
SHOWN_FIELDS = 8
STREAMS = ("cur", "old", "engine")
_RANK = {"seq": 0, "scalars": 1, "synced": 2}
"""Order of the lines of one step: weights are delivered after the step they are named by."""


class Interchange:
    """One `.jsonl` or `.jsonl.gz` file.

    `records` may be iterated once; afterwards `problems` holds (line number, why) of every line that was not used.
    `done` of `total` bytes are read (unpacked).
    Raises: TapeError if the file cannot be read, or no line of it can be used.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.done, self.total = 0, 0
        self.meta = MetaLine()
        self._unknown: Counter[str] = Counter()
        self._number = array("q")
        self._offset = array("q")
        self._step = array("q")
        self._place = array("q")
        try:
            with lines.opened(self.path) as file:
                self._index(file)
        except (OSError, EOFError) as error:
            raise TapeError(f"{self.path}: cannot be read ({error}); wanted JSON lines, plain or gzip") from error
        if not self._number and self.meta == MetaLine():
            raise self._useless()
        self.run = self.meta.run or self.path.name.removesuffix(".gz").removesuffix(".jsonl")
        self._source = Source(self.run, "trainer", PRODUCER)
        self._mis_sized: Counter[int] = Counter()

    def _useless(self) -> TapeError:
        """Why nothing at all can be judged."""
        if not self.problems:
            return TapeError(f"{self.path}: no line in it; wanted JSON lines of this format (README, File format)")
        (number, why), other = self.problems[0], "" if self._number else "not JSON Lines of this format: "
        return TapeError(f"{self.path}: {other}no line can be used; line {number}: {why}")

    def _index(self, file: Bytes) -> None:
        for number, text in lines.numbered(file, self.problems):
            self.total = file.tell()
            at = self.total - len(text)
            if not text.strip():
                continue
            try:
                if len(text) >= MAX_LINE_BYTES:
                    raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
                key = lines.parse_key(text)
                if key.type == "meta":
                    self._take_meta(number, text)
                    continue
            except ValueError as error:
                self.problems.append((number, str(error)))
                continue
            self._number.append(number)
            self._offset.append(at)
            self._step.append(key.step)
            self._place.append(key.update if key.type == "seq" else 2**60 + _RANK[key.type])

    def _take_meta(self, number: int, text: bytes) -> None:
        line = self._known(text)
        if not isinstance(line, MetaLine) or self.meta != MetaLine():
            return
        self.meta = line
        for side, name in line.dtypes().items():
            if not is_known_dtype(name):
                self.problems.append((number, f"{side}_dtype {plain(name, 40)!r}: wanted {', '.join(DTYPE_NAMES)}"))

    def records(self) -> Iterator[Record]:
        """Hello, then per step: Train records, Scalars, Synced, StepEnd."""
        yield Hello(
            self._source, self.meta.model_name, sampling=self.meta.sampling(), dtypes=self.meta.dtypes(), stack="file"
        )
        step: int | None = None
        batch: list[SeqLine] = []
        for line in self._in_order():
            if step is not None and line.step != step:
                yield from self._end(step, batch)
            step = line.step
            if isinstance(line, SeqLine):
                if batch and (_key(line) != _key(batch[0]) or _is_full(batch)):
                    yield from self._flush(batch)
                batch.append(line)
                continue
            yield from self._flush(batch)
            yield self._plain(line)
        if step is not None:
            yield from self._end(step, batch)
        elif self.meta == MetaLine():
            raise self._useless()

    def _in_order(self) -> Iterator[SeqLine | ScalarsLine | SyncedLine]:
        order: I64 = np.lexsort((np.asarray(self._place, np.int64), np.asarray(self._step, np.int64)))
        with ExitStack() as stack:
            file = lines.opened(self.path)
            stack.callback(file.close)
            if isinstance(file, Unpacked) and (np.diff(order) < 0).any():
                # Lines out of order need seeks, which a packed file answers by reading from its start.
                plain: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
                plain.writelines(file)
                file = plain
            for index in order.tolist():
                file.seek(self._offset[index])
                text = file.readline()
                self.done += len(text)
                line = self._parse(self._number[index], text)
                if line is not None:
                    yield line
        self.problems.sort()
        if self._unknown:
            self.notes.append(_told(self._unknown))

    def _known(self, text: bytes) -> lines.AnyLine:
        """The line; fields that are not of the format are counted."""
        line, unknown = lines.parse(text)
        self._unknown.update(unknown)
        return line

    def _parse(self, number: int, text: bytes) -> SeqLine | ScalarsLine | SyncedLine | None:
        """The line, or None and one problem more."""
        try:
            line = self._known(text)
            if isinstance(line, SeqLine):
                self._check(line)
        except (ValueError, OverflowError) as error:
            self.problems.append((number, str(error)))
            return None
        return None if isinstance(line, MetaLine) else line

    def _check(self, line: SeqLine) -> None:
        """Raises: ValueError with the numbers when the arrays of a line disagree; its tokens count as mis_sized."""
        arrays = {name: getattr(line, name) for name in (*STREAMS, "mask", "tokens")}
        sizes = {name: len(values) for name, values in arrays.items() if values is not None}
        if sizes.keys().isdisjoint(STREAMS):
            raise ValueError(f"id {line.id!r}: none of engine, old, cur is there")
        if len(set(sizes.values())) > 1:
            self._mis_sized[line.step] += max(sizes.values())
            raise ValueError(f"id {line.id!r}: lengths disagree: {', '.join(f'{k} {v}' for k, v in sizes.items())}")
        for name in STREAMS:
            lines.stream(arrays[name])
        lines.spans(line.versions, next(iter(sizes.values())))

    def _plain(self, line: ScalarsLine | SyncedLine) -> Record:
        if isinstance(line, ScalarsLine):
            values = {name: float("nan") if value is None else float(value) for name, value in line.values.items()}
            return Scalars(self._source, line.step, values)
        return Synced(
            self._source, line.version, line.step, line.label or "", line.checksum or "",
            float("nan") if line.norm is None else line.norm, -1 if line.tensors is None else line.tensors,
        )  # fmt: skip

    def _end(self, step: int, batch: list[SeqLine]) -> Iterator[Record]:
        yield from self._flush(batch)
        lost = sum(tokens for at, tokens in self._mis_sized.items() if at <= step)
        if lost:
            yield Heartbeat(self._source, step, dropped_tokens={"mis_sized": lost})
        yield StepEnd(self._source, step)

    def _flush(self, batch: list[SeqLine]) -> Iterator[Record]:
        if batch:
            yield _train(self._source, batch)
            batch.clear()


def _told(unknown: Counter[str]) -> str:
    """Which fields were not read, in how many lines, and what each may have meant."""
    named = []
    for name, num in unknown.most_common(SHOWN_FIELDS):
        near = lines.nearest(name)
        hint = f", did you mean {near!r}?" if near else ""
        named.append(f"{plain(name, 40)!r} ({num} {'line' if num == 1 else 'lines'}{hint})")
    return f"fields that are not of this format were not read: {', '.join(named)}" + (
        ", ..." if len(unknown) > SHOWN_FIELDS else ""
    )


def _length(line: SeqLine) -> int:
    return max(len(getattr(line, name) or ()) for name in STREAMS)


def _key(line: SeqLine) -> tuple[object, ...]:
    """Lines with equal keys fit into one Train record."""
    present = tuple(getattr(line, name) is None for name in (*STREAMS, "tokens", "versions", "group", "old_version"))
    return (line.step, line.update, line.version, line.old_is, line.replica, present)


def _is_full(batch: list[SeqLine]) -> bool:
    return len(batch) >= BATCH_ROWS or sum(map(_length, batch)) >= BATCH_TOKENS


def _train(source: Source, batch: list[SeqLine]) -> Train:
    head = batch[0]
    lengths = [_length(line) for line in batch]
    offsets_S1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cur, old, engine = (
        None if getattr(head, name) is None else np.concatenate([_stream(line, name) for line in batch])
        for name in STREAMS
    )
    start_K = version_K = None
    if head.versions is not None:
        spans = [lines.spans(line.versions, length) for line, length in zip(batch, lengths, strict=True)]
        start_K = np.concatenate([start + at for (start, _), at in zip(spans, offsets_S1[:-1], strict=True)])
        version_K = np.concatenate([version for _, version in spans])
    masks = [[1] * n if line.mask is None else line.mask for line, n in zip(batch, lengths, strict=True)]
    return Train(
        source=source,
        step=head.step,
        version=UNKNOWN_VERSION if head.version is None else head.version,
        ids=tuple(str(line.id) for line in batch),
        offsets_S1=offsets_S1,
        update=head.update,
        cur_N=cur,
        old_N=old,
        engine_N=engine,
        mask_N=None if all(line.mask is None for line in batch) else np.concatenate([np.array(m) != 0 for m in masks]),
        span_start_K=start_K,
        span_version_K=version_K,
        old_is=head.old_is,
        old_version_S=None if head.old_version is None else np.array([line.old_version for line in batch], np.int64),
        groups=() if head.group is None else tuple(str(line.group) for line in batch),
        advantage_S=np.array([np.nan if line.advantage is None else line.advantage for line in batch], np.float32),
        tokens_N=None if head.tokens is None else np.concatenate([np.array(line.tokens, np.int32) for line in batch]),
        replica="" if head.replica is None else str(head.replica),
    )


def _stream(line: SeqLine, name: str) -> F32:
    values = lines.stream(getattr(line, name))
    assert values is not None
    return values
