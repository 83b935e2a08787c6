"""The files that come with the package: dashboards, rules, deployment examples, runbooks. Read only.

In a wheel they lie inside it (dlc_sentinel/dashboards, dlc_sentinel/runbooks), in a checkout beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import dlc_sentinel
from dlc_sentinel.errors import ConfigError

DEFAULT_RUNBOOKS = "http://127.0.0.1:9877/runbooks"
"""Where shipped rules and panels say that the runbooks are: `serve` answers there with its default settings."""
RUNBOOKS_PATH = "/runbooks"
_PAGE = re.compile(r"[A-Za-z_]{1,64}")
_PACKAGE = Path(dlc_sentinel.__file__).parent


def dashboards() -> Path:
    """The folder with grafana/, prometheus/, alertmanager/ and deploy/. Raises: ConfigError if it is not there."""
    return _there(_PACKAGE / "dashboards", _PACKAGE.parent / "dashboards")


def runbooks() -> Path:
    """The folder with one .md per alert. Raises: ConfigError if it is not there."""
    return _there(_PACKAGE / "runbooks", _PACKAGE.parent / "docs" / "runbooks")


def runbook_names() -> list[str]:
    """The names that `runbook` takes, in order; none if the pages are not there."""
    try:
        return sorted(path.stem for path in runbooks().glob("*.md"))
    except ConfigError:
        return []


def runbook(name: str) -> str | None:
    """The text of a page, with or without .md in its name; None if there is none of that name."""
    page = name.removesuffix(".md")
    if not _PAGE.fullmatch(page):
        return None
    try:
        return (runbooks() / f"{page}.md").read_text(encoding="utf-8")
    except (OSError, ConfigError):
        return None


def with_runbooks(text: str, base: str | None) -> str:
    """The text of a shipped file with its runbook links moved to `base` (None = as shipped)."""
    return text if base is None else text.replace(DEFAULT_RUNBOOKS, base.rstrip("/"))


def files(folder: Path) -> Iterator[tuple[Path, str]]:
    """(path relative to the folder, text) of every shipped file under it, in order."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".py":
            yield path.relative_to(folder), path.read_text(encoding="utf-8")


def _there(packaged: Path, checkout: Path) -> Path:
    for folder in (packaged, checkout):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{packaged}: not there; this installation lacks its data files, reinstall dlc-sentinel")
