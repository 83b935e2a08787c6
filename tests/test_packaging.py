"""What the wheel holds: every package, and every file beside the code that a package reads."""

from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS = {name: ROOT / SETTINGS["package-dir"].get(name, name.replace(".", "/")) for name in SETTINGS["packages"]}


def test_every_package_is_named():
    there = {path.parent for path in (ROOT / "dlc_sentinel").rglob("__init__.py")}

    assert there <= set(FOLDERS.values())


def test_every_named_package_is_there():
    assert all(folder.is_dir() for folder in FOLDERS.values())


def test_every_file_beside_the_code_is_named():
    named = {
        path for name, patterns in SETTINGS["package-data"].items() for pattern in patterns
        for path in FOLDERS[name].glob(pattern)
    }  # fmt: skip
    data = {
        path for name, folder in FOLDERS.items() if name.startswith("dlc_sentinel") and folder.is_relative_to(ROOT)
        for path in folder.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc") and path.name[0] != "."
    }  # fmt: skip

    assert data <= named
