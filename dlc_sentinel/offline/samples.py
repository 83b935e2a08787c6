"""Trained sequences as dumps hold them, packed into the records a hook would have sent.

Axes: T tokens of one response, N tokens packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlc_sentinel.records import F32, I64, UNKNOWN_VERSION, Bool, Rollout, Source, Train

BATCH_TOKENS = 2**16


@dataclass(slots=True)
class Sample:
    """One response. `cur_T` None = the trainer's side is not in the dump."""

    id: str
    engine_T: F32
    cur_T: F32 | None
    mask_T: Bool
    group: str = ""
    span_start_K: I64 = field(default_factory=lambda: np.zeros(1, np.int64))
    span_version_K: I64 = field(default_factory=lambda: np.full(1, UNKNOWN_VERSION, np.int64))
    advantage: float = float("nan")

    def __post_init__(self) -> None:
        lengths = {len(x) for x in (self.engine_T, self.cur_T, self.mask_T) if x is not None}
        if len(lengths) != 1:
            cur = "none" if self.cur_T is None else len(self.cur_T)
            raise ValueError(
                f"id {self.id!r}: lengths disagree: engine {len(self.engine_T)}, trainer {cur}, mask {len(self.mask_T)}"
            )


def records(
    source: Source, step: int, version: int, samples: Sequence[Sample], *, micro: int = 0
) -> Iterator[Train | Rollout]:
    """Train records of the samples that have both sides, Rollout records of those that only an engine has seen."""
    both = [s for s in samples if s.cur_T is not None and len(s.engine_T)]
    for number, batch in enumerate(_batches(both)):
        yield _train(source, step, version, batch, micro + number)
    engine = Source(source.run, "engine", f"{source.producer}-engine")
    for batch in _batches([s for s in samples if s.cur_T is None and len(s.engine_T)]):
        yield _rollout(engine, batch)


def _batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    num_tokens = 0
    for sample in samples:
        batch.append(sample)
        num_tokens += len(sample.engine_T)
        if num_tokens >= BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _train(source: Source, step: int, version: int, samples: list[Sample], micro: int) -> Train:
    offsets, starts, versions = _packed(samples)
    return Train(
        source=source,
        step=step,
        version=version,
        ids=tuple(s.id for s in samples),
        offsets_S1=offsets,
        micro=micro,
        cur_N=np.concatenate([s.cur_T for s in samples if s.cur_T is not None]),
        engine_N=np.concatenate([s.engine_T for s in samples]),
        mask_N=np.concatenate([s.mask_T for s in samples]),
        span_start_K=starts,
        span_version_K=versions,
        groups=tuple(s.group or s.id for s in samples),
        advantage_S=np.array([s.advantage for s in samples], np.float32),
    )


def _rollout(source: Source, samples: list[Sample]) -> Rollout:
    offsets, starts, versions = _packed(samples)
    return Rollout(
        source=source,
        ids=tuple(s.id for s in samples),
        offsets_S1=offsets,
        token_offset_S=np.zeros(len(samples), np.int64),
        final_S=np.ones(len(samples), np.bool_),
        logprobs_N=np.concatenate([s.engine_T for s in samples]),
        span_start_K=starts,
        span_version_K=versions,
    )


def _packed(samples: list[Sample]) -> tuple[I64, I64, I64]:
    offsets = np.concatenate([[0], np.cumsum([len(s.engine_T) for s in samples])]).astype(np.int64)
    starts = np.concatenate([s.span_start_K + at for s, at in zip(samples, offsets[:-1], strict=True)])
    return offsets, starts, np.concatenate([s.span_version_K for s in samples])


def known_version(version: int, length: int) -> tuple[I64, I64]:
    """Span of a whole response of one version."""
    return np.zeros(min(length, 1), np.int64), np.full(min(length, 1), version, np.int64)
