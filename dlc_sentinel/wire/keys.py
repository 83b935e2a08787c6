"""A folder of CURVE keys: who may send to the sentinel, and how a producer knows it is the right one.

    sentinel.public  sentinel.secret    the sentinel's pair
    producer.public  producer.secret    one pair for all hooks of a job

A sentinel needs its own pair and every `producer*.public`; a hook needs `sentinel.public` and the producer pair. Each
file holds one Z85 key of 40 characters, mode 0600.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from dlc_sentinel.errors import KeysError

_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class SentinelKeys:
    public: bytes
    secret: bytes = field(repr=False)
    producers: frozenset[bytes] = frozenset()
    """Public keys that may connect."""

    def callback(self, domain: str, key: bytes) -> bool:
        """True when the client key may connect (the shape that pyzmq's authenticator calls)."""
        return key in self.producers


@dataclass(frozen=True, slots=True)
class ProducerKeys:
    sentinel_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def new_keys(folder: str | Path) -> list[Path]:
    """The four files written, mode 0600 whatever the umask is, in a folder of mode 0700 made if missing.

    Raises: KeysError when one of them exists (keys are never overwritten) or the folder cannot be written.
    """
    folder = Path(folder)
    pairs = {name: zmq.curve_keypair() for name in ("sentinel", "producer")}
    texts = {f"{name}.{kind}": pair[i] for name, pair in pairs.items() for i, kind in enumerate(("public", "secret"))}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KeysError(f"{folder} cannot be made for keys: {error.strerror}") from error
    taken = [name for name in texts if (folder / name).exists()]
    if taken:
        raise KeysError(f"{folder} already holds {', '.join(taken)}; choose another folder or remove them first")
    for name, key in texts.items():
        _write(folder / name, key)
    return [folder / name for name in texts]


def load_sentinel(folder: str | Path) -> SentinelKeys:
    """The sentinel's pair and the producers it lets in. Raises: KeysError."""
    folder = Path(folder)
    producers = frozenset(_read(path) for path in sorted(folder.glob("producer*.public")))
    if not producers:
        raise KeysError(f"{folder} holds no producer*.public; make keys with `dlc-sentinel keys new {folder}`")
    return SentinelKeys(_read(folder / "sentinel.public"), _read(folder / "sentinel.secret"), producers)


def load_producer(folder: str | Path) -> ProducerKeys:
    """What a hook needs to connect. Raises: KeysError."""
    folder = Path(folder)
    return ProducerKeys(*(_read(folder / name) for name in ("sentinel.public", "producer.public", "producer.secret")))


def _write(path: Path, key: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(handle, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key + b"\n")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_KEY_CHARACTERS + 3).strip()
    except OSError as error:
        raise KeysError(
            f"{path} cannot be read ({error.strerror}); make keys with `dlc-sentinel keys new {path.parent}`"
        ) from error
    if path.suffix == ".secret" and mode & 0o077:
        raise KeysError(f"{path} has mode {mode:04o}: others can read it; run `chmod 600 {path}`, or make new keys")
    try:
        valid = len(text) == _KEY_CHARACTERS and len(z85.decode(text)) == 32
    except (ValueError, KeyError):
        valid = False
    if not valid:
        raise KeysError(f"{path} holds no key: wanted {_KEY_CHARACTERS} Z85 characters, got {len(text)} bytes")
    return text
