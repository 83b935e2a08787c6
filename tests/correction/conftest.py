"""The slow second implementation as a fixture; test modules have no package to import it from."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reference():
    spec = importlib.util.spec_from_file_location("correction_reference", Path(__file__).with_name("reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
