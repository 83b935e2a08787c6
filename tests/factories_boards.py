"""What the dashboards' tests share: the shipped boards, their queries, and the metrics that a query names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import promql_parser

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "dashboards"
RUNBOOKS = ROOT / "docs" / "runbooks"
SCHEMAS = Path(os.environ.get("DLC_GRAFANA_SCHEMAS", ROOT.parent / "shared" / "grafana_schemas"))
NAMES = ("dlc-overview", "dlc-lag", "dlc-engine", "dlc-learning", "dlc-health")
VARIABLES = {
    "run": ".*",
    "model_name": ".*",
    "engine": ".*",
    "__rate_interval": "1m",
    "__interval": "15s",
    "__range": "1h",
}


class Query(NamedTuple):
    board: str
    panel: str
    expr: str

    def __str__(self):
        return f"{self.board}/{self.panel}"


def load(name):
    return json.loads((FOLDER / "grafana" / f"{name}.json").read_text())


def panels(board):
    """All that shows something: rows are left out."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(name):
    """Every query of a board's panels."""
    board = load(name)
    return [Query(name, p["title"], t["expr"]) for p in panels(board) for t in p.get("targets", [])]


def annotation_queries(name):
    return [Query(name, a["name"], a["expr"]) for a in load(name)["annotations"]["list"] if "expr" in a]


def substituted(expr):
    """The query as Grafana sends it, with everything chosen."""
    for name, value in VARIABLES.items():
        expr = expr.replace(f"${name}", value)
    assert "$" not in expr, f"a variable nobody sets: {expr}"
    return expr


def selectors(expr):
    """[(metric, {label: pattern})] of a query. Raises: ValueError where it is not PromQL."""
    found = []

    def walk(node):
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {m.name: m.value for m in node.matchers.matchers}))
        for name in dir(node):
            if name.startswith("__") or name in ("parse", "prettify"):
                continue
            value = getattr(node, name)
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(inner, promql_parser.Expr):
                    walk(inner)

    walk(promql_parser.parse(expr))
    return found


ALL = [query for name in NAMES for query in queries(name)]
MARKS = [query for name in NAMES for query in annotation_queries(name)]
