"""Peak memory and time of the DLC loss from hidden states, forward and backward, each case in a process of its own.

`run()` returns one dict of plain numbers; `python -m benchmarks.bench_correction` prints it as JSON. Peak = largest
resident set (VmHWM, reset once the inputs lie in memory) minus the resident set at that moment: it holds one chunk of
logits, a temporary like it, the float32 gradients, what torch's products borrow. Linux only. One thread. The large
case is about 10 TFLOP of products: minutes on a CPU. The time ratio is against the plain loss of whole logits
(matmul, log_softmax, gather), at a size that a small machine can hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dlc_sentinel.correction import Batch, EngineList, Hidden, dlc_loss

VOCAB, HIDDEN, LISTED = 151_936, 1024, 20
PROMISED_BYTES = 2e9
CHILD_TIMEOUT_S = 1800


def make_case(num: int, vocab: int, hidden: int, dtype: torch.dtype) -> tuple[Hidden, Batch]:
    """Rows of up to 1,024 tokens with a top-20 list and the generator's values on it; all near a flat policy."""
    random = torch.Generator().manual_seed(0)
    source = Hidden(
        torch.randn(num, hidden, generator=random, dtype=dtype).requires_grad_(),
        torch.empty(vocab, hidden, dtype=dtype).normal_(0.0, hidden**-0.5, generator=random).requires_grad_(),
    )
    index_NK = torch.randint(vocab // LISTED, (num, LISTED), generator=random) + torch.arange(LISTED) * (
        vocab // LISTED
    )
    logp_NK = torch.full((num, LISTED), -4.0) + 0.1 * torch.randn(num, LISTED, generator=random)
    gen_logp_NK = logp_NK + 0.05 * torch.randn(num, LISTED, generator=random)
    batch = Batch.packed(
        index_NK[:, 0],
        torch.randn(num, generator=random),
        offsets_S1=torch.tensor([*range(0, num, 1024), num]),
        gen_logp_N=gen_logp_NK[:, 0],
        engine_logp_N=logp_NK[:, 0],
        engine=EngineList(index_NK, logp_NK, gen_logp_NK),
    )
    return source, batch


def dlc(source: Hidden, batch: Batch, chunk_tokens: int | None = None) -> None:
    """Forward and backward of the DLC loss."""
    dlc_loss(source, batch, chunk_tokens=chunk_tokens).loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped


def plain(source: Hidden, batch: Batch, chunk_tokens: int | None = None) -> None:
    """Forward and backward of the usual loss, whole logits in float32."""
    logp_NV: Tensor = (source.hidden @ source.output_VH.T).float().log_softmax(1)
    logp_N = logp_NV.gather(1, batch.token_M[:, None]).squeeze(1)
    (-(batch.advantage_M * logp_N).mean()).backward()  # type: ignore[no-untyped-call]  # as above


LOSSES: dict[str, Callable[[Hidden, Batch, int | None], None]] = {"dlc": dlc, "plain": plain}


def child(
    loss: str, num: int, vocab: int, hidden: int, dtype: str, chunk_tokens: int | None = None
) -> dict[str, float]:
    """Measures one case in this process: peak_bytes beyond the inputs, and seconds."""
    torch.set_num_threads(1)
    LOSSES[loss](*make_case(8, vocab // 8, hidden, getattr(torch, dtype)), None)  # code and pools, not in the peak
    source, batch = make_case(num, vocab, hidden, getattr(torch, dtype))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, started = resident_bytes("VmRSS"), time.perf_counter()
    LOSSES[loss](source, batch, chunk_tokens)
    seconds = time.perf_counter() - started
    assert source.output_VH.grad is not None
    return {"peak_bytes": resident_bytes("VmHWM") - before, "seconds": seconds}


def resident_bytes(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024.0 * float(next(line.split()[1] for line in lines if line.startswith(field)))


def measure(
    loss: str, num: int, *, vocab: int = VOCAB, hidden: int = HIDDEN, dtype: str = "float32"
) -> dict[str, float]:
    """`child` in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_correction",
        "--child",
        loss,
        *map(str, (num, vocab, hidden)),
        dtype,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"bench_correction: {command} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run(large: int = 8192, small: int = 384) -> dict[str, object]:
    """Peak at 8k tokens (float32 matrix, float32 gradient; the promise is 2 GB), and time beside the plain loss."""
    peak = measure("dlc", large)
    ours, plain_found = measure("dlc", small), measure("plain", small)
    half = measure("dlc", small, dtype="bfloat16")
    return {
        "tokens": large,
        "vocabulary": VOCAB,
        "hidden": HIDDEN,
        "peak_bytes": peak["peak_bytes"],
        "peak_seconds": peak["seconds"],
        "promised_bytes": PROMISED_BYTES,
        "small_tokens": small,
        "small_seconds": ours["seconds"],
        "small_plain_seconds": plain_found["seconds"],
        "time_ratio_to_plain": ours["seconds"] / plain_found["seconds"],
        "small_peak_bytes": ours["peak_bytes"],
        "small_plain_peak_bytes": plain_found["peak_bytes"],
        "small_bfloat16_peak_bytes": half["peak_bytes"],
        "small_bfloat16_seconds": half["seconds"],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])))
    else:
        print(json.dumps(run(), indent=2))
