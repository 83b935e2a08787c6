"""Pickles and torch files read without running them: a small machine of our own goes through the opcodes.

Nothing is imported and nothing is called. A name of `_RULES` is worked out here with numpy, a name of `_INERT` stays a
`Thing` (its name, arguments and state), and any other name refuses the file. torch itself is not needed.
"""

from __future__ import annotations

import io
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.pickled import DTYPES, Name, Storage, Tensor, Thing
from dlc_sentinel.records import Json

MAX_NESTING = 4
"""Pickles inside pickles; real dumps have two."""
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_INERT = re.compile(
    r"torch\.(\w+Storage|storage\.\w+Storage|Tensor|Size|device|[a-z]+\d+|bool|nested\._internal\.nested_tensor\.\w+|"
    r"_dynamo\.decorators\._DimRange)|numpy\.(ndarray|dtype)|numpy\._?core\.multiarray\.(_reconstruct|scalar)|"
    r"tensordict\.(\w+\.)?\w+|verl\.protocol\.DataProto|(__builtin__|builtins)\.(set|slice)|collections\.defaultdict"
)
"""Names that may stand in a dump; what is made with them stays a `Thing`."""


def load_file(path: str | Path) -> Json:
    """The plain content of a pickle or of a torch.save file: numbers, text, dicts, lists, `Tensor`s, `Thing`s.

    Raises: TapeError if the file names anything that is not on the list, is torn, or is none.
    """
    try:
        with Path(path).open("rb") as file:
            if file.read(4) == b"PK\x03\x04":
                return _Zip(file, str(path), 0).load()
            file.seek(0)
            return _Machine(file, str(path), 0, None).run()
    except TapeError:
        raise
    except OSError as error:
        raise TapeError(f"{path}: cannot be read ({error})") from error


def load_bytes(data: bytes, where: str, depth: int = 1) -> Json:
    """As `load_file`, of bytes found inside a file."""
    if depth > MAX_NESTING:
        raise TapeError(f"{where}: pickles nested deeper than {MAX_NESTING}; no dump of a training job looks like this")
    if data[:4] == b"PK\x03\x04":
        return _Zip(io.BytesIO(data), where, depth).load()
    file = io.BytesIO(data)
    first = _Machine(file, where, depth, None).run()
    if first != LEGACY_MAGIC:
        return first
    try:
        return _legacy(file, where, depth)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TapeError(f"{where}: a torn torch storage ({type(error).__name__}: {error})") from error


def _legacy(file: IO[bytes], where: str, depth: int) -> Json:
    """What follows the magic number of torch's older format: version, system, object, keys, raw storages."""
    storages: dict[str, Storage] = {}
    _Machine(file, where, depth, None).run()
    if not _Machine(file, where, depth, None).run().get("little_endian", True):
        raise TapeError(f"{where}: written on a big-endian machine")
    tree = _Machine(file, where, depth, storages).run()
    for key in _Machine(file, where, depth, None).run():
        size = int.from_bytes(file.read(8), "little")
        storage = storages[str(key)]
        storage.data = file.read(size * np.dtype(DTYPES[storage.kind]).itemsize)
    return tree


class _Zip:
    """torch's newer format: a zip of one pickle and one member per storage."""

    def __init__(self, file: IO[bytes], where: str, depth: int) -> None:
        self.where, self._depth = where, depth
        try:
            self._zip = zipfile.ZipFile(file)
            self._names = {name.split("/", 1)[-1]: name for name in self._zip.namelist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in self._zip.infolist()):
                raise ValueError("compressed, as torch never writes it")
        except (zipfile.BadZipFile, ValueError) as error:
            raise TapeError(f"{where}: a torn torch file ({error})") from error

    def load(self) -> Json:
        storages: dict[str, Storage] = {}
        tree = _Machine(io.BytesIO(self._member("data.pkl")), self.where, self._depth, storages).run()
        for key, storage in storages.items():
            storage.data = self._member(f"data/{key}")
        return tree

    def _member(self, name: str) -> bytes:
        try:
            return self._zip.read(self._names[name])
        except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError) as error:
            raise TapeError(
                f"{self.where}: member {name} of this torch file is damaged or missing ({error})"
            ) from error


