"""Engines are started once for all tests of this folder: each costs ten seconds and more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stacks.vllm.support import Drive, drive


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny models lie."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def inprocess(vllm_folder: Path) -> Drive:
    """One process with one engine after another in it."""
    return drive("inprocess", vllm_folder, {"DLC_SENTINEL_FORCE_LOGPROBS": "1"})


@pytest.fixture(scope="session")
def multiprocess(vllm_folder: Path) -> Drive:
    """Front end and engine core in two processes."""
    return drive("multiprocess", vllm_folder, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
