"""actions list and reset: what a person may see and do, and that the tape knows it."""

from __future__ import annotations

import http.client
from contextlib import closing

import pytest
from factories import Job
from factories_cli import wait_until
from factories_snapshots import make_run, make_snapshot

from dlc_sentinel.cli import reset_token
from dlc_sentinel.sinks.prometheus import RESET_PATH, PrometheusSink
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.replay import last_state, read_tape
from dlc_sentinel.tape.schema import RESET, STATE_KIND


@pytest.fixture
def sink():
    with closing(PrometheusSink()) as sink:
        sink.publish(make_snapshot(make_run()))
        yield sink


def post(sink, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=5)
    try:
        connection.request("POST", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_reset_needs_the_token_a_local_name_and_a_run_that_is_there(sink):
    heard = []
    path = f"{RESET_PATH}?run=r1"
    good = {"Authorization": "Bearer secret"}
    too_early = post(sink, path, **good)
    sink.accept_resets("secret", heard.append)

    refused = [
        post(sink, path),
        post(sink, path, Authorization="Bearer wrong"),
        post(sink, path, Host="evil.example", **good),
        post(sink, f"{RESET_PATH}?run=r2", **good),
        post(sink, "/metrics", **good),
    ]

    assert too_early == 403 and refused == [401, 401, 403, 404, 404] and heard == []
    assert post(sink, path, **good) == 202 and heard == ["r1"]


def tape_with_open_breaker(folder):
    """What a sentinel leaves behind whose RESYNCs had no effect."""
    job = Job()
    for step in range(3):
        job.step(step)
    state = job.monitor.dump_state("r1")
    state["decider"] |= {"breaker_open": True, "fails_in_row": 3}
    recorder = Recorder(folder, 2**20, 2**20)
    recorder.row(job.now_s, "r1", 2, STATE_KIND, state)
    recorder.close(job.now_s)


@pytest.mark.slow
def test_reset_closes_the_breaker_of_a_running_sentinel_and_the_tape_knows_it(serving, cli, home):
    tape_with_open_breaker(home / "tape")
    served = serving("--tape", home / "tape")
    wait_until(lambda: cli("actions", "list", served.url).out)

    before = cli("actions", "list", served.url, "--json").json()
    done = cli("actions", "reset", served.url)
    after = cli("actions", "list", served.url)
    again = cli("actions", "reset", served.url, "--json")
    served.end()
    rows = [frame.payload for frame in read_tape(home / "tape") if frame.header == RESET]

    assert [(run["run"], run["breaker_open"]) for run in before] == [("r1", True)]
    assert (done.code, done.out) == (0, "breaker reset: r1\n")
    assert after.out.startswith("r1: mode resync, breaker closed")
    assert again.code == 0 and again.json() == {"reset": [], "open": []}
    assert rows == [b"r1"] and last_state(home / "tape", "r1")["decider"]["breaker_open"] is False


@pytest.mark.slow
def test_reset_of_a_run_that_is_not_there_or_without_the_token_is_refused(serving, cli, home):
    tape_with_open_breaker(home / "tape")
    served = serving("--tape", home / "tape")
    wait_until(lambda: cli("actions", "list", served.url).out)

    unknown = cli("actions", "reset", served.url, "--run", "r2")
    reset_token.path_for(int(served.url.rpartition(":")[2])).unlink()
    without_token = cli("actions", "reset", served.url)

    assert unknown.code == 2 and "runs known: r1" in unknown.err
    assert without_token.code == 1 and "no token" in without_token.err


def test_without_a_sentinel_both_exit_1(cli):
    for command in ("list", "reset"):
        done = cli("actions", command, "http://127.0.0.1:1")
        assert done.code == 1 and done.out == "" and "serve" in done.err


def test_a_token_is_private_and_taken_away_only_by_its_owner(home):
    first = reset_token.write(1234)
    second = reset_token.write(1234)

    reset_token.remove(1234, first)
    kept = reset_token.read(1234)
    reset_token.remove(1234, second)

    assert first != second == kept and reset_token.read(1234) is None
