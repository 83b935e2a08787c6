"""What the README says of names is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_of_environment_variables_holds_each_that_is_read_and_no_other():
    sources = [
        path.read_text() for folder in ("dlc_sentinel", "integrations") for path in (ROOT / folder).rglob("*.py")
    ]
    read = set(re.findall(r"DLC_SENTINEL(?:_[A-Z]+)*", "\n".join(sources)))

    shown = re.findall(r"^\| `(DLC_SENTINEL[A-Z_]*)[.]*` \|", README, re.MULTILINE)

    assert sorted(name.rstrip("_") for name in shown) == sorted(read - {"DLC_SENTINEL_CFG_ESS_HORIZON"})


def test_every_file_that_the_readme_links_to_or_names_as_a_test_is_there():
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    named = re.findall(r"`((?:tests|examples|docs|benchmarks)/[\w./]+)`", README)

    assert [path for path in linked + named if not (ROOT / path).exists()] == []
