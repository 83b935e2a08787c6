"""Which weights a vLLM engine core holds: a version that moves with every update that nobody labelled.

An explicit label (update_weight_version, finish_weight_update, a version in the update's own arguments) always wins.
Otherwise updates are noticed by the name of the RPC, by the model's load_weights and by add_lora; the version moves at
the next engine step, once for the hundreds of RPCs that one synchronisation may take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlc_sentinel.records import UNKNOWN_VERSION
from dlc_sentinel.wire.pack import version_of

AUTO = "auto-"
"""What begins a label made here."""
NATIVE_FIRST = "default"
"""vLLM's label before anybody set one."""
ASLEEP = "discarded"
"""Label after sleep level 2: the weights are gone until some are loaded."""

_CHANGES = re.compile(r"update|load|receive|refit|reshard|broadcast_param|set_weights|sync_weights|finish_.*delta")
_READS = re.compile(
    r"^(init|get|report|profile|sleep|wake|liveness|compute|prepare|check|save|shutdown|start|reset|list|pin|remove)"
    r"|update_(config|max_model_len|environment)|load_model|warm|destroy"
)
_PER_PARAMETER = re.compile(r"named_param|update_weight$|broadcast_param|parameter_in_bucket|^load_weights$")
_TOLD = ("weight_version", "version", "policy_version", "global_steps", "global_step")


@dataclass(frozen=True, slots=True)
class Counting:
    """How versions count where nobody tells them: the first weights are `first`, each update adds `step`."""

    first: int = 0
    step: int = 1
    enabled: bool = True

    @classmethod
    def parse(cls, text: str) -> Counting:
        """From "off", "FIRST" or "FIRST:STEP". Raises: ValueError.

        >>> Counting.parse("300:4")
        Counting(first=300, step=4, enabled=True)
        """
        text = text.strip().lower()
        if text in ("off", "none"):
            return cls(enabled=False)
        first, _, step = text.partition(":")
        return cls(int(first or 0), int(step or 1))

    def version_of(self, label: str | None) -> int:
        """The version a label of vLLM stands for; -1 where none can be told."""
        if label == NATIVE_FIRST:
            return max(self.first, UNKNOWN_VERSION) if self.enabled else UNKNOWN_VERSION
        return version_of(label)


def changes_weights(method: object) -> bool:
    """True for the name (or function) of an RPC after which the weights may be other ones."""
    name = rpc_name(method).lower()
    return bool(_CHANGES.search(name)) and not _READS.search(name)


def begins_update(method: object) -> bool:
    """True for the RPC that opens vLLM's own start ... update ... finish."""
    return "start_weight_update" in rpc_name(method)


def rpc_name(method: object) -> str:
    """The method's name, whether it was given by name or as a function."""
    return method if isinstance(method, str) else str(getattr(method, "__name__", type(method).__name__))


def parameter_key(method: object, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """The parameter that a one-parameter RPC carries; "" for any other RPC."""
    if not _PER_PARAMETER.search(rpc_name(method)):
        return ""
    for value in (kwargs.get("name"), *args):
        if isinstance(value, str) and value:
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)) and value[0]:
            return str(value[0][0])
    return ""


def told_version(kwargs: Mapping[str, object]) -> str:
    """A version that the update carries itself; "" when it carries none."""
    for key in _TOLD:
        value = kwargs.get(key)
        if isinstance(value, (int, str)) and not isinstance(value, bool) and str(value):
            return str(value)
    return ""


@dataclass(slots=True)
class Update:
    """What `Versions` tells about one change of version."""

    label: str
    why: str
    running: int = 0
    """Requests that were running, un-paused: their tokens carry two versions."""
    names_old: bool = False
    """True where a label was given to weights that had been loaded, and counted, before."""


