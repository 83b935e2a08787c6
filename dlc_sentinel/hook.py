"""What a job imports: `connect()` gives a hook that streams logprobs to the sentinel and brings commands back.

    hook = dlc_sentinel.connect(run="r1", role="trainer", rank=rank)
    hook.train(step, version, seq_id=ids, cur=cur, engine=engine, old=old, old_is="generator", mask=mask, versions=v)
    command = hook.poll(step)          # None, or a RESYNC / ABORT to apply now and then hook.ack(...)

Where DLC_SENTINEL is unset the hook does nothing: no thread, no socket. No call waits, and none raises into training.
Only numpy, msgspec and pyzmq are needed; torch tensors are accepted without importing torch.

Longer than 300 lines: it is the whole public face, most of it signatures and docstrings.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from dlc_sentinel.errors import RecordError
from dlc_sentinel.records import (
    UNKNOWN_VERSION,
    Ack,
    Command,
    Hello,
    Json,
    Outcome,
    Role,
    Scalars,
    Source,
    StepEnd,
    Synced,
)  # fmt: skip
from dlc_sentinel.wire import address as addresses
from dlc_sentinel.wire import tensors
from dlc_sentinel.wire.gather import Packed
from dlc_sentinel.wire.outbox import Parcel
from dlc_sentinel.wire.pack import TrainCall, version_column, version_of
from dlc_sentinel.wire.pack_rollout import RolloutCall, rollout_call

if TYPE_CHECKING:
    from dlc_sentinel.wire.control import Notice
    from dlc_sentinel.wire.sender import Sender

__all__ = ["Hook", "NoHook", "connect", "hash_id"]

QUEUE_BYTES = 256 * 2**20
_LINE_EVERY_S = 10.0
_PROMPT_TOKENS = 32
_PARCEL_BYTES = 2048
_MAX_FAILURES = 20
"""Different failures that are said; what comes after them is counted only."""
_log = logging.getLogger("dlc_sentinel.hook")

_STREAMS = ("cur", "old", "engine")
_JUDGED = (*_STREAMS, "trainer")
"""Keys of `dtypes` that the usual discrepancy depends on; the next ones are kept as facts."""
_TOLD = ("kv_cache", "quantization")
_Call: TypeAlias = TrainCall | RolloutCall
P = ParamSpec("P")
R = TypeVar("R")


def hash_id(prompt_ids: Sequence[int], response_ids: Sequence[int], occurrence: int = 1) -> str:
    """An id both sides can compute: "h:" + hex of blake2b-128 + "#n" for the n-th occurrence, counted from 1.

    Hashed: the last 32 prompt ids, then all response ids, as little-endian int32.
    >>> hash_id([1, 2], [3]) == hash_id(range(1, 3), [3], 1)
    True
    """
    prompt = np.asarray(prompt_ids if len(prompt_ids) <= _PROMPT_TOKENS else prompt_ids[-_PROMPT_TOKENS:])
    ids = b"".join(part.astype("<i4").tobytes() for part in (prompt, np.asarray(response_ids)))
    return f"h:{hashlib.blake2b(ids, digest_size=16).hexdigest()}#{occurrence}"


def connect(
    run: str | None = None,
    role: Role = "trainer",
    rank: int = 0,
    replica: str | int = "0",
    model_name: str = "",
    stack: str | None = None,
    versions: Mapping[str, str] | None = None,
    sampling: Mapping[str, Json] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Hook | NoHook:
    """A hook to the sentinel that DLC_SENTINEL names, or one that does nothing when it names none or is wrong.

    Reads DLC_SENTINEL, DLC_SENTINEL_RUN (when `run` is None), DLC_SENTINEL_KEYS (folder of CURVE keys),
    DLC_SENTINEL_INSECURE (1 = tcp off loopback without keys) and DLC_SENTINEL_QUEUE_BYTES (default 256 MiB).
    Args: dtypes: what each side computes in, {"engine": "bfloat16", "trainer": "bfloat16"}; a side that is not named
    counts as bfloat16.
    """
    text = os.environ.get("DLC_SENTINEL", "").strip()
    if text in ("", "0"):
        return _NO_HOOK
    try:
        if role not in get_args(Role):
            raise RecordError(f"role={role!r}: wanted one of {', '.join(get_args(Role))}")
        hello = Hello(
            Source(str(run or os.environ.get("DLC_SENTINEL_RUN") or "default"), role, "", int(rank), str(replica)),
            model_name=model_name,
            stack=stack or "",
            versions=dict(versions or {}),
            pid=os.getpid(),
            host=socket.gethostname(),
            sampling=dict(sampling or {}),
            dtypes={key: tensors.dtype_name(name) for key, name in (dtypes or {}).items()},
        )
        return Hook(text, hello)
    except Exception as error:  # noqa: BLE001  # a wrong setting costs the watching, not the run
        _log.error("dlc-sentinel: not connected to %r, training goes on unwatched: %s", text, error)
        return _NO_HOOK


def _guarded(method: Callable[Concatenate[Hook, P], R]) -> Callable[Concatenate[Hook, P], R | None]:
    """The method, with the package's one catch-all: an error is counted and said once per text, never raised."""

    def call(self: Hook, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # nothing may raise into training
            self._failed(method.__name__, error)
            return None

    functools.update_wrapper(call, method)
    return call


class Hook:
    """One producer's connection. Every method returns at once; safe to call from several threads and after a fork."""

    def __init__(self, address: str, hello: Hello) -> None:
        from dlc_sentinel.wire import keys, sender  # noqa: PLC0415  # an unwatched job does not load ZeroMQ

        folder = os.environ.get("DLC_SENTINEL_KEYS")
        where = addresses.parse(address)
        insecure = os.environ.get("DLC_SENTINEL_INSECURE", "") not in ("", "0")
        addresses.require_safe(where, keyed=bool(folder), insecure=insecure)
        leads = hello.source.role == "trainer" and hello.source.rank == 0
        self.num_errors: dict[str, int] = {}
        """Calls that failed, by method."""
        self._address = address
        self._hello = hello
        self._lander = tensors.Lander()
        self._call: tuple[tuple[int, int], int] = ((-1, -1), 0)
        self._said_s: dict[str, float] = {}
        self._failures: set[str] = set()
        """Texts of failures without their numbers, at most `_MAX_FAILURES`."""
        self._check_dtypes("connect", hello.dtypes)
        self._sender: Sender = sender.Sender(
            where,
            hello,
            keys=keys.load_producer(folder) if folder else None,
            queue_bytes=int(os.environ.get("DLC_SENTINEL_QUEUE_BYTES") or QUEUE_BYTES),
            on_notice=self._notice if leads else None,
        )

    def __reduce__(self) -> tuple[Callable[[str, Hello], Hook], tuple[str, Hello]]:
        """Pickled with the trainer that holds it, it connects anew."""
        return Hook, (self._address, self._hello)

    @property
    def source(self) -> Source:
        """This producer's name as it stands on its records."""
        return self._sender.source

    def account(self) -> tuple[int, dict[str, int], int]:
        """(tokens offered, tokens dropped by cause, bytes waiting)."""
        return self._sender.outbox.account()

    @_guarded
    def rollout(
        self,
        seq_id: object,
        logprobs: object,
        *,
        version: object = None,
        version_spans: Sequence[object] | None = None,
        finish: object = None,
        cached_tokens: object = None,
        replica: str | int | None = None,
        sampling: object = None,
        tokens: object = None,
        token_offset: int = 0,
        final: bool = True,
    ) -> None:
        """Tokens an engine generated: one sequence, or many with lists of ids and rows and values per row or for all.

        Args: logprobs [T], nats; version of the weights, or version_spans [(version, first token)] where they changed;
        token_offset, final: where a piece lies when one response is sent in pieces.
        """
        given = {
            "version": version, "version_spans": version_spans, "finish": finish, "cached_tokens": cached_tokens,
            "sampling": sampling, "token_offset": token_offset, "final": final,
        }  # fmt: skip
        source = self._sender.source if replica is None else replace(self._sender.source, replica=str(replica))
        call = rollout_call(source, self._lander, seq_id, logprobs, tokens, given)
        in_flight = call.is_in_flight()
        if in_flight:
            call.columns = {name: tensors.keep(value) for name, value in call.columns.items()}
        self._send(call, in_flight, f"rollout {call.ids[:1]}")

    @_guarded
    def train(
        self,
        step: int,
        version: object,
        *,
        update: int = 0,
        micro: int = 0,
        seq_id: Sequence[object] | str | None = None,
        group: Sequence[object] | None = None,
        segments: Sequence[Sequence[Sequence[object]]] | None = None,
        cur: object = None,
        engine: object = None,
        old: object = None,
        old_is: str = "absent",
        old_version: object = None,
        mask: object = None,
        versions: object = None,
        lengths: object = None,
        cu_seqlens: object = None,
        advantage: object = None,
        tokens: object = None,
        dtypes: Mapping[str, str] | None = None,
        replica: str | int | None = None,
        owned: bool = False,
    ) -> None:
        """One micro-batch: any of the streams `cur`, `old`, `engine` in nats, padded [B, T], packed [N] or B rows.

        Padding goes by `lengths` [B], else by the last nonzero of `mask`; packed rows need `cu_seqlens` [B + 1].
        Args: version: the trainer's at this step; versions: the generator's, one, [B] or one per token; old_version:
        trainer version at which `old` was computed, one or [B]; owned=True: packed arrays stay as they are, no copy;
        dtypes: of the streams before a cast (else the arrays' own): they count where coarser than what `connect` said.
        Rows whose arrays disagree in length are left out, counted as mis_sized and told; the rest is sent.
        """
        if int(step) < 0:
            raise RecordError(f"step={step}: wanted 0 or more; no step below 0 is ever judged")
        given = {"cur": cur, "old": old, "engine": engine, "mask": mask, "tokens": tokens}
        self._check_dtypes("train", dtypes or {})
        fetch = self._lander.fetch
        call = TrainCall(
            source=self._sender.source,
            step=int(step),
            version=self._version("train", version),
            columns={name: fetch(value) for name, value in given.items() if value is not None},
            update=int(update),
            micro=int(micro),
            ids=list(seq_id) if isinstance(seq_id, list) else seq_id,
            groups=list(group) if isinstance(group, list) else group,
            segments=segments,
            old_is=old_is if old is not None else "absent",
            old_version=version_column(old_version, fetch),
            versions=version_column(versions, fetch),
            lengths=None if lengths is None else fetch(lengths),
            cu_seqlens=None if cu_seqlens is None else fetch(cu_seqlens),
            advantage=None if advantage is None else fetch(advantage),
            dtypes={n: tensors.dtype_of(given[n]) for n in _STREAMS if given[n] is not None} | dict(dtypes or {}),
            replica="" if replica is None else str(replica),
            owned=owned,
        )
        self._name_rows(call)
        self._sender.saw_step(call.step)
        in_flight = call.is_in_flight()
        call.keep_host_arrays(in_flight)
        self._send(call, in_flight, f"train step {step}")

    @_guarded
    def synced(
        self,
        version: object,
        step: int,
        *,
        checksum: str | None = None,
        norm: float | None = None,
        tensors: int | None = None,
        label: str | None = None,
    ) -> None:
        """The engine now holds the weights of trainer version `version`; a text version is kept as the label."""
        text = label if label is not None else version if isinstance(version, str) else ""
        record = Synced(
            self._sender.source,
            self._version("synced", version),
            int(step),
            label=str(text),
            checksum=str(checksum or ""),
            norm=float("nan") if norm is None else float(norm),
            tensors=-1 if tensors is None else int(tensors),
        )
        self._sender.saw_step(record.step)
        self._sender.offer(Parcel(record))

    @_guarded
    def scalars(self, step: int, values: Mapping[str, object]) -> None:
        """The stack's own numbers of a step (reward, entropy, grad_norm ...); what is no number is left out."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            try:
                numbers[str(name)] = float(value)  # type: ignore[arg-type]  # numpy and torch scalars convert too
            except (TypeError, ValueError):
                continue
        self._sender.saw_step(int(step))
        self._sender.offer(Parcel(Scalars(self._sender.source, int(step), numbers)))

    @_guarded
    def poll(self, step: int) -> Command | None:
        """The command to apply at this step, or None. Says also that all of this step was sent from here.

        Each command comes once. One past its last step is acknowledged as expired and not given.
        """
        step = int(step)
        self._sender.saw_step(step)
        self._sender.offer(Parcel(StepEnd(self._sender.source, step)))
        command, settled = self._sender.inbox.take(step)
        for done in settled:
            self._sender.ack(Ack(self._sender.source, done.command.id, done.outcome, step, reason=done.reason))
        return command

    @_guarded
    def ack(
        self, command: Command | str, outcome: Outcome, *, version: object = None, reason: str | None = None
    ) -> None:
        """What was done with the command; `version` = version of the weights the engine holds after "applied"."""
        id = command if isinstance(command, str) else command.id
        step = self._sender.last_step
        self._sender.ack(Ack(self._sender.source, id, outcome, step, self._version("ack", version), reason or ""))

    @_guarded
    def close(self) -> None:
        """Sends what waits and says goodbye, for about a second at most, and says what was not taken by then.

        Runs by itself at exit.
        """
        self._sender.close()

    def _send(self, call: _Call, in_flight: bool, what: str) -> None:
        if not in_flight:
            parcel = self._load(call, what)
            if parcel is not None and not self._sender.offer(parcel) and parcel.block is not None:
                self._sender.blocks.give(parcel.block)
            return
        num_tokens = max(tensors.num_values(value) for value in call.columns.values())
        num_bytes = sum(tensors.num_bytes(value) for value in call.columns.values())
        self._sender.offer(Parcel(None, num_tokens, num_bytes, pack=functools.partial(self._load_later, call, what)))

    def _load(self, call: _Call, what: str) -> Parcel | None:
        """The call's arrays in memory of our own, as a parcel that the sender thread makes a record of."""
        packed = call.load(self._take)
        outbox = self._sender.outbox
        if packed.complaint:
            outbox.refuse("mis_sized", packed.refused_tokens)
            text = f"{what}: {packed.refused_tokens} tokens not sent: {packed.complaint}; is the hook before trimming?"
            self._say("mis_sized", _LINE_EVERY_S, text)
        if packed.kept == []:
            return None
        if not packed.arrays:
            outbox.refuse("queue_full", packed.num_tokens)
            return None
        num_bytes = sum(array.nbytes for array in packed.arrays.values()) if packed.block is None else packed.block.size
        finish = functools.partial(self._finish, call, packed)
        return Parcel(None, packed.num_tokens, num_bytes + _PARCEL_BYTES, packed.block, finish)

    def _take(self, num_bytes: int) -> NDArray[np.uint8] | None:
        return self._sender.blocks.take(num_bytes) if self._sender.outbox.has_room(num_bytes) else None

    @_guarded
    def _finish(self, call: _Call, packed: Packed) -> Parcel | None:
        return Parcel(call.record(packed), packed.num_tokens, block=packed.block)

    @_guarded
    def _load_later(self, call: _Call, what: str) -> Parcel | None:
        parcel = self._load(call, what)
        return None if parcel is None or parcel.pack is None else parcel.pack()

    def _name_rows(self, call: TrainCall) -> None:
        """Rows without ids are named by rank, step, the call's place in its update, and row."""
        key = (call.step, call.update)
        place = self._call[1] + 1 if self._call[0] == key else 0
        self._call = (key, place)
        call.id_prefix = f"r{call.source.rank}:{call.step}:{place}:"

    def _version(self, method: str, label: object) -> int:
        number = version_of(label)
        if number == UNKNOWN_VERSION and isinstance(label, str):
            text = "ends in no whole number, so it is not known how old any weights are; wanted 12 or 'step-12'"
            self._say(f"version {method}", float("inf"), f"hook.{method}: version={label[:80]!r} {text} (said once)")
        return number

    def _check_dtypes(self, method: str, dtypes: Mapping[str, object]) -> None:
        """Says which names are known where one is not; it is sent all the same."""
        strange = [
            f"{key}: {str(name)[:40]}"
            for key, name in dtypes.items()
            if key not in _TOLD and (key not in _JUDGED or not tensors.is_known_dtype(name))
        ]
        if strange:
            self._say(f"dtypes {method}", float("inf"), (
                f"hook.{method}: dtypes={{{', '.join(strange)}}}: not known, and what is usual for the engine's "
                f"numerics depends on it; known keys: {', '.join(_JUDGED)}; "
                f"known values: {', '.join(tensors.DTYPE_NAMES)}, and names with {', '.join(tensors.EIGHT_BIT_PARTS)} "
                "in them (sent all the same; said once)"
            ))  # fmt: skip

    def _notice(self, notice: Notice) -> None:
        if self._due(f"notice {notice.level}", _LINE_EVERY_S):
            sys.stderr.write(f"dlc-sentinel {notice.level}: {notice.text}\n")
            sys.stderr.flush()

    def _failed(self, method: str, error: Exception) -> None:
        self.num_errors[method] = self.num_errors.get(method, 0) + 1
        text = f"hook.{method}, {type(error).__name__}: {error}"
        kind = re.sub(r"\d+", "", text[:400])
        if kind not in self._failures and len(self._failures) < _MAX_FAILURES:
            self._failures.add(kind)
            last = "; other failures are counted only" if len(self._failures) == _MAX_FAILURES else ""
            _log.warning("dlc-sentinel: %s (this call sent nothing; said once%s)", text, last)

    def _say(self, kind: str, every_s: float, text: str) -> None:
        if self._due(kind, every_s):
            _log.warning("dlc-sentinel: %s", text)

    def _due(self, kind: str, every_s: float) -> bool:
        now_s = time.monotonic()
        due = now_s - self._said_s.get(kind, float("-inf")) >= every_s
        if due:
            self._said_s[kind] = now_s
        return due


class NoHook:
    """The hook of a job that nobody watches: every method does nothing."""

    num_errors: Mapping[str, int] = {}

    def rollout(self, seq_id: object, logprobs: object, **rest: object) -> None:
        """Nothing."""

    def train(self, step: int, version: object, **rest: object) -> None:
        """Nothing."""

    def synced(self, version: object, step: int, **rest: object) -> None:
        """Nothing."""

    def scalars(self, step: int, values: Mapping[str, object]) -> None:
        """Nothing."""

    def poll(self, step: int) -> Command | None:
        """None: no command ever comes."""
        return None

    def ack(self, command: Command | str, outcome: Outcome, **rest: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def account(self) -> tuple[int, dict[str, int], int]:
        """(0, {}, 0)."""
        return 0, {}, 0


_NO_HOOK = NoHook()
