"""How long `analyze` takes and how much memory: `python -m benchmarks.bench_analyze [SCALE]`.

Promises: < 60 s and < 1 GB for 100 M tokens of tape and for 20 M tokens of `.jsonl`, three streams each. Both readers
stream: a part of it (`SCALE`, default a fifth) shows the rate, and the memory, which does not grow with the length.
Each is analysed in a process of its own; the `.jsonl` is what `analyze --export` writes, full digits and all.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.bench_ingest import TRAINER, encoded, messages
from benchmarks.bench_memory import resident_bytes
from dlc_sentinel.offline.analyze import analyze
from dlc_sentinel.offline.export import export
from dlc_sentinel.runtime import HEADER_AT
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.schema import TapeFrame
from dlc_sentinel.wire.frame import open_header

PROMISED_TOKENS = {"tape": 100e6, "jsonl": 20e6}
PROMISE_S, PROMISE_BYTES = 60.0, 1e9
STEP_TOKENS, MESSAGE_TOKENS = 2**18, 2**16


def tape_frames(num_steps: int) -> Iterator[TapeFrame]:
    """What a sentinel would have recorded of `num_steps` steps, one a second."""
    now_s = 0.0
    for number, buffer in enumerate(encoded(messages(MESSAGE_TOKENS, num_steps, STEP_TOKENS))):
        now_s += 1.0
        yield TapeFrame(now_s, "data", TRAINER.producer, number, buffer, HEADER_AT + len(open_header(buffer)[1]))


def write_tape(folder: Path, num_steps: int) -> None:
    recorder = Recorder(folder, 2**40, 64 * 2**20)
    now_s = 0.0
    for frame in tape_frames(num_steps):
        recorder.frame(frame)
        now_s = frame.t_s
    recorder.close(now_s)


def write_lines(path: Path, num_steps: int) -> None:
    """One step exported from a tape, again and again under later steps and versions."""
    with tempfile.TemporaryDirectory() as folder:
        write_tape(Path(folder) / "tape", 1)
        export(Path(folder) / "tape", Path(folder) / "one.jsonl")
        meta, *lines = (Path(folder) / "one.jsonl").read_bytes().splitlines(keepends=True)
    with path.open("wb") as file:
        file.write(meta)
        for step in range(num_steps):
            for line in lines:
                line = line.replace(b'"step":0,', b'"step":%d,' % step, 1)
                line = line.replace(b'"version":0,', b'"version":%d,' % step, 1)
                file.write(line.replace(b'"versions":0', b'"versions":%d' % max(step - 1, 0), 1))


def _analyze(line: Connection, path: str) -> None:
    idle = resident_bytes()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    report = analyze(path)
    line.send(
        {
            "wall_s": time.perf_counter() - started_s,
            "cpu_s": time.process_time() - started_cpu_s,
            "idle_rss_bytes": idle,
            "peak_rss_bytes": resident_bytes("VmHWM"),
            "tokens": sum(step["num_tokens"] for step in report["steps"]),
            "verdict": report["verdict"],
        }
    )


def measure(kind: str, num_tokens: float) -> dict[str, object]:
    """{wall_s, cpu_s, peak_rss_bytes, tokens, full_length_s ...} of one analysis in a fresh process."""
    num_steps = max(int(num_tokens / STEP_TOKENS), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("tape" if kind == "tape" else "run.jsonl")
        (write_tape if kind == "tape" else write_lines)(path, num_steps)
        line, far = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_analyze, args=(far, str(path)))
        process.start()
        far.close()
        found: dict[str, object] = line.recv()
        process.join()
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    rate = float(str(found["tokens"])) / float(str(found["cpu_s"]))
    full_s = PROMISED_TOKENS[kind] / rate
    kept = full_s < PROMISE_S and float(str(found["peak_rss_bytes"])) < PROMISE_BYTES
    return found | {"file_bytes": size, "tokens_per_cpu_s": rate, "full_length_s": full_s, "kept": kept}


def run(scale: float = 0.2) -> dict[str, object]:
    """Figures of both kinds at `scale` of the promised length, and whether the promises hold."""
    found = {kind: measure(kind, scale * tokens) for kind, tokens in PROMISED_TOKENS.items()}
    return {
        "name": "analyze", "scale": scale, "promise_s": PROMISE_S, "promise_bytes": PROMISE_BYTES, **found,
        "kept": all(bool(part["kept"]) for part in found.values()),
    }  # fmt: skip


if __name__ == "__main__":
    json.dump(run(float(sys.argv[1]) if len(sys.argv) > 1 else 0.2), sys.stdout, indent=1)
    print()
