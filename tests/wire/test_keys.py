"""CURVE keys: files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlc_sentinel.errors import KeysError
from dlc_sentinel.wire.keys import load_producer, load_sentinel, new_keys


def test_key_files_have_mode_0600_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written = new_keys(tmp_path / "keys")
    finally:
        os.umask(before)

    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_both_sides_load_keys_that_fit_each_other(tmp_path: Path) -> None:
    new_keys(tmp_path)
    sentinel, producer = load_sentinel(tmp_path), load_producer(tmp_path)

    assert producer.sentinel_public == sentinel.public
    assert sentinel.callback("", producer.public)
    assert not sentinel.callback("", sentinel.public)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    new_keys(tmp_path)

    with pytest.raises(KeysError, match=r"already holds sentinel\.public"):
        new_keys(tmp_path)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    new_keys(tmp_path)
    (tmp_path / "producer.secret").chmod(0o640)

    with pytest.raises(KeysError, match=r"0640.*chmod 600"):
        load_producer(tmp_path)


def test_missing_and_malformed_keys_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="keys new"):
        load_sentinel(tmp_path)
    new_keys(tmp_path)
    (tmp_path / "producer.public").write_text("short\n")
    with pytest.raises(KeysError, match="40 Z85 characters, got 5"):
        load_producer(tmp_path)


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    new_keys(tmp_path)
    keys = load_producer(tmp_path)

    assert repr(keys.secret) not in repr(keys)
