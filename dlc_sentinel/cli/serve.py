"""serve: one sentinel in the foreground until SIGTERM or Ctrl-C."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.cli.sentinel import Latest, Sentinel, until_signal
from dlc_sentinel.config import Config
from dlc_sentinel.ui import live


def serve(
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    observe: settings.Observe = False,
    act: settings.Act = None,
    tape: settings.TapeDir = None,
    insecure: settings.Insecure = False,
    keys: settings.KeysDir = None,
    ui: Annotated[bool, typer.Option("--ui", help="Show the live view here, as `watch` does.")] = False,
    as_json: settings.AsJson = False,
) -> None:
    """Run the sentinel in the foreground.

    It listens to jobs, judges, records, exports, and sends RESYNC or ABORT back. Prints where it listens (stderr; with
    --json one line on stdout) and runs until SIGTERM or Ctrl-C, then takes what has already arrived, closes the tape
    and exits 0. In the job, set DLC_SENTINEL to the data address.
    """
    if ui and as_json:
        raise typer.BadParameter("--ui and --json both write to stdout; give one of them")
    chosen = settings.load(config, sets, observe=observe, act=act, tape=tape, insecure=insecure, keys=keys).config
    latest = Latest()
    # Lines on the terminal would break the picture; the picture shows the same events.
    with Sentinel(chosen, latest, alerts=not (ui and sys.stderr.isatty())) as sentinel:
        stop = threading.Event()
        with until_signal(stop.set if ui else sentinel.runtime.stop):
            if as_json:
                screen.data_json({**sentinel.addresses(), "pid": os.getpid()})
            announce(sentinel, chosen)
            if ui:
                sentinel.start()
                with screen.keyboard() as pressed:
                    live.watch(latest, screen.console(), stop=stop, keys=pressed)
            else:
                sentinel.run()
    if sentinel.error is not None:
        raise typer.Exit(codes.INTERNAL)


def announce(sentinel: Sentinel, config: Config) -> None:
    """The addresses as one block on stderr."""
    tape = config.tape.dir or "none (--tape DIR records the run)"
    lines = (
        f"dlc-sentinel listens, mode {config.act.mode}, pid {os.getpid()}",
        f"  data     {sentinel.address.data}",
        f"  control  {sentinel.address.control}",
        f"  metrics  {sentinel.metrics.url}/metrics",
        f"  page     {_page(sentinel, config)}",
        f"  tape     {tape}",
        f"  job      export {' '.join(_exports(sentinel, config))}",
        f"  view     dlc-sentinel watch {sentinel.metrics.url}",
    )
    print("\n".join(lines), file=sys.stderr, flush=True)


def _exports(sentinel: Sentinel, config: Config) -> Iterator[str]:
    """What a job's environment needs, as a shell takes it."""
    address = sentinel.address
    yield f"DLC_SENTINEL={f'tcp://{socket.gethostname()}:{address.port}' if _is_any(address.host) else address}"
    if config.serve.keys:
        yield f"DLC_SENTINEL_KEYS={shlex.quote(str(Path(config.serve.keys).resolve()))}"
    elif config.serve.insecure and not address.is_local:
        yield "DLC_SENTINEL_INSECURE=1"


def _is_any(host: str) -> bool:
    """True for an address that one listens at, on every interface, and no other machine can connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _page(sentinel: Sentinel, config: Config) -> str:
    if sentinel.page is None:
        return "off (serve.page)"
    wanted = config.serve.page_port
    taken = f" (port {wanted} is taken; --set serve.page_port=PORT)" if wanted not in (0, sentinel.page.port) else ""
    return f"{sentinel.page.url}{taken}"
