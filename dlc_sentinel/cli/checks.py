"""What `doctor` looks at, one function per question; each answers with a Check and changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dlc_sentinel.cli.extras import EXTRAS
from dlc_sentinel.config import Config
from dlc_sentinel.errors import AddressError, KeysError, SentinelError
from dlc_sentinel.sinks import snapshot_json
from dlc_sentinel.tape.schema import STATE_FILE
from dlc_sentinel.version import __version__
from dlc_sentinel.wire import address as addresses
from dlc_sentinel.wire import keys as keyring
from dlc_sentinel.wire.address import Address

LITTLE_BYTES = 256 * 2**20
"""Free disk below which a tape is in danger within minutes."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    fix: str = ""


def python() -> Check:
    text = f"Python {sys.version.split()[0]}, dlc-sentinel {__version__}"
    if sys.version_info < (3, 11):
        return Check("python", "fail", text, "the sentinel needs 3.11 (the hook alone 3.10)")
    return Check("python", "ok", text)


def packages(config: Config) -> Iterator[Check]:
    """One check for what the sentinel needs, one for the demo, one for Grafana; what nobody asked for only warns."""
    for name, extra, is_needed in (
        ("packages", "serve", True),
        ("demo packages", "demo", False),
        ("Grafana packages", "grafana", bool(config.grafana.url)),
    ):
        found = {package: _version(package) for package in EXTRAS[extra]}
        missing = [package for package, version in found.items() if version is None]
        if missing:
            text = f"not installed: {', '.join(missing)}"
            yield Check(name, "fail" if is_needed else "warn", text, f"pip install 'dlc-sentinel[{extra}]'")
        else:
            yield Check(name, "ok", ", ".join(f"{package} {version}" for package, version in found.items()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def address(config: Config) -> Check:
    """Whether the sentinel's address is usable: free, or held by whom."""
    serve = config.serve
    try:
        where = addresses.parse(serve.address)
        addresses.require_safe(where, keyed=bool(serve.keys), insecure=serve.insecure)
    except AddressError as error:
        return Check("address", "fail", str(error), "set serve.address, or make keys with `dlc-sentinel keys new DIR`")
    holder = _holder(where)
    if holder is None:
        return Check("address", "ok", f"{where} is free; `dlc-sentinel serve` listens there")
    alive = _pid_lives(holder)
    return Check(
        "address",
        "ok" if alive else "warn",
        f"{where} is held by pid {holder or 'unknown'}",
        "" if alive else "if that is no sentinel of yours, take another with --set serve.address=...",
    )


def _holder(where: Address) -> str | None:
    """Pid of who listens there, "" if unknown, None if nobody does."""
    if where.ipc_path is not None:
        return lock_holder(Path(f"{where.ipc_path}.lock"))
    for port in {where.port, where.port + 1} if where.port else ():
        if is_taken(where.host, port):
            return listener_pid(port)
    return None


def lock_holder(path: Path) -> str | None:
    """Pid in a lock file that is held; None if nobody holds it."""
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock that is got is given back with the handle; the file stays as it was.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return os.read(handle, 32).decode(errors="replace").strip()
    finally:
        os.close(handle)


def is_taken(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError:
            return True
    return False


def listener_pid(port: int) -> str:
    """Pid of the process of this user that listens on the tcp port, "" if that cannot be seen (Linux only)."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        except OSError:
            continue
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    for pid in (name for name in os.listdir("/proc") if name.isdigit()) if inodes else ():
        try:
            if any(os.readlink(f"/proc/{pid}/fd/{name}") in inodes for name in os.listdir(f"/proc/{pid}/fd")):
                return pid
        except OSError:
            continue
    return ""


def _pid_lives(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def folder(config: Config) -> Check:
    """Whether the socket's folder is this user's alone."""
    try:
        where = addresses.parse(config.serve.address)
    except AddressError as error:
        return Check("socket folder", "fail", str(error), "see `address`")
    if where.ipc_path is None:
        return Check("socket folder", "ok", "not used: the address is tcp")
    path = Path(where.ipc_path).parent
    if not path.exists():
        return Check("socket folder", "ok", f"{path} is made with mode 0700 when it is needed")
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        addresses.check_folder(path)
    except AddressError:
        return Check("socket folder", "warn", f"{path} has mode {mode:04o}: others may enter", f"chmod 700 {path}")
    return Check("socket folder", "ok", f"{path}, mode {mode:04o}")


def keys(config: Config) -> Check:
    """Whether the key files are whole and private."""
    if not config.serve.keys:
        return Check("keys", "ok", "none set; needed only for tcp off loopback")
    path = Path(config.serve.keys)
    try:
        held = keyring.load_sentinel(path)
    except KeysError as error:
        return _producer_keys(path) or Check("keys", "fail", str(error), f"dlc-sentinel keys new {path}")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Check("keys", "warn", f"{path} has mode {mode:04o}: others may list it", f"chmod 700 {path}")
    return Check("keys", "ok", f"{path}: whole, secrets private, {len(held.producers)} producer keys let in")


def sentinel_keys(config: Config) -> str:
    """Folder whose keys a sentinel here can use, "" where there is none."""
    folder = config.serve.keys
    try:
        if folder:
            keyring.load_sentinel(folder)
    except KeysError:
        return ""
    return folder


def _producer_keys(path: Path) -> Check | None:
    """What a node needs on which only the job runs; None where that is not whole, or a sentinel's keys are here too."""
    if (path / "sentinel.secret").exists():
        return None
    try:
        keyring.load_producer(path)
    except KeysError:
        return None
    text = f"{path}: a job's keys, whole; a sentinel here would need sentinel.secret from where they were made"
    return Check("keys", "ok", text)


def metrics_port(config: Config) -> Check:
    """Whether the metrics port is free, or a sentinel answers there."""
    host, port = config.serve.metrics_host, config.serve.metrics_port
    if port == 0 or not is_taken(host, port):
        return Check("metrics port", "ok", f"{host}:{port} is free")
    pid = listener_pid(port) or "unknown"
    try:
        snapshot_json.fetch(f"http://{host}:{port}", timeout_s=2.0, history=0)
    except (OSError, SentinelError):
        text = f"{host}:{port} is held by pid {pid}, which is no sentinel"
        return Check("metrics port", "fail", text, "--set serve.metrics_port=0 takes any free one")
    return Check("metrics port", "ok", f"{host}:{port}: a sentinel answers there (pid {pid})")


def tape(config: Config) -> Iterator[Check]:
    """Whether the tape folder takes files, and for how long."""
    if not config.tape.dir:
        running = _recorded(config)
        if running:
            yield Check("tape", "ok", f"{running}: the sentinel that runs records there")
        else:
            text = "no tape.dir in these settings: with them nothing is recorded, and a restart forgets"
            yield Check("tape", "warn", text, "serve --tape DIR")
        return
    path = Path(config.tape.dir)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Check("tape", "fail", f"{path} cannot be written: {error.strerror}", "choose another --tape folder")
        return
    busy = lock_holder(path / "lock") is not None
    yield Check("tape", "ok", f"{path} can be written" + (" (a sentinel records there now)" if busy else ""))
    free, wanted = shutil.disk_usage(there).free, config.tape.token_bytes
    text = f"{_mib(free)} free at {there}; the ring of token frames takes up to {_mib(wanted)}"
    if free < LITTLE_BYTES:
        yield Check("disk space", "fail", text, "make room, or record elsewhere")
    elif free < wanted:
        yield Check("disk space", "warn", text, f"--set tape.token_bytes={free // 2}")
    else:
        yield Check("disk space", "ok", text)


def _recorded(config: Config) -> str:
    """Tape folder of the sentinel that holds the address, "" where there is none or it cannot be seen (Linux only)."""
    try:
        pid = _holder(addresses.parse(config.serve.address)) or ""
        files = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")] if pid else []
    except (AddressError, OSError):
        return ""
    return next((str(Path(file).parent) for file in files if Path(file).name == STATE_FILE), "")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
