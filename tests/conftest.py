"""What is left out of `make test-fast`: folders and files that start programs, or play many whole runs."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SLOW = {
    "bench", "cases", "cli", "correction", "dashboards", "demo", "report", "web", "test_replay.py", "test_runtime.py",
}  # fmt: skip
SLOW_FILES = {
    "core/test_attacks.py", "core/test_direct_evidence.py", "core/test_held_data.py", "core/test_kinds_of_faults.py",
    "core/test_learning.py", "core/test_rule_lines.py", "core/test_strides.py", "core/test_whole_runs.py",
    "maths/test_calibrated.py", "offline/test_analyze.py", "offline/test_corrections.py",
    "stacks/verl/test_driver.py", "wire/test_live.py",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        path = item.path.relative_to(HERE)
        if path.parts[0] in SLOW or path.as_posix() in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
