"""What verl knows of a row besides its tensors: ids, groups, and the generator's version of every token.

Plain Python and numpy; `segments` is {"tokens": [n, ...], "versions": [v, ...], "ids": [id, ...], "turns": k}: the
engine requests one sample was made of, in order, as `verl_rollout` noted them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlc_sentinel.records import I64, UNKNOWN_VERSION, Bool

SEGMENTS = "dlc_segments"
"""Key of the segments in verl's extra_fields."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One row's generator: oldest and newest version, and the segments where they are known."""

    oldest: int
    newest: int
    segments: Mapping[str, Any] | None = None

    @property
    def is_uniform(self) -> bool:
        return self.oldest == self.newest


def facts_of(extra: Mapping[str, Any]) -> Facts:
    """The row's facts from verl's extra_fields, or from the columns of the same names."""
    segments = extra.get(SEGMENTS)
    if isinstance(segments, Mapping) and segments.get("versions"):
        versions = [_version(v) for v in segments["versions"]]
        return Facts(min(versions), max(versions), segments)
    newest = _version(extra.get("max_global_steps"))
    oldest = _version(extra.get("min_global_steps"))
    return Facts(oldest, newest)


def token_versions(facts: Sequence[Facts], width: int, mask_BT: Bool | None) -> I64:
    """[B] version of each row, or [B, T] of each token where a row is of several versions.

    T = width. A row of several versions whose tokens cannot be told apart is UNKNOWN_VERSION throughout. `mask_BT`
    (True on generated tokens) is needed only where `needs_mask` says so.
    """
    if all(row.is_uniform for row in facts):
        return np.array([row.newest for row in facts], np.int64)
    out_BT = np.full((len(facts), width), UNKNOWN_VERSION, np.int64)
    for index, row in enumerate(facts):
        if row.is_uniform:
            out_BT[index] = row.newest
        elif row.segments is not None:
            generated = np.repeat([_version(v) for v in row.segments["versions"]], row.segments["tokens"])[:width]
            if row.segments.get("turns", 1) <= 1:
                out_BT[index, : len(generated)] = generated
                out_BT[index, len(generated) :] = generated[-1] if len(generated) else UNKNOWN_VERSION
            elif mask_BT is not None:
                at = np.flatnonzero(mask_BT[index])[: len(generated)]
                out_BT[index, at] = generated[: len(at)]
    return out_BT


def needs_mask(facts: Sequence[Facts]) -> bool:
    """True when tool text lies between tokens of different versions, so that only the mask can place them."""
    return any(not row.is_uniform and row.segments is not None and row.segments.get("turns", 1) > 1 for row in facts)


def wire_segments(facts: Sequence[Facts]) -> list[list[list[Any]]] | None:
    """[[engine id, first token, tokens], ...] of each row for hook.train, or None unless all rows have engine ids."""
    rows = []
    for row in facts:
        if row.segments is None or not all(row.segments["ids"]):
            return None
        rows.append([[name, 0, num] for name, num in zip(row.segments["ids"], row.segments["tokens"], strict=True)])
    return rows


class RowNames:
    """Names that are unique within one optimizer update over all ranks: uid, session, rank, and n-th of that name."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: dict[str, int] = {}

    def restart(self) -> None:
        """A new update begins."""
        self._seen.clear()

    def take(self, uids: Sequence[Any], sessions: Sequence[Any] | None) -> list[str]:
        """One name per row."""
        names = []
        for index, uid in enumerate(uids):
            stem = f"{uid}_{sessions[index]}" if sessions is not None else str(uid)
            place = self._seen[stem] = self._seen.get(stem, -1) + 1
            names.append(f"{stem}/{self._rank}.{place}")
        return names


def _version(value: Any) -> int:
    return UNKNOWN_VERSION if value is None else int(value)
