"""Wraps of a stack that is not there yet: put in when a module loads, refused where they do not fit, taken out."""

import importlib
import logging
import subprocess
import sys

import pytest
from dlc_sentinel.integrations.verl_wraps import Aborted, Symbol, Wraps, quietly

SOURCE = """
class Trainer:
    def update(self, batch, metrics=None):
        return ["trained", batch]

class Child(Trainer):
    pass
"""


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """Name of an importable module that nobody has imported."""
    (tmp_path / "stack_for_wraps.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "stack_for_wraps"
    sys.modules.pop("stack_for_wraps", None)


@pytest.fixture
def wraps():
    made = Wraps()
    yield made
    made.undo()


def loud(original):
    return lambda *args, **kwargs: ["wrapped", *original(*args, **kwargs)]


@pytest.mark.parametrize("imported_before", [True, False])
def test_a_function_is_wrapped_whether_its_module_came_before_or_after(stack, wraps, imported_before):
    if imported_before:
        importlib.import_module(stack)
    wraps.add(Symbol(stack, "Trainer.update", ("self", "batch")), loud)

    assert importlib.import_module(stack).Trainer().update(1) == ["wrapped", "trained", 1]


def test_two_wraps_of_one_module_are_both_put_in(stack, wraps):
    wraps.add(Symbol(stack, "Trainer.update", ("self", "batch")), loud)
    wraps.add(Symbol(stack, "Child.update", ("self", "batch")), loud)

    assert importlib.import_module(stack).Child().update(1) == ["wrapped", "wrapped", "trained", 1]


def test_a_function_with_other_arguments_is_left_alone_and_named(stack, wraps, caplog):
    with caplog.at_level(logging.WARNING):
        wraps.add(Symbol(stack, "Trainer.update", ("self", "data")), loud)
        module = importlib.import_module(stack)

    assert module.Trainer().update(1) == ["trained", 1]
    assert len(wraps.refused) == 1
    assert [r.getMessage() for r in caplog.records if "wanted (self, data, ...)" in r.getMessage()]


def test_a_function_that_is_missing_is_named_and_the_import_succeeds(stack, wraps):
    wraps.add(Symbol(stack, "Trainer.gone", ("self",)), loud)

    importlib.import_module(stack)

    assert wraps.refused == [f"{stack}.Trainer.gone does not exist in this verl"]


def test_undo_gives_back_the_very_functions(stack, wraps):
    module = importlib.import_module(stack)
    before = dict(vars(module.Trainer)), dict(vars(module.Child))
    wraps.add(Symbol(stack, "Trainer.update", ("self", "batch")), loud)
    wraps.add(Symbol(stack, "Child.update", ("self", "batch")), loud)

    wraps.undo()

    assert (dict(vars(module.Trainer)), dict(vars(module.Child))) == before
    assert not [finder for finder in sys.meta_path if "verl_wraps" in type(finder).__module__]


def test_an_error_of_ours_is_told_once_and_goes_no_further(caplog):
    @quietly
    def broken():
        raise KeyError("x")

    with caplog.at_level(logging.WARNING):
        assert [broken(), broken()] == [None, None]

    assert len(caplog.records) == 1


def test_a_deliberate_end_of_the_job_does_get_through():
    @quietly
    def stop():
        raise Aborted("ABORT")

    with pytest.raises(Aborted):
        stop()


@pytest.mark.parametrize("value", ["", "0"])
def test_unset_means_that_nothing_is_wrapped_at_all(value):
    code = (
        "import sys; before = list(sys.meta_path); import dlc_sentinel.integrations.verl_hook as hook;"
        "print(sys.meta_path == before, hook.wraps.refused, 'torch' in sys.modules)"
    )
    env = {"DLC_SENTINEL": value, "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=60)

    assert out.stdout.split() == ["True", "[]", "False"]
