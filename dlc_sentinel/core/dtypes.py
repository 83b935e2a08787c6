"""Which dtypes a run's floor goes by: what each side said at connect, and what its arrays add to that."""

from __future__ import annotations

from collections.abc import Mapping

from dlc_sentinel.core.floors import coarsest

UNSAID: Mapping[str, str] = {"engine": "bfloat16", "trainer": "bfloat16"}
"""Of a side that nobody spoke for: one side's word says nothing of the other's numerics."""
SIDES: Mapping[str, str] = {"engine": "engine", "trainer": "trainer", "cur": "trainer"}


def said(dtypes: Mapping[str, str]) -> dict[str, str]:
    """What a Hello's dtypes say, by side; a name that has no floor of its own ("auto") counts as the usual one."""
    named = {key: name for key, name in dtypes.items() if name}
    return {SIDES.get(key, key): coarsest([name]) if key in SIDES else name for key, name in named.items()}


def carried(dtypes: Mapping[str, str]) -> dict[str, str]:
    """What a record's dtypes add to what was said, by stream: a 16-bit or 8-bit one makes the floor coarser.

    None makes it finer: logprobs of any numerics are returned as float32. `old` is not of the engine's step.
    """
    return {f"{stream} array": name for stream, name in dtypes.items() if stream != "old"}
