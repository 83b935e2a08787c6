"""Runs the driver in .venv-vllm with a receiver beside it; gives both sides, what vLLM said and what was streamed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlc_sentinel.records import Bye, Heartbeat, Hello, Record, Rollout, Synced
from dlc_sentinel.wire.codec import decode
from dlc_sentinel.wire.receiver import Receiver

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "dlc_sentinel",
    "DLC_SENTINEL_RUN": "vllm",
}
LIMIT_S = 540.0

needs_vllm = pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no vLLM in .venv-vllm; `make .venv-vllm/.ready`")


@dataclass
class Response:
    """One streamed response, its pieces put together."""

    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: str = ""
    final: bool = False
    cached: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    replica: str = ""
    pieces: int = 0
    producer: str = ""


class Stream:
    """All frames of one receiver, read by a thread until `close`."""

    def __init__(self, receiver: Receiver) -> None:
        self.payloads: list[bytes] = []
        self._receiver = receiver
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def close(self) -> None:
        """Reads what is still on its way."""
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while True:
            frames = self._receiver.poll(100)
            self.payloads += [bytes(frame.payload) for frame in frames]
            if not frames and self._stop.is_set():
                return

    @property
    def records(self) -> list[Record]:
        return [decode(payload)[0] for payload in self.payloads]

    @property
    def responses(self) -> dict[str, Response]:
        """By id. A piece that does not follow the one before it fails here."""
        found: dict[str, Response] = {}
        for record in self.records:
            if isinstance(record, Rollout):
                _take(found, record)
        return found

    @property
    def hellos(self) -> list[Hello]:
        return [record for record in self.records if isinstance(record, Hello)]

    @property
    def synced(self) -> list[Synced]:
        return [record for record in self.records if isinstance(record, Synced)]

    @property
    def dropped(self) -> int:
        """Tokens that producers say they lost."""
        last = {r.source.producer: r for r in self.records if isinstance(r, (Heartbeat, Bye))}
        return sum(sum(record.dropped_tokens.values()) for record in last.values())


def _take(found: dict[str, Response], record: Rollout) -> None:
    bounds = record.offsets_S1.tolist()
    for index, name in enumerate(record.ids):
        start, end = bounds[index], bounds[index + 1]
        response = found.setdefault(name, Response(replica=record.source.replica, producer=record.source.producer))
        assert not response.final, f"{name} came twice"
        at = int(record.token_offset_S[index])
        assert at == len(response.logprobs), f"{name}: a piece at {at} after {len(response.logprobs)} tokens"
        for where, version in zip(record.span_start_K.tolist(), record.span_version_K.tolist(), strict=True):
            if start <= where < end and (not response.spans or response.spans[-1][0] != version):
                response.spans.append((version, where - start + at))
        response.logprobs += record.logprobs_N[start:end].tolist()
        response.final = bool(record.final_S[index])
        response.pieces += 1
        response.finish = record.finish[index]
        assert record.cached_tokens_S is not None
        response.cached = int(record.cached_tokens_S[index])
        response.sampling = record.sampling[index] or {}


@dataclass
class Drive:
    """One run of the driver."""

    rows: dict[str, list[dict[str, Any]]]
    """By scene, what the engine returned."""
    stream: Stream
    stderr: str


@contextmanager
def listening() -> Iterator[tuple[Receiver, Stream]]:
    with Receiver("tcp://127.0.0.1:0") as receiver:
        stream = Stream(receiver)
        try:
            yield receiver, stream
        finally:
            stream.close()


def drive(mode: str, folder: Path, env: Mapping[str, str]) -> Drive:
    """The driver's run to its end."""
    with listening() as (receiver, stream):
        where = {"DLC_SENTINEL": str(receiver.address)}
        command = [str(ENGINE_PYTHON), str(HERE / "driver.py"), mode, str(folder)]
        done = subprocess.run(
            command, cwd=HERE, env=os.environ | ENGINE_ENV | where | dict(env), capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    return Drive(json.loads(done.stdout.splitlines()[-1]), stream, done.stderr)


def gap(row: Mapping[str, Any], response: Response, key: str = "trainer") -> Any:
    """Trainer minus streamed engine logprobs of one response, nats."""
    return np.array(row[key]) - np.array(response.logprobs)


def rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.concatenate([np.ravel(value) for value in values])))))
