"""One line of the open file format (README, "File format"), parsed and checked."""

from __future__ import annotations

import difflib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from msgspec import Meta

from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import F32, I64, Json, OldIs

MAX_LINE_BYTES = 256 * 2**20
Number: TypeAlias = int | float
Values: TypeAlias = list[float | str | None]
Int: TypeAlias = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Versions: TypeAlias = int | list[int | list[int] | None] | None
"""A number, one per token, or [version, first token] pairs."""
Problems: TypeAlias = list[tuple[int, str]]
"""(line number, why) of what is not used."""


class Unpacked(gzip.GzipFile):
    """A gzip file whose whole lines are read up to where it breaks off, as a killed job leaves it; iterate or readline.

    `broken` says why it ends there, "" where it does not. Raises: OSError, EOFError where it cannot be unpacked at all.
    """

    broken = ""

    def readline(self, size: int | None = -1) -> bytes:
        if self.broken:
            return b""
        try:
            return super().readline(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            if not self.tell():
                raise gzip.BadGzipFile(str(error)) from error
            self.broken = str(error)
            return b""


Bytes: TypeAlias = IO[bytes] | Unpacked


def opened(path: Path) -> Bytes:
    """The file's bytes, unpacked if it is gzip, whatever its name says.  Raises: OSError."""
    file = path.open("rb")
    if file.read(2) == b"\x1f\x8b":
        file.close()
        return Unpacked(path)
    file.seek(0)
    return file


def numbered(file: Bytes, problems: Problems, name: str = "") -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes) of each line, of one that is too long its first MAX_LINE_BYTES.

    Where a packed file breaks off is a problem more, told with `name` in front.
    """
    number = 0
    while text := file.readline(MAX_LINE_BYTES):
        number += 1
        yield number, text
        while len(text) == MAX_LINE_BYTES and not text.endswith(b"\n"):
            text = file.readline(MAX_LINE_BYTES)
    if isinstance(file, Unpacked) and file.broken:
        problems.append((number + 1, f"{name}cannot be read from here on ({file.broken})"))


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """What every line may carry; unknown fields are left out, and named, before it is made."""


class MetaLine(Line, frozen=True, kw_only=True, tag="meta"):
    run: str = ""
    model_name: str = ""
    engine_dtype: str = ""
    trainer_dtype: str = ""
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    logprobs_mode: str | None = None

    def sampling(self) -> dict[str, Number | str]:
        """The sampling facts that are known."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs_mode")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def dtypes(self) -> dict[str, str]:
        """{"engine": ..., "trainer": ...}, only what is known."""
        return {side: name for side, name in (("engine", self.engine_dtype), ("trainer", self.trainer_dtype)) if name}


class SeqLine(Line, frozen=True, kw_only=True, tag="seq"):
    step: Int
    id: str | int
    update: Int = 0
    version: Int | None = None
    group: str | int | None = None
    engine: Values | None = None
    old: Values | None = None
    cur: Values | None = None
    old_is: OldIs = "absent"
    old_version: Int | None = None
    versions: Versions = None
    mask: list[bool | float] | None = None
    tokens: list[int] | None = None
    advantage: float | None = None
    finish: str | None = None
    replica: str | int | None = None
    cached_tokens: Int | None = None


class ScalarsLine(Line, frozen=True, kw_only=True, tag="scalars"):
    step: Int
    values: dict[str, float | str | None] = {}


class SyncedLine(Line, frozen=True, kw_only=True, tag="synced"):
    step: Int
    version: Int
    checksum: str | None = None
    norm: float | None = None
    label: str | None = None
    tensors: Int | None = None


AnyLine: TypeAlias = MetaLine | SeqLine | ScalarsLine | SyncedLine


class KeyLine(msgspec.Struct, frozen=True):
    """The part of a line that says where it belongs."""

    type: Literal["meta", "seq", "scalars", "synced"]
    step: Int = 0
    update: Int = 0


