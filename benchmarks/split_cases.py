"""Recorded runs of `record_split` and one evaluation of the calibrated split against the exact one.

Axes: S rows, N packed tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlc_sentinel.maths import LagStats
from dlc_sentinel.maths.arrays import F32, F64, I64
from dlc_sentinel.maths.calibrated import Calibrated, CalibrationPool, calibrate
from dlc_sentinel.maths.cells import DiscrepancyCells, row_positions
from dlc_sentinel.maths.stale import StaleRows

LAGS = (1, 3, 6)
SOURCES = ("fresh", "pool", "rescored")
GROUP_ROWS = 4
FEW_ROWS = 3
"""Rows without lag that a step of 64 rows is given: 5 %."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One generated batch: the engine's logprobs, the trainer's by lag (nan where it was not scored), packed."""

    engine_N: F32
    trainer: dict[int, F32]
    offsets_S1: I64

    def rows(self, rows: I64) -> Batch:
        """The batch of these rows only."""
        length_S = np.diff(self.offsets_S1)[rows]
        pieces = [slice(int(self.offsets_S1[row]), int(self.offsets_S1[row + 1])) for row in rows.tolist()]
        trainer = {lag: np.concatenate([x[piece] for piece in pieces]) for lag, x in self.trainer.items()}
        offsets = np.concatenate(([0], np.cumsum(length_S))).astype(np.int64)
        return Batch(np.concatenate([self.engine_N[piece] for piece in pieces]), trainer, offsets)

    def difference(self, lag: int) -> F64:
        """Trainer `lag` versions later minus the engine, nats."""
        return self.trainer[lag].astype(np.float64) - self.engine_N

    def cells(self) -> DiscrepancyCells:
        """The discrepancy of the batch, scored at its own version."""
        cells = DiscrepancyCells()
        cells.add(self.engine_N, row_positions(self.offsets_S1), self.difference(0), self.offsets_S1)
        return cells


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run: batch v was generated at version v."""

    name: str
    batches: list[Batch]
    rescored: dict[int, Batch]
    """One row a version, scored by trainer and engine both at that version though it was generated earlier."""
    engines: list[str]
    """The engine in force at each version."""
    train_lag: int
    """Age at which batches were trained on; rows that were trained on already are not judged."""
    rounded: list[str]
    """Engines whose keys and values were rounded before they were cached, for want of a CPU with vLLM's fp8 cache."""

    @property
    def versions(self) -> range:
        """Versions at which batches up to `train_lag` old can be judged: the first ones trained on batch 0 only."""
        return range(2 * self.train_lag, len(self.batches))

    @property
    def lags(self) -> tuple[int, ...]:
        """Ages this run is for: 1 and 3, or the one age at which it trained."""
        return (1, 3) if self.train_lag == 3 else (self.train_lag,)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(batch.engine_N) for batch in self.batches)

    def few_cells(self, version: int) -> DiscrepancyCells:
        """FEW_ROWS rows of the version's own batch: what a job with 5 % of fresh rows sees."""
        batch = self.batches[version]
        rng = np.random.default_rng([version, zlib.crc32(self.name.encode())])
        return batch.rows(rng.choice(len(batch.offsets_S1) - 1, FEW_ROWS, replace=False)).cells()

    def stale(self, version: int, lag: int) -> StaleRows:
        """The batch `lag` versions old, as the trainer at `version` meets it."""
        batch = self.batches[version - lag]
        stale = StaleRows()
        positions = row_positions(batch.offsets_S1)
        stale.add(batch.difference(lag), batch.engine_N, positions, batch.offsets_S1, groups(batch))
        return stale

    def truth(self, version: int, lag: int) -> LagStats:
        """The exact lag of the same rows."""
        batch = self.batches[version - lag]
        stats = LagStats()
        exact_N = batch.trainer[lag].astype(np.float64) - batch.trainer[0]
        stats.add(exact_N, batch.offsets_S1, group_S=groups(batch))
        return stats

    def lag_rms(self, version: int, lag: int) -> float:
        """rms of the exact lag, nats."""
        batch = self.batches[version - lag]
        return float(np.sqrt(np.mean((batch.trainer[lag].astype(np.float64) - batch.trainer[0]) ** 2)))


def groups(batch: Batch) -> I64:
    """Prompt group of each row."""
    return np.arange(len(batch.offsets_S1) - 1, dtype=np.int64) // GROUP_ROWS


def load(path: Path) -> Run:
    """The run that `record_split` wrote to a file."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    batches, start = [], 0
    for length_S in arrays["lengths"]:
        end = start + int(length_S.sum())
        trainer = {lag: arrays[f"trainer_{lag}"][start:end] for lag in (0, *LAGS)}
        offsets_S1 = np.concatenate(([0], np.cumsum(length_S))).astype(np.int64)
        batches.append(Batch(arrays["engine"][start:end], trainer, offsets_S1))
        start = end
    rescored, start, train_lag = {}, 0, int(arrays["train_lag"])
    for place, row in enumerate(arrays["rescored_row"].tolist()):
        length = int(arrays["lengths"][place, row])
        part = slice(start, start + length)
        ends = np.array([0, length])
        engine_N, trainer_N = arrays["rescored_engine"][part], arrays["rescored_trainer"][part]
        rescored[place + train_lag] = Batch(engine_N, {0: trainer_N}, ends)
        start += length
    engines, rounded = arrays["engine_of_version"].tolist(), arrays["rounded_cache"].tolist()
    return Run(path.stem, batches, rescored, engines, train_lag, rounded)


@dataclass(frozen=True, slots=True)
class Case:
    """One batch at one lag: the truth and what each source of lag-0 rows made of it."""

    run: str
    version: int
    lag: int
    ess: float
    """Exact ESS_32."""
    rms: float
    total_ess: float
    results: dict[str, Calibrated]


def louder(run: Run, factor: float) -> Run:
    """The run as an engine with `factor` times the discrepancy would have made it, token by token."""
    batches = []
    for batch in run.batches:
        engine_N = (batch.trainer[0] - factor * batch.difference(0)).astype(np.float32)
        batches.append(Batch(engine_N, batch.trainer, batch.offsets_S1))
    return Run(run.name, batches, {}, run.engines, run.train_lag, run.rounded)


def cases(run: Run, lags: Sequence[int] = (), sources: Sequence[str] = SOURCES) -> Iterator[Case]:
    """Every version and lag (default: the run's own), with lag-0 rows of its step alone, pooled, or re-scored."""
    pool, rescored = CalibrationPool(), CalibrationPool()
    for version in range(len(run.batches)):
        few = run.few_cells(version)
        pool.add(few, version)
        if version in run.rescored:
            rescored.add(run.rescored[version].cells(), version)
        if version not in run.versions:
            continue
        laws = {"fresh": few, "pool": pool.cells(), "rescored": rescored.cells()}
        for lag in lags or run.lags:
            stale, truth = run.stale(version, lag), run.truth(version, lag)
            results = {name: calibrate(stale, cells, seed=version) for name, cells in laws.items() if name in sources}
            rms, naive = run.lag_rms(version, lag), stale.total_ess()["32"]
            yield Case(run.name, version, lag, truth.ess()["32"], rms, naive, results)
