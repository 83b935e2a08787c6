"""Arrays as a job holds them, brought to the host without making the job wait. torch is met, never imported.

numpy arrays, torch tensors on any device, and lists of either become numpy arrays, or a `Flight`: a copy under way from
a GPU on a stream of its own into pinned memory, which the sender thread waits for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

DTYPE_NAMES: tuple[str, ...] = (
    "float64", "float32", "float", "fp32", "float16", "half", "fp16", "bfloat16", "bf16", "moe",
)  # fmt: skip
"""Names of dtypes for which the sentinel has a floor, as core.floors reads them."""
EIGHT_BIT_PARTS: tuple[str, ...] = ("fp8", "float8", "e4m3", "e5m2", "int8")
"""A name that holds one of these is known as well."""

Column: TypeAlias = NDArray[Any] | list[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Flight:
    """A tensor on its way to the host."""

    host: Any
    event: Any

    def land(self) -> NDArray[Any]:
        """The array, after waiting (without the interpreter lock) for the copy."""
        self.event.synchronize()
        array: NDArray[Any] = self.host.numpy()
        return array


@dataclass(frozen=True, slots=True)
class Flights:
    """A list of rows of which some are on their way."""

    rows: list[NDArray[Any] | Flight]

    def land(self) -> list[NDArray[Any]]:
        return [row.land() if isinstance(row, Flight) else row for row in self.rows]


Landing: TypeAlias = NDArray[Any] | list[NDArray[Any]] | Flight | Flights


def dtype_of(value: object) -> object:
    """The dtype object of an array, tensor or list of them; "" where it has none."""
    if isinstance(value, (list, tuple)):
        return dtype_of(value[0]) if value else ""
    return getattr(value, "dtype", "")


def dtype_name(dtype: object) -> str:
    """A numpy or torch dtype as "float32", "bfloat16" ..."""
    return str(dtype).removeprefix("torch.")


def is_known_dtype(dtype: object) -> bool:
    """True for a dtype, or a name, that the usual discrepancy depends on; and for "", not known."""
    name = dtype_name(dtype).lower()
    return name in ("", *DTYPE_NAMES) or any(part in name for part in EIGHT_BIT_PARTS)


def keep(landing: Landing) -> Landing:
    """A copy of what is on the host already, for a call whose other arrays are still on their way."""
    if isinstance(landing, np.ndarray):
        return landing.copy()
    if isinstance(landing, list):
        return [row.copy() for row in landing]
    if isinstance(landing, Flights):
        return Flights([row if isinstance(row, Flight) else row.copy() for row in landing.rows])
    return landing


def num_values(landing: Landing) -> int:
    """Values in the column, padding included."""
    if isinstance(landing, Flight):
        return int(landing.host.numel())
    rows = landing.rows if isinstance(landing, Flights) else landing
    return landing.size if isinstance(landing, np.ndarray) else sum(num_values(row) for row in rows)


def num_bytes(landing: Landing) -> int:
    """Host memory that the column takes, in bytes."""
    if isinstance(landing, Flight):
        return int(landing.host.nbytes)
    rows = landing.rows if isinstance(landing, Flights) else landing
    return landing.nbytes if isinstance(landing, np.ndarray) else sum(num_bytes(row) for row in rows)


def land(landing: Landing) -> Column:
    """The column on the host, waiting for a copy that is under way."""
    return landing.land() if isinstance(landing, (Flight, Flights)) else landing


class Lander:
    """Brings arrays to the host; keeps one side stream per device."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def fetch(self, value: Any) -> Landing:
        """An array, a list of rows, or what is on its way. None inside a list of numbers becomes NaN."""
        if isinstance(value, np.ndarray):
            return value
        if hasattr(value, "detach"):
            return self._tensor(value)
        if not isinstance(value, Sequence):
            return np.asarray(value)
        first = value[0] if value else 0.0
        listed = hasattr(first, "__len__") and getattr(first, "ndim", None) != 0
        return self.fetch_rows(value) if listed else _numbers(value)

    def fetch_rows(self, rows: Any) -> Landing:
        """A list (or the rows of an array or tensor) as a list of arrays, or what is on its way."""
        if hasattr(rows, "detach") or isinstance(rows, np.ndarray):
            rows = list(rows)
        fetched = [self._row(row) for row in rows]
        arrays = [row for row in fetched if not isinstance(row, Flight)]
        return arrays if len(arrays) == len(fetched) else Flights(fetched)

    def _row(self, row: Any) -> NDArray[Any] | Flight:
        if isinstance(row, np.ndarray):
            return row
        return self._tensor(row) if hasattr(row, "detach") else _numbers(row)

    def _tensor(self, tensor: Any) -> NDArray[Any] | Flight:
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            return self._fly(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.to("cpu")
        array: NDArray[Any] = _numpy_dtype(tensor).numpy()
        return array

    def _fly(self, tensor: Any) -> Flight:
        torch = sys.modules[type(tensor).__module__.partition(".")[0]]
        side = self._streams.get(tensor.device)
        if side is None:
            side = self._streams[tensor.device] = torch.cuda.Stream(device=tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            source = _numpy_dtype(tensor)
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        # The allocator must not hand the tensor's memory out again before the side stream has read it.
        tensor.record_stream(side)
        return Flight(host, event)


def _numpy_dtype(tensor: Any) -> Any:
    """The tensor in a dtype that numpy has: bfloat16 and the float8 family become float32."""
    name = str(tensor.dtype)
    return tensor.float() if "bfloat" in name or "float8" in name else tensor


def _numbers(values: Sequence[Any]) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype == object:
        return np.asarray([np.nan if value is None else float(value) for value in values], np.float64)
    return array
