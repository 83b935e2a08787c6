"""Speed of the maths floor in tokens per CPU second, as ratios to np.exp(float64) and, where installed, to verl.

`run()` returns one dict of plain numbers; `python benchmarks/bench_maths.py` prints it as JSON. One thread: set
OMP_NUM_THREADS=1. Full statistics = mask, split of three float32 streams, StreamStats of lag, discrepancy and total,
LagStats with all horizons, ages, groups and KL, on ragged rows.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from dlc_sentinel.maths import LagStats, StreamStats, compress, prime_allocator, row_chunks, split
from dlc_sentinel.maths.arrays import CHUNK_TOKENS, F32, F64, I64, Bool

PASSES = 5
MIN_PASS_S = 0.2
EXP_CHUNK = 16384


class Batch(NamedTuple):
    """Three float32 logprob streams of ragged rows, mask and groups."""

    cur_N: F32
    old_N: F32
    engine_N: F32
    mask_N: Bool
    offsets_S1: I64
    group_S: I64


def make_batch(length_S: I64, *, seed: int = 0, masked_share: float = 0.1) -> Batch:
    """Rows of the given lengths; lag rms 0.02, discrepancy rms 0.03 nats; one masked run per row (a tool's output)."""
    rng = np.random.default_rng(seed)
    offsets_S1 = np.concatenate(([0], np.cumsum(length_S))).astype(np.int64)
    num = int(offsets_S1[-1])
    engine_N = -rng.exponential(0.5, num)
    old_N = engine_N + rng.normal(0.0, 0.03, num)
    cur_N = old_N + rng.normal(-0.0002, 0.02, num)
    mask_N = np.ones(num, dtype=bool)
    for start, length in zip(offsets_S1[:-1].tolist(), length_S.tolist(), strict=True):
        cut = int(length * masked_share)
        if cut:
            first = start + int(rng.integers(0, length - cut))
            mask_N[first : first + cut] = False
    cur32_N, old32_N, engine32_N = (stream_N.astype(np.float32) for stream_N in (cur_N, old_N, engine_N))
    group_S = np.arange(len(length_S), dtype=np.int64) // 8
    return Batch(cur32_N, old32_N, engine32_N, mask_N, offsets_S1, group_S)


class FullStats:
    """All statistics of one window, as the monitor keeps them."""

    def __init__(self) -> None:
        self.lag, self.disc, self.total = StreamStats(), StreamStats(), StreamStats()
        self.window = LagStats()

    def read(self) -> tuple[float, ...]:
        """A number of each, so that nothing is left waiting."""
        return self.lag.rms, self.disc.rms, self.total.rms, self.window.action_ess

    def add(self, batch: Batch) -> None:
        """Adds a batch, chunk by chunk of whole rows."""
        for first, last in row_chunks(batch.offsets_S1, CHUNK_TOKENS):
            start, end = int(batch.offsets_S1[first]), int(batch.offsets_S1[last])
            offsets_S1, streams = compress(
                batch.mask_N[start:end],
                batch.offsets_S1[first : last + 1] - start,
                batch.cur_N[start:end],
                batch.old_N[start:end],
                batch.engine_N[start:end],
            )
            parts = split(*streams)
            self.lag.add(parts.lag_N)
            self.disc.add(parts.disc_N)
            self.total.add(parts.total_N)
            age_S = np.arange(first, last, dtype=np.int64) % 4
            self.window.add(
                parts.lag_N,
                offsets_S1,
                group_S=batch.group_S[first:last],
                span_start_K=offsets_S1[:-1],
                span_age_K=age_S,
            )


def per_cpu_second(num: int, *works: Callable[[], object]) -> list[float]:
    """Elements per CPU second of each work: the best of a few passes, taken in turn so that noise meets all alike."""
    for work in works:
        work()
    best = [0.0] * len(works)
    for _ in range(PASSES):
        for place, work in enumerate(works):
            done, start = 0, time.process_time()
            while (spent := time.process_time() - start) < MIN_PASS_S:
                work()
                done += num
            best[place] = max(best[place], done / spent)
    return best


def exp_of(num: int) -> Callable[[], None]:
    """np.exp(float64, out=) over `num` elements, in cache-sized chunks."""
    x_N: F64 = np.random.default_rng(0).normal(0.0, 0.02, num)
    out_N = np.empty(EXP_CHUNK)

    def work() -> None:
        for start in range(0, num, EXP_CHUNK):
            part_N = x_N[start : start + EXP_CHUNK]
            np.exp(part_N, out=out_N[: len(part_N)])

    return work


def verl_rates(batch: Batch) -> dict[str, float] | str:
    """Tokens per CPU second of verl's own off-policy metrics and IS weights on the same rows, padded; or why not."""
    if importlib.util.find_spec("verl") is None:
        return "verl is not installed here"
    import torch

    verl_helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")

    torch.set_num_threads(1)
    length_S = np.diff(batch.offsets_S1)
    shape, row_N = (len(length_S), int(length_S.max())), np.repeat(np.arange(len(length_S)), length_S)
    column_N = np.arange(len(row_N)) - np.repeat(batch.offsets_S1[:-1], length_S)

    def padded(stream_N: F32 | Bool) -> torch.Tensor:
        out = np.zeros(shape, dtype=stream_N.dtype)
        out[row_N, column_N] = stream_N
        return torch.from_numpy(out)

    cur, engine, mask = padded(batch.cur_N), padded(batch.engine_N), padded(batch.mask_N).to(torch.float32)

    def metrics() -> object:
        return verl_helper.compute_offpolicy_metrics(cur, engine, mask)

    def weights() -> object:
        return verl_helper.compute_rollout_correction_weights(cur - engine, mask, "token", 2.0)

    def both() -> None:
        metrics()
        weights()

    rates = per_cpu_second(len(batch.cur_N), metrics, weights, both, partial(_add_to_new, batch))
    return dict(zip(("offpolicy_metrics", "is_weights", "both", "ours"), rates, strict=True))


def _add_to_new(batch: Batch) -> None:
    stats = FullStats()
    stats.add(batch)
    stats.read()


def run() -> dict[str, object]:
    """Tokens per CPU second by shape of the batch, of np.exp and of verl, and the ratios that are promised."""
    prime_allocator()
    rng = np.random.default_rng(1)
    shapes = {
        "64 rows of about 16k": rng.integers(12_000, 20_000, 64),
        "256 rows of about 4k": rng.integers(2_000, 6_000, 256),
        "1000 rows of 100": np.full(1000, 100),
        "4000 rows of 20..400": rng.integers(20, 400, 4000),
    }
    out: dict[str, object] = {}
    for name, length_S in shapes.items():
        batch = make_batch(length_S.astype(np.int64))
        num = len(batch.cur_N)
        ours, exp = per_cpu_second(num, partial(_add_to_new, batch), exp_of(num))
        out[name] = {"tokens_per_cpu_s": ours, "np_exp": exp, "ratio_to_exp": ours / exp}
    single, stats = make_batch(np.array([4096])), FullStats()
    out["one add of 4096 tokens, ms"] = 4096e3 / per_cpu_second(4096, partial(stats.add, single))[0]
    verl = verl_rates(make_batch(np.full(256, 4096)))
    out["verl"] = verl
    if not isinstance(verl, str):
        out["ratio_to_verl"] = verl["ours"] / verl["both"]
    return out


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
