"""alerts.py -> Prometheus rule file, as YAML text; and -> Grafana's own rule format, as JSON."""

from __future__ import annotations

from typing import Any

import yaml

from dashboards.builders.alerts import ALERTS, RECORDS, Alert
from dlc_sentinel.sinks.shipped import DEFAULT_RUNBOOKS

HEAD = """\
# Alert and recording rules of dlc-sentinel, one alert per verdict and those about the sentinel itself.
# Made by `python -m dashboards.builders`; `dlc-sentinel prometheus export DIR --runbooks URL` moves the links.
"""
FOLDER = "dlc-sentinel"
GROUP = "dlc-sentinel"


class _Text(yaml.SafeDumper):
    """Long text is folded, so that a person can read it; lists are indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=">" if len(text) > 70 else None)


_Text.add_representer(str, _text)


def prometheus() -> str:
    """The rule file."""
    return f"---\n{HEAD}{as_yaml(groups())}"


def as_yaml(tree: dict[str, Any]) -> str:
    return yaml.dump(tree, Dumper=_Text, sort_keys=False, width=110, indent=2, allow_unicode=True)


def groups() -> dict[str, Any]:
    recording = [{"record": record.name, "expr": record.expr} for record in RECORDS]
    return {
        "groups": [
            {"name": "dlc-sentinel-recording", "interval": "30s", "rules": recording},
            {"name": "dlc-sentinel-alerts", "rules": [_alert(alert) for alert in ALERTS]},
        ]
    }


def _alert(alert: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
    if alert.for_ != "0s":
        rule["for"] = alert.for_
    if alert.keep != "0s":
        rule["keep_firing_for"] = alert.keep
    return rule | {"labels": labels(alert), "annotations": annotations(alert)}


def labels(alert: Alert) -> dict[str, str]:
    return {"severity": alert.severity, "service": "dlc-sentinel"} | (
        {"verdict": alert.verdict} if alert.verdict else {}
    )


def annotations(alert: Alert) -> dict[str, str]:
    return {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": f"{DEFAULT_RUNBOOKS}/{alert.page_name}.md",
        "dashboard": alert.board,
    }


def grafana() -> dict[str, Any]:
    """A rule group of Grafana's own, without folder and data source, which `grafana push` fills in.

    Grafana fires on a value that is not 0, so each expression is made 1 where it has a series. Its templates know no
    queries, so the text names no numbers.
    """
    return {"title": GROUP, "interval": 60, "rules": [_managed(alert) for alert in ALERTS]}


def _managed(alert: Alert) -> dict[str, Any]:
    expr = alert.expr
    for record in reversed(RECORDS):
        expr = expr.replace(record.name, f"({record.expr})")
    model = {
        "refId": "A",
        "expr": f"({expr}) * 0 + 1",
        "instant": True,
        "range": False,
        "intervalMs": 1000,
        "maxDataPoints": 43200,
    }
    return {
        "uid": f"dlc-{alert.name.lower()}",
        "title": alert.name,
        "ruleGroup": GROUP,
        "condition": "A",
        "for": alert.for_,
        "noDataState": "OK",
        "execErrState": "Error",
        "orgID": 1,
        "labels": labels(alert),
        "annotations": {
            "summary": _plain(alert),
            "description": f"{alert.page.means} First: {alert.page.check_first[0]}",
            "runbook_url": f"{DEFAULT_RUNBOOKS}/{alert.page_name}.md",
            "__dashboardUid__": alert.board,
        },
        "data": [{"refId": "A", "relativeTimeRange": {"from": 600, "to": 0}, "model": model}],
    }


def _plain(alert: Alert) -> str:
    where = "" if alert.name.startswith("DlcSentinel") else " in run {{ $labels.run }}"
    return f"{alert.page_name}{where}: {alert.page.line}"
