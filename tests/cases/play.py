"""How a made-up job trains, step by step; `job` is a monitor that believes it watches a real one."""

from __future__ import annotations

from factories import Job, commands
from factories_streams import make_streams

MOVES = {"lr": 1e-6, "grad_norm": 0.7}


def play(job: Job, steps, records_at, *, first=0, scalars_at=lambda step: MOVES, checksum_at=None, obey=None):
    """Trains `steps` steps; weights go out after each where `checksum_at` is given; RESYNCs are answered by `obey`."""
    for step in range(first, first + steps):
        records = records_at(step)
        events = job.step(step, *(records if isinstance(records, list) else [records]), scalars=scalars_at(step))
        if checksum_at:
            job.synced(step + 1, step, checksum=checksum_at(step))
        for command in commands(events):
            if obey and command["kind"] == "RESYNC" and command["sent"]:
                obey(step)
                job.ack(command, version=step + 1, step=step)


def new_checksum(step):
    return f"c{step}"


def shrug(step):
    """Obeys, and nothing changes."""


def at_level(job, steps, disc_at):
    """A sync job whose engine is off by rms `disc_at(step)` nats; it obeys, and nothing changes."""
    play(job, steps, lambda step: make_streams(step, disc=disc_at(step)).train(), checksum_at=new_checksum, obey=shrug)
