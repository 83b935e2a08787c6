"""keys new: CURVE keys for a sentinel and its producers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import screen, settings
from dlc_sentinel.wire import keys as keyring

app = typer.Typer(no_args_is_help=True, help="CURVE keys, needed for tcp off loopback.", rich_markup_mode=None)


@app.command("new")
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if missing, mode 0700.")],
    as_json: settings.AsJson = False,
) -> None:
    """Write a sentinel pair and a producer pair, mode 0600; existing keys are never overwritten."""
    paths = [str(path) for path in keyring.new_keys(folder)]
    if as_json:
        screen.data_json({"files": paths})
        return
    for path in paths:
        screen.data(path)
    screen.say(f"sentinel: --keys {folder}; job: DLC_SENTINEL_KEYS={folder} (needs no sentinel.secret there)")


@app.callback()
def _keys() -> None:
    """A group stays a group while it has one command."""
