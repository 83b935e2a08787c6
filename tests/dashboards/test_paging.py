"""From a collapsing run to a pager, with the real programs: hook, sentinel, Prometheus, Alertmanager, webhook."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time

import factories_boards as boards
import pytest
import yaml
from factories_cli import connect, ended, program, send_step
from factories_prometheus import Alertmanager, Prometheus, Webhook, free_port, get, wait_for

from dlc_sentinel.cli.sentinel import Sentinel
from dlc_sentinel.config import Act, Config, Serve
from dlc_sentinel.offline import timeline
from dlc_sentinel.records import Event, Snapshot
from dlc_sentinel.sinks.openmetrics import OpenMetricsSink

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")
missing = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")]
FASTER = 30
"""Every `for` is this many times shorter: a DlcBlind that waits 10 minutes waits 20 s here."""


HEALTHY_S = float(os.environ.get("DLC_TEST_HEALTHY_S", "45"))
"""Seconds that the healthy run lives at least."""
DEMO_S = 240.0


def hurried(rules):
    """The shipped rules with `for` and keep_firing_for shortened, evaluated every second."""
    tree = yaml.safe_load(rules)
    for group in tree["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            for key in ("for", "keep_firing_for"):
                if key in rule:
                    seconds = {"s": 1, "m": 60}[rule[key][-1]] * int(rule[key][:-1])
                    rule[key] = f"{max(seconds // FASTER, 1)}s"
    return yaml.safe_dump(tree)


def exported(folder, metrics_url, manager_port):
    """What `prometheus export` writes, made to run here: the user's own way to the files."""
    target = metrics_url.removeprefix("http://")
    done = ended(program("prometheus", "export", folder, "--target", target, "--runbooks", f"{metrics_url}/runbooks"))
    assert done.code == 0, done.err
    rules = folder / "prometheus" / "dlc-rules.yml"
    rules.write_text(hurried(rules.read_text()))
    config = (folder / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("5s", "1s").replace("10s", "1s").replace("127.0.0.1:9093", f"127.0.0.1:{manager_port}")
    return config.replace("- dlc-rules.yml", f"- {rules}")


def healthy_job(address, stop):
    hook, step = connect(address, "healthy"), 0
    while not stop.wait(0.4):
        send_step(hook, step)
        step += 1
    hook.close()


def collapsing_job(address, is_paged):
    """Nobody syncs: the lag grows until somebody is woken."""
    hook, step = connect(address, "collapse"), 0
    pause = threading.Event()
    while not is_paged() and step < 400:
        send_step(hook, step, gen=0, lag=min(0.01 + 0.03 * step, 0.5))
        step += 1
        pause.wait(0.2)
    hook.close()


@pytest.fixture(scope="module")
def paged(tmp_path_factory):
    """Two jobs side by side, one healthy and one that collapses, until the pager rings: what came of it."""
    folder = tmp_path_factory.mktemp("paging")
    serve = Serve(address=f"ipc://{folder}/s.sock", metrics_port=0, page=False)
    with Webhook() as webhook, Sentinel(Config(act=Act(mode="observe"), serve=serve), alerts=False) as sentinel:
        sentinel.start()
        example = (boards.FOLDER / "alertmanager" / "alertmanager.yml").read_text()
        example = example.replace("http://127.0.0.1:9099", webhook.url).replace("group_wait: 10s", "group_wait: 1s")
        with Alertmanager(folder, example) as manager:
            config = exported(folder / "export", sentinel.metrics.url, manager.port)
            with Prometheus(folder, config) as prometheus:
                started = time.time()
                stop = threading.Event()
                healthy = threading.Thread(target=healthy_job, args=(sentinel.address, stop))
                healthy.start()

                def lag():
                    return [a for _, a in webhook.alerts() if a["labels"]["alertname"] == "DlcLag"]

                try:
                    wait_for(lambda: prometheus.now('dlc_sentinel_last_step{run="healthy"} > 0'), "the healthy run")
                    collapsing_job(sentinel.address, lag)
                    wait_for(lag, "the pager")
                    wait_for(lambda: time.time() - started > HEALTHY_S, "the healthy run's time", HEALTHY_S + 15)
                    link = lag()[0]["annotations"]["runbook_url"]
                    yield {
                        "posts": webhook.alerts(),
                        "runbook": get(link),
                        "link": link,
                        "fired": prometheus.over("ALERTS", start_s=started - 5, end_s=time.time(), step_s=1),
                        "healthy": prometheus.now('dlc_sentinel_last_step{run="healthy"}'),
                        "verdict": prometheus.now('dlc_sentinel_verdict_info{run="healthy"}'),
                    }
                finally:
                    stop.set()
                    healthy.join()


def test_the_collapse_reaches_the_pager_with_its_numbers(paged):
    path, alert = next((p, a) for p, a in paged["posts"] if a["labels"]["alertname"] == "DlcLag")

    assert path == "/chat" and alert["status"] == "firing"
    assert alert["labels"]["run"] == "collapse" and alert["labels"]["severity"] == "warning"
    assert re.search(r"Lag ESS 0\.[0-4]\d", alert["annotations"]["description"])
    assert "mode observe" in alert["annotations"]["description"]


def test_the_link_in_the_page_leads_to_its_runbook(paged):
    status, text = paged["runbook"]

    assert paged["link"].endswith("/runbooks/LAG.md") and status == 200
    assert text == (boards.RUNBOOKS / "LAG.md").read_text()


def test_no_alert_was_ever_firing_for_the_healthy_run(paged):
    """It lives for at least HEALTHY_S, which with `for` shortened thirtyfold stands for more than 20 minutes."""
    of_healthy = [
        series["metric"]["alertname"] for series in paged["fired"]
        if series["metric"].get("run") == "healthy" and series["metric"]["alertstate"] == "firing"
    ]  # fmt: skip
    (last,) = paged["healthy"]

    assert of_healthy == []
    assert float(last["value"][1]) > 40 and paged["verdict"][0]["metric"]["verdict"] == "HEALTHY"


def test_nothing_about_the_sentinel_itself_was_paged(paged):
    assert [a["labels"]["alertname"] for _, a in paged["posts"] if "Sentinel" in a["labels"]["alertname"]] == []


# -- ten minutes of a recorded run, by promtool ------------------------------------------------------------------------


class Grid:
    """Keeps snapshots' series on promtool's grid of 15 s."""

    def __init__(self):
        self.sink = OpenMetricsSink(fill_s=15.0)

    def handle(self, event: Event) -> None:
        self.sink.handle(event)

    def publish(self, snapshot: Snapshot) -> None:
        self.sink.publish(snapshot)

    def close(self) -> None:
        return None

    def series(self, path):
        """[{"series", "values"}] of the OpenMetrics text at `path`."""
        points = {}
        self.sink.write(path)
        for line in path.read_text().splitlines():
            if not line.startswith("#"):
                head, value, at = line.rsplit(" ", 2)
                points.setdefault(head, {})[round(float(at) / 15)] = value
        last = max(max(at) for at in points.values())
        return [
            {"series": head, "values": " ".join(at.get(number, "_") for number in range(last + 1))}
            for head, at in points.items()
        ], 15 * last


def alerts_of(lines, folder):
    """(minutes, {alert: what promtool saw}) of a .jsonl, told to the shipped rules as a scrape would have."""
    folder.mkdir()
    path = folder / "run.jsonl"
    path.write_text(lines)
    grid = Grid()
    timeline.play(path, Config(), grid, step_s=30.0)
    series, length_s = grid.series(folder / "run.om")
    series.append({"series": 'up{job="dlc-sentinel",instance="h:1"}', "values": "1x99"})
    names = [r["alert"] for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"] if "alert" in r]
    checks = [
        {"eval_time": f"{at}s", "alertname": name, "exp_alerts": []} for name in names for at in range(0, length_s, 30)
    ]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "alert_rule_test": checks}],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", folder / "test.yml"], capture_output=True, text=True, check=False
    )
    return length_s / 60, set(re.findall(r"alertname: ?(\w+), time", done.stdout + done.stderr)), done


