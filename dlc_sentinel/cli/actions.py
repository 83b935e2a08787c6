"""actions list, actions reset: what a running sentinel sent, and closing its breaker by hand."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer

from dlc_sentinel.cli import codes, reset_token, screen, settings
from dlc_sentinel.cli.watch import url_of
from dlc_sentinel.errors import SentinelError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import RunSnapshot
from dlc_sentinel.sinks import snapshot_json
from dlc_sentinel.sinks.prometheus import RESET_PATH

CONFIRM_S = 10.0
_LOOK_S = 0.1

Url = Annotated[
    str | None, typer.Argument(metavar="[URL]", help="The sentinel's metrics address; else this machine's.")
]

RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only this run; else all.")]

app = typer.Typer(no_args_is_help=True, help="What was sent to jobs.", rich_markup_mode=None)


@app.command("list")
def list_actions(
    url: Url = None,
    config: settings.ConfigFile = None,
    run: RunName = None,
    as_json: settings.AsJson = False,
) -> None:
    """Print what a running sentinel sent. With what came of each command, and the breakers."""
    runs = [shown for shown in _runs(url_of(url, settings.load(config).config)) if run in (None, shown.run)]
    if as_json:
        screen.data_json([
            {"run": shown.run, "breaker_open": shown.breaker_open, "commands": [dict(c) for c in shown.commands]}
            for shown in runs
        ])  # fmt: skip
        return
    for shown in runs:
        screen.data(f"{plain(shown.run, 60)}: mode {shown.mode}, breaker {'OPEN' if shown.breaker_open else 'closed'}")
        columns = ("step", "kind", "action", "outcome", "reason", "id")
        screen.table(columns, [[command.get(name) or "" for name in columns] for command in shown.commands])
    if not runs:
        screen.say("no run here" if run is None else f"no run {plain(run, 60)!r} here")


@app.command("reset")
def reset(
    url: Url = None,
    config: settings.ConfigFile = None,
    run: RunName = None,
    as_json: settings.AsJson = False,
) -> None:
    """Close an open breaker by hand.

    RESYNCs without effect have opened it; afterwards the sentinel acts again. Without --run: every open one.
    Only the user who started the sentinel, on the same machine.
    """
    base = url_of(url, settings.load(config).config)
    runs = _runs(base)
    wanted = [shown.run for shown in runs if (shown.breaker_open if run is None else shown.run == run)]
    if run is not None and not wanted:
        known = ", ".join(plain(shown.run, 40) for shown in runs) or "none"
        raise typer.BadParameter(f"no run {plain(run, 60)!r} here; runs known: {known}")
    for name in wanted:
        _post(base, name)
    still = _still_open(base, wanted)
    if as_json:
        screen.data_json({"reset": [name for name in wanted if name not in still], "open": still})
    elif wanted:
        screen.data(f"breaker reset: {', '.join(plain(name, 60) for name in wanted if name not in still) or 'none'}")
    else:
        screen.data("no breaker is open")
    if still:
        screen.say(f"still open after {CONFIRM_S:g} s: {', '.join(plain(name, 60) for name in still)}")
        raise typer.Exit(codes.DEGRADED)


def _runs(base: str) -> tuple[RunSnapshot, ...]:
    try:
        return snapshot_json.fetch(base, history=0).runs
    except (OSError, SentinelError) as error:
        screen.say(str(error))
        raise typer.Exit(codes.DEGRADED) from error


def _post(base: str, run: str) -> None:
    port = urlsplit(base if "://" in base else f"http://{base}").port or 80
    secret = reset_token.read(port)
    if secret is None:
        screen.say(
            f"no token for the sentinel at {base} ({reset_token.path_for(port)} is not there or not yours): "
            "run this on the sentinel's machine as its user"
        )
        raise typer.Exit(codes.DEGRADED)
    request = urllib.request.Request(
        f"{base if '://' in base else f'http://{base}'}{RESET_PATH}?run={quote(run, safe='')}",
        method="POST",
        headers={"Authorization": f"Bearer {secret}"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=CONFIRM_S):
            pass
    except urllib.error.HTTPError as error:
        screen.say(f"{base} refused: {error.code} {plain(error.read(400).decode(errors='replace'))}")
        raise typer.Exit(codes.DEGRADED) from error
    except OSError as error:
        screen.say(f"{base}: {error}")
        raise typer.Exit(codes.DEGRADED) from error


def _still_open(base: str, names: list[str]) -> list[str]:
    """Names whose breaker the sentinel still shows as open when the time is over."""
    end_s = time.monotonic() + CONFIRM_S
    pause = threading.Event()
    while True:
        still = [shown.run for shown in _runs(base) if shown.run in names and shown.breaker_open]
        if not still or time.monotonic() >= end_s:
            return still
        pause.wait(_LOOK_S)
