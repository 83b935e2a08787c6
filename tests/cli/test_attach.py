"""attach and detach say at once that nobody is there; what they do in a real job is in tests/stacks/verl."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def ray(monkeypatch):
    """A Ray that says to which address it was asked to connect, and knows no actor."""
    asked = []

    def init(address, **_):
        asked.append(address)

    util = SimpleNamespace(list_named_actors=lambda all_namespaces: [])
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, util=util, shutdown=lambda: None))
    return asked


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("command", ["attach", "detach"])
def test_an_address_where_nobody_listens_is_told_before_ray_waits_for_it(cli, ray, free_port, command, scheme):
    address = f"{scheme}127.0.0.1:{free_port}"

    done = cli(command, "--ray", address, "--timeout", "10")

    assert done.code == 2 and ray == []
    assert f"no Ray cluster at '{address}': " in done.err and "Connection refused" in done.err
    assert "wanted the address of the job's cluster" in done.err


def test_a_host_that_does_not_answer_is_given_up_within_the_timeout(cli, ray):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        port = deaf.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            done = cli("attach", "--ray", f"127.0.0.1:{port}", "--timeout", "0.2")

    assert done.code == 2 and ray == [] and "no answer in 0.2 s" in done.err


def test_where_somebody_listens_and_for_auto_ray_is_asked(cli, ray):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        done = [cli("attach", "--ray", each) for each in (address, "auto")]

    assert ray == [address, "auto"]
    assert all(each.code == 2 and "no verl job at Ray address" in each.err for each in done)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no..name:6379"])
def test_an_address_that_is_none_is_told_as_one(cli, ray, address):
    done = cli("attach", "--ray", address)

    assert done.code == 2 and ray == [] and f"no Ray cluster at '{address}': " in done.err
