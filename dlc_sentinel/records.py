"""Plain carriers: what crosses the wire, and what the monitor hands to its sinks.

Axes, as capital suffixes: S sequences of one record; N tokens packed over those sequences (padding removed, masked
positions kept); K version spans. `offsets_S1` has S + 1 entries: sequence i owns tokens offsets[i]:offsets[i+1].
Logprobs are natural logarithms (nats), float32 as the producer held them. NaN marks a value the producer lacked.
Versions are int64; UNKNOWN_VERSION (-1) = not known, never age 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
Bool: TypeAlias = NDArray[np.bool_]
Json: TypeAlias = Any

UNKNOWN_VERSION = -1

Role = Literal["trainer", "engine"]
OldIs = Literal["generator", "proximal", "reused", "engine", "rescored", "absent"]
CommandKind = Literal["RESYNC", "ABORT"]
Action = Literal["sync_weights", "drop_stale"]
Outcome = Literal["applied", "refused", "expired"]
Level = Literal["INFO", "WARN", "CRITICAL"]
EventKind = Literal["step", "finding", "command", "ack", "producer", "breaker", "note"]

OLD_IS: tuple[str, ...] = ("generator", "proximal", "reused", "engine", "rescored", "absent")

TOKEN_CAUSES: tuple[str, ...] = (
    "non_finite", "no_engine", "positive", "placeholder", "mis_sized", "duplicate", "out_of_order", "unmatched",
    "late", "oversize", "join_full", "queue_full", "restarted_version",
)  # fmt: skip
"""Why tokens are refused; every lost token is counted under exactly one of these."""

FRAME_CAUSES: tuple[str, ...] = ("frame_gap", "unknown_protocol", "unparsable")
"""Why whole frames are refused, where no token count is known."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who sent a record: on every frame, so that a lost hello costs names only, never data."""

    run: str
    role: Role
    producer: str
    """Unique per process and connect(): 16 hex digits."""
    rank: int = 0
    replica: str = "0"