_MARK = object()
_TORN = (
    ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError, StopIteration, EOFError,
)  # fmt: skip
_VALUE_OPS = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
))  # fmt: skip
_CONSTANTS: Mapping[str, Callable[[], Json]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
    "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """One pickle. `storages` collects what persistent ids name; None = there may be none."""

    def __init__(self, file: IO[bytes], where: str, depth: int, storages: dict[str, Storage] | None) -> None:
        self._file, self.where, self._depth, self._storages = file, where, depth, storages
        self._stack: list[Json] = []
        self._memo: dict[int, Json] = {}

    def run(self) -> Json:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python has remarks on texts that a damaged file is full of
                for code, argument, _ in pickletools.genops(self._file):
                    if code.name == "STOP":
                        return self._stack.pop()
                    self._step(code.name, argument)
        except TapeError:
            raise
        except _TORN as error:
            raise TapeError(f"{self.where}: no pickle, or a torn one ({type(error).__name__}: {error})") from error
        raise TapeError(f"{self.where}: the pickle ends in its middle")

    def _step(self, op: str, argument: Json) -> None:
        stack = self._stack
        if op in _VALUE_OPS:
            stack.append(argument)
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op]())
        elif op in _TUPLES:
            stack[-_TUPLES[op] :] = [tuple(stack[-_TUPLES[op] :])]
        elif op in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif op == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif op in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif op in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
            self._fill(op)
        elif op in ("TUPLE", "LIST", "DICT", "FROZENSET"):
            stack.append(_MADE[op](self._since_mark()))
        elif op in ("PROTO", "FRAME"):
            pass
        else:
            self._construct(op, argument)

    def _since_mark(self) -> list[Json]:
        at = len(self._stack) - 1 - next(i for i, x in enumerate(reversed(self._stack)) if x is _MARK)
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _fill(self, op: str) -> None:
        num = {"APPEND": 1, "SETITEM": 2}.get(op, 0)
        items = self._stack[-num:] if num else self._since_mark()
        if num:
            del self._stack[-num:]
        target = self._stack[-1]
        if isinstance(target, Thing):  # a list or dict of a class of its own
            target.state = [target.state, items]
        elif op in ("SETITEM", "SETITEMS"):
            target.update(_pairs(items))
        elif op == "ADDITEMS":
            target.update(items)
        else:
            target.extend(items)

    def _construct(self, op: str, argument: Json) -> None:
        stack = self._stack
        if op == "GLOBAL":
            stack.append(self._named(str(argument).replace(" ", ".", 1)))
        elif op == "STACK_GLOBAL":
            module, name = stack[-2:]
            stack[-2:] = [self._named(f"{module}.{name}")]
        elif op in ("REDUCE", "NEWOBJ"):
            name, arguments = stack[-2:]
            stack[-2:] = [self._made(name, arguments)]
        elif op == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Thing):
                stack[-1].state = state
        elif op == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        else:
            raise TapeError(f"{self.where}: opcode {op} has no place in a dump of a training job")

    def _named(self, full: str) -> Name:
        if full not in _RULES and not _INERT.fullmatch(full):
            raise TapeError(
                f"{self.where}: refused, it names {full!r}; only tensors, arrays and plain values are read, "
                "and nothing is run"
            )
        return Name(full)

    def _made(self, name: Json, arguments: Json) -> Json:
        if not isinstance(name, Name) or not isinstance(arguments, tuple):
            raise TapeError(f"{self.where}: refused, it calls a {type(name).__name__}")
        rule = _RULES.get(name.full)
        return rule(self, arguments) if rule else Thing(name.full, arguments)

    def _storage(self, key: Json) -> Storage:
        if self._storages is None or not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage":
            raise TapeError(f"{self.where}: refused, it refers to something outside of the file")
        kind = key[1].full.rsplit(".", 1)[-1].removesuffix("Storage") if isinstance(key[1], Name) else ""
        if kind not in DTYPES:
            raise TapeError(f"{self.where}: a tensor of unknown kind {kind!r}")
        return self._storages.setdefault(str(key[2]), Storage(kind))

    def from_bytes(self, arguments: tuple[Json, ...]) -> Callable[[], Storage]:
        data, where, depth = bytes(arguments[0]), self.where, self._depth + 1

        def storage() -> Storage:
            found = load_bytes(data, where, depth)
            if not isinstance(found, Storage):
                raise TapeError(f"{where}: no storage where the values of a tensor should be")
            return found

        return storage


def _pairs(items: list[Json]) -> dict[Json, Json]:
    return dict(zip(items[::2], items[1::2], strict=True))


_MADE: Mapping[str, Callable[[list[Json]], Json]] = {
    "TUPLE": tuple, "LIST": list, "FROZENSET": frozenset, "DICT": _pairs,
}  # fmt: skip


def _tensor(machine: _Machine, arguments: tuple[Json, ...]) -> Json:
    storage, first, size, stride = arguments[:4]
    if not isinstance(storage, Storage) and not callable(storage):
        raise TypeError("a tensor without a storage")
    return Tensor(storage, int(first), tuple(map(int, size)), tuple(map(int, stride)), machine.where)


def _of_type(machine: _Machine, arguments: tuple[Json, ...]) -> Json:
    """torch's way to pickle a subclass: (function, type, arguments, state)."""
    function, _, inner, _ = arguments
    rule = _RULES.get(function.full)
    return rule(machine, inner) if rule else Thing(function.full, inner)


_RULES: Mapping[str, Callable[[_Machine, tuple[Json, ...]], Json]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_parameter": lambda machine, arguments: arguments[0],
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.storage._load_from_bytes": _Machine.from_bytes,
    "collections.OrderedDict": lambda machine, arguments: dict(*arguments),
    "_codecs.encode": lambda machine, arguments: str(arguments[0]).encode("latin-1"),
}
"""Names that mean something here, and what: never the function of that name."""
