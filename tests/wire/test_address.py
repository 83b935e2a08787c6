"""Addresses: the text of DLC_SENTINEL, what is allowed, and where sockets lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlc_sentinel.errors import AddressError
from dlc_sentinel.wire.address import parse, require_safe


def test_ipc_puts_control_beside_data() -> None:
    address = parse("ipc:///run/x/s.sock")

    assert (address.data, address.control) == ("ipc:///run/x/s.sock", "ipc:///run/x/s.sock.ctl")


def test_tcp_puts_control_at_the_next_port() -> None:
    address = parse("tcp://10.0.0.5:5757")

    assert (address.data, address.control) == ("tcp://10.0.0.5:5757", "tcp://10.0.0.5:5758")


def test_1_is_a_socket_in_the_users_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    runtime = parse("1")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    temporary = parse("1")

    assert runtime.ipc_path == f"{tmp_path}/dlc-sentinel/sentinel.sock"
    assert temporary.ipc_path == f"{tmp_path}/dlc-sentinel-{os.getuid()}/sentinel.sock"


def test_a_default_folder_that_others_may_enter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "dlc-sentinel").mkdir()
    (tmp_path / "dlc-sentinel").chmod(0o755)

    with pytest.raises(AddressError, match="0700"):
        parse("1")


def test_ipc_paths_end_at_107_bytes_with_the_control_suffix() -> None:
    assert parse("ipc:///" + "x" * 102).ipc_path == "/" + "x" * 102

    with pytest.raises(AddressError, match=r"108 bytes.*107"):
        parse("ipc:///" + "x" * 103)


@pytest.mark.parametrize(
    "text", ["", "yes", "ipc://relative", "tcp://host", "tcp://:5757", "tcp://h:x", "tcp://h:65535", "udp://h:1"]
)
def test_what_is_no_address_is_refused_with_what_was_wanted(text: str) -> None:
    with pytest.raises(AddressError, match="wanted"):
        parse(text)


@pytest.mark.parametrize("text", ["ipc:///a", "tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5"])
def test_local_addresses_need_no_keys(text: str) -> None:
    require_safe(parse(text), keyed=False, insecure=False)


@pytest.mark.parametrize("text", ["tcp://10.0.0.1:5", "tcp://0.0.0.0:5", "tcp://*:5", "tcp://node7:5"])
def test_addresses_off_loopback_need_keys_or_insecure(text: str) -> None:
    with pytest.raises(AddressError, match="keys new"):
        require_safe(parse(text), keyed=False, insecure=False)
    require_safe(parse(text), keyed=True, insecure=False)
    require_safe(parse(text), keyed=False, insecure=True)
