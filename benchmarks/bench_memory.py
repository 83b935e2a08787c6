"""Resident memory of one sentinel process: `python -m benchmarks.bench_memory`.

Promises: < 400 MB with steps of 1.6 GB of three-stream frames, and no growth: over 1,000 small steps the RSS of the
last 100 is at most that of the first 100 plus 5 %. Frames come through real sockets, the tape is on.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.bench_ingest import STALL_S, Nowhere, encoded, messages
from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.runtime import LiveSource, Runtime
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.wire.receiver import Receiver

LARGE_STEP_BYTES = 1.6e9
BYTES_PER_TOKEN = 12
"""Three float32 streams."""
PROMISE_BYTES = 400e6
PROMISE_GROWTH = 1.05
RING_BYTES = 256 * 2**20


def resident_bytes(key: str = "VmRSS") -> int:
    """Resident memory of this process now (VmRSS) or at most so far (VmHWM), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _sentinel(line: Connection, num_steps: int) -> None:
    receiver = Receiver("tcp://127.0.0.1:0")
    config = Config()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, RING_BYTES, RING_BYTES // 4)
        runtime = Runtime(config, LiveSource(receiver), Monitor(config), recorder, [Nowhere()])
        line.send(receiver.address.data)
        idle, seen, last_step, news_s = resident_bytes(), [], -1, time.perf_counter()
        while last_step < num_steps - 1:
            runtime.step(200)
            runs = runtime.monitor.snapshot(0.0).runs
            step = runs[0].last_step if runs else -1
            if step > last_step or (runs and step == last_step and runs[0].num_frames % 64 == 0):
                news_s = time.perf_counter()
            if step > last_step:
                seen += [resident_bytes()] * (step - last_step)
                last_step = step
            assert time.perf_counter() - news_s < STALL_S, f"nothing came after step {last_step}"
        (run,) = runtime.snapshot().runs
        runtime.close()
    line.send({"idle": idle, "peak": resident_bytes("VmHWM"), "steps": seen, "tokens": run.num_tokens["cur"]})


def measure(message_tokens: int, num_steps: int, step_tokens: int) -> dict[str, object]:
    """{idle, peak, steps: RSS after each} in bytes of a sentinel fed `num_steps` steps over sockets."""
    import zmq

    line, far = multiprocessing.Pipe()
    sentinel = multiprocessing.get_context("spawn").Process(target=_sentinel, args=(far, num_steps))
    sentinel.start()
    far.close()
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = 16
    socket.connect(line.recv())
    for frame in encoded(messages(message_tokens, num_steps, step_tokens)):
        socket.send(frame, copy=False)
    result: dict[str, object] = line.recv()
    sentinel.join()
    socket.close(linger=0)
    context.term()
    return result


def run(scale: float = 1.0) -> dict[str, object]:
    """Figures and whether the promises hold; `scale` shortens both passes (the first to a smaller step)."""
    step_tokens = int(scale * LARGE_STEP_BYTES / BYTES_PER_TOKEN / 65536) * 65536
    large = measure(65536, 2, step_tokens)
    small = measure(4096, max(int(1000 * scale), 200), 4096)
    steps = np.asarray(small["steps"], np.float64)
    first, last = float(np.median(steps[:100])), float(np.median(steps[-100:]))
    return {
        "name": "memory",
        "large_step_bytes": step_tokens * BYTES_PER_TOKEN,
        "idle_rss_bytes": large["idle"],
        "large_peak_rss_bytes": large["peak"],
        "promise_peak_bytes": PROMISE_BYTES,
        "small_steps": len(steps),
        "small_first_100_rss_bytes": first,
        "small_last_100_rss_bytes": last,
        "growth_ratio": last / first,
        "promise_growth_ratio": PROMISE_GROWTH,
        "kept": bool(float(str(large["peak"])) < PROMISE_BYTES and last <= PROMISE_GROWTH * first),
    }


if __name__ == "__main__":
    json.dump(run(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0), sys.stdout, indent=1)
    print()
