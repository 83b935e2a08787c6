"""What waits to be sent, bounded in bytes, with the producer's own account of every token; and the blocks it is in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.records import Record

_SMALL_BYTES = 512
_SMALL_SLACK_BYTES = 2**20


@dataclass(slots=True)
class Parcel:
    """A record on its way, or how the sender thread makes it from what the call has copied."""

    record: Record | None
    num_tokens: int = 0
    num_bytes: int = _SMALL_BYTES
    block: NDArray[np.uint8] | None = None
    """Memory that the record's arrays lie in; it goes back to `Blocks` once the frames are built."""
    pack: Callable[[], Parcel | None] | None = None
    """Makes the parcel that holds the record; None = it could not be made, and that was said."""


class Outbox:
    """First in, first out; a parcel that does not fit is dropped and its tokens counted. Safe between threads.

    Law: tokens_offered = tokens sent + dropped by cause + still waiting.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.tokens_offered = 0
        self.dropped_tokens: dict[str, int] = {}
        self._max_bytes = max_bytes
        self._parcels: deque[Parcel] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parcels)

    def has_room(self, num_bytes: int) -> bool:
        """False when a parcel of that size would be dropped now."""
        return self.num_bytes + num_bytes <= self._max_bytes

    def offer(self, parcel: Parcel) -> bool:
        """False when the parcel was dropped, counted as queue_full."""
        # A record without tokens (a step's end, a sync) gets some room beyond the bound: it costs little, tells much.
        limit = self._max_bytes + (0 if parcel.num_tokens else _SMALL_SLACK_BYTES)
        with self._lock:
            self.tokens_offered += parcel.num_tokens
            fits = self.num_bytes + parcel.num_bytes <= limit
            if fits:
                self.num_bytes += parcel.num_bytes
                self._parcels.append(parcel)
            else:
                self.dropped_tokens["queue_full"] = self.dropped_tokens.get("queue_full", 0) + parcel.num_tokens
        return fits

    def refuse(self, cause: str, num_tokens: int, *, offered: bool = False) -> None:
        """Count tokens that will not be sent; `offered` = they were counted as offered already."""
        with self._lock:
            self.tokens_offered += 0 if offered else num_tokens
            self.dropped_tokens[cause] = self.dropped_tokens.get(cause, 0) + num_tokens

    def recount(self, num_tokens: int) -> None:
        """Correct tokens_offered by the difference between a parcel's estimate and what was in it."""
        with self._lock:
            self.tokens_offered += num_tokens

    def take(self) -> Parcel | None:
        """The oldest parcel; its bytes stay counted until `done`."""
        with self._lock:
            return self._parcels.popleft() if self._parcels else None

    def done(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes

    def drop_all(self) -> int:
        """Count all that waits as queue_full and forget it; the number of its tokens."""
        num_tokens = 0
        while (parcel := self.take()) is not None:
            self.refuse("queue_full", parcel.num_tokens, offered=True)
            self.done(parcel.num_bytes)
            num_tokens += parcel.num_tokens
        return num_tokens

    def account(self) -> tuple[int, dict[str, int], int]:
        """(tokens offered, dropped by cause, bytes waiting), consistent with each other."""
        with self._lock:
            return self.tokens_offered, dict(self.dropped_tokens), self.num_bytes


class Blocks:
    """Reused memory: a fresh megabyte costs more in page faults than the copy into it. Safe between threads.

    `warm`, called where time does not matter, keeps spare blocks of the size in use ready for a queue that grows.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._last_size = 0
        self._free: dict[int, deque[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """A block of at least `num_bytes` and at most a quarter more, uint8, content undefined."""
        step = max(1 << max(num_bytes.bit_length() - 3, 0), 4096)
        size = -(-max(num_bytes, 1) // step) * step
        with self._lock:
            self._last_size = size
            free = self._free.get(size)
            if free:
                self._held_bytes -= size
                return free.pop()
        return np.empty(size, np.uint8)

    def warm(self, spare: int = 2) -> None:
        """Makes sure that `spare` blocks of the last size taken wait, their pages already touched."""
        size = self._last_size
        while size and len(self._free.get(size, ())) < spare and self._held_bytes + size <= self._max_bytes:
            self.give(np.zeros(size, np.uint8) + np.uint8(0))

    def give(self, block: NDArray[np.uint8]) -> None:
        """Takes the block back; beyond the bound it is freed."""
        with self._lock:
            if self._held_bytes + block.size <= self._max_bytes:
                self._held_bytes += block.size
                self._free.setdefault(block.size, deque()).append(block)
