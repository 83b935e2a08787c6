"""One call of hook.train to one parcel: arrays gathered, rows that disagree left out, versions as spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import RecordError, ShapeError
from dlc_sentinel.records import I64, OLD_IS, UNKNOWN_VERSION, OldIs, Source, Train
from dlc_sentinel.wire import gather
from dlc_sentinel.wire.gather import Packed
from dlc_sentinel.wire.tensors import Column, Flight, Flights, Landing, dtype_name, keep, land

Take = Callable[[int], NDArray[np.uint8] | None]

_OTHER_ARRAYS = ("old_version", "versions", "lengths", "cu_seqlens", "advantage")
_TRAILING_INTEGER = re.compile(r"(\d+)\D*$")


@dataclass(slots=True)
class TrainCall:
    """What hook.train was given, arrays landed or on their way."""

    source: Source
    step: int
    version: int
    columns: dict[str, Landing]
    """cur, engine, old, mask, tokens: those that were given."""
    update: int = 0
    micro: int = 0
    ids: Sequence[object] | str | None = None
    id_prefix: str = ""
    """Rows without an id are named by this and their index."""
    groups: Sequence[object] | None = None
    segments: Sequence[Sequence[Sequence[Any]]] | None = None
    old_is: str = "absent"
    old_version: Landing | int | None = None
    versions: Landing | int | None = None
    lengths: Landing | None = None
    cu_seqlens: Landing | None = None
    advantage: Landing | None = None
    dtypes: Mapping[str, object] = field(default_factory=dict)
    """By stream: a dtype, or its name."""
    replica: str = ""
    owned: bool = False

    def is_in_flight(self) -> bool:
        """True when an array is still being copied from a device."""
        kinds = set(map(type, self.columns.values()))
        kinds.update(map(type, (self.old_version, self.versions, self.lengths, self.cu_seqlens, self.advantage)))
        return not kinds.isdisjoint((Flight, Flights))

    def load(self, take: Take) -> Packed:
        """See `load_train`."""
        return load_train(self, take)

    def record(self, packed: Packed) -> Train:
        """See `train_record`."""
        return train_record(self, packed)

    def keep_host_arrays(self, in_flight: bool) -> None:
        """Copy what the job may change before the record is made: values per row, and columns when one is in flight."""
        if in_flight:
            self.columns = {name: keep(value) for name, value in self.columns.items()}
        for name in _OTHER_ARRAYS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                setattr(self, name, keep(value))


def version_of(label: object) -> int:
    """The version as an integer: itself, else the trailing integer of a text ("step-12" -> 12), else -1."""
    if isinstance(label, str):
        match = _TRAILING_INTEGER.search(label)
        return int(match.group(1)) if match and match.end(1) == len(label.rstrip()) else UNKNOWN_VERSION
    if label is None:
        return UNKNOWN_VERSION
    return max(int(label), UNKNOWN_VERSION)  # type: ignore[call-overload, no-any-return]  # numpy and torch scalars convert


def version_column(value: Any, fetch: Callable[[Any], Landing]) -> Landing | int | None:
    """Versions as given: one for all (int), or an array or rows of them; texts become their trailing integers."""
    if value is None or isinstance(value, (int, str)):
        return None if value is None else version_of(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, str) or one is None for one in value):
        return np.asarray([version_of(one) for one in value], np.int64)
    return fetch(value)


def load_train(call: TrainCall, take: Take) -> Packed:
    """The call's arrays in memory of our own; waits for those on their way. This much must happen inside the call.

    Raises: RecordError, ShapeError where the call contradicts itself.
    """
    if call.old_is not in OLD_IS:
        raise RecordError(f"old_is={call.old_is!r}: wanted one of {', '.join(OLD_IS)}")
    columns: dict[str, Column] = {name: land(value) for name, value in call.columns.items()}
    lengths = None if call.lengths is None else np.asarray(land(call.lengths))
    cu_seqlens = None if call.cu_seqlens is None else np.asarray(land(call.cu_seqlens))
    num_rows = _num_rows(columns, lengths, cu_seqlens)
    versions = _versions(call.versions, num_rows)
    if isinstance(versions, list) or (isinstance(versions, np.ndarray) and versions.shape != (num_rows,)):
        columns["versions"] = versions
        versions = UNKNOWN_VERSION
    call.versions = keep(versions) if isinstance(versions, np.ndarray) else versions
    call.columns = {}
    return gather.gather(columns, None if call.owned else take, length_B=lengths, cu_seqlens=cu_seqlens)


def train_record(call: TrainCall, packed: Packed) -> Train:
    """The record of a loaded call. Raises: ShapeError where a value per row has not one entry for each."""
    arrays = packed.arrays
    offsets_S1 = packed.offsets()
    span_start_K, span_version_K = _spans(packed, offsets_S1, call.versions)
    return Train(
        source=call.source,
        step=call.step,
        version=call.version,
        ids=_ids(call, packed),
        offsets_S1=offsets_S1,
        update=call.update,
        micro=call.micro,
        cur_N=arrays.get("cur"),
        old_N=arrays.get("old"),
        engine_N=arrays.get("engine"),
        mask_N=arrays.get("mask"),
        span_start_K=span_start_K,
        span_version_K=span_version_K,
        old_is=_old_is(call.old_is),
        old_version_S=_per_row_versions(call.old_version, packed),
        groups=tuple(map(str, _rows(call.groups, packed, "group"))) if call.groups is not None else (),
        segments=_segments(call, packed),
        advantage_S=_advantage(call, packed),
        tokens_N=arrays.get("tokens"),
        dtypes={name: dtype_name(kind) for name, kind in call.dtypes.items()},
        replica=call.replica,
    )


def _num_rows(columns: Mapping[str, Column], lengths: NDArray[Any] | None, cu_seqlens: NDArray[Any] | None) -> int:
    first = next(iter(columns.values()), None)
    if cu_seqlens is not None:
        return max(cu_seqlens.size - 1, 0)
    if isinstance(first, np.ndarray) and first.ndim < 2:
        return 1 if lengths is None else lengths.size
    return 0 if first is None else len(first)


def _versions(value: Landing | int | None, num_rows: int) -> Column | int | None:
    if value is None or isinstance(value, int):
        return value
    landed = land(value)
    if isinstance(landed, np.ndarray):
        if landed.ndim == 0:
            return version_of(landed.item())
        if landed.ndim == 2 and landed.shape == (num_rows, 1):
            return landed.reshape(-1)
    return landed


def _spans(packed: Packed, offsets_S1: I64, versions: Landing | int | None) -> tuple[I64 | None, I64 | None]:
    if versions is None:
        return None, None
    per_token_N = packed.arrays.get("versions")
    if per_token_N is not None:
        return gather.spans(offsets_S1, UNKNOWN_VERSION, per_token_N)
    if isinstance(versions, int):
        return gather.spans(offsets_S1, versions)
    per_row = np.asarray(land(versions), np.int64)
    return gather.spans(offsets_S1, per_row if packed.kept is None else per_row[packed.kept])


def _per_row_versions(value: Landing | int | None, packed: Packed) -> I64 | None:
    if value is None:
        return None
    num_kept = len(packed.lengths)
    landed = _versions(value, packed.num_rows)
    per_row = np.asarray(landed, np.int64)
    if per_row.ndim == 0:
        return np.full(num_kept, max(int(per_row), UNKNOWN_VERSION), np.int64)
    if per_row.shape != (packed.num_rows,):
        raise ShapeError(f"old_version has shape {per_row.shape} for {packed.num_rows} rows")
    kept: I64 = np.maximum(per_row if packed.kept is None else per_row[packed.kept], UNKNOWN_VERSION)
    return kept


def _ids(call: TrainCall, packed: Packed) -> tuple[str, ...]:
    if call.ids is None:
        rows = range(packed.num_rows) if packed.kept is None else packed.kept
        return tuple(f"{call.id_prefix}{row}" for row in rows)
    return tuple(map(str, _rows([call.ids] if isinstance(call.ids, str) else call.ids, packed, "seq_id")))


def _rows(values: Sequence[Any], packed: Packed, name: str) -> list[Any]:
    listed = list(values)
    if len(listed) != packed.num_rows:
        raise ShapeError(f"{name} has {len(listed)} entries for {packed.num_rows} rows")
    return listed if packed.kept is None else [listed[i] for i in packed.kept]


def _segments(call: TrainCall, packed: Packed) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    if call.segments is None:
        return ()
    return tuple(
        tuple((str(engine_id), int(first), int(count)) for engine_id, first, count in row)
        for row in _rows(call.segments, packed, "segments")
    )


def _advantage(call: TrainCall, packed: Packed) -> NDArray[np.float32] | None:
    """One value per row; of a per-token advantage the first token's (they are equal where rows are scored whole)."""
    if call.advantage is None:
        return None
    landed = land(call.advantage)
    if isinstance(landed, list):
        values = np.asarray([row[0] if np.size(row) else np.nan for row in landed], np.float32)
    else:
        values = np.asarray(landed, np.float32)
        values = values[:, 0] if values.ndim == 2 and values.shape[1] else values.reshape(-1)
    if values.size == packed.num_tokens != packed.num_rows:
        padded = np.append(values, np.float32(np.nan))
        return padded[packed.offsets()[:-1]]
    if values.size != packed.num_rows:
        raise ShapeError(f"advantage has {values.size} values for {packed.num_rows} rows")
    return values if packed.kept is None else values[packed.kept]


def _old_is(value: str) -> OldIs:
    return value  # type: ignore[return-value]  # checked against OLD_IS by the caller
