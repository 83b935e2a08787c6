"""A real `vllm serve` with two API servers, and a client that asks it over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.stacks.vllm.support import ENGINE_ENV, ENGINE_PYTHON, HERE, Stream, listening

READY_S = 540.0
SHUTDOWN_S = 30
"""Without it vLLM kills its API servers at once, whatever they still hold."""
MAX_TOKENS = 32768
"""Far more than are generated while a busy server finds out that a client has hung up."""


class Server:
    """The address of a running server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer; None where the body is empty."""
        url, headers = f"http://127.0.0.1:{self.port}{path}", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def give_up(self, body: Mapping[str, Any], events: int) -> str:
        """Starts a streamed completion, reads so many events, hangs up. The completion's id."""
        text = json.dumps(dict(body) | {"stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as line:
            line.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
            seen = b""
            while seen.count(b"data: {") < events:
                seen += line.recv(65536)
        first = seen.split(b"data: ", 1)[1]
        return str(json.JSONDecoder().raw_decode(first.decode(errors="replace"))[0]["id"])


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[tuple[Server, Stream]]:
    """A server with a receiver beside it; both are gone afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    make = "import sys, pathlib, tiny_model; tiny_model.write(pathlib.Path(sys.argv[1]))"
    if not folder.exists():
        subprocess.run([str(ENGINE_PYTHON), "-c", make, str(folder)], cwd=HERE, check=True, env=os.environ | ENGINE_ENV)
    command = [
        str(ENGINE_PYTHON.with_name("vllm")), "serve", str(folder), "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64",
        "--max-model-len", str(MAX_TOKENS), "--hf-overrides", json.dumps({"max_position_embeddings": MAX_TOKENS}),
        "--api-server-count", "2", "--distributed-executor-backend", "uni", "--no-enable-prefix-caching",
        "--served-model-name", "tiny", "--shutdown-timeout", str(SHUTDOWN_S),
    ]  # fmt: skip
    with listening() as (receiver, stream), log.open("w") as out:
        env = os.environ | ENGINE_ENV | {
            "DLC_SENTINEL": str(receiver.address), "DLC_SENTINEL_FORCE_LOGPROBS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1",
        }  # fmt: skip
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            _wait_ready(port, process, log)
            yield Server(port), stream
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(3 * SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def _wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end_s, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)  # the server has no other sign of being ready than that it answers
