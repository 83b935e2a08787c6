"""The secret that lets a person of this machine change a running sentinel: one 0600 file per metrics port.

It lies in the user's own runtime folder, so that only who may read the sentinel's sockets may also reset its breaker.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from dlc_sentinel.wire import address as addresses


def path_for(port: int) -> Path:
    """Where the token of the sentinel with this metrics port is. Raises: AddressError for an unsafe folder."""
    return addresses.default_folder() / f"actions-{port}.token"


def write(port: int) -> str:
    """A new token, written with mode 0600; one that a killed sentinel left is replaced."""
    path, token = path_for(port), secrets.token_urlsafe(32)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    addresses.check_folder(path.parent)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(token + "\n")
    return token


def read(port: int) -> str | None:
    """The token, None where there is none for this user on this machine."""
    with suppress(OSError):
        return path_for(port).read_text().strip()
    return None


def remove(port: int, token: str) -> None:
    """Takes the file away if it is still this sentinel's."""
    if read(port) == token:
        with suppress(OSError):
            path_for(port).unlink()
