"""watch: the live view of a running sentinel, or the picture that a tape ends with."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.cli.checks import lock_holder
from dlc_sentinel.cli.sentinel import until_signal
from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import TapeError
from dlc_sentinel.evidence import Evidence
from dlc_sentinel.records import Snapshot
from dlc_sentinel.runtime import Runtime
from dlc_sentinel.sinks import snapshot_json
from dlc_sentinel.tape.replay import TapeSource, last_states, read_tape
from dlc_sentinel.tape.schema import BOOT, is_tape
from dlc_sentinel.ui import live


def watch(
    source: Annotated[
        str | None, typer.Argument(metavar="[URL|DIR]", help="A sentinel's metrics address, or a tape folder.")
    ] = None,
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run; else the worst.")] = None,
    once: Annotated[bool, typer.Option("--once", help="One picture, then exit: 1 where health is not known.")] = False,
    as_json: settings.AsJson = False,
) -> None:
    """Show a run live, or the end of a tape.

    Verdict, what to do, both error terms, the ESS ladder, what was sent. On a terminal, ? shows the keys that open
    findings, worst tokens and history; q or Ctrl-C ends it. Without one: plain text, a new picture whenever step or
    verdict change. --json prints the snapshot and implies --once.
    """
    chosen = settings.load(config, sets).config
    read = snapshots(source, chosen)
    # Nothing new comes from a tape that nobody writes: without a screen to keep it on, one picture is all.
    ends = isinstance(read, _Tape) and not sys.stdout.isatty() and lock_holder(Path(str(source)) / "lock") is None
    if once or as_json or ends:
        try:
            code = live.once(read, screen.console(), run=run, as_json=snapshot_json.encode if as_json else None)
        except TapeError:
            raise
        except OSError as error:
            screen.say(str(error))
            raise typer.Exit(codes.DEGRADED) from error
        raise typer.Exit(code)
    stop = threading.Event()
    with until_signal(stop.set), screen.keyboard() as keys:
        live.watch(read, screen.console(), run=run, stop=stop, keys=keys)


def url_of(source: str | None, config: Config) -> str:
    """Base URL of a sentinel's metrics port: what was given, with or without /metrics, or where one listens here."""
    return (source or f"http://127.0.0.1:{config.serve.metrics_port}").rstrip("/").removesuffix("/metrics")


def snapshots(source: str | None, config: Config) -> Callable[[], Snapshot]:
    """Where pictures come from; calling it raises OSError or SentinelError while there is none."""
    if source is not None and Path(source).is_dir():
        return _Tape(Path(source), config)
    url = url_of(source, config)
    return lambda: snapshot_json.fetch(url)


class _Tape:
    """The last picture of a tape, made again only when the tape has grown."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder = folder
        self._config = config
        self._seen: object = None
        self._snapshot: Snapshot | None = None

    def __call__(self) -> Snapshot:
        size = sorted((path.name, path.stat().st_size) for path in self._folder.glob("*.arrows"))
        if self._snapshot is None or size != self._seen:
            self._snapshot, self._seen = last_picture(self._folder, self._config), size
        return self._snapshot


def last_picture(folder: Path, config: Config) -> Snapshot:
    """The snapshot a recorded run ends with, judged anew with `config`. Raises: TapeError if there is no tape."""
    frames = read_tape(folder)
    first = next(frames, None)
    kept = [] if first is None else [first]
    monitor = Monitor(config, replaying=True)
    runtime = Runtime(config, TapeSource(chain(kept, frames)), monitor, None, (), evidence=Evidence())
    if first is None or first.header != BOOT:
        assert is_tape(folder)
        runtime.resume(last_states(folder, float("inf") if first is None else first.t_s))
    runtime.run()
    return runtime.snapshot()