@dataclass(slots=True)
class Versions:
    """The version of one engine core. All methods run in its thread.

    Args: set_label: hands a label to vLLM (or keeps it, where vLLM has none); tell: what to do after each change.
    """

    counting: Counting
    set_label: Callable[[str], None]
    tell: Callable[[Update], None]
    label: str = NATIVE_FIRST
    last_known: int = UNKNOWN_VERSION
    num_updates: int = 0
    inside: int = 0
    """Depth of nested RPCs: what an RPC calls in turn is part of it."""
    dirty: str = ""
    """RPC whose change waits for the next step."""
    told: str = ""
    running: int = 0
    keys: set[str] = field(default_factory=set)
    batches_before: int = 0
    """Batches dispatched before the update that are still to come out, with the old weights."""
    begun: int = 0
    """1 = between start_weight_update and finish_weight_update, 2 = and the version has moved there already."""

    def changed(self, method: object, args: Sequence[object], kwargs: Mapping[str, object], **now: int) -> None:
        """An update went through. now: running requests (0 when paused), in_flight batches."""
        name, key = rpc_name(method), parameter_key(method, args, kwargs)
        if self._is_counted(name):
            return
        self.told = told_version(kwargs) or self.told
        self.running = max(self.running, now["running"])
        if key not in self.keys and (self.dirty or (key and self.keys)):
            # One synchronisation still, even though the engine may have stepped in between.
            self.keys |= {key} if key else set()
            return
        if self.dirty:
            self._move()  # a parameter came twice without a step in between: two synchronisations
        self.dirty, self.keys, self.batches_before = name, {key} if key else set(), now["in_flight"]
        self.running = now["running"]

    def _is_counted(self, name: str) -> bool:
        """True inside a native start ... finish whose change of version has been made."""
        counted = self.begun == 2
        if "finish" in name:
            self.begun = 0
        return counted

    def begin(self) -> None:
        """start_weight_update: what follows until finish_weight_update is one update."""
        self.begun = 1

    def before_step(self) -> None:
        """The next batch is about to be dispatched."""
        if self.dirty and self.batches_before == 0:
            self._move()

    def after_step(self, num_out: int) -> None:
        """So many batches came out."""
        self.batches_before = max(self.batches_before - num_out, 0)

    def explicit(self, label: str) -> None:
        """Somebody set the label: it stands, and what waited is covered by it."""
        why, running = self.dirty, self.running
        names_old = not why and self.label.startswith(AUTO)
        self._forget()
        self.keys = set()
        self._adopt(label, Update(label, why or "label", running, names_old))

    def asleep(self) -> None:
        """The weights were discarded: what is generated before the next load has no version."""
        self._forget()
        self.label = ASLEEP
        self.set_label(ASLEEP)

    def _move(self) -> None:
        why, running, told = self.dirty, self.running, self.told
        self._forget()
        self.begun = 2 if self.begun else 0
        self.num_updates += 1
        known = self.last_known
        if known == UNKNOWN_VERSION:
            known = self.counting.first + (self.num_updates - 1) * self.counting.step
        label = told or f"{AUTO}{max(known + self.counting.step, 0)}"
        self.set_label(label)
        self._adopt(label, Update(label, why, running))

    def _adopt(self, label: str, update: Update) -> None:
        self.label = label
        version = version_of(label)
        self.last_known = version if version != UNKNOWN_VERSION else self.last_known
        self.tell(update)

    def _forget(self) -> None:
        # The keys stay: a later parameter of the same synchronisation must not count as a new one.
        self.dirty, self.told, self.running, self.batches_before = "", "", 0, 0


def lora_version(name: str | None) -> int:
    """The version in a versioned adapter name ("policy-v12", "step_40"); -1 for any other name.

    A bare trailing number is no version: verl calls every adapter "123".
    """
    match = re.search(r"(?:^|[-_./])(?:step|v|version|ckpt|checkpoint|update)[-_]?(\d+)$", name or "", re.IGNORECASE)
    return int(match.group(1)) if match else UNKNOWN_VERSION
