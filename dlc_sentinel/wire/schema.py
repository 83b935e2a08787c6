"""Headers of every frame, as msgspec structs, and the table of array buffers that follow them.

A header holds the scalar and text fields of its record under the record's own names; arrays travel behind it. Unknown
fields are ignored and every field added after version 1 needs a default: an older reader then still reads the frame.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field

from dlc_sentinel import records

PROTOCOL_VERSION = 1
READABLE_VERSIONS: dict[int, str] = {1: "0.1"}
"""Protocol version -> release that introduced it. This release and the one before it are read."""

MAX_FRAME_BYTES = 2**20

Int: TypeAlias = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Text: TypeAlias = str
"""As long as a frame allows: what can be encoded can be decoded."""
Plain: TypeAlias = dict[str, Any]

DTYPES: dict[str, str] = {"f4": "<f4", "i4": "<i4", "i8": "<i8"}
"""Dtype code -> numpy dtype. The code "bit" is apart: 8 values to a byte, lowest bit first."""

BUFFERS: dict[str, str] = {
    "offsets_S1": "i8", "token_offset_S": "i8", "final_S": "bit", "cached_tokens_S": "i8", "old_version_S": "i8",
    "advantage_S": "f4", "span_start_K": "i8", "span_version_K": "i8", "mask_N": "bit", "tokens_N": "i4",
    "logprobs_N": "f4", "cur_N": "f4", "old_N": "f4", "engine_N": "f4",
}  # fmt: skip
"""Array field of a record -> its dtype code on the wire."""


class BufferHead(Struct, frozen=True, array_like=True):
    """One array behind the header: field name, dtype code, number of values."""

    name: Annotated[str, Meta(max_length=64)]
    dtype: Literal["f4", "i4", "i8", "bit"]
    count: Annotated[int, Meta(ge=0, le=2**31)]


class SourceHead(Struct, frozen=True):
    run: Text
    role: records.Role
    producer: Text
    rank: Int = 0
    replica: Text = "0"


class Head(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    source: SourceHead
    frame_no: Int
    buffers: tuple[BufferHead, ...] = ()


class HelloHead(Head, frozen=True, kw_only=True, tag="hello"):
    model_name: Text = ""
    stack: Text = ""
    versions: dict[str, Text] = field(default_factory=dict)
    pid: Int = 0
    host: Text = ""
    sampling: Plain = field(default_factory=dict)
    dtypes: dict[str, Text] = field(default_factory=dict)


class ByeHead(Head, frozen=True, kw_only=True, tag="bye"):
    frames_sent: Count = 0
    dropped_tokens: dict[str, Count] = field(default_factory=dict)


class HeartbeatHead(Head, frozen=True, kw_only=True, tag="heartbeat"):
    last_step: Int = -1
    frames_sent: Count = 0
    tokens_offered: Count = 0
    dropped_tokens: dict[str, Count] = field(default_factory=dict)
    queue_bytes: Count = 0


class RolloutHead(Head, frozen=True, kw_only=True, tag="rollout"):
    ids: tuple[Text, ...]
    finish: tuple[Text, ...] = ()
    sampling: tuple[Plain | None, ...] = ()


class TrainHead(Head, frozen=True, kw_only=True, tag="train"):
    step: Int
    version: Int
    ids: tuple[Text, ...]
    update: Int = 0
    micro: Int = 0
    old_is: records.OldIs = "absent"
    groups: tuple[Text, ...] = ()
    segments: tuple[tuple[tuple[Text, Count, Count], ...], ...] = ()
    dtypes: dict[str, Text] = field(default_factory=dict)
    replica: Text = ""


class SyncedHead(Head, frozen=True, kw_only=True, tag="synced"):
    version: Int
    step: Int
    label: Text = ""
    checksum: Text = ""
    norm: float = float("nan")
    tensors: Int = -1


class ScalarsHead(Head, frozen=True, kw_only=True, tag="scalars"):
    step: Int
    values: dict[str, float]


class StepEndHead(Head, frozen=True, kw_only=True, tag="step_end"):
    step: Int


class AckHead(Head, frozen=True, kw_only=True, tag="ack"):
    command_id: Text
    outcome: records.Outcome
    step: Int = -1
    version: Int = -1
    reason: Text = ""


AnyHead: TypeAlias = (
    HelloHead | ByeHead | HeartbeatHead | RolloutHead | TrainHead | SyncedHead | ScalarsHead | StepEndHead | AckHead
)


class CommandHead(Struct, frozen=True, kw_only=True, tag_field="kind_of_message", tag="command"):
    """Sentinel to trainer, on the control channel only."""

    id: Text
    run: Text
    kind: records.CommandKind
    action: records.Action | None = None
    reset_cache: bool = False
    reason: Text = ""
    evidence: Plain = field(default_factory=dict)
    issued_step: Int = -1
    not_before_step: Int = -1
    expires_step: Int = -1
    version_at_least: Int = -1


class NoticeHead(Struct, frozen=True, kw_only=True, tag_field="kind_of_message", tag="notice"):
    run: Text
    level: records.Level
    text: Annotated[str, Meta(max_length=4096)]


class WelcomeHead(Struct, frozen=True, kw_only=True, tag_field="kind_of_message", tag="welcome"):
    """A sentinel that sees this connection for the first time; the producer answers with its hello."""

    room_frames: Count = 0


class TakenHead(Struct, frozen=True, kw_only=True, tag_field="kind_of_message", tag="taken"):
    """The sentinel has read the goodbye, and with it all that went before."""


AnyDown: TypeAlias = CommandHead | NoticeHead | WelcomeHead | TakenHead
