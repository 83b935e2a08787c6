"""test-fire: one notification to every target, so that nobody learns at 3 a.m. that the pager was never wired."""

from __future__ import annotations

import socket
from typing import Annotated, Literal

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.records import Level

_LEVELS: dict[str, Level] = {"info": "INFO", "warn": "WARN", "critical": "CRITICAL"}


def fire(
    level: Annotated[
        Literal["info", "warn", "critical"], typer.Option(help="critical reaches the targets that hear only that.")
    ] = "critical",
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    as_json: settings.AsJson = False,
) -> None:
    """Send one test notification to every target of the settings.

    Prints what came of each; an address is never shown. Exit code: 0 all took it, 1 one did not, 2 there is none.
    """
    from dlc_sentinel.sinks.notify import trouble
    from dlc_sentinel.sinks.targets import targets_of

    chosen = settings.load(config, sets).config.notify
    targets = targets_of(chosen)
    if not targets:
        raise typer.BadParameter("no target: set notify.urls or notify.file (see `dlc-sentinel config init`)")
    title = f"dlc-sentinel {level}: test"
    body = f"A test of the notifications of dlc-sentinel on {socket.gethostname()}. Nothing is wrong; do nothing."
    results = []
    for target in targets:
        if target.only_critical and level != "critical":
            results.append((target.name, "skipped: hears only what is critical"))
        else:
            results.append((target.name, trouble(target, title, body, _LEVELS[level]) or "taken"))
    if as_json:
        screen.data_json([{"target": name, "outcome": outcome} for name, outcome in results])
    else:
        for name, outcome in results:
            screen.data(f"{name}: {outcome}")
    if any(outcome != "taken" and not outcome.startswith("skipped") for _, outcome in results):
        raise typer.Exit(codes.DEGRADED)
