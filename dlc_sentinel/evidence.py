"""What the records show and the monitor sums away: the worst sequences token by token, scalars, syncs, who is who.

A tap on the record stream, bounded in memory, for the page, the terminal, the report. It never judges: its order is by
the largest difference of one token, and nothing of it reaches a verdict.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import F32, Bool, Hello, Json, Record, Rollout, Scalars, Synced, Train
from dlc_sentinel.strips import MAX_NATS, Kept, Strip, keep

MAX_RUNS = 64
MAX_STEPS = 512
MAX_SCALARS = 32
MAX_ABOUT = 64
ROLLOUT_BYTES = 32 * 2**20
"""Generated logprobs that wait for their trainer rows, over all runs."""


@dataclass(frozen=True, slots=True)
class RunEvidence:
    worst: tuple[Strip, ...] = ()
    """Largest score first."""
    scalars: tuple[Mapping[str, Json], ...] = ()
    """{"step": .., name: value}, oldest first."""
    synced: tuple[Mapping[str, Json], ...] = ()
    """{"step", "version", "checksum", "label", "replica"}, oldest first."""
    about: tuple[Mapping[str, Json], ...] = ()
    """One object per producer that said hello: role, rank, replica, stack, versions, dtypes, sampling."""


@dataclass(slots=True)
class _Run:
    worst: dict[tuple[int, str], Kept] = field(default_factory=dict)
    newest: int = -1
    scalars: OrderedDict[int, dict[str, Json]] = field(default_factory=OrderedDict)
    synced: deque[Mapping[str, Json]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    about: OrderedDict[str, Mapping[str, Json]] = field(default_factory=OrderedDict)
    rollouts: OrderedDict[str, list[F32]] = field(default_factory=OrderedDict)
    rollout_bytes: int = 0

    def bar(self, keep: int) -> float:
        """Score a sequence must beat to be kept."""
        return min(kept.score for kept in self.worst.values()) if len(self.worst) >= keep else 0.0


class Evidence:
    """Feed it every record; ask for one run's evidence whenever it is to be shown.

    keep: sequences a run; last_steps: only of the newest steps (None = of all); steps: only of these steps, inclusive.
    """

    def __init__(self, *, keep: int = 8, last_steps: int | None = 16, steps: tuple[int, int] | None = None) -> None:
        self._keep = keep
        self._last_steps = last_steps
        self._steps = steps
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def feed(self, record: Record) -> None:
        """Takes what is worth keeping of one record, copied."""
        if isinstance(record, Train):
            self._train(self._run(record.source.run), record)
        elif isinstance(record, Rollout):
            run = self._run(record.source.run)
            _hold(run, record, ROLLOUT_BYTES // len(self._runs))
        elif isinstance(record, Scalars):
            _note_scalars(self._run(record.source.run), record)
        elif isinstance(record, Synced):
            self._run(record.source.run).synced.append({
                "step": record.step, "version": record.version, "checksum": plain(record.checksum, 80),
                "label": plain(record.label, 80), "replica": plain(record.source.replica, 40),
            })  # fmt: skip
        elif isinstance(record, Hello):
            _note_hello(self._run(record.source.run), record)

    def of(self, run: str) -> RunEvidence:
        """What is kept of `run`; empty where nothing came of it."""
        kept = self._runs.get(run)
        if kept is None:
            return RunEvidence()
        worst = sorted(kept.worst.values(), key=lambda each: -each.score)
        return RunEvidence(
            tuple(each.strip() for each in worst),
            tuple(kept.scalars.values()),
            tuple(kept.synced),
            tuple(kept.about.values()),
        )

    def _run(self, name: str) -> _Run:
        if name not in self._runs:
            self._runs[name] = _Run()
            if len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
        return self._runs[name]

    def _train(self, run: _Run, record: Train) -> None:
        if self._steps is not None and not self._steps[0] <= record.step <= self._steps[1]:
            return
        self._forget(run, record.step)
        for index, at, score, engine in self._candidates(run, record):
            name = record.ids[index]
            held = run.worst.get((record.step, name))
            if held is not None and held.score >= score:
                continue
            run.worst[record.step, name] = keep(record, index, at, score, engine)
            if len(run.worst) > self._keep:
                least = min(run.worst, key=lambda key: run.worst[key].score)
                del run.worst[least]

    def _forget(self, run: _Run, step: int) -> None:
        if self._last_steps is None:
            return
        if step + self._last_steps < run.newest:
            # The run begins again under its old name.
            run.newest = step
            run.worst.clear()
        elif step > run.newest:
            run.newest = step
            for key in [key for key in run.worst if key[0] <= step - self._last_steps]:
                del run.worst[key]

    def _candidates(self, run: _Run, record: Train) -> Iterator[tuple[int, int, float, F32 | None]]:
        """(sequence, its worst token, score, its engine stream) of the sequences that may belong to the worst."""
        bar = run.bar(self._keep)
        if record.engine_N is None and record.cur_N is not None and run.rollouts:
            for index in range(len(record.ids)):
                found = _joined(run, record, index)
                if found is not None and found[1] > bar:
                    yield index, *found
            return
        pair = _pair(record)
        if pair is None or not len(pair[0]):
            return
        size_N = _sizes(pair[0], pair[1], record.mask_N)
        if not size_N.max() > bar:
            return
        filled = np.flatnonzero(np.diff(record.offsets_S1))
        top_S = np.maximum.reduceat(size_N, record.offsets_S1[filled])
        for place in np.argsort(top_S)[::-1][: self._keep].tolist():
            if not top_S[place] > bar:
                return
            index = int(filled[place])
            start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
            engine = None if record.engine_N is None else record.engine_N[start:end]
            yield index, int(size_N[start:end].argmax()), float(top_S[place]), engine


def _pair(record: Train) -> tuple[F32, F32] | None:
    """The two streams whose difference ranks the record's sequences; None where it holds fewer than two."""
    streams = [stream for stream in (record.cur_N, record.engine_N, record.old_N) if stream is not None]
    return (streams[0], streams[1]) if len(streams) > 1 else None


