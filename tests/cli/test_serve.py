"""A sentinel as a program: addresses, the view over HTTP, an orderly end, kill -9, a second one at the same place."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from factories_cli import connect, ended, program, send_step, wait_until
from factories_job import live, stale_job

from dlc_sentinel.cli import reset_token
from dlc_sentinel.cli import sentinel as module
from dlc_sentinel.cli.sentinel import Sentinel, build_sinks
from dlc_sentinel.cli.serve import announce
from dlc_sentinel.config import Config, Serve, Tape
from dlc_sentinel.errors import TapeError
from dlc_sentinel.runtime import Runtime, replay
from dlc_sentinel.sinks.alert_lines import AlertLines
from dlc_sentinel.sinks.event_log import EventLog
from dlc_sentinel.sinks.prometheus import PrometheusSink
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.schema import STATE_KIND
from dlc_sentinel.web.sink import PageSink

slow = pytest.mark.slow


def feed(address, steps, **changes):
    hook = connect(address)
    for step in steps:
        send_step(hook, step, **changes)
    hook.close()


def shown(cli, url):
    """The run that `watch --once --json` shows, None while there is none."""
    done = cli("watch", url, "--once", "--json")
    runs = done.json()["runs"] if done.out else []
    return runs[0] if runs else None


def test_the_sinks_are_a_tuple_to_be_read(home):
    config = Config(tape=Tape(dir=str(home)), serve=Serve(metrics_port=0))

    sinks = build_sinks(config)
    for sink in sinks:
        sink.close()

    assert [type(sink) for sink in sinks] == [AlertLines, EventLog, PrometheusSink, PageSink]


@slow
def test_serve_prints_where_it_listens_and_exits_0_when_told_to_stop(serving, home):
    served = serving("--tape", home / "tape")
    pid = served.info["pid"]
    scrape = urllib.request.urlopen(served.url + "/healthz", timeout=5).read()
    path = reset_token.path_for(int(served.url.rpartition(":")[2]))
    mode = stat.S_IMODE(path.stat().st_mode)

    done = served.end()

    assert served.info["data"] == f"ipc://{home}/s.sock" and served.info["control"] == f"ipc://{home}/s.sock.ctl"
    assert pid == served.process.pid and scrape == b"alive\n"
    assert done.code == 0 and done.out == ""
    for word in (served.info["data"], served.info["control"], f"{served.url}/metrics", str(home / "tape")):
        assert word in done.err
    assert mode == 0o600 and not path.exists()


@slow
def test_what_had_arrived_before_the_stop_is_judged_and_on_the_tape(serving, cli, home):
    served = serving("--tape", home / "tape")
    hook = connect(served.info["data"])
    send_step(hook, 0)
    wait_until(lambda: (run := shown(cli, served.url)) and run["last_step"] == 0)

    served.process.send_signal(signal.SIGSTOP)
    for _ in range(100):
        # More frames than one look at the sockets takes.
        hook.scalars(1, {"reward": 0.5})
    send_step(hook, 1)
    wait_until(lambda: hook.account()[2] == 0)
    served.process.send_signal(signal.SIGTERM)
    served.process.send_signal(signal.SIGCONT)
    done = ended(served.process)
    hook.close()
    _, _, report = replay(home / "tape", Config())

    assert done.code == 0 and [step["step"] for step in report["steps"]] == [0, 1]


@slow
def test_watch_once_shows_the_run_as_text_and_as_json(serving, cli):
    served = serving()
    before = wait_until(lambda: (done := cli("watch", served.url, "--once")).out and done)
    feed(served.info["data"], range(4))

    wait_until(lambda: (run := shown(cli, served.url)) and run["last_step"] == 3)
    text = cli("watch", f"{served.url}/metrics", "--once")

    assert before.code == 1 and "BLIND" in before.out
    assert text.code == 0 and "HEALTHY" in text.out and "step 3" in text.out and "\x1b" not in text.out


def test_watch_without_a_sentinel_exits_1_and_says_so(cli):
    done = cli("watch", "http://127.0.0.1:1", "--once", "--json")

    assert done.code == 1 and done.out == "" and "is `dlc-sentinel serve` running there?" in done.err


@slow
def test_a_killed_sentinel_goes_on_from_its_tape_and_the_job_does_not_notice(serving, cli, home):
    first = serving("--tape", home / "tape")
    hook = connect(first.info["data"])
    for step in range(6):
        send_step(hook, step, gen=0, lag=0.01 + 0.1 * step)
    before = wait_until(lambda: (run := shown(cli, first.url)) and run["last_step"] == 5 and run)

    first.kill()
    second = serving("--tape", home / "tape")
    resumed = wait_until(lambda: shown(cli, second.url))
    for step in range(6, 9):
        send_step(hook, step)
    after = wait_until(lambda: (run := shown(cli, second.url)) and run["last_step"] == 8 and run)
    hook.close()

    assert resumed["last_step"] == 5 and resumed["verdict"] == before["verdict"] == "LAG"
    assert resumed["commands"] == before["commands"] != []
    assert [step["step"] for step in after["history"]] == list(range(9)) and hook.num_errors == {}


@slow
@pytest.mark.parametrize("address", ["ipc", "tcp://127.0.0.1:0"])
def test_a_second_sentinel_at_the_same_address_is_refused_by_name(serving, home, address):
    served = serving(address=f"ipc://{home}/s.sock" if address == "ipc" else address)
    address = served.info["data"]

    second = ended(program(
        "serve", "--set", f"serve.address={address}", "--set", "serve.metrics_port=0", "--tape", home / "tape"
    ))  # fmt: skip

    assert second.code == 2 and address in second.err and "--set serve.address=" in second.err
    assert not (home / "tape").exists()
    assert (f"pid {served.info['pid']}" in second.err) or ("is in use" in second.err)
    assert served.process.poll() is None


@slow
def test_a_second_sentinel_on_the_same_metrics_port_or_tape_is_refused(serving, home):
    served = serving("--tape", home / "tape")
    port = served.url.rpartition(":")[2]
    other = ["--set", f"serve.address=ipc://{home}/other.sock"]

    on_port = ended(program("serve", *other, "--set", f"serve.metrics_port={port}"))
    on_tape = ended(program("serve", *other, "--set", "serve.metrics_port=0", "--tape", home / "tape"))

    assert on_port.code == 2 and "serve.metrics_port" in on_port.err
    assert on_tape.code == 2 and "another sentinel records here" in on_tape.err


@slow
def test_doctor_finds_a_usable_machine_and_who_holds_the_address(serving, cli, home):
    served = serving("--tape", home / "tape")
    port = served.url.rpartition(":")[2]

    done = cli("doctor", "--json", "--set", f"serve.address=ipc://{home}/s.sock", "--set", f"serve.metrics_port={port}")
    found = {check["name"]: check for check in done.json()["checks"]}

    assert done.code == 0 and done.json()["ok"] is True
    assert f"held by pid {served.info['pid']}" in found["address"]["text"]
    assert f"a sentinel answers there (pid {served.info['pid']})" in found["metrics port"]["text"]
    assert found["tape"] | {"fix": None} == {
        "name": "tape", "state": "ok", "text": f"{home}/tape: the sentinel that runs records there", "fix": None,
    }  # fmt: skip
    assert found["round trip"]["state"] == "ok" and "HEALTHY" in found["round trip"]["text"]


def test_doctor_fails_on_keys_that_others_can_read_and_says_the_fix(cli, home):
    cli("keys", "new", "k")
    os.chmod(home / "k" / "sentinel.secret", 0o644)

    done = cli("doctor", "--set", "serve.keys=k", "--set", "serve.metrics_port=0")
    line = next(line for line in done.out.splitlines() if " keys: " in line)

    assert done.code == 1 and line.startswith("fail") and "chmod 600" in line


def test_doctor_fails_on_a_tape_folder_that_takes_no_files(cli, home):
    (home / "file").write_text("")

    done = cli("doctor", "--set", f"tape.dir={home}/file", "--set", "serve.metrics_port=0", "--json")

    assert done.code == 1
    assert next(c for c in done.json()["checks"] if c["name"] == "tape")["state"] == "fail"


@slow
def test_ctrl_c_is_an_orderly_end(serving):
    served = serving()
    os.kill(served.process.pid, signal.SIGINT)

    assert ended(served.process).code == 0


def test_a_fault_in_the_sentinel_of_a_job_is_kept_and_said_and_raises_nowhere(home, monkeypatch, caplog):
    monkeypatch.setattr(Runtime, "step", lambda self, timeout_ms: 1 / 0)
    config = Config(serve=Serve(address=f"ipc://{home}/s.sock", metrics_port=0))

    with Sentinel(config, alerts=False) as sentinel:
        sentinel.start()
        wait_until(lambda: sentinel.error)

    assert isinstance(sentinel.error, ZeroDivisionError)
    assert "the sentinel ended: ZeroDivisionError" in caplog.text


def test_a_tape_that_cannot_be_written_is_refused_as_a_tape(cli, home):
    (home / "file").write_text("")

    done = cli("serve", "--set", f"serve.address=ipc://{home}/s.sock", "--tape", home / "file")

    assert done.code == 2 and "no tape can be written there" in done.err and "--tape" in done.err


def test_a_state_of_another_version_is_refused_and_not_half_used(home):
    recorder = Recorder(home / "tape", 2**20, 2**20)
    recorder.row(1.0, "r1", 2, STATE_KIND, {"last_closed": 2})
    recorder.close(1.0)
    config = Config(serve=Serve(address=f"ipc://{home}/s.sock", metrics_port=0), tape=Tape(dir=str(home / "tape")))

    for _ in range(2):
        with pytest.raises(TapeError, match="run 'r1' is of another version"):
            Sentinel(config)


def test_a_large_tape_to_go_on_from_is_announced_before_it_is_read(home, monkeypatch, capfd):
    live(home / "tape", stale_job(3))
    config = Config(serve=Serve(address=f"ipc://{home}/s.sock", metrics_port=0), tape=Tape(dir=str(home / "tape")))
    said = []
    monkeypatch.setattr(module, "last_states", lambda folder: said.append(capfd.readouterr().err) or {})
    monkeypatch.setattr(module, "TOLD_BYTES", 1)

    with Sentinel(config, alerts=False):
        assert "reading 0 MB of tape of the last life" in said[0]


def test_a_small_tape_is_read_without_a_word(home, capfd):
    live(home / "tape", stale_job(3))
    config = Config(serve=Serve(address=f"ipc://{home}/s.sock", metrics_port=0), tape=Tape(dir=str(home / "tape")))

    with Sentinel(config, alerts=False):
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_job_elsewhere_is_told_a_name_of_this_machine_and_where_its_keys_are(cli, home, capfd, host):
    cli("keys", "new", "my keys")
    config = Config(serve=Serve(address=f"tcp://{host}:0", keys="my keys", metrics_port=0))

    with Sentinel(config, alerts=False) as sentinel:
        announce(sentinel, config)
        port = sentinel.address.port
    (job,) = (line for line in capfd.readouterr().err.splitlines() if " job " in line)

    assert job.split(maxsplit=1)[1] == (
        f"export DLC_SENTINEL=tcp://{socket.gethostname()}:{port} DLC_SENTINEL_KEYS='{home.resolve()}/my keys'"
    )


def test_a_job_that_has_no_keys_is_told_that_it_must_allow_it(home, capfd):
    config = Config(serve=Serve(address="tcp://0.0.0.0:0", insecure=True, metrics_port=0))

    with Sentinel(config, alerts=False) as sentinel:
        announce(sentinel, config)

    assert f"{sentinel.address.port} DLC_SENTINEL_INSECURE=1\n" in capfd.readouterr().err


def test_a_lock_that_others_may_wait_for_stays_and_one_named_after_this_process_goes(home):
    for address in (f"ipc://{home}/s.sock", module.own_address("run")):
        with Sentinel(Config(serve=Serve(address=address, metrics_port=0)), alerts=False):
            assert Path(f"{address.removeprefix('ipc://')}.lock").exists()

    assert [path.name for path in home.rglob("*.lock")] == ["s.sock.lock"]


def test_the_page_is_served_on_loopback_and_obeys_nobody_without_the_token(serving):
    served = serving()
    page = served.info["page"]

    assert page.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(f"{page}/healthz", timeout=10) as answer:
        assert answer.read() == b"alive\n"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(f"{page}/api/v1/actions/reset?run=r1", method="POST"), timeout=10)


def test_the_page_shows_what_a_job_sends_down_to_its_worst_tokens(serving):
    served = serving()

    def shown():
        with urllib.request.urlopen(f"{served.info['page']}/api/v1/page?run=r1", timeout=10) as answer:
            return json.load(answer)["run"]

    wait_until(lambda: urllib.request.urlopen(f"{served.info['page']}/api/v1/page", timeout=10).status == 200)
    feed(served.info["data"], range(3))
    run = wait_until(lambda: (found := shown()) and found["last_step"] >= 1 and found, "the second step")

    assert run["columns"]["step"][:2] == [0, 1]
    assert len(run["worst"]) == 8
    assert len(run["worst"][0]["engine"]) == 96


def test_the_page_takes_another_port_where_its_own_is_taken_and_can_be_switched_off(serving, home):
    first = serving()
    port = first.info["page"].rsplit(":", 1)[1]
    second = serving("--set", f"serve.page_port={port}", address=f"ipc://{home}/t.sock")
    third = serving("--set", "serve.page=false", address=f"ipc://{home}/u.sock")

    assert second.info["page"] not in (None, first.info["page"])
    assert f"(port {port} is taken; --set serve.page_port=PORT)" in second.end().err
    assert third.info["page"] is None


def test_doctor_takes_a_jobs_keys_for_whole_on_a_node_where_only_the_job_runs(cli, home):
    cli("keys", "new", "k")
    (home / "k" / "sentinel.secret").unlink()

    done = cli("doctor", "--set", "serve.keys=k", "--set", "serve.metrics_port=0")
    line = next(line for line in done.out.splitlines() if " keys: " in line)
    assert line.startswith("ok") and "sentinel.secret" in line
    assert not any(line.startswith("fail") for line in done.out.splitlines())
