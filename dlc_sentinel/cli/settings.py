"""The configuration of one command: defaults < TOML file < environment < flags, with the origin of every value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.config import ENV_PREFIX, Config, resolve
from dlc_sentinel.errors import ConfigError
from dlc_sentinel.records import Json

FILE_NAME = "dlc-sentinel.toml"
FILE_VARIABLE = "DLC_SENTINEL_CONFIG"
_HOOK_VARIABLES = {
    "DLC_SENTINEL": "serve.address",
    "DLC_SENTINEL_KEYS": "serve.keys",
    "DLC_SENTINEL_INSECURE": "serve.insecure",
}
"""What a job's hook reads: the sentinel started in the same shell means the same address."""

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"TOML file; else ${FILE_VARIABLE}, else ./{FILE_NAME} if there."),
]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, as ess.horizon=32; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line of stdout.")]
Observe = Annotated[bool, typer.Option("--observe", help="Say only; send nothing to the job.")]
Act = Annotated[
    str | None,
    typer.Option("--act", metavar="MODE", help="resync: send RESYNC, say ABORT; abort: send both."),
]
TapeDir = Annotated[Path | None, typer.Option("--tape", metavar="DIR", help="Record the run here, and resume from it.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow tcp off loopback without keys.")]
KeysDir = Annotated[
    Path | None, typer.Option("--keys", metavar="DIR", help="CURVE keys made by `dlc-sentinel keys new DIR`.")
]


@dataclass(frozen=True, slots=True)
class Settings:
    config: Config
    origins: Mapping[str, str]
    """Dotted key -> "default", the file, the variable or the flag."""
    file: Path | None


def load(
    file: Path | None = None,
    sets: Sequence[str] | None = None,
    *,
    observe: bool = False,
    act: str | None = None,
    tape: Path | None = None,
    insecure: bool = False,
    keys: Path | None = None,
    unless_set: Mapping[str, Json] | None = None,
) -> Settings:
    """The resolved settings of a command with these flags; `unless_set`: the command's own defaults by dotted key.

    Raises: ConfigError; typer.BadParameter for flags at odds.
    """
    if observe and act:
        raise typer.BadParameter("--observe and --act exclude each other; give one of them")
    if act not in (None, "resync", "abort"):
        raise typer.BadParameter(f"--act {act}: wanted resync or abort; to send nothing use --observe")
    flags: dict[str, Json] = dict(map(_pair, sets or ()))
    named: dict[str, tuple[str, Json]] = {}
    if observe or act:
        named["act.mode"] = ("--observe", "observe") if observe else ("--act", act)
    if tape is not None:
        named["tape.dir"] = ("--tape", str(tape))
    if insecure:
        named["serve.insecure"] = ("--insecure", True)
    if keys is not None:
        named["serve.keys"] = ("--keys", str(keys))
    flags |= {key: value for key, (_, value) in named.items()}
    environment, aliases = _environment()
    path = _find(file, environment)
    config, origins = resolve(path, env=environment, flags=flags)
    own = {key: value for key, value in (unless_set or {}).items() if origins[key] == "default"}
    if own:
        config, origins = resolve(path, env=environment, flags=flags | own)
        origins |= dict.fromkeys(own, "this command")
    renamed = {key: aliases.get(origin, origin) for key, origin in origins.items()}
    return Settings(config, renamed | {key: flag for key, (flag, _) in named.items()}, path)


def _pair(text: str) -> tuple[str, Json]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: wanted KEY=VALUE, as in --set ess.horizon=32")
    return key.strip(), value.strip()


def _environment() -> tuple[dict[str, str], dict[str, str]]:
    """(variables with the hook's own put in where the long name is not set, {origin text: origin to show})."""
    environment = dict(os.environ)
    aliases: dict[str, str] = {}
    for short, key in _HOOK_VARIABLES.items():
        name = ENV_PREFIX + key.replace(".", "_").upper()
        value = environment.get(short, "").strip()
        if value not in ("", "0") and name not in environment:
            environment[name] = value
            aliases[f"${name}"] = f"${short}"
    return environment, aliases


def _find(file: Path | None, environment: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if environment.get(FILE_VARIABLE):
        return Path(environment[FILE_VARIABLE])
    here = Path(FILE_NAME)
    return here if here.is_file() else None
