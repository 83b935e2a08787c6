"""Whole folders that are left out of `make test-fast`: they start programs, or play many whole runs."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = {"bench", "cases", "cli", "correction", "dashboards", "report", "web"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)
