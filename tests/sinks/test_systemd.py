"""What systemd hears: ready when the first picture is out, alive with each one, stopping at the end."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from factories_snapshots import make_run, make_snapshot

from dlc_sentinel.sinks.systemd import SystemdNotify


@pytest.fixture
def manager(tmp_path):
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        yield manager


def test_it_is_ready_once_alive_each_time_and_stopping_once(manager):
    sink = SystemdNotify(manager.getsockname())
    sink.publish(make_snapshot())
    sink.publish(make_snapshot(make_run(verdict="LAG")))
    sink.close()
    sink.close()

    first, second, last = (manager.recv(4096).decode().splitlines() for _ in range(3))
    assert first == ["READY=1", "WATCHDOG=1", "STATUS=1 runs, worst verdict HEALTHY"]
    assert second == ["WATCHDOG=1", "STATUS=1 runs, worst verdict LAG"]
    assert last == ["STOPPING=1"]


def test_nothing_is_told_before_the_first_picture(manager):
    SystemdNotify(manager.getsockname())
    manager.settimeout(0.05)

    with pytest.raises(TimeoutError):
        manager.recv(10)


def test_a_manager_that_is_gone_harms_nobody(tmp_path):
    sink = SystemdNotify(str(tmp_path / "nobody"))

    sink.publish(make_snapshot())
    sink.close()


def test_an_abstract_socket_is_reached():
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind("\0dlc-sentinel-test-notify")
        manager.settimeout(5)
        SystemdNotify("@dlc-sentinel-test-notify").publish(make_snapshot())

        assert manager.recv(4096).startswith(b"READY=1")