RULES = boards.FOLDER / "prometheus" / "dlc-rules.yml"


def job_lines(num_steps, *, gen, lag):
    """A .jsonl of factories_job's rows; `gen` and `lag` are functions of the step."""
    import json

    from factories_job import train

    lines = [{"type": "meta", "run": "r1", "engine_dtype": "float32", "trainer_dtype": "float32"}]
    for step in range(num_steps):
        record = train(step, gen=gen(step), lag=lag(step))
        for row, name in enumerate(record.ids):
            own = slice(int(record.offsets_S1[row]), int(record.offsets_S1[row + 1]))
            streams = {"engine": record.engine_N, "old": record.old_N, "cur": record.cur_N}
            lines.append({
                "type": "seq", "step": step, "version": step, "id": name, "group": record.groups[row],
                "old_is": "generator", "versions": gen(step),
                **{key: stream[own].astype(float).round(6).tolist() for key, stream in streams.items()},
            })  # fmt: skip
    return "\n".join(json.dumps(line) for line in lines) + "\n"


def test_ten_minutes_of_a_healthy_recording_fire_nothing(tmp_path):
    lines = job_lines(22, gen=lambda step: step, lag=lambda step: 0.01)

    minutes, fired, done = alerts_of(lines, tmp_path / "healthy")

    assert minutes >= 10
    assert done.returncode == 0, done.stdout + done.stderr
    assert fired == set()


