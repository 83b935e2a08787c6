"""Writes every generated file, or with --check says which are not as they would be written."""

from __future__ import annotations

import sys
from pathlib import Path

from dashboards.builders.files import generated

ROOT = Path(__file__).parents[2]


def main(arguments: list[str]) -> int:
    stale = [name for name, text in generated().items() if not _same(ROOT / name, text)]
    if "--check" in arguments:
        said = "\n".join(f"not up to date: {name}" for name in stale) or "all generated files are up to date"
        sys.stdout.write(said + "\n")
        return 1 if stale else 0
    for name in stale:
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generated()[name], encoding="utf-8")
        sys.stdout.write(name + "\n")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
