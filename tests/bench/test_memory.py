"""The sentinel's memory over the first step of a run, which nothing before it says how large it will be."""

from __future__ import annotations

from benchmarks.bench_memory import BYTES_PER_TOKEN, measure

STEP_TOKENS = 2**23


def test_a_large_first_step_is_not_kept():
    found = measure(2**16, 2, STEP_TOKENS)

    grown = float(str(found["peak"])) - float(str(found["idle"]))
    assert grown < 0.8 * STEP_TOKENS * BYTES_PER_TOKEN, f"{grown / 2**20:.0f} MiB"
