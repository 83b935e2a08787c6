"""The one frozen configuration tree: defaults < TOML file < environment (DLC_SENTINEL_CFG_*) < flags.

    [ess]
    horizon = 32          ->  DLC_SENTINEL_CFG_ESS_HORIZON=32   ->  --set ess.horizon=32

`resolve` returns the tree with the origin of every value; an unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomllib
from msgspec import Meta

from dlc_sentinel.errors import ConfigError

ENV_PREFIX = "DLC_SENTINEL_CFG_"

Ratio = Annotated[float, Meta(gt=0.0, le=1.0)]
Steps = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=0)]
Nats = Annotated[float, Meta(gt=0.0)]


class Ess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Effective sample size of the lag ratio."""

    horizon: Count = 32
    """Action horizon h*, tokens: length of the blocks whose ESS sends a RESYNC. 1: the token level; 64: careful."""
    threshold: Ratio = 0.5
    """RESYNC when ESS_h* is below this in 2 of the last 3 steps with data."""
    severe: Ratio = 0.25
    """RESYNC when ESS_h* is below this in one step."""
    closed: Ratio = 0.6
    """A LAG finding closes after 3 steps above this."""


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a step's sample is large enough to stand alone."""

    min_groups: Count = 4
    min_blocks: Count = 64
    pool_steps: Count = 8
    """A small step is pooled with at most this many steps before it."""
    pool_age: Steps = 2
    """... whose mean age differs by at most this."""
    min_tokens: Count = 1000
    """Usable tokens below which a step proves nothing (HEALTHY, UNWIRED)."""


