"""The floors: imports only go down, one library has one owner, and the hook stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dlc_sentinel

ROOT = Path(dlc_sentinel.__file__).parent
FLOORS = {
    "errors": 0, "version": 0, "plaintext": 0, "browser": 0,
    "maths": 1, "correction": 1,
    "records": 2, "readings": 2.5,
    "config": 3, "catalog": 3, "verdicts": 3, "missing": 3.5, "strips": 3,
    "core": 4, "evidence": 4,
    "wire": 5, "tape": 5,
    "hook": 6, "sinks": 6, "ui": 6, "web": 6, "report": 6,
    "runtime": 7,
    "offline": 8, "demo": 8,
    "cli": 9,
    "__main__": 10,
}  # fmt: skip
OWNERS = {
    "zmq": {"wire"},
    "msgspec": {"wire", "config", "offline", "tape", "demo"},
    "prometheus_client": {"sinks"},
    "grafana_api": {"sinks"},
    "rich": {"ui", "cli"},
    "typer": {"cli"},
    "starlette": {"web"},
    "uvicorn": {"web"},
    "jinja2": {"web", "report"},
    "apprise": {"sinks"},
    "pyarrow": {"tape"},
    "torch": {"demo", "correction"},
    "transformers": {"demo"},
    "matplotlib": {"demo"},
    "vllm": {"demo"},
}
MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports(source: str) -> set[str]:
    """Every module name imported anywhere in the source, inside functions too; type-only imports do not count."""
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module} | {f"{node.module}.{alias.name}" for alias in node.names})
    return found


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def violations(unit: str, source: str) -> list[str]:
    """What this source may not import from where it stands."""
    bad = []
    for name in imports(source):
        top = name.split(".")[0]
        if top in OWNERS and unit not in OWNERS[top]:
            bad.append(f"{unit} imports {top}, which belongs to {sorted(OWNERS[top])}")
        parts = name.split(".")
        if top != "dlc_sentinel" or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == unit:
            continue
        if FLOORS[parts[1]] >= FLOORS[unit]:
            bad.append(f"{unit} (floor {FLOORS[unit]}) imports {parts[1]} (floor {FLOORS[parts[1]]})")
    return sorted(set(bad))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path):
    assert violations(unit_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        ("hook", "import rich"),
        ("core", "from dlc_sentinel.sinks.prometheus import PrometheusSink"),
        ("maths", "def f():\n    import torch"),
        ("wire", "from dlc_sentinel import hook"),
        ("core", "import zmq"),
    ],
)
def test_the_wall_stops(unit, line):
    assert violations(unit, line) != []


def test_every_module_stands_on_a_floor():
    assert {unit_of(path) for path in MODULES} <= set(FLOORS)


def test_a_bare_interpreter_imports_the_hook_and_nothing_heavy():
    code = (
        "import sys, dlc_sentinel.hook; "
        "heavy = {'torch','prometheus_client','rich','pydantic','pyarrow','typer','transformers','vllm','tomllib'}; "
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert out.stdout.strip() == "[]"
