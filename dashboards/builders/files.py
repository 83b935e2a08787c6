"""All generated files: path from the repository's root -> text."""

from __future__ import annotations

import json
from typing import Any

from dashboards.builders import kubernetes, rules, runbooks
from dashboards.builders.boards import BOARDS


def generated() -> dict[str, str]:
    texts = {f"dashboards/grafana/{name}": _json(build()) for name, build in BOARDS.items()}
    texts["dashboards/grafana/alert-rules.json"] = _json(rules.grafana())
    texts["dashboards/prometheus/dlc-rules.yml"] = rules.prometheus()
    boards = {name: json.dumps(build(), sort_keys=True, ensure_ascii=False) for name, build in BOARDS.items()}
    texts["dashboards/deploy/kubernetes/dashboards.yaml"] = kubernetes.boards(boards)
    texts["dashboards/deploy/kubernetes/rules.yaml"] = kubernetes.rules()
    return texts | {f"docs/runbooks/{name}": text for name, text in runbooks.pages().items()}


def _json(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
