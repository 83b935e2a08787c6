"""Where the sentinel listens: the text of DLC_SENTINEL to a pair of ZeroMQ endpoints."""

from __future__ import annotations

import ipaddress
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dlc_sentinel.errors import AddressError

IPC_PATH_BYTES = 107
"""Longest ipc path the kernel takes."""

_CONTROL_SUFFIX = ".ctl"


@dataclass(frozen=True, slots=True)
class Address:
    """Endpoints of one sentinel; `str()` is the value for DLC_SENTINEL."""

    data: str
    control: str

    def __str__(self) -> str:
        return self.data

    @property
    def ipc_path(self) -> str | None:
        """File of the data socket, None for tcp."""
        return self.data.removeprefix("ipc://") if self.data.startswith("ipc://") else None

    @property
    def host(self) -> str:
        """Host of a tcp address without brackets, "" for ipc."""
        return "" if self.ipc_path is not None else self.data.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Data port, 0 for ipc or for any free port."""
        return 0 if self.ipc_path is not None else int(self.data.rpartition(":")[2])

    @property
    def is_local(self) -> bool:
        """True for ipc and for loopback tcp: bytes never leave the machine."""
        if self.ipc_path is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def with_port(self, port: int) -> Address:
        """The same host at another data port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return Address(f"tcp://{host}:{port}", f"tcp://{host}:{port + 1 if port else 0}")


def parse(text: str) -> Address:
    """Address for `1`, ipc:///path or tcp://host:port (port 0: any free pair, for binding only).

    Control is at path + ".ctl" or port + 1.  Raises: AddressError with what was got and wanted.
    """
    text = text.strip()
    if text == "1":
        return _ipc(str(default_folder() / "sentinel.sock"))
    if text.startswith("ipc://"):
        return _ipc(text.removeprefix("ipc://"))
    if text.startswith("tcp://"):
        return _tcp(text)
    raise AddressError(f"DLC_SENTINEL address {text!r}: wanted 1, ipc:///path or tcp://host:port")


def default_folder() -> Path:
    """The user's own folder for sockets: under XDG_RUNTIME_DIR, else the temp folder. It is not created here.

    Raises: AddressError when another user owns it, or others may enter: they could read logprobs and send ABORT.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "dlc-sentinel" if base else Path(tempfile.gettempdir()) / f"dlc-sentinel-{os.getuid()}"
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Nothing, or AddressError when an existing folder is not this user's with mode 0700."""
    try:
        info = os.lstat(folder)
    except OSError:
        return
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise AddressError(
            f"{folder} must be a folder of user {os.getuid()} with mode 0700; it belongs to {info.st_uid} with mode "
            f"{stat.S_IMODE(info.st_mode):04o}; remove it or give DLC_SENTINEL an ipc path of your own"
        )


def make_folder(address: Address) -> None:
    """Create the socket's folder for binding, mode 0700, when it is missing. Does nothing for tcp."""
    if address.ipc_path is None:
        return
    folder = Path(address.ipc_path).parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AddressError(f"{folder} cannot be made for the socket: {error.strerror}") from error


def require_safe(address: Address, *, keyed: bool, insecure: bool) -> None:
    """Nothing, or AddressError: off loopback, tcp needs CURVE keys or an explicit `insecure`."""
    if not (address.is_local or keyed or insecure):
        raise AddressError(
            f"{address} is not a loopback address: set DLC_SENTINEL_KEYS to a folder made by `dlc-sentinel keys new`, "
            f"or allow it with --insecure (DLC_SENTINEL_INSECURE=1 in the job)"
        )


def _ipc(path: str) -> Address:
    if not path.startswith("/"):
        raise AddressError(f"ipc address 'ipc://{path}': wanted an absolute path, as in ipc:///run/user/1000/s.sock")
    length = len(os.fsencode(path + _CONTROL_SUFFIX))
    if length > IPC_PATH_BYTES:
        raise AddressError(
            f"ipc path {path!r} is {length} bytes with {_CONTROL_SUFFIX!r}; the kernel takes {IPC_PATH_BYTES}; "
            f"choose a shorter folder"
        )
    return Address(f"ipc://{path}", f"ipc://{path}{_CONTROL_SUFFIX}")


def _tcp(text: str) -> Address:
    host, colon, port_text = text.removeprefix("tcp://").rpartition(":")
    bare = host.strip("[]")
    if not colon or not bare or not (port_text.isdecimal() and port_text.isascii()):
        raise AddressError(f"tcp address {text!r}: wanted tcp://host:port, as in tcp://127.0.0.1:5757")
    port = int(port_text)
    if port > 65534:
        raise AddressError(f"tcp address {text!r}: port {port}; wanted at most 65534, since control takes the next one")
    # ZeroMQ binds to numbers only; the name is the same on both sides.
    return Address(f"tcp://{'127.0.0.1' if bare == 'localhost' else host}:0", "").with_port(port)
