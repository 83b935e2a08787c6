"""Rewrites state.arrows without the states nobody can resume from any more; every event stays."""

from __future__ import annotations

import os
from pathlib import Path

from dlc_sentinel.errors import TapeError
from dlc_sentinel.tape.schema import STATE, STATE_FILE, STATE_KIND, TOKENS, part_paths
from dlc_sentinel.tape.stream import Opener, StreamReader, StreamWriter


def compact(directory: Path, opener: Opener) -> None:
    """Keeps, of each run, the newest state and the newest one before each part of the ring (a replay starts there).

    The file is replaced in one step. Raises: OSError, after which the old file is as it was.
    """
    path = directory / STATE_FILE
    spare = directory / f"{STATE_FILE}.new"
    spare.unlink(missing_ok=True)
    wanted = _wanted(path, [*_part_starts(directory), float("inf")])
    try:
        writer = StreamWriter(spare, STATE, opener)
        try:
            at = 0
            for batch in StreamReader(path, STATE):
                kinds = batch.column("kind").to_pylist()
                for i, kind in enumerate(kinds):
                    if kind != STATE_KIND or at + i in wanted:
                        writer.append(batch.slice(i, 1))
                at += len(kinds)
            writer.sync()
        finally:
            writer.close()
        os.replace(spare, path)
    except OSError:
        spare.unlink(missing_ok=True)
        raise


def _wanted(path: Path, starts_s: list[float]) -> set[int]:
    """Row numbers of the states to keep."""
    newest: dict[tuple[str, float], int] = {}
    at = 0
    for batch in StreamReader(path, STATE):
        columns = (batch.column(name).to_pylist() for name in ("t_s", "run", "kind"))
        for t_s, run, kind in zip(*columns, strict=True):
            if kind == STATE_KIND:
                newest |= {(run, start_s): at for start_s in starts_s if t_s < start_s}
            at += 1
    return set(newest.values())


def _part_starts(directory: Path) -> list[float]:
    """Time of the first frame of each part."""
    starts: list[float] = []
    for _, path in part_paths(directory):
        try:
            batch = next(iter(StreamReader(path, TOKENS)), None)
        except TapeError:
            continue
        if batch is not None:
            starts.append(batch.column("t_s")[0].as_py())
    return starts
