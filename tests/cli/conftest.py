"""Commands as users run them: in this process for what prints and ends, as programs for what serves."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from factories_cli import ROOT, Done, Serving

from dlc_sentinel.__main__ import main


@pytest.fixture
def home(monkeypatch):
    """An empty working folder with a short path (ipc paths are bounded), and no variable of ours set."""
    for name in list(os.environ):
        if name.startswith("DLC_SENTINEL"):
            monkeypatch.delenv(name)
    folder = Path(tempfile.mkdtemp(prefix="dlc-t-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (folder / "run").mkdir(mode=0o700)
    monkeypatch.chdir(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cli(home, capfd):
    """Runs one command in this process."""

    def call(*arguments):
        code = main([str(word) for word in arguments])
        return Done(code, *capfd.readouterr())

    yield call
    logging.getLogger("dlc_sentinel").handlers = []


@pytest.fixture
def serving(home):
    """Starts sentinels; those that still run at the end are killed."""
    with ExitStack() as stack:

        def start(*arguments, address=f"ipc://{home}/s.sock"):
            served = Serving("--set", f"serve.address={address}", *arguments)
            stack.callback(lambda: served.process.poll() is None and served.kill())
            return served

        yield start
