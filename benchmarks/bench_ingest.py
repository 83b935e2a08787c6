"""Tokens per second through real sockets, full statistics, one core: `python -m benchmarks.bench_ingest`.

A sender process on the other core pushes frames that were encoded before the clock starts; the sentinel (sockets, their
I/O thread, codec, join, window, verdicts) is pinned to one core. Promise: >= 2 M tokens/s with messages of 4k tokens,
>= 10 M with 64k. It is judged per second of that core's CPU: on a machine whose cores are shared, the wall clock
measures the neighbours. Both are printed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.records import Hello, Record, Source, StepEnd, Train
from dlc_sentinel.runtime import LiveSource, Runtime
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.wire.codec import encode
from dlc_sentinel.wire.receiver import Receiver

PROMISES = {4096: 2e6, 65536: 10e6}
"""Tokens of a message -> tokens/s."""
TRAINER = Source("bench", "trainer", "00000000000000aa")
SEQUENCE_TOKENS = {4096: 512, 65536: 2048}
STEP_TOKENS = {4096: 2**18, 65536: 2**20}
"""Tokens of a step: 64 messages of 4k, 16 of 64k."""
STALL_S = 30.0
PASSES = 2
"""The fastest counts: whatever else the machine does only ever makes a pass slower."""


def messages(message_tokens: int, num_steps: int, step_tokens: int | None = None) -> Iterator[Record]:
    """Hello, then per step the train records of `message_tokens` and a StepEnd; every id and step is new."""
    yield Hello(TRAINER, model_name="bench", dtypes={"engine": "bfloat16", "trainer": "bfloat16"})
    rng = np.random.default_rng(0)
    length = SEQUENCE_TOKENS.get(message_tokens, message_tokens)
    num_sequences = message_tokens // length
    engine_N = (-2.0 - rng.exponential(1.0, message_tokens)).astype(np.float32)
    old_N = engine_N + rng.normal(0.0, 0.01, message_tokens).astype(np.float32)
    cur_N = old_N + rng.normal(0.0, 0.02, message_tokens).astype(np.float32)
    offsets_S1 = np.arange(0, message_tokens + 1, length, dtype=np.int64)
    for step in range(num_steps):
        for micro in range((step_tokens or STEP_TOKENS[message_tokens]) // message_tokens):
            yield Train(
                TRAINER,
                step,
                step,
                tuple(f"{step}-{micro}-{i}" for i in range(num_sequences)),
                offsets_S1,
                micro=micro,
                cur_N=cur_N,
                old_N=old_N,
                engine_N=engine_N,
                mask_N=np.ones(message_tokens, np.bool_),
                span_start_K=offsets_S1[:-1],
                span_version_K=np.full(num_sequences, max(step - 1, 0), np.int64),
                old_is="generator",
                groups=tuple(f"{step}-{micro}-{i // 4}" for i in range(num_sequences)),
            )
        yield StepEnd(TRAINER, step)


def encoded(records: Iterator[Record]) -> Iterator[memoryview]:
    """Numbered frames."""
    number = 0
    for record in records:
        frames = encode(record, number)
        number += len(frames)
        yield from frames


def pin(core: int) -> None:
    """Keeps this process, and every thread it starts from here on, on one core."""
    os.sched_setaffinity(0, {core})


def cores() -> tuple[int, int]:
    """(sentinel's core, sender's core); the same one where there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def _send(address: str, core: int, message_tokens: int, num_steps: int, line: Connection) -> None:
    import zmq

    pin(core)
    frames = list(encoded(messages(message_tokens, num_steps)))
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = 64
    socket.connect(address)
    line.send("ready")
    line.recv()
    for frame in frames:
        socket.send(frame, copy=False)
    line.recv()
    socket.close(linger=0)
    context.term()


def measure(message_tokens: int, num_steps: int, *, tape: bool = False) -> dict[str, float]:
    """{tokens_per_s, cpu_s, tokens_per_cpu_s, latency_s, ...} of one pass; called in a process of its own."""
    mine, other = cores()
    pin(mine)
    receiver = Receiver("tcp://127.0.0.1:0")
    line, far = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    sender = spawn.Process(target=_send, args=(receiver.address.data, other, message_tokens, num_steps, far))
    sender.start()
    assert line.poll(120.0), "the sender did not get ready"
    line.recv()
    config = Config()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, 2**31, 2**26) if tape else None
        runtime = Runtime(config, LiveSource(receiver), Monitor(config), recorder, [Nowhere()])
        runtime.step(0)
        line.send("go")
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        last_step, news_s = -1, begin_s
        while last_step < num_steps - 1:
            runtime.step(200)
            runs = runtime.monitor.snapshot(0.0).runs
            if runs and runs[0].last_step > last_step:
                last_step, news_s = runs[0].last_step, time.perf_counter()
            assert time.perf_counter() - news_s < STALL_S, f"nothing closed after step {last_step}"
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        line.send("done")
        sender.join(30.0)
        (run,) = runtime.snapshot().runs
        runtime.close()
    num_tokens = num_steps * STEP_TOKENS[message_tokens]
    assert run.num_tokens["cur"] == num_tokens, f"{run.num_tokens['cur']} of {num_tokens} tokens arrived"
    assert not any(run.dropped_tokens.values()), run.dropped_tokens
    return {
        "message_tokens": message_tokens,
        "tokens": num_tokens,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens_per_s": num_tokens / wall_s,
        "tokens_per_cpu_s": num_tokens / cpu_s,
        "verdict_latency_s": run.verdict_latency_s,
        "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


class Nowhere:
    """A sink that takes everything and keeps nothing."""

    def handle(self, event: object) -> None:
        return None

    def publish(self, snapshot: object) -> None:
        return None

    def close(self) -> None:
        return None


def _measure_into(line: Connection, message_tokens: int, num_steps: int, tape: bool) -> None:
    line.send(measure(message_tokens, num_steps, tape=tape))


def apart(message_tokens: int, num_steps: int, *, tape: bool = False) -> dict[str, float]:
    """`measure` in a fresh process, so that pinning and memory are its own."""
    line, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_measure_into, args=(far, message_tokens, num_steps, tape)
    )
    process.start()
    far.close()
    result: dict[str, float] = line.recv()
    process.join()
    return result


def run(scale: float = 1.0) -> dict[str, object]:
    """Figures and whether the promises hold; `scale` shortens or lengthens the passes."""
    rows = []
    for message_tokens, num_steps in ((4096, 24), (65536, 24)):
        steps = max(int(num_steps * scale), 3)
        passes = [apart(message_tokens, steps) for _ in range(PASSES)]
        fastest = max(each["tokens_per_cpu_s"] for each in passes)
        row: dict[str, object] = dict(next(each for each in passes if each["tokens_per_cpu_s"] == fastest))
        row["with_tape_tokens_per_cpu_s"] = apart(message_tokens, steps, tape=True)["tokens_per_cpu_s"]
        row["promise_tokens_per_s"] = PROMISES[message_tokens]
        row["kept"] = fastest >= PROMISES[message_tokens]
        rows.append(row)
    return {"name": "ingest", "rows": rows, "kept": all(row["kept"] for row in rows)}


if __name__ == "__main__":
    json.dump(run(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0), sys.stdout, indent=1)
    print()