@dataclass(frozen=True, slots=True)
class Hello:
    source: Source
    model_name: str = ""
    stack: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package versions, e.g. {"torch": "2.13.0", "verl": "0.9.1"}."""
    pid: int = 0
    host: str = ""
    sampling: Mapping[str, Json] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty ..., logprobs_mode; only what is known."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """{"engine": "bfloat16", "trainer": "float32"}; only what is known."""


@dataclass(frozen=True, slots=True)
class Bye:
    source: Source
    frames_sent: int = 0
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Every 2 s on the control socket; the sender's own account, beside the receiver's gap counter."""

    source: Source
    last_step: int = -1
    frames_sent: int = 0
    tokens_offered: int = 0
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)
    queue_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """What an engine generated: logprobs of sampled tokens with the versions of the weights that produced them."""

    source: Source
    ids: tuple[str, ...]
    """S engine request ids."""
    offsets_S1: I64
    token_offset_S: I64
    """Position of the sequence's first token in this record within the whole response."""
    final_S: Bool
    """True where this record ends the response."""
    logprobs_N: F32
    span_start_K: I64
    """First packed token of each version span, ascending, span_start[0] = 0; every sequence starts a span."""
    span_version_K: I64
    finish: tuple[str, ...] = ()
    """S finish reasons ("stop", "length", "abort" ...; "" = unknown), or empty."""
    cached_tokens_S: I64 | None = None
    tokens_N: I32 | None = None
    sampling: tuple[Mapping[str, Json] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Train:
    """What the trainer saw of one micro-batch: any of the three streams, the mask and the generator's versions."""

    source: Source
    step: int
    version: int
    """Trainer version at this step = version of the weights that update 0 of the step starts from."""
    ids: tuple[str, ...]
    offsets_S1: I64
    update: int = 0
    micro: int = 0
    token_offset_S: I64 | None = None
    """None = all 0."""
    final_S: Bool | None = None
    """None = all True."""
    cur_N: F32 | None = None
    old_N: F32 | None = None
    engine_N: F32 | None = None
    mask_N: Bool | None = None
    """True on tokens the policy sampled and the loss uses; None = all."""
    span_start_K: I64 | None = None
    """Generator version spans as in Rollout; None = the trainer does not know them."""
    span_version_K: I64 | None = None
    old_is: OldIs = "absent"
    old_version_S: I64 | None = None
    """Trainer version at which `old` was computed; None = by `old_is`."""
    groups: tuple[str, ...] = ()
    """S prompt groups; empty = every sequence its own."""
    segments: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    """S lists of (engine id, first token, number of tokens) where a sample was several engine requests; or empty."""
    advantage_S: F32 | None = None
    tokens_N: I32 | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """dtype of each stream before the cast to float32: {"cur": "bfloat16", ...}."""
    replica: str = ""


@dataclass(frozen=True, slots=True)
class Synced:
    """Weights were delivered to the engine; `version` is the version of the delivered weights."""

    source: Source
    version: int
    step: int
    label: str = ""
    checksum: str = ""
    norm: float = float("nan")
    tensors: int = -1


@dataclass(frozen=True, slots=True)
class Scalars:
    source: Source
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """This producer has sent all it has for `step` (sent by hook.poll); lets a verdict out without waiting."""

    source: Source
    step: int


@dataclass(frozen=True, slots=True)
class Command:
    """Sentinel to trainer. `not_before_step` <= step of the poll that may apply it <= `expires_step`."""

    id: str
    run: str
    kind: CommandKind
    action: Action | None = None
    reset_cache: bool = False
    reason: str = ""
    evidence: Mapping[str, Json] = field(default_factory=dict)
    issued_step: int = -1
    not_before_step: int = -1
    expires_step: int = -1
    version_at_least: int = UNKNOWN_VERSION


@dataclass(frozen=True, slots=True)
class Ack:
    source: Source
    command_id: str
    outcome: Outcome
    step: int = -1
    version: int = UNKNOWN_VERSION
    """Version of the weights the engine holds after `applied`."""
    reason: str = ""


Record: TypeAlias = Hello | Bye | Heartbeat | Rollout | Train | Synced | Scalars | StepEnd | Ack


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, for sinks, the terminal and the state tape.

    kind: "step" (data = the step object of the file format), "finding" (data = the finding object), "command"
    (data = the command), "ack", "producer" (appeared, silent, gone, restarted), "breaker", "note".
    """

    kind: EventKind
    run: str
    step: int
    t_s: float
    level: Level
    text: str
    data: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """All that is shown of one run, consistent in itself; objects as in the file format (README, "File format")."""

    run: str
    model_name: str
    engines: tuple[str, ...]
    mode: str
    verdict: str
    last_step: int
    step: Mapping[str, Json] | None
    """Step object of the last closed step."""
    history: tuple[Mapping[str, Json], ...]
    """The newest closed steps, oldest first, at most 512."""
    findings: tuple[Mapping[str, Json], ...]
    """Most severe open first, then closed ones, newest first."""
    commands: tuple[Mapping[str, Json], ...]
    """{"step", "kind", "action", "reason", "id", "outcome": sent|applied|refused|expired|hypothetical, "version"}."""
    events: tuple[Event, ...]
    """The newest 64 events of level WARN and above, and commands and acks."""
    producers: tuple[Mapping[str, Json], ...]
    """"producer", "role", "rank", "replica", "host", "pid", "last_seen_s", "last_step", "state" (alive|silent|gone)."""
    num_tokens: Mapping[str, int]
    """Tokens received by stream: engine, old, cur."""
    dropped_tokens: Mapping[str, int]
    refused_frames: Mapping[str, int]
    num_frames: int
    sequence_gaps: int
    join_bytes: int
    num_commands: Mapping[str, int]
    """Keys "KIND/outcome", e.g. "RESYNC/applied"."""
    verdict_latency_s: float
    breaker_open: bool = False
    action_horizon: int = 32
    """h*: the rung of the ESS ladder that sends a RESYNC."""
    worst: tuple[Mapping[str, Json], ...] = ()
    """The worst sequences of the newest steps, token by token; see strips.Strip. This and the next three are empty
    where no evidence is kept (runtime.Runtime)."""
    scalars: tuple[Mapping[str, Json], ...] = ()
    """{"step": .., name: value} as the stack reported them, oldest first."""
    synced: tuple[Mapping[str, Json], ...] = ()
    """Weights delivered: {"step", "version", "checksum", "label", "replica"}, oldest first."""
    about: tuple[Mapping[str, Json], ...] = ()
    """What each producer said of itself: role, rank, replica, host, stack, versions, dtypes, sampling."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One frozen picture for exporter, terminal view and page."""

    t_s: float
    started_s: float
    version: str
    runs: tuple[RunSnapshot, ...]
    num_refused: Mapping[str, int] = field(default_factory=dict)
    """Frames refused before a run could be named, by cause."""