def _sizes(later: F32, earlier: F32, mask: Bool | None) -> F32:
    """|later - earlier| per token in nats; 0 where it is masked, not finite or a placeholder's."""
    with np.errstate(invalid="ignore", over="ignore"):
        size: F32 = np.abs(later - earlier)
        wrong = ~(size < MAX_NATS)
    size[wrong if mask is None else wrong | ~mask] = 0.0
    return size


def _joined(run: _Run, record: Train, index: int) -> tuple[int, float, F32] | None:
    """(worst token, score, engine stream) of a sequence whose engine side came as a rollout; None if it did not."""
    start, end = int(record.offsets_S1[index]), int(record.offsets_S1[index + 1])
    segments = (record.segments[index] if record.segments else ()) or ((record.ids[index], 0, -1),)
    parts = []
    for name, first, num in segments:
        whole = run.rollouts.get(name)
        if whole is None:
            return None
        array = whole[0] if len(whole) == 1 else np.concatenate(whole)
        parts.append(array[first:] if num < 0 else array[first : first + num])
    engine = np.concatenate(parts)
    mask = None if record.mask_N is None else record.mask_N[start:end]
    if mask is not None and len(engine) == int(mask.sum()) != end - start:
        spread = np.full(end - start, np.nan, np.float32)
        spread[mask] = engine
        engine = spread
    if len(engine) != end - start or not len(engine):
        return None
    assert record.cur_N is not None
    size = _sizes(record.cur_N[start:end], engine, mask)
    at = int(size.argmax())
    return at, float(size[at]), engine


def _hold(run: _Run, record: Rollout, most_bytes: int) -> None:
    """Keeps generated logprobs until the trainer's side comes, at most `most_bytes` of them."""
    for index, name in enumerate(record.ids):
        part = np.array(record.logprobs_N[int(record.offsets_S1[index]) : int(record.offsets_S1[index + 1])])
        at = int(record.token_offset_S[index])
        held = run.rollouts.pop(name, [])
        if at == 0:
            run.rollout_bytes -= sum(chunk.nbytes for chunk in held)
            held = []
        run.rollouts[name] = [*held, part]
        run.rollout_bytes += part.nbytes
    while run.rollout_bytes > most_bytes and run.rollouts:
        run.rollout_bytes -= sum(chunk.nbytes for chunk in run.rollouts.popitem(last=False)[1])


def _note_scalars(run: _Run, record: Scalars) -> None:
    values = run.scalars.setdefault(record.step, {"step": record.step})
    for name, value in record.values.items():
        if len(values) <= MAX_SCALARS:
            values[plain(name, 60)] = float(value) if math.isfinite(value) else None
    while len(run.scalars) > MAX_STEPS:
        run.scalars.popitem(last=False)


def _note_hello(run: _Run, record: Hello) -> None:
    source = record.source
    run.about[source.producer] = {
        "role": source.role, "rank": source.rank, "replica": plain(source.replica, 40), "host": plain(record.host, 80),
        "pid": record.pid, "model_name": plain(record.model_name, 120), "stack": plain(record.stack, 80),
        "versions": _small(record.versions), "dtypes": _small(record.dtypes), "sampling": _small(record.sampling),
    }  # fmt: skip
    while len(run.about) > MAX_ABOUT:
        run.about.popitem(last=False)


def _small(tree: Mapping[str, Json]) -> dict[str, str]:
    return {plain(key, 60): plain(value, 120) for key, value in list(tree.items())[:MAX_SCALARS]}
