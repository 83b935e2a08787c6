"""replay --to-tsdb: a recorded run as blocks of a Prometheus, made by promtool."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import typer

from dlc_sentinel.cli import codes, screen
from dlc_sentinel.config import Config
from dlc_sentinel.offline import timeline
from dlc_sentinel.plaintext import plain
from dlc_sentinel.sinks.openmetrics import OpenMetricsSink
from dlc_sentinel.tape.schema import is_tape

TEXT_FILE = "dlc-sentinel.om"


def write(path: Path, folder: Path, config: Config, *, ends_now: bool) -> None:
    """Fills `folder` with blocks, or where promtool is missing with the text to make them from (exit code 1).

    A .jsonl knows no times: it always ends now.
    """
    sink = OpenMetricsSink()
    timeline.play(path, config, sink)
    if ends_now or not is_tape(path):
        sink.end_at(time.time())
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / TEXT_FILE
    sink.write(text)
    promtool = shutil.which("promtool")
    command = ["tsdb", "create-blocks-from", "openmetrics", str(text), str(folder)]
    if promtool is None:
        screen.say(f"promtool is not installed; {sink.num_samples} samples are in {text}: promtool {' '.join(command)}")
        raise typer.Exit(codes.DEGRADED)
    done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        screen.say(f"promtool failed ({done.returncode}), the samples are in {text}: {plain(done.stderr, 400)}")
        raise typer.Exit(codes.DEGRADED)
    text.unlink()
    screen.say(f"{sink.num_samples} samples written to {folder}: prometheus --storage.tsdb.path={folder} shows them")