TYPES: dict[str, type[Line]] = {"meta": MetaLine, "seq": SeqLine, "scalars": ScalarsLine, "synced": SyncedLine}
FIELDS = {name: frozenset({"type", *line.__struct_fields__}) for name, line in TYPES.items()}
_WORDS: dict[str, tuple[str, ...]] = {"type": tuple(TYPES), "old_is": get_args(OldIs)}
"""Fields that take a word of a list."""
_keys = msgspec.json.Decoder(KeyLine)
_lines = msgspec.json.Decoder(AnyLine)
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def tree_of(text: bytes) -> Json:
    """Any JSON as plain values; bare NaN and Infinity as null.  Raises: ValueError that says what is wrong."""
    if b"NaN" in text or b"Infinity" in text:
        text = text.replace(b"-Infinity", b"null").replace(b"Infinity", b"null").replace(b"NaN", b"null")
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def parse_key(text: bytes) -> KeyLine:
    """Kind, step and update of a line.  Raises: ValueError that says what is wrong."""
    try:
        return _keys.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.convert(_worded(_lenient(text)), KeyLine)


def parse(text: bytes) -> tuple[AnyLine, frozenset[str]]:
    """The line, and the names of its fields that no line of its type has: they are not read.

    Raises: ValueError (msgspec.ValidationError is one) that says what is wrong, and where.
    """
    try:
        return _lines.decode(text), frozenset()
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        parts = _parts.decode(text)
        unknown = parts.keys() - FIELDS[msgspec.json.decode(parts["type"])]
        known = {name: part for name, part in parts.items() if name not in unknown}
        return _lines.decode(msgspec.json.encode(known)), frozenset(unknown)
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        tree = _worded(_lenient(text))
    unknown = tree.keys() - FIELDS[tree["type"]]
    line: AnyLine = msgspec.convert({name: value for name, value in tree.items() if name not in unknown}, AnyLine)
    return line, frozenset(unknown)


def nearest(name: str) -> str:
    """The field that a misspelt one may have meant, "" for none."""
    found = difflib.get_close_matches(name, sorted(frozenset().union(*FIELDS.values())), n=1, cutoff=0.75)
    return found[0] if found else ""


def _lenient(text: bytes) -> dict[str, Json]:
    """The line as Python's own json module writes it: bare NaN and Infinity, numbers like 3.0 for whole ones."""
    try:
        tree = json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(tree, dict):
        raise ValueError(f"no JSON object but {type(tree).__name__}")
    return {key: _whole(value) for key, value in tree.items()}


def _worded(tree: dict[str, Json]) -> dict[str, Json]:
    """The same.  Raises: ValueError with the words that are wanted where a field holds none of them."""
    if "type" not in tree:
        raise ValueError(f"no type; wanted {', '.join(TYPES)}")
    for name, wanted in _WORDS.items():
        if name in tree and tree[name] not in wanted:
            raise ValueError(f"{name} is {plain(repr(tree[name]), 40)}; wanted {', '.join(wanted)}")
    return tree


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def stream(values: Values | None) -> F32 | None:
    """Logprobs as float32; null, NaN and "NaN" as nan.  Raises: ValueError for a text that is no number."""
    if values is None:
        return None
    with np.errstate(over="ignore"):  # -3.4e39 and its like become -inf, and are refused as such
        return np.array(values, np.float32)


def spans(versions: Versions, length: int) -> tuple[I64, I64]:
    """(first token, version) of each span of equal generator version; unknown = -1.

    Raises: ValueError if a list has neither one version per token nor ascending [version, first token] pairs from 0.
    """
    if versions is None or isinstance(versions, int):
        return np.zeros(1, np.int64), np.array([-1 if versions is None else versions], np.int64)
    pairs = [entry for entry in versions if isinstance(entry, list)]
    if pairs:
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError("versions holds a list that is no [version, first token] pair")
        starts = np.array([start for _, start in pairs], np.int64)
        ascending = starts[0] == 0 and bool((np.diff(starts) > 0).all()) and int(starts[-1]) < max(length, 1)
        if len(pairs) != len(versions) or not ascending:
            raise ValueError(f"versions pairs start at {starts.tolist()[:8]}; wanted ascending from 0, below {length}")
        return starts, np.array([version for version, _ in pairs], np.int64)
    if len(versions) != length:
        raise ValueError(f"versions has {len(versions)} entries for {length} tokens")
    version_T = np.array([-1 if v is None else v for v in versions], np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(version_T)) + 1]).astype(np.int64)[:length]
    return starts, version_T[starts]
