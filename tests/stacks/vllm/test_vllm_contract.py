"""The symbols the plug-in wraps exist, with the arguments it relies on, in the vLLM releases that matter."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dlc_sentinel.integrations.vllm_symbols import ALL, Symbol, complaint

from tests.stacks.vllm.support import ENGINE_ENV, ENGINE_PYTHON, needs_vllm

PINNED_BY_VERL = "0.24.0"
"""verl 0.9.1 pins this vLLM."""
INSTALLED = sorted((ENGINE_PYTHON.parents[1] / "lib").glob("python3.*/site-packages/vllm"))
LATER_THAN_PINNED = {symbol for symbol in ALL if symbol.since == "0.28"}
STATE = ("request_id", "external_req_id", "parent_req", "request_index", "num_cached_tokens", "lora_name")
"""Attributes of RequestState that give a response its id, its cached tokens and its adapter."""


@pytest.fixture(scope="session")
def pinned_source() -> Path:
    """The unpacked source archive of the pinned release, fetched once and kept; skips where it cannot be had."""
    kept = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dlc-sentinel" / f"vllm-{PINNED_BY_VERL}"
    if not kept.exists():
        _download(kept)
    return kept


def _download(kept: Path) -> None:
    work = kept.with_name(f"{kept.name}.part{os.getpid()}")
    work.mkdir(parents=True)
    # The archive's metadata cannot be built without CUDA, so pip fails in the end; --no-clean leaves what it unpacked.
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
        "--no-clean", f"vllm=={PINNED_BY_VERL}", "-d", str(work),
    ]  # fmt: skip
    try:
        subprocess.run(command, env=os.environ | {"TMPDIR": str(work)}, capture_output=True, timeout=180, check=False)
        found = next(work.glob("pip-*/vllm_*/vllm/v1"), None)
        if found is None:
            pytest.skip(f"the source archive of vllm {PINNED_BY_VERL} could not be downloaded")
        for folder in ("engine", "worker"):
            shutil.copytree(found / folder, work / "vllm" / "v1" / folder)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(work / "vllm", kept)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the source archive of vllm {PINNED_BY_VERL} did not come in time")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def owner_of(symbol: Symbol, vllm: Path) -> ast.ClassDef:
    tree = ast.parse((vllm / Path(*symbol.module.split(".")[1:])).with_suffix(".py").read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == symbol.owner)


def arguments(symbol: Symbol, vllm: Path) -> list[str] | None:
    """Names of the method's arguments in the source; None where it is not there."""
    for node in owner_of(symbol, vllm).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == symbol.name:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return None


@pytest.mark.parametrize("symbol", ALL, ids=lambda symbol: symbol.path)
def test_every_symbol_is_in_the_installed_vllm(symbol: Symbol) -> None:
    if not INSTALLED:
        pytest.skip("no vLLM in .venv-vllm; `make .venv-vllm/.ready`")

    found = arguments(symbol, INSTALLED[0])

    assert found is not None
    assert complaint(symbol, found) == ""


@pytest.mark.slow
@pytest.mark.parametrize("symbol", ALL, ids=lambda symbol: symbol.path)
def test_every_symbol_is_in_the_vllm_that_verl_pins(pinned_source: Path, symbol: Symbol) -> None:
    found = arguments(symbol, pinned_source)

    if symbol in LATER_THAN_PINNED:
        assert found is None
        return
    assert found is not None
    assert complaint(symbol, found) == ""


@pytest.mark.slow
def test_the_request_state_of_the_pinned_vllm_has_what_names_a_response(pinned_source: Path) -> None:
    state = Symbol("vllm.v1.engine.output_processor", "RequestState", "__init__", ("self",))
    text = ast.unparse(owner_of(state, pinned_source))

    assert [name for name in STATE if f"self.{name} = " not in text] == []


def test_a_method_with_other_arguments_is_refused_with_both_lists() -> None:
    symbol = Symbol("m", "Owner", "method", ("self", "a", "b"))

    assert complaint(symbol, ["self", "a", "b", "more"]) == ""
    assert complaint(symbol, ["self", "b", "a"]) == "Owner.method takes (self, b, a), wanted (self, a, b, ...)"


_IN_VLLM = """
import os, sys
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.core import EngineCore
from dlc_sentinel.integrations.vllm_plugin import register
plain = OutputProcessor.process_outputs, EngineCore.collective_rpc
register()
assert (OutputProcessor.process_outputs, EngineCore.collective_rpc) == plain, "wrapped without DLC_SENTINEL"
assert "dlc_sentinel.integrations.vllm_wraps" not in sys.modules
def other(self, outputs_of_another_release): pass
OutputProcessor.process_outputs = other
os.environ["DLC_SENTINEL"] = "ipc:///tmp/nobody.sock"
register()
assert OutputProcessor.process_outputs is other
assert OutputProcessor.add_request.__name__ == "add_request" and not hasattr(OutputProcessor.add_request, "__wrapped__")
assert hasattr(EngineCore.collective_rpc, "__wrapped__")
once = EngineCore.collective_rpc
register()
assert EngineCore.collective_rpc is once
print("fine")
"""


@pytest.mark.vllm
@pytest.mark.slow
@needs_vllm
def test_without_the_variable_nothing_is_wrapped_and_a_misfit_disables_its_own_group_only() -> None:
    env = {name: value for name, value in (os.environ | ENGINE_ENV).items() if name != "DLC_SENTINEL"}

    done = subprocess.run(
        [str(ENGINE_PYTHON), "-c", _IN_VLLM], env=env, capture_output=True, text=True, timeout=300, check=False
    )

    assert done.stdout.strip() == "fine", done.stderr[-2000:]
    assert (
        "not wrapped: OutputProcessor.process_outputs takes (self, outputs_of_another_release), wanted" in done.stderr
    )
