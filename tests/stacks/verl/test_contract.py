"""Every function of verl that is relied on has the name and the arguments it is relied on for, in each release."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dlc_sentinel.integrations.verl_wraps import CONTRACT, Symbol

RELEASES = ("0.8.0", "0.9.0", "0.9.1")


@pytest.fixture(scope="module")
def wheels(request):
    """release -> its wheel, downloaded once and kept in pytest's cache."""
    folder = Path(request.config.cache.mkdir("verl-wheels"))
    found = {}
    for release in RELEASES:
        kept = list(folder.glob(f"verl-{release}-*.whl"))
        if not kept:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                f"verl=={release}",
                "-d",
                str(folder),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            kept = list(folder.glob(f"verl-{release}-*.whl"))
            if not kept:
                pytest.skip(f"verl {release} could not be downloaded: {done.stderr.strip()[-200:]}")
        found[release] = kept[0]
    return found


def argument_names(source: str, path: str) -> list[str] | None:
    """Names of the arguments of a dotted path in a source text, None where there is no such function."""
    body = ast.parse(source).body
    *outer, name = path.split(".")
    for part in outer:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part), [])
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return None


def in_wheel(wheel: Path, symbol: Symbol) -> list[str] | None:
    with zipfile.ZipFile(wheel) as archive:
        name = symbol.module.replace(".", "/") + ".py"
        if name not in archive.namelist():
            return None
        return argument_names(archive.read(name).decode(), symbol.path)


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("symbol", CONTRACT, ids=lambda s: s.path)
def test_a_release_has_each_function_as_it_is_relied_on(wheels, release, symbol):
    if symbol.since > release:
        assert in_wheel(wheels[release], symbol) is None, f"{symbol.path} exists in {release}: `since` is too late"
        return

    assert symbol.misfit(in_wheel(wheels[release], symbol)) == ""


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.parametrize("release", RELEASES)
def test_a_loss_is_called_by_the_names_it_is_wrapped_for(wheels, release):
    with zipfile.ZipFile(wheels[release]) as archive:
        source = archive.read("verl/workers/engine/fsdp/transformer_impl.py").decode()
    calls = [
        {keyword.arg for keyword in node.keywords} | {f"#{i}" for i in range(len(node.args))}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "loss_function"
    ]

    assert calls and all(call >= {"model_output", "data"} for call in calls)


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.parametrize("release", [release for release in RELEASES if release >= "0.9"])
def test_a_release_loads_plugins_by_entry_point(wheels, release):
    with zipfile.ZipFile(wheels[release]) as archive:
        assert "verl.plugins" in archive.read("verl/__init__.py").decode()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (None, "does not exist"),
        (["self", "batch"], "takes \\(self, batch\\), wanted \\(self, data, ...\\)"),
        (["self"], "takes \\(self\\)"),
    ],
)
def test_a_function_that_changed_is_named_with_what_was_wanted(names, said):
    import re

    assert re.search(said, Symbol("verl.x", "C.f", ("self", "data")).misfit(names))


def test_arguments_after_the_wanted_ones_are_no_misfit():
    assert Symbol("verl.x", "C.f", ("self", "data")).misfit(["self", "data", "new"]) == ""
