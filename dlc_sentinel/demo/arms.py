"""Runs arms as processes, two at a time, and hands on what they report.

    for item in run_demo(three_arms(seed=1), out, env={"watched": {"DLC_SENTINEL": address}}):
        ...                       # StepReport while arms run, ArmResult as each ends

An arm is a process of its own (trainer.py) with a generator process of its own; it works alike with and without a
sentinel. What the arms and their generators write to standard error goes to OUT/<arm>/stderr.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import dlc_sentinel
from dlc_sentinel.demo.spec import ArmResult, ArmSpec, StepReport, report_from_dict
from dlc_sentinel.records import Json

END_S = 15.0
"""How long an arm that is told to stop may take."""

Progress: TypeAlias = StepReport | ArmResult


class ArmFailed(RuntimeError):
    """An arm's process broke; the message carries the end of its standard error."""


def three_arms(seed: int = 1, base: ArmSpec | None = None) -> tuple[ArmSpec, ArmSpec, ArmSpec]:
    """(watched, unwatched, control): one job three times, with equal seed and settings.

    watched: old weights until a command comes, which it obeys. unwatched: the same, deaf. control: weights every step.
    """
    job = replace(base or ArmSpec(), seed=seed)
    thirds = tuple(job.num_steps * part // 4 for part in (1, 2, 3))
    return (
        replace(job, name="watched", syncs_every_step=False, obeys=True, snapshot_steps=thirds),
        replace(job, name="unwatched", syncs_every_step=False, obeys=False),
        replace(job, name="control", syncs_every_step=True, obeys=True),
    )


def run_demo(
    specs: Sequence[ArmSpec],
    out: Path,
    *,
    env: Mapping[str, Mapping[str, str]] | None = None,
    parallel: int = 2,
) -> Iterator[Progress]:
    """Every arm's StepReports as they come, and one ArmResult as each ends, in the order of events.

    Args: out: folder for the arms' files, made if need be; env: {arm name: variables for its processes}, such as
    DLC_SENTINEL; DLC_SENTINEL_RUN is the arm's name unless given. Arms start in the order of `specs`, at most
    `parallel` at a time. Closing the iterator ends the arms that run.
    Raises: ArmFailed, after the others were ended.
    """
    waiting = list(specs)
    running: dict[str, _Running] = {}
    news: queue.Queue[tuple[str, str | None]] = queue.Queue()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                spec = waiting.pop(0)
                running[spec.name] = _Running(spec, out / spec.name, (env or {}).get(spec.name, {}), news)
            name, line = news.get()
            item = running[name].take(line)
            if item is not None:
                yield item
            if line is None:
                del running[name]
    finally:
        for arm in running.values():
            arm.end()


@dataclass(slots=True)
class _Running:
    """One arm's process; a thread puts its lines, then None, on `news`."""

    spec: ArmSpec
    folder: Path
    env: Mapping[str, str]
    news: queue.Queue[tuple[str, str | None]]
    steps: list[StepReport] = field(default_factory=list)
    last: dict[str, Json] = field(default_factory=dict)
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "spec.json").write_text(self.spec.to_json())
        root = str(Path(dlc_sentinel.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        names = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DLC_SENTINEL_RUN": self.spec.name}
        with (self.folder / "stderr.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dlc_sentinel.demo.trainer", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **names, **self.env},
                start_new_session=True,
            )
        threading.Thread(target=self._read, name=f"arm {self.spec.name}", daemon=True).start()

    def take(self, line: str | None) -> Progress | None:
        """The report in a line; None as line = the process is through: its result. Raises: ArmFailed."""
        if line is None:
            return self._result()
        message = json.loads(line)
        if message["type"] != "step":
            self.last = message
            return None
        report = report_from_dict(message)
        self.steps.append(report)
        return report

    def end(self) -> None:
        """Ends the arm and its generator: asked first, then made to."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
                return

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.news.put((self.spec.name, line))
        self.process.wait()
        self.news.put((self.spec.name, None))

    def _result(self) -> ArmResult:
        if self.last.get("type") != "end":
            log = (self.folder / "stderr.log").read_text(errors="replace")[-2000:]
            why = self.last.get("text") or f"exit code {self.process.returncode}"
            raise ArmFailed(
                f"arm {self.spec.name} after {len(self.steps)} steps: {why}; {self.folder}/stderr.log:\n{log}"
            )
        return ArmResult(
            self.spec,
            tuple(self.steps),
            ended=str(self.last["ended"]),
            wall_s=float(self.last["wall_s"]),
            checksums=tuple((int(version), str(text)) for version, text in self.last["checksums"]),
            snapshots=tuple(self.last["snapshots"]),
        )
