"""grafana export, prometheus export, replay --to-tsdb, the runbooks over HTTP: the files as a user gets them."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from contextlib import closing

import factories_boards as boards
import pytest
import yaml
from factories_cli import ended, program
from factories_job import live, stale_job
from factories_prometheus import get

from dlc_sentinel.config import Config
from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline import timeline
from dlc_sentinel.sinks import shipped
from dlc_sentinel.sinks.openmetrics import OpenMetricsSink
from dlc_sentinel.sinks.prometheus import PrometheusSink


def exported(*arguments):
    done = ended(program(*arguments, "--json"))
    assert done.code == 0, done.err
    return done.json()["files"]


@pytest.mark.slow
def test_grafana_export_writes_boards_rules_and_provisioning(tmp_path):
    files = exported("grafana", "export", tmp_path, "--runbooks", "https://wiki.example/dlc")

    names = {os.path.relpath(path, tmp_path) for path in files}
    assert {f"grafana/{name}.json" for name in boards.NAMES} | {"grafana/alert-rules.json"} <= names
    assert {"provisioning/dashboards/dlc.yaml", "provisioning/datasources/dlc-prometheus.yaml"} <= names
    board = json.loads((tmp_path / "grafana" / "dlc-lag.json").read_text())
    links = {link["url"] for panel in boards.panels(board) for link in panel["links"]}
    assert all(link.startswith("https://wiki.example/dlc/") for link in links)


@pytest.mark.slow
def test_prometheus_export_writes_rules_a_scrape_job_an_alertmanager_and_the_runbooks(tmp_path):
    files = exported("prometheus", "export", tmp_path, "--target", "trainer-1:9877")

    names = {os.path.relpath(path, tmp_path) for path in files}
    assert {"prometheus/dlc-rules.yml", "prometheus/prometheus.yml", "alertmanager/alertmanager.yml"} <= names
    assert {f"runbooks/{path.name}" for path in boards.RUNBOOKS.glob("*.md")} <= names
    (job,) = yaml.safe_load((tmp_path / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["trainer-1:9877"]}]
    assert not any(path.endswith(".py") for path in files)


@pytest.mark.slow
def test_without_promtool_the_text_stays_and_the_command_is_said(tmp_path):
    live(tmp_path / "tape", stale_job(4))
    env = {**os.environ, "PATH": str(tmp_path)}

    done = ended(program("replay", tmp_path / "tape", "--to-tsdb", tmp_path / "data", env=env))

    assert done.code == 1 and "promtool tsdb create-blocks-from openmetrics" in done.err
    assert (tmp_path / "data" / "dlc-sentinel.om").read_text().endswith("# EOF\n")


def test_a_log_of_numbers_without_tokens_is_said_to_be_no_replay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"actor/entropy": 1.0, "critic/score/mean": 0.5}}\n')

    with pytest.raises(TapeError, match="no tokens to replay; `analyze` reads it"):
        timeline.play(path, Config(), OpenMetricsSink())


@pytest.fixture
def sink():
    with closing(PrometheusSink()) as sink:
        yield sink


@pytest.mark.parametrize("name", ["LAG.md", "LAG", "DlcSentinelDown.md", "README.md"])
def test_the_sentinel_serves_its_runbooks_as_plain_text(sink, name):
    status, text = get(f"{sink.url}/runbooks/{name}")

    assert status == 200
    assert text == (boards.RUNBOOKS / f"{name.removesuffix('.md')}.md").read_text()


@pytest.mark.parametrize(
    "name", ["NOPE.md", "../README.md", "..%2f..%2fREADME", "LAG.md/", "/etc/passwd", "LAG.txt", "x" * 999]
)
def test_what_is_no_runbook_is_not_found(sink, name):
    assert get(f"{sink.url}/runbooks/{name}")[0] == 404


def test_runbook_links_are_moved_to_where_they_are_told():
    text = (boards.FOLDER / "prometheus" / "dlc-rules.yml").read_text()

    moved = shipped.with_runbooks(text, "https://wiki.example/dlc/")

    assert "https://wiki.example/dlc/LAG.md" in moved and shipped.DEFAULT_RUNBOOKS not in moved
    assert shipped.with_runbooks(text, None) == text


@pytest.mark.slow
def test_the_wheel_holds_the_files_and_not_the_code_that_makes_them(tmp_path):
    """Built as a user would get it; the boards of an installed package are found beside its code."""
    pytest.importorskip("setuptools", minversion="77", reason="no setuptools 77 to build with")
    import subprocess
    import sys

    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "bench-out", "out", "tests", "__pycache__")
    shutil.copytree(boards.ROOT, source, ignore=ignored)
    command = [
        sys.executable,
        "-c",
        "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))",
        tmp_path,
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    for name in boards.NAMES:
        assert f"dlc_sentinel/dashboards/grafana/{name}.json" in names
    assert "dlc_sentinel/dashboards/prometheus/dlc-rules.yml" in names
    assert "dlc_sentinel/dashboards/deploy/compose/Dockerfile" in names
    assert "dlc_sentinel/runbooks/LAG.md" in names
    assert not [name for name in names if "builders" in name]
