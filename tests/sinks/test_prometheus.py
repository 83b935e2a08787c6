"""The metrics port, asked over HTTP as Prometheus and `watch` do."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import closing

import pytest
from factories_snapshots import make_finding, make_producer, make_run, make_snapshot, make_step
from prometheus_client.parser import text_string_to_metric_families

from dlc_sentinel import catalog
from dlc_sentinel.errors import AddressInUse
from dlc_sentinel.sinks.prometheus import PrometheusSink
from dlc_sentinel.sinks.snapshot_json import fetch

HOSTILE = '</script><script>alert(1)</script>\x1b[31m\n"quoted"\\ ' + "z" * 10_000


@pytest.fixture
def sink():
    with closing(PrometheusSink()) as sink:
        yield sink


def ask(sink, path, method="GET", **headers):
    """Status, headers, body text."""
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=5)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def samples(sink):
    families = text_string_to_metric_families(ask(sink, "/metrics")[2])
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def value(sink, name, **labels):
    labels = {"run": "r1", "model_name": "Qwen3-0.6B", "engine": "0", **labels}
    return samples(sink).get((name, tuple(sorted(labels.items()))))


def test_a_scrape_shows_the_last_published_snapshot(sink):
    sink.publish(make_snapshot(make_run(step=make_step(lag_ess={"32": 0.9}))))
    sink.publish(make_snapshot(make_run(step=make_step(lag_ess={"32": 0.43}))))

    assert value(sink, "dlc_sentinel_lag_ess_ratio", horizon="32") == 0.43
    assert value(sink, "dlc_sentinel_frames_total") == 260
    assert value(sink, "dlc_sentinel_basis_info", basis="exact") == 1


def test_every_metric_of_the_catalogue_is_served_and_nothing_else(sink):
    step = make_step(forecast_steps={"low": 1.0, "mid": 2.0, "high": 3.0}, stale_kv={"rms": 0.02})
    told = {"scalars": ({"step": 12, "reward": 0.4},), "synced": ({"step": 12, "version": 12},)}
    sink.publish(make_snapshot(make_run(step=step, findings=(make_finding(),), **told)))

    assert {name for name, _ in samples(sink)} == {metric.full_name for metric in catalog.METRICS}


def test_a_run_that_is_gone_from_the_snapshot_leaves_no_series(sink):
    sink.publish(make_snapshot(make_run(), make_run(run="r2")))
    sink.publish(make_snapshot(make_run(run="r2")))

    assert value(sink, "dlc_sentinel_frames_total") is None
    assert value(sink, "dlc_sentinel_frames_total", run="r2") == 260


def test_a_scrape_before_the_first_publish_is_empty_and_not_an_error(sink):
    assert ask(sink, "/metrics")[0] == 200
    assert samples(sink) == {}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_complain_about(sink):
    sink.publish(
        make_snapshot(make_run(), make_run(run=HOSTILE), make_run(run=HOSTILE + "z"), num_refused={"unparsable": 1})
    )

    done = subprocess.run(
        ["promtool", "check", "metrics"], input=ask(sink, "/metrics")[2], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_openmetrics_is_answered_to_those_who_ask_for_it(sink):
    sink.publish(make_snapshot())

    _, headers, body = ask(sink, "/metrics", Accept="application/openmetrics-text; version=1.0.0")

    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_a_scrape_during_publishes_is_never_half_old_and_half_new(sink):
    pictures = [
        make_snapshot(make_run(last_step=n, num_frames=n, step=make_step(n, loop_gain=float(n)))) for n in range(50)
    ]
    sink.publish(pictures[0])
    stop = threading.Event()

    def publish():
        while not stop.is_set():
            for picture in pictures:
                sink.publish(picture)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(20):
            found = {name: number for (name, _), number in samples(sink).items()}
            assert (
                found["dlc_sentinel_last_step"]
                == found["dlc_sentinel_frames_total"]
                == found["dlc_sentinel_loop_gain_ratio"]
            )
    finally:
        stop.set()
        publisher.join()


def test_the_port_is_free_chosen_and_on_loopback_unless_told_otherwise(sink):
    assert sink.port > 0
    assert sink.url == f"http://127.0.0.1:{sink.port}"


def test_a_port_that_is_taken_is_said_with_the_setting_that_helps(sink):
    with pytest.raises(AddressInUse, match=rf"127.0.0.1:{sink.port} .*serve.metrics_port"):
        PrometheusSink(port=sink.port)


def test_a_closed_sink_gives_its_port_back_and_may_be_closed_again():
    sink = PrometheusSink()
    sink.close()
    sink.close()

    with closing(PrometheusSink(port=sink.port)) as again:
        assert again.port == sink.port


def test_two_sinks_in_one_process_do_not_share_metrics(sink):
    with closing(PrometheusSink()) as other:
        sink.publish(make_snapshot())

        assert samples(other) == {}


def test_alive_is_answered_before_anything_was_published(sink):
    assert ask(sink, "/healthz")[0] == 200


@pytest.mark.parametrize("target", ["/runbooks", "/runbooks/"])
def test_the_runbooks_are_listed_and_each_of_the_list_is_there(sink, target):
    status, _, listed = ask(sink, target)

    assert status == 200 and "/runbooks/LAG" in listed.split()
    assert {ask(sink, page)[0] for page in listed.split()} == {200}


@pytest.mark.parametrize("target", ["/", "/nothing"])
def test_who_asks_for_no_page_is_told_all_there_are(sink, target):
    assert "/runbooks/NAME" in ask(sink, target)[2] and "/api/v1/snapshot" in ask(sink, target)[2]


def test_ready_means_published_and_a_producer_alive(sink):
    before = ask(sink, "/readyz")
    sink.publish(make_snapshot(make_run(producers=(make_producer(state="gone"),))))
    without = ask(sink, "/readyz")
    sink.publish(make_snapshot())
    after = ask(sink, "/readyz")

    assert (before[0], without[0], after[0]) == (503, 503, 200)
    assert "DLC_SENTINEL" in without[2]


def test_the_snapshot_fetched_is_the_snapshot_published(sink):
    snapshot = make_snapshot(make_run(run=HOSTILE, findings=(make_finding(),)))
    sink.publish(snapshot)

    assert fetch(sink.url) == snapshot
    assert len(fetch(f"127.0.0.1:{sink.port}", history=3).runs[0].history) == 3


def test_a_snapshot_asked_for_before_the_first_publish_is_an_os_error_that_says_so(sink):
    with pytest.raises(OSError, match="it is still starting: try again in a moment"):
        fetch(sink.url)


def test_the_snapshot_is_json_that_no_browser_takes_for_a_page(sink):
    sink.publish(make_snapshot(make_run(run=HOSTILE)))

    _, headers, body = ask(sink, "/api/v1/snapshot")

    assert json.loads(body)["runs"][0]["run"] == HOSTILE
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("history", ["x", "-1", "9999999", "%00", "²"])
def test_a_history_that_is_no_number_is_a_bad_request(sink, history):
    sink.publish(make_snapshot())

    assert ask(sink, f"/api/v1/snapshot?history={urllib.request.quote(history, safe='%')}")[0] == 400


@pytest.mark.parametrize("path", ["/nothing", "/metrics/../etc/passwd", "//evil", "/api/v1/snapshots"])
def test_other_paths_are_not_found(sink, path):
    assert ask(sink, path)[0] == 404


@pytest.mark.parametrize(("method", "status"), [("POST", 404), ("PUT", 501), ("DELETE", 501)])
def test_pages_can_be_read_only(sink, method, status):
    assert ask(sink, "/metrics", method)[0] == status


def reset(sink, run="r1", token="secret", **headers):
    return ask(sink, f"/api/v1/actions/reset?run={run}", "POST", Authorization=f"Bearer {token}", **headers)[0]


def test_a_reset_is_applied_to_the_named_run_for_who_knows_the_token(sink):
    applied = []
    sink.publish(make_snapshot())
    sink.accept_resets("secret", applied.append)

    assert reset(sink) == 202
    assert applied == ["r1"]


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"token": "wrong"}, 401),
        ({"token": ""}, 401),
        ({"run": "r9"}, 404),
        ({"run": ""}, 404),
        ({"Host": "evil"}, 403),
    ],
    ids=str,
)
def test_a_reset_with_a_wrong_token_run_or_host_is_refused(sink, settings, status):
    applied = []
    sink.publish(make_snapshot())
    sink.accept_resets("secret", applied.append)

    assert reset(sink, **settings) == status
    assert applied == []


def test_a_sentinel_that_takes_no_resets_refuses_them_all(sink):
    sink.publish(make_snapshot())

    assert reset(sink) == 403


def test_head_is_answered_without_a_body(sink):
    sink.publish(make_snapshot())

    with socket.create_connection(("127.0.0.1", sink.port), timeout=5) as peer:
        peer.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: peer.recv(4096), b""))

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 403), ("localhost:1", 200), ("[::1]:9", 200), ("[::", 403)]
)
def test_a_name_that_was_made_to_point_here_is_refused_on_loopback(sink, host, status):
    sink.publish(make_snapshot())

    assert ask(sink, "/api/v1/snapshot", Host=host)[0] == status


def test_random_bytes_and_a_peer_that_hangs_up_harm_nobody(sink, capfd):
    for junk in (b"\x00\xff\x16\x03\x01junk\r\n\r\n", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\r\n" * 9):
        with socket.create_connection(("127.0.0.1", sink.port), timeout=5) as peer:
            peer.sendall(junk)

    assert ask(sink, "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_scrapes_it(sink, tmp_path):
    sink.publish(make_snapshot(make_run(run=HOSTILE), make_run(step=make_step(lag_ess={"32": 0.43}))))
    (tmp_path / "p.yml").write_text(
        f"scrape_configs:\n- job_name: dlc\n  scrape_interval: 200ms\n  scrape_timeout: 200ms\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{sink.port}']}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/p.yml",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query?query=dlc_sentinel_lag_ess_ratio%7Brun%3D%22r1%22,horizon%3D%2232%22%7D"
        found = _poll(url, deadline_s=20.0)
    finally:
        server.terminate()
        server.wait(10)

    assert found[0]["value"][1] == "0.43"
    assert found[0]["metric"]["model_name"] == "Qwen3-0.6B"


def _poll(url, deadline_s):
    """The first non-empty result of a query; Prometheus offers nothing to wait on."""
    end_s = time.monotonic() + deadline_s
    pause = threading.Event()
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            result = []
        if result:
            return result
        pause.wait(0.1)
    raise AssertionError("Prometheus has no sample")
