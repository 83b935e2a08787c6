"""Programs of the command line, and what a job does to a sentinel through the real hook."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from factories_job import train

from dlc_sentinel.hook import Hook
from dlc_sentinel.records import Hello, Source

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


def program(*arguments, **changes):
    """One command as a process of its own; its pipes are text."""
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "dlc_sentinel", *map(str, arguments)]
    return subprocess.Popen(command, **(settings | changes))


def ended(process, deadline_s=DEADLINE_S):
    """What came of a process that must end by itself."""
    try:
        out, err = process.communicate(timeout=deadline_s)
    finally:
        process.kill()
    return Done(process.returncode, out, err)


def wait_until(condition, what="it"):
    end_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end_s, f"{what} did not come before the deadline"
        threading.Event().wait(0.02)
    return found


class Serving:
    """A `serve --json` that is up; `info` is the line it printed."""

    def __init__(self, *arguments):
        self.process = program("serve", "--json", "--set", "serve.metrics_port=0", *arguments)
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(ended(self.process).err)
        self.info = json.loads(line)
        self.url = self.info["metrics"]

    def kill(self):
        self.process.kill()
        return ended(self.process)

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        return ended(self.process)


def connect(address, run="r1"):
    return Hook(str(address), Hello(Source(run, "trainer", "")))


def send_step(hook, step, **changes):
    """One whole step of factories_job.train; returns the command that poll gives."""
    record = train(step, **changes)
    hook.train(
        step, record.version, seq_id=list(record.ids), group=list(record.groups), cur=record.cur_N, old=record.old_N,
        engine=record.engine_N, cu_seqlens=record.offsets_S1, old_is=record.old_is,
        versions=int(record.span_version_K[0]),
    )  # fmt: skip
    return hook.poll(step)


def shuffled(step):
    """Streams that no longer belong to one another: catastrophic."""
    record = train(step)
    return {"engine_N": record.engine_N[::-1].copy()}
