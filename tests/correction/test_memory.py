"""Peak memory beyond the inputs, in a process of its own; the full size is benchmarks/bench_correction.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlc_sentinel.correction.source import CHUNK_BYTES

ROOT = Path(__file__).parents[2]
TOKENS, CHUNK, VOCAB, HIDDEN = 512, 64, 151_936, 16  # a chunk above 32 MB: malloc maps it, and gives it back

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux")


def peak_bytes():
    case = f"'dlc', {TOKENS}, {VOCAB}, {HIDDEN}, 'float32', {CHUNK}"
    code = f"from benchmarks.bench_correction import child; print(child({case}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(done.stdout.split("'peak_bytes': ")[1].split(",")[0])


def test_two_chunks_of_logits_and_the_weight_gradient_are_all_that_is_alive():
    weight_gradient, slack = 4 * VOCAB * HIDDEN, 40e6

    peak = peak_bytes()

    chunk, whole_logits = 4 * CHUNK * VOCAB, 4 * TOKENS * VOCAB
    assert peak < 2 * chunk + weight_gradient + slack < whole_logits / 2
    # hence at 8k tokens and a hidden size of 1,024, where only the gradients of the inputs are larger:
    assert 2 * CHUNK_BYTES + slack + 4 * VOCAB * 1024 + 3 * 4 * 8192 * 1024 < 2e9
