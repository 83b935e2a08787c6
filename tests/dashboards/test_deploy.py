"""The deployment files: they parse, they lint clean, and they name what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import factories_boards as boards
import kubernetes_validate
import pytest
import yaml

from dlc_sentinel.config import Config, resolve

DEPLOY = boards.FOLDER / "deploy"
YAMLS = sorted(path for path in boards.FOLDER.rglob("*") if path.suffix in (".yml", ".yaml"))
SCRIPTS = (DEPLOY / "slurm" / "train.sbatch", DEPLOY / "ray" / "submit.sh")


def short(path):
    return str(path.relative_to(boards.FOLDER))


def documents(path):
    return [tree for tree in yaml.safe_load_all(path.read_text()) if tree is not None]


def test_every_yaml_file_lints_clean():
    pytest.importorskip("yamllint", reason="yamllint is not installed")
    command = [sys.executable, "-m", "yamllint", "--strict", "-c", boards.FOLDER / ".yamllint", *YAMLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", [p for p in YAMLS if p.name == "prometheus.yml"], ids=short)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_every_prometheus_configuration_is_accepted(path, tmp_path):
    shutil.copy(path, tmp_path)
    shutil.copy(boards.FOLDER / "prometheus" / "dlc-rules.yml", tmp_path)
    command = ["promtool", "check", "config", tmp_path / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [job["job_name"] for job in documents(path)[0]["scrape_configs"]]
    assert jobs == ["dlc-sentinel"], "alerts and boards expect this name"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_systemd_unit_is_accepted(tmp_path):
    unit = tmp_path / "dlc-sentinel.service"
    text = (DEPLOY / "systemd" / "dlc-sentinel.service").read_text()
    unit.write_text(text.replace("/usr/local/bin/dlc-sentinel", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_systemd_unit_leaves_an_intruder_little(tmp_path):
    unit = tmp_path / "dlc-sentinel.service"
    shutil.copy(DEPLOY / "systemd" / "dlc-sentinel.service", unit)
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-600:] + done.stderr


def test_the_systemd_unit_waits_for_ready_and_watches_the_loop():
    text = (DEPLOY / "systemd" / "dlc-sentinel.service").read_text()

    assert "Type=notify" in text and "WatchdogSec=" in text and "Restart=on-failure" in text


def settings_in(text):
    return set(re.findall(r"DLC_SENTINEL_CFG_[A-Z_]+", text))


def test_every_setting_in_the_deployment_files_exists():
    env = {name: "1" for path in DEPLOY.rglob("*") if path.is_file() for name in settings_in(path.read_text())}

    assert len(env) >= 3
    config, origins = resolve(env={**env, "DLC_SENTINEL_CFG_SERVE_ADDRESS": "1"})  # an unknown name is an error
    assert isinstance(config, Config) and {v for v in origins.values() if v.startswith("$")} == {f"${n}" for n in env}


def test_the_compose_file_mounts_what_exists_and_opens_ports_on_this_machine_only():
    path = DEPLOY / "compose" / "compose.yaml"
    (tree,) = documents(path)
    services = tree["services"]

    assert set(services) == {"sentinel", "prometheus", "alertmanager", "grafana"}
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    made_by_the_user = {"./keys"}
    for mount in mounts:
        if mount.startswith(".") and mount not in made_by_the_user:
            assert (path.parent / mount).exists(), mount
        elif not mount.startswith("."):
            assert mount in tree["volumes"], mount
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
    dockerfile = path.parent / services["sentinel"]["build"]["context"] / services["sentinel"]["build"]["dockerfile"]
    assert dockerfile.resolve().is_file()


def test_grafana_in_the_compose_file_finds_the_boards_where_its_provisioning_looks():
    (tree,) = documents(DEPLOY / "compose" / "compose.yaml")
    (provider,) = documents(boards.FOLDER / "provisioning" / "dashboards" / "dlc.yaml")[0]["providers"]

    mounts = dict(volume.split(":")[:2] for volume in tree["services"]["grafana"]["volumes"])
    assert mounts["../../grafana"] == provider["options"]["path"]
    assert provider["allowUiUpdates"] is False


def test_the_kubernetes_job_has_the_sentinel_as_a_native_sidecar():
    (job,) = documents(DEPLOY / "kubernetes" / "trainer-job.yaml")
    spec = job["spec"]["template"]["spec"]
    (sidecar,) = spec["initContainers"]
    (trainer,) = spec["containers"]

    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert sidecar["restartPolicy"] == "Always" and "startupProbe" in sidecar
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (sidecar, trainer):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    ours = {e["name"]: e.get("value") for e in sidecar["env"]}
    theirs = {e["name"]: e.get("value") for e in trainer["env"]}
    assert ours["DLC_SENTINEL_CFG_SERVE_ADDRESS"] == theirs["DLC_SENTINEL"]
    assert sidecar["securityContext"]["runAsUser"] == trainer["securityContext"]["runAsUser"], "one owner of the socket"


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", ["trainer-job.yaml", "dashboards.yaml"])
def test_a_kubernetes_object_is_valid_by_the_published_schema_unknown_fields_refused(name, version):
    (tree,) = documents(DEPLOY / "kubernetes" / name)

    assert kubernetes_validate.validate(tree, version, strict=True) == version
    tree["spec" if "spec" in tree else "data"] = ["not a mapping"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(tree, version, strict=True)


def test_the_pod_monitor_selects_the_jobs_pods_and_their_port():
    (job,) = documents(DEPLOY / "kubernetes" / "trainer-job.yaml")
    (monitor,) = documents(DEPLOY / "kubernetes" / "podmonitor.yaml")
    pod = job["spec"]["template"]

    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in pod["spec"]["initContainers"][0]["ports"]]
    assert {"targetLabel": "job", "replacement": "dlc-sentinel"} in endpoint["relabelings"]


def test_the_config_map_holds_the_boards_and_fits_into_one_object():
    import json

    path = DEPLOY / "kubernetes" / "dashboards.yaml"
    (tree,) = documents(path)

    assert {name: json.loads(text) for name, text in tree["data"].items()} == {
        f"{name}.json": boards.load(name) for name in boards.NAMES
    }
    assert tree["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert path.stat().st_size < 2**20


def test_the_rule_object_holds_the_rules():
    (tree,) = documents(DEPLOY / "kubernetes" / "rules.yaml")

    assert tree["spec"] == documents(boards.FOLDER / "prometheus" / "dlc-rules.yml")[0]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_job_script_is_a_shell_script_that_ends_the_sentinel_with_the_job(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    text = path.read_text()

    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in text and "trap " in text and "dlc-sentinel serve" in text


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_job_script_passes_shellcheck(path):
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
