"""What a pickle is read into: plain values, and these, which stand for what nobody made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import TapeError
from dlc_sentinel.records import Json

DTYPES: Mapping[str, str] = {
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "BFloat16": "<u2", "Long": "<i8", "Int": "<i4", "Short": "<i2",
    "Char": "i1", "Byte": "u1", "Bool": "?", "Untyped": "u1",
}  # fmt: skip
"""Storage names of torch -> dtype on disk."""
Array: TypeAlias = NDArray[np.generic]


@dataclass(eq=False, slots=True)
class Name:
    """A global that the pickle names: never looked up."""

    full: str


@dataclass(eq=False, slots=True)
class Thing:
    """What `name(*args)` would have made, with the state it would have been given; nobody made it."""

    name: str
    args: tuple[Json, ...]
    state: Json = None


@dataclass(slots=True)
class Storage:
    """The bytes behind tensors; `kind` as in torch's storage names (Float, Long ...)."""

    kind: str
    data: bytes = b""


@dataclass(slots=True)
class Tensor:
    """A tensor that is not worked out yet: most of a dump is never asked for."""

    storage: Storage | Callable[[], Storage]
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    where: str

    def array(self) -> Array:
        """The values, copied; bfloat16 as float32.  Raises: TapeError if they reach past their storage."""
        storage = self.storage() if callable(self.storage) else self.storage
        flat = np.frombuffer(storage.data, DTYPES[storage.kind])
        num = int(np.prod(self.size, dtype=object)) if self.size else 1
        last = self.first + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        if min((self.first, *self.size, *self.stride)) < 0 or num > len(flat) or (num and last >= len(flat)):
            raise TapeError(
                f"{self.where}: a tensor of shape {list(self.size)} does not fit its storage of {len(flat)}"
            )
        if not num:
            return np.zeros(self.size, flat.dtype)
        strides = [step * flat.itemsize for step in self.stride]
        out = np.lib.stride_tricks.as_strided(flat[self.first :], self.size, strides, writeable=False).copy()
        return (out.astype(np.uint32) << 16).view(np.float32) if storage.kind == "BFloat16" else out
