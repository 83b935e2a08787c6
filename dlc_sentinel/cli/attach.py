"""attach, detach: into a verl job that already runs, and out of it again, through Ray."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.plaintext import plain

RayAddress = Annotated[
    str, typer.Option("--ray", metavar="ADDRESS", help="Ray address of the job; auto = the one here.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Longest wait for a busy training rank.")]
KEPT = ("DLC_SENTINEL_KEYS", "DLC_SENTINEL_INSECURE", "DLC_SENTINEL_QUEUE_BYTES")


def attach(
    ray: RayAddress = "auto",
    sentinel: Annotated[
        str | None, typer.Option("--sentinel", metavar="ADDRESS", help="As DLC_SENTINEL; else that variable, else 1.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Name of the run; else default.")] = None,
    timeout: Timeout = 600.0,
    as_json: settings.AsJson = False,
) -> None:
    """Watch a verl job that already runs. Run it with the job's own Python; nothing of the job's settings changes.

    It watches only: RESYNC and ABORT need the plug-in at launch. `detach` takes everything out again.
    """
    from dlc_sentinel.integrations import verl_attach

    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env["DLC_SENTINEL"] = sentinel or os.environ.get("DLC_SENTINEL") or "1"
    env["DLC_SENTINEL_RUN"] = run or os.environ.get("DLC_SENTINEL_RUN") or "default"
    _tell(verl_attach.attach(ray, env, timeout_s=timeout), as_json, verl_attach.WATCHES_ONLY)


def detach(ray: RayAddress = "auto", timeout: Timeout = 600.0, as_json: settings.AsJson = False) -> None:
    """Take out what `attach` put into a running job: every function is the job's own again."""
    from dlc_sentinel.integrations import verl_attach

    _tell(verl_attach.detach(ray, timeout_s=timeout), as_json, "")


def _tell(reached: list, as_json: bool, note: str) -> None:  # type: ignore[type-arg]  # verl_attach is imported late
    if as_json:
        actors = [{"actor": one.name, "outcome": one.outcome} for one in reached]
        screen.data_json({"actors": actors, "note": note})
    else:
        for one in reached:
            screen.data(plain(f"{one.name}: {one.outcome}"))
        if note:
            screen.say(note)
    if not any(one.is_done for one in reached):
        raise typer.Exit(codes.DEGRADED)