def test_a_recording_that_collapses_fires_lag_and_nothing_else(tmp_path):
    """The same way, so that the healthy one proves something."""
    lines = job_lines(26, gen=lambda step: 0, lag=lambda step: min(0.01 + 0.03 * step, 0.5))

    _, fired, done = alerts_of(lines, tmp_path / "ill")

    assert fired == {"DlcLag"}, done.stdout + done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo itself, three real runs side by side, until its pager has rung and its control has ended."""
    folder, port = tmp_path_factory.mktemp("demo"), free_port()
    example = (boards.FOLDER / "alertmanager" / "alertmanager.yml").read_text()
    settings = ("--set", f"serve.metrics_port={port}", "--set", "serve.page=false")
    with Webhook() as webhook, (folder / "said.txt").open("w") as said:
        example = example.replace("http://127.0.0.1:9099", webhook.url).replace("group_wait: 10s", "group_wait: 1s")
        job = program("demo", "--plain", "--out", folder / "out", *settings, stdout=said, stderr=said)
        try:
            with Alertmanager(folder, example) as manager:
                config = exported(folder / "export", f"http://127.0.0.1:{port}", manager.port)
                with Prometheus(folder, config) as prometheus:
                    started = time.time()

                    def lag():
                        return [a for _, a in webhook.alerts() if a["labels"]["alertname"] == "DlcLag"]

                    wait_for(lag, "the pager", DEMO_S)
                    runbook = get(lag()[0]["annotations"]["runbook_url"])
                    reached = 'dlc_sentinel_last_step{run="control"} >= 150'
                    wait_for(lambda: prometheus.now(reached), "the end of the healthy arm", DEMO_S)
                    fired = prometheus.over("ALERTS", start_s=started, end_s=time.time(), step_s=1)
                    yield {"lag": lag(), "runbook": runbook, "fired": fired}
        finally:
            job.kill()
            job.wait()


def test_the_demos_collapse_reaches_the_pager_with_a_link_that_leads_somewhere(demo):
    status, text = demo["runbook"]

    assert {alert["labels"]["run"] for alert in demo["lag"]} <= {"unwatched", "watched"}
    assert status == 200 and "# LAG" in text


def test_no_alert_fires_for_the_demos_healthy_arm(demo):
    of_control = [
        series["metric"]["alertname"] for series in demo["fired"]
        if series["metric"].get("run") == "control" and series["metric"]["alertstate"] == "firing"
    ]  # fmt: skip

    assert of_control == []
