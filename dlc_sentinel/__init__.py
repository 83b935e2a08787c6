"""Watches LLM reinforcement-learning runs: splits engine discrepancy from policy lag, says what is wrong, and acts.

`connect` gives a job its hook (a no-op while DLC_SENTINEL is unset); `analyze` reads a recorded run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlc_sentinel.hook import connect
from dlc_sentinel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dlc_sentinel.config import Config
    from dlc_sentinel.records import Json

__all__ = ["__version__", "analyze", "connect"]


def analyze(path: str | Path, config: Config | None = None, *, corrections: bool = False) -> Mapping[str, Json]:
    """The report object of a tape folder or a `.jsonl` file, as `dlc-sentinel analyze --json` prints it.

    `corrections`: under the key of that name, what each correction would have done and which one the run needs.
    Raises: TapeError when nothing in `path` can be read.
    """
    from dlc_sentinel.offline.analyze import analyze as read

    return read(path, config, corrections=corrections)
