"""run -- CMD: a sentinel and the job it watches, started and ended together."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.cli.child import ABORT, Child
from dlc_sentinel.cli.sentinel import Sentinel, own_address
from dlc_sentinel.cli.serve import announce
from dlc_sentinel.config import Config
from dlc_sentinel.errors import AddressInUse
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json, Snapshot

GRACE_S = 60.0


class AbortBell:
    """The sink that says when an ABORT was sent to the job."""

    def __init__(self, ring: Callable[[str], None]) -> None:
        self._ring = ring

    def handle(self, event: Event) -> None:
        if event.kind == "command" and event.data.get("kind") == "ABORT" and event.data.get("sent"):
            self._ring(ABORT)

    def publish(self, snapshot: Snapshot) -> None:
        """Nothing: a command is an event."""

    def close(self) -> None:
        """Nothing to release."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The job and its arguments.")],
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    observe: settings.Observe = False,
    act: settings.Act = None,
    tape: settings.TapeDir = None,
    insecure: settings.Insecure = False,
    keys: settings.KeysDir = None,
    name: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run; else made up.")] = None,
    grace: Annotated[float, typer.Option(min=0.0, metavar="S", help="Seconds after ABORT to SIGTERM, to SIGKILL.")] = (
        GRACE_S
    ),
) -> None:
    """Run a job with a sentinel of its own.

    Exits with the job's own exit code (128 + n after signal n). The job gets DLC_SENTINEL and DLC_SENTINEL_RUN; signals
    are passed on to it. With --act abort: an ABORT asks the job's hook first; a job that has not ended after the grace
    time gets SIGTERM, and after the same time again SIGKILL.
    """
    load = partial(settings.load, config, sets, observe=observe, act=act, tape=tape, insecure=insecure, keys=keys)
    name = name or os.environ.get("DLC_SENTINEL_RUN") or _made_up(command)
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    sentinel, chosen = _beside(load, AbortBell(news.put))
    with sentinel:
        announce(sentinel, chosen)
        sentinel.start()
        try:
            child = Child(command, _environment(sentinel, chosen, name), news)
        except OSError as error:
            screen.say(f"{command[0]}: cannot be started: {error.strerror}")
            missing = isinstance(error, FileNotFoundError)
            raise typer.Exit(codes.NOT_FOUND if missing else codes.NOT_EXECUTABLE) from error
        with child.signals_passed_on():
            code = child.wait(grace)
    screen.say(_summary(sentinel, chosen, name, code))
    raise typer.Exit(code)


def _beside(load: Callable[..., settings.Settings], bell: AbortBell) -> tuple[Sentinel, Config]:
    """A sentinel for one job. Several may run on one machine, so what nobody set is chosen free."""
    own: dict[str, Json] = {"serve.address": own_address("run")}
    chosen = load(unless_set=own)
    try:
        return Sentinel(chosen.config, bell), chosen.config
    except AddressInUse:
        other = load(unless_set=own | {"serve.metrics_port": 0})
        if other == chosen:
            raise
    return Sentinel(other.config, bell), other.config


def _environment(sentinel: Sentinel, config: Config, name: str) -> dict[str, str]:
    """What the job's hook reads, in the environment that we were given."""
    told = {"DLC_SENTINEL": str(sentinel.address), "DLC_SENTINEL_RUN": name}
    if config.serve.keys:
        told["DLC_SENTINEL_KEYS"] = str(Path(config.serve.keys).resolve())
    if config.serve.insecure:
        told["DLC_SENTINEL_INSECURE"] = "1"
    return {**os.environ, **told}


def _made_up(command: Sequence[str]) -> str:
    """A run name that says what ran and when: train-20260821-031502."""
    script = next((part for part in command[1:] if part.endswith(".py")), command[0])
    return f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _summary(sentinel: Sentinel, config: Config, name: str, code: int) -> str:
    heard = {run.run: run for run in sentinel.runtime.snapshot().runs}
    # A run without a step is at most an engine under the name of the environment, while the trainer took another.
    runs = {known: run for known, run in heard.items() if run.last_step >= 0} or heard
    renamed = ""
    if name not in runs and len(runs) == 1:
        (own,) = runs
        renamed = f" (the job named it so: connect(run=...) wins over DLC_SENTINEL_RUN={plain(name, 60)})"
        name = own
    text = f"the job ended with {code}; run {plain(name, 60)}{renamed}: "
    if sentinel.error is not None:
        text += f"not watched to its end ({type(sentinel.error).__name__}: {sentinel.error})"
    elif name in runs:
        text += f"{runs[name].verdict} at step {runs[name].last_step}"
    elif runs:
        text += (
            f"nothing came under this name; the job reported as {', '.join(map(plain, runs))} (connect(run=...) wins "
            "over DLC_SENTINEL_RUN)"
        )
    else:
        text += "nothing came from the job; does it call the hook?"
    return text + (f"; tape {config.tape.dir}, read it with `dlc-sentinel replay`" if config.tape.dir else "")