class Act(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be sent to the trainer, and how often. Everything counts in steps."""

    mode: Literal["observe", "resync", "abort"] = "resync"
    """observe: say only; resync: send RESYNC, say ABORT; abort: send both."""
    warmup_steps: Steps = 2
    min_interval_steps: Count = 3
    ttl_steps: Count = 20
    """A command not applied within this many steps expires."""
    pending_tokens: Count = 4096
    pending_groups: Count = 4
    pending_steps: Count = 20
    """Steps to wait for rows of the acknowledged version before calling the run BLIND."""
    drained: Ratio = 0.10
    """Rule (a) waits until less than this share of a step's tokens is older than the acknowledged version."""
    effect_factor: Annotated[float, Meta(ge=1.0)] = 1.5
    breaker: Count = 3
    """RESYNCs in a row without effect that open the breaker."""


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Discrepancy rms, in nats, that healthy engines show; by the coarser dtype of the two sides."""

    float32: Nats = 1e-3
    float16: Nats = 5e-3
    bfloat16: Nats = 0.045
    moe: Nats = 0.08
    float8: Nats = 0.18
    minimum: Nats = 1e-3
    steps: Count = 10
    """The run's own floor is the median of its first this many steps, at most twice the value above."""


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What waits for its other half."""

    max_bytes: Bytes = 256 * 2**20
    max_age_steps: Count = 50


class Tape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written to disk."""

    dir: str = ""
    """Empty = no tape."""
    token_bytes: Bytes = 2 * 2**30
    """Ring of token frames; 0 = none."""
    part_bytes: Count = 64 * 2**20


class Serve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the sentinel listens."""

    address: str = "1"
    """As DLC_SENTINEL: 1, ipc:///path or tcp://host:port."""
    keys: str = ""
    """Folder with CURVE keys; required for a tcp address off loopback."""
    insecure: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 9877
    """0 = any free port."""
    page: bool = True
    """A page for a browser on this machine: curves, verdict, actions, worst tokens."""
    page_port: Annotated[int, Meta(ge=0, le=65535)] = 9878
    """Any free port where it is taken; loopback only."""
    max_frame_bytes: Count = 2**20


class Notify(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is told, through apprise: chat, pager, e-mail, webhook, desktop. `dlc-sentinel test-fire` tries them."""

    urls: str = ""
    """Targets, as a list or separated by spaces: slack://..., pagerduty://..., mailto://..., json://host/path, dbus://.
    One with critical= in front hears only what is critical, and what was escalated. They hold secrets: never shown."""
    file: str = ""
    """More targets, one a line, # for comments; keep it 0600."""
    cooldown_s: Annotated[float, Meta(ge=0.0)] = 600.0
    """The same news is not told again within this time; what was held back is counted in the next one."""
    escalate_s: Annotated[float, Meta(ge=0.0)] = 1800.0
    """A finding still open after this long is told once more, to the critical targets too; 0 = never."""
    max_per_hour: Count = 30
    """More than this is held back, whatever it is, but for what is critical."""


class Grafana(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Grafana that `grafana push` writes to and that `serve` marks commands and syncs in."""

    url: str = ""
    """https://grafana.example:3000, with its path where it has one. Empty = none."""
    token_file: str = ""
    """File with a service account token (role Editor), or with user:password; keep it 0600."""
    annotate: bool = True
    """`serve` writes an annotation for every RESYNC, ABORT and weight sync."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ess: Ess = Ess()
    window: Window = Window()
    act: Act = Act()
    floor: Floor = Floor()
    join: Join = Join()
    tape: Tape = Tape()
    serve: Serve = Serve()
    notify: Notify = Notify()
    grafana: Grafana = Grafana()


SECRET_KEYS = frozenset({"notify.urls"})
"""Keys whose values are shown to nobody, not even in an error."""
LIST_KEYS = frozenset({"notify.urls"})
"""Keys that take a list of texts as well as one text separated by spaces."""
HIDDEN = "(hidden)"


def shown(key: str, value: object) -> str:
    """The value as text for `check` and reports; a secret that is set is only said to be."""
    if key in SECRET_KEYS and value:
        return HIDDEN
    return '""' if value == "" else str(value)


def known_keys() -> dict[str, type[msgspec.Struct]]:
    """Dotted key -> the section struct that holds it."""
    return {
        f"{section.name}.{leaf.name}": section.type
        for section in msgspec.structs.fields(Config)
        for leaf in msgspec.structs.fields(section.type)
    }


def resolve(
    path: str | Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> tuple[Config, dict[str, str]]:
    """The resolved tree and {dotted key: origin}, origin = "default", the file, the variable or the flag.

    Args: path: a TOML file (sections at top level, or under [tool.dlc-sentinel]); env: usually os.environ;
    flags: {dotted key: value}, strings are parsed by the field's type.
    Raises: ConfigError with the key, its origin, what was wanted and the nearest known key.
    """
    known = known_keys()
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    if path is not None:
        for key, value in _from_toml(Path(path)).items():
            _put(values, origins, known, key, value, str(path))
    by_variable = {ENV_PREFIX + key.replace(".", "_").upper(): key for key in known}
    for name, text in (env or {}).items():
        if name.startswith(ENV_PREFIX):
            _put(values, origins, known, by_variable.get(name, name), text, f"${name}", near=by_variable)
    for key, value in (flags or {}).items():
        _put(values, origins, known, key, value, f"--set {key}")
    return _build(values, origins), origins


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"{path}: cannot be read ({error.strerror}); write one with `dlc-sentinel config init`"
        raise ConfigError(why) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    tree = tree.get("tool", {}).get("dlc-sentinel", tree) if path.name == "pyproject.toml" else tree
    flat: dict[str, Any] = {}
    for section, leaves in tree.items():
        if not isinstance(leaves, dict):
            flat[section] = leaves
            continue
        flat.update({f"{section}.{leaf}": value for leaf, value in leaves.items()})
    return flat


def _put(
    values: dict[str, Any],
    origins: dict[str, str],
    known: Mapping[str, Any],
    key: str,
    value: Any,
    origin: str,
    near: Mapping[str, str] | None = None,
) -> None:
    if key not in known:
        candidates = difflib.get_close_matches(key, list(near or known), n=1, cutoff=0.5)
        hint = f"did you mean {candidates[0]!r}?" if candidates else "`dlc-sentinel check` lists all keys"
        raise ConfigError(f"{origin}: unknown key {key!r}; {hint}")
    values[key] = value
    origins[key] = origin


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    sections: dict[str, Any] = {}
    for section in msgspec.structs.fields(Config):
        leaves: dict[str, Any] = {}
        for leaf in msgspec.structs.fields(section.type):
            key = f"{section.name}.{leaf.name}"
            if key not in values:
                continue
            try:
                value = _joined(values[key]) if key in LIST_KEYS else values[key]
                leaves[leaf.name] = msgspec.convert(value, leaf.type, strict=not isinstance(value, str))
            except msgspec.ValidationError as error:
                got = HIDDEN if key in SECRET_KEYS else repr(values[key])
                raise ConfigError(f"{origins[key]}: {key} = {got}: {error}") from error
        sections[section.name] = section.type(**leaves)
    return Config(**sections)


def _joined(value: Any) -> Any:
    """The parts as one text separated by spaces, from a list or from the text of one as TOML writes it.

    Raises: msgspec.ValidationError, which repeats no part: they may be secret.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = tomllib.loads(f"parts = {value.strip()}")["parts"]
        except tomllib.TOMLDecodeError:
            raise msgspec.ValidationError('no list as in ["json://host/path", "slack://..."]') from None
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        return value
    if any(len(part.split()) != 1 for part in value):
        raise msgspec.ValidationError("a part of the list is empty or holds a space; write a space as %20")
    return " ".join(value)


def to_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """The tree as TOML text, one comment per key that says its origin (when given); read back by `resolve`."""
    lines: list[str] = []
    for section in msgspec.structs.fields(Config):
        lines.append(f"[{section.name}]")
        for leaf in msgspec.structs.fields(section.type):
            value = getattr(getattr(config, section.name), leaf.name)
            text = msgspec.json.encode(value).decode() if isinstance(value, (str, bool)) else repr(value)
            origin = (origins or {}).get(f"{section.name}.{leaf.name}", "")
            lines.append(f"{leaf.name} = {text}" + (f"  # {origin}" if origin else ""))
        lines.append("")
    return "\n".join(lines)
