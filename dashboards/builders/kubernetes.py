"""Boards as a ConfigMap for Grafana's sidecar, rules as a PrometheusRule for the Prometheus Operator."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards.builders.rules import HEAD, as_yaml, groups

LABELS = {"app.kubernetes.io/name": "dlc-sentinel"}


def boards(texts: Mapping[str, str]) -> str:
    """`texts`: file name -> JSON. Grafana's sidecar loads ConfigMaps with the label grafana_dashboard."""
    head = "# The five boards for Grafana's dashboard sidecar. Made by `python -m dashboards.builders`.\n"
    meta = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "dlc-sentinel-dashboards",
            "labels": {**LABELS, "grafana_dashboard": "1"},
            "annotations": {"grafana_folder": "dlc-sentinel"},
        },
    }
    data = "".join(f"  {name}: |\n    {text}\n" for name, text in texts.items())
    return f"---\n{head}{as_yaml(meta)}data:\n{data}"


def rules() -> str:
    tree = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "dlc-sentinel", "labels": LABELS},
        "spec": groups(),
    }
    return f"---\n{HEAD}{as_yaml(tree)}"
