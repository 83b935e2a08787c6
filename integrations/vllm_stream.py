"""Sampled tokens of one vLLM front end, from engine steps to rows: converted per few steps, sorted per few thousand.

Axes: N tokens of a step or of an epoch (the steps since the last sort). An epoch has one weight version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from dlc_sentinel.records import F32, UNKNOWN_VERSION, Json

GATHER_STEPS = 16
"""Engine steps whose arrays are converted together."""
EPOCH_TOKENS = 8192
PIECE_TOKENS = 16384
"""A response longer than this is sent in pieces while it grows."""
SEND_TOKENS = 65536
"""Finished rows of so many tokens are sent at once; fewer wait for company, at most FLUSH_S."""
FLUSH_S = 0.2
_WIDE = 32


@dataclass(slots=True, eq=False)
class Trail:
    """One response as it grows."""

    id: str
    state: Any
    """vLLM's RequestState: holds the cached tokens, and the token ids for hash ids."""
    sampling: Mapping[str, Json]
    forced: bool = False
    """True where the client asked for no logprobs and must not see those that we made the engine send."""
    own_version: int = UNKNOWN_VERSION
    """Version told by the name of the request's LoRA adapter."""
    chunks: list[F32] = field(default_factory=list)
    length: int = 0
    sent: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """[(version, first token)] of the whole response."""
    finish: str = ""

    def add(self, logprobs_N: F32, version: int) -> None:
        """Tokens generated under one version of the weights."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, self.length))
        self.chunks.append(logprobs_N)
        self.length += logprobs_N.size

    def take(self) -> Row:
        """What was not sent yet."""
        logprobs = self.chunks[0] if len(self.chunks) == 1 else np.concatenate(self.chunks or [_NOTHING])
        spans = self.spans
        if self.sent:
            inside = [(version, max(at - self.sent, 0)) for version, at in spans]
            spans = inside[max(k for k, (_, at) in enumerate(inside) if at == 0) :]
        cached = int(getattr(self.state, "num_cached_tokens", 0) or 0)
        row = Row(self.id, logprobs, spans, self.sent, self.finish, cached, self.sampling)
        self.chunks = []
        self.sent = self.length
        return row


@dataclass(slots=True)
class Row:
    """A response, or a piece of one, on its way out."""

    id: str
    logprobs: F32
    spans: list[tuple[int, int]]
    offset: int
    finish: str
    """"" = more pieces will follow."""
    cached_tokens: int
    sampling: Mapping[str, Json]


_NOTHING: F32 = np.empty(0, np.float32)
Send = Callable[[Sequence[Row]], None]


class Collector:
    """The open responses of one OutputProcessor. `step` and `close` run in its thread, `flush` in any.

    Args: send: takes rows; version_of: the version a label of vLLM stands for; name: the id of a finished response
    where it is not known before its tokens are (then nothing is sent in pieces).
    """

    def __init__(
        self, send: Send, version_of: Callable[[str | None], int], name: Callable[[Trail], str] | None = None
    ) -> None:
        self._send = send
        self._version_of = version_of
        self._name = name
        self._slot_of: dict[str, int] = {}
        self._trails: dict[int, Trail] = {}
        self._next_slot = 0
        self._label: str | None = None
        self._steps: list[Sequence[Any]] = []
        self._flats: list[F32] = []
        self._slots: list[int] = []
        self._num_forced = 0
        self._done: list[int] = []
        self._done_tokens = 0
        self._long: list[Trail] = []
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    @property
    def has_done(self) -> bool:
        """True when finished responses wait to be sent."""
        return bool(self._done)

    def open(self, request_id: str, trail: Trail) -> None:
        """A request that the engine is about to get; a request that is open already stays as it is."""
        with self._lock:
            if request_id in self._slot_of:
                return
            slot = self._next_slot
            self._next_slot += 1
            self._trails[slot] = trail
            self._slot_of[request_id] = slot
            self._num_forced += trail.forced

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def hide(self, outputs: Sequence[Any]) -> dict[int, Any]:
        """Takes logprobs nobody asked for out of the outputs: {position: LogprobsLists}, to be handed to `step`."""
        hidden: dict[int, Any] = {}
        if not self._num_forced:
            return hidden
        for at, output in enumerate(outputs):
            slot = self._slot_of.get(output.request_id)
            if slot is not None and output.new_logprobs is not None and self._trails[slot].forced:
                hidden[at] = output.new_logprobs
                output.new_logprobs = None
        return hidden

    def step(self, outputs: Sequence[Any], label: str | None, hidden: Mapping[int, Any]) -> None:
        """Keeps the logprobs of one engine step, read after vLLM has cut what lies behind a stop string."""
        with self._lock:
            if label != self._label:
                self._settle()
                self._label = label
            if hidden:
                self._gather()
                self._take_any(outputs, hidden)
            else:
                self._steps.append(outputs)
                if len(self._steps) >= GATHER_STEPS:
                    self._gather()
            if len(self._slots) >= EPOCH_TOKENS:
                self._settle()

    def close(self, request_id: str, finish: str) -> None:
        """No more tokens will come for the request; one that is not open is left alone."""
        with self._lock:
            if request_id in self._slot_of:
                self._gather()
                slot = self._slot_of.pop(request_id)
                trail = self._trails[slot]
                trail.finish = finish or "unknown"
                self._num_forced -= trail.forced
                self._done.append(slot)
                self._done_tokens += trail.length

    def needs_flush(self) -> bool:
        """True when what waits should be sent now rather than with the next few."""
        return bool(self._long or (self._done and (not self._slot_of or self._done_tokens >= SEND_TOKENS)))

    def flush(self) -> None:
        """Sends all finished responses, and what is due of long ones."""
        with self._sending:
            with self._lock:
                self._settle()
                trails = [self._trails.pop(slot) for slot in self._done]
                self._done, self._done_tokens = [], 0
                # A long response that has ended meanwhile is among the finished ones.
                trails += [trail for trail in self._long if not trail.finish]
                self._long = []
                if self._name is not None:
                    for trail in trails:
                        trail.id = self._name(trail)
                rows = [trail.take() for trail in trails if trail.length]
            if rows:
                self._send(rows)

    def _gather(self) -> None:
        """Converts the steps that were only kept: together where all are of the usual kind, else one by one."""
        steps, self._steps = self._steps, []
        if len(steps) > 1 and self._take_plain(list(chain.from_iterable(steps))):
            return
        for outputs in steps:
            if not self._take_plain(outputs):
                self._take_any(outputs, {})

    def _take_plain(self, outputs: Sequence[Any]) -> bool:
        """The usual kind, every output one watched token; False (nothing kept) when it is another."""
        # Every 0.1 us here is paid per token: two list comprehensions, and the bytes joined (4 times np.concatenate).
        slot_of = self._slot_of
        try:
            slots = [slot_of[output.request_id] for output in outputs]
            arrays = [output.new_logprobs[1] for output in outputs]
            width = arrays[0].shape[1]
            if width > _WIDE or arrays[0].dtype != np.float32:
                return False
            if {array.nbytes for array in arrays} != {4 * width}:
                return False
            flat = np.frombuffer(b"".join(arrays), np.float32)
        except (TypeError, KeyError, IndexError, BufferError):
            return False
        self._flats.append(flat if width == 1 else flat[::width])
        self._slots += slots
        return True

    def _take_any(self, outputs: Sequence[Any], hidden: Mapping[int, Any]) -> None:
        for at, output in enumerate(outputs):
            slot = self._slot_of.get(output.request_id)
            lists = hidden.get(at, output.new_logprobs)
            if slot is None or lists is None:
                continue
            # vLLM trims the logprobs it knows of at a stop string; hidden ones follow the ids that were kept.
            column = lists[1][: len(output.new_token_ids), 0]
            self._flats.append(column)
            self._slots += [slot] * len(column)

    def _settle(self) -> None:
        """Hands the epoch's tokens to their responses."""
        self._gather()
        if not self._slots:
            return
        slot_N = np.array(self._slots, np.int32)
        order_N = np.argsort(slot_N, kind="stable")
        slot_N = slot_N[order_N]
        logprob_N = np.concatenate(self._flats).astype(np.float32, copy=False)[order_N]
        self._flats, self._slots = [], []
        version = self._version_of(self._label)
        ends = [*(np.flatnonzero(slot_N[1:] != slot_N[:-1]) + 1).tolist(), len(slot_N)]
        start = 0
        for end in ends:
            trail = self._trails[int(slot_N[start])]
            trail.add(logprob_N[start:end], version if trail.own_version < 0 else trail.own_version)
            if trail.length - trail.sent >= PIECE_TOKENS and self._name is None and trail not in self._long:
                self._long.append(trail)
            start = end


class Pump:
    """Flushes collectors FLUSH_S after something was finished. One daemon thread, started at first use."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._due = threading.Event()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="dlc-sentinel-vllm", daemon=True).start()

    def arm(self) -> None:
        """Something waits."""
        if not self._due.is_set():
            self._due.set()

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._stop.wait(FLUSH_S)
            self._due.clear()
            self._flush()


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Whole responses together, every piece of a longer one alone: one call of hook.rollout each."""
    whole: list[Row] = []
    pieces: list[list[Row]] = []
    for row in rows:
        if row.offset == 0 and row.finish:
            whole.append(row)
        else:
            pieces.append([row])
    return ([whole] if whole else []) + pieces
