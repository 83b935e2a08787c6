"""One call of hook.rollout to one parcel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.records import I64, UNKNOWN_VERSION, Json, Rollout, Source
from dlc_sentinel.wire import gather
from dlc_sentinel.wire.gather import Packed
from dlc_sentinel.wire.pack import Take, version_of
from dlc_sentinel.wire.tensors import Flight, Flights, Lander, Landing, land


@dataclass(slots=True)
class RolloutCall:
    """What hook.rollout was given, one entry per sequence."""

    source: Source
    ids: list[str]
    columns: dict[str, Landing]
    """logprobs and perhaps tokens, each a list of rows."""
    versions: list[int]
    spans: list[Sequence[tuple[Any, int]] | None]
    """Per sequence [(version, first token)], or None for the version alone."""
    finish: list[str]
    cached_tokens: list[int] | None
    sampling: list[Mapping[str, Json] | None] | None
    token_offset: int
    final: bool

    def is_in_flight(self) -> bool:
        """True when a row is still being copied from a device."""
        return any(isinstance(value, (Flight, Flights)) for value in self.columns.values())

    def load(self, take: Take) -> Packed:
        """See `load_rollout`."""
        return load_rollout(self, take)

    def record(self, packed: Packed) -> Rollout:
        """See `rollout_record`."""
        return rollout_record(self, packed)


def rollout_call(
    source: Source, lander: Lander, seq_id: Any, logprobs: Any, tokens: Any, given: Mapping[str, Any]
) -> RolloutCall:
    """The call of one sequence (`seq_id` a text) or of many, with each value given per row or once for all.

    Raises: ShapeError where a list has not one entry per sequence.
    """
    many = isinstance(seq_id, (list, tuple))
    ids = [str(one) for one in seq_id] if many else [str(seq_id)]
    columns = {"logprobs": logprobs} if tokens is None else {"logprobs": logprobs, "tokens": tokens}
    cached, sampling = given["cached_tokens"], given["sampling"]

    def each(name: str) -> list[Any]:
        value = given[name]
        if not many or value is None or isinstance(value, (int, str, Mapping)):
            return [value] * len(ids)
        if len(value) != len(ids):
            raise ShapeError(f"{name} has {len(value)} entries for {len(ids)} sequences")
        return list(value)

    return RolloutCall(
        source=source,
        ids=ids,
        columns={name: lander.fetch_rows(value if many else [value]) for name, value in columns.items()},
        versions=[version_of(one) for one in each("version")],
        spans=each("version_spans"),
        finish=[str(one or "") for one in each("finish")],
        cached_tokens=None if cached is None else [int(one or 0) for one in each("cached_tokens")],
        sampling=None if sampling is None else each("sampling"),
        token_offset=int(given["token_offset"]),
        final=bool(given["final"]),
    )


def load_rollout(call: RolloutCall, take: Take) -> Packed:
    """The rows in memory of our own. Raises: ShapeError when a column lacks rows."""
    packed = gather.gather({name: land(value) for name, value in call.columns.items()}, take)
    if packed.num_rows != len(call.ids):
        raise ShapeError(f"{packed.num_rows} rows of logprobs for {len(call.ids)} sequences")
    call.columns = {}
    return packed


def rollout_record(call: RolloutCall, packed: Packed) -> Rollout:
    """The record of a loaded call."""
    rows = list(range(packed.num_rows)) if packed.kept is None else packed.kept
    offsets_S1 = packed.offsets()
    start_K, version_K = _spans(call, offsets_S1, rows)
    return Rollout(
        source=call.source,
        ids=tuple(call.ids[i] for i in rows),
        offsets_S1=offsets_S1,
        token_offset_S=np.full(len(rows), call.token_offset, np.int64),
        final_S=np.full(len(rows), call.final, np.bool_),
        logprobs_N=packed.arrays["logprobs"],
        span_start_K=start_K,
        span_version_K=version_K,
        finish=tuple(call.finish[i] for i in rows),
        cached_tokens_S=_kept(call.cached_tokens, rows),
        tokens_N=packed.arrays.get("tokens"),
        sampling=() if call.sampling is None else tuple(call.sampling[i] for i in rows),
    )


def _kept(values: list[int] | None, rows: list[int]) -> I64 | None:
    return None if values is None else np.asarray([values[i] for i in rows], np.int64)


def _spans(call: RolloutCall, offsets_S1: I64, rows: list[int]) -> tuple[I64, I64]:
    starts: list[int] = []
    versions: list[int] = []
    bounds = offsets_S1.tolist()
    for at, end, row in zip(bounds[:-1], bounds[1:], rows, strict=True):
        for version, first in _clean(call.spans[row] or [(call.versions[row], 0)], end - at):
            starts.append(at + first)
            versions.append(version)
    return np.asarray(starts, np.int64), np.asarray(versions, np.int64)


def _clean(spans: Sequence[tuple[Any, int]], num_tokens: int) -> list[tuple[int, int]]:
    """Spans that begin at 0 and ascend inside the row; a weight change after the last token leaves no span."""
    if num_tokens == 0:
        return []
    ordered = sorted(((version_of(version), int(at)) for version, at in spans), key=lambda span: span[1])
    if ordered[0][1] > 0:
        ordered.insert(0, (UNKNOWN_VERSION, 0))
    newest = {max(at, 0): version for version, at in ordered if at < num_tokens}
    return [(version, at) for at, version in newest.items()]
