"""What a person meets first: help in the error, settings that say where they come from, keys, words for verdicts."""

from __future__ import annotations

import os
import stat
import sys
import types

import pytest

from dlc_sentinel.__main__ import main
from dlc_sentinel.cli import checks
from dlc_sentinel.cli import explain as explain_module
from dlc_sentinel.config import Config, known_keys, resolve
from dlc_sentinel.verdicts import VERDICTS
from dlc_sentinel.version import __version__


class Interrupted(types.ModuleType):
    """A module during whose import somebody presses Ctrl-C."""

    def __getattr__(self, name):
        raise KeyboardInterrupt if name == "run" else AttributeError(name)


def test_ctrl_c_while_the_commands_are_loaded_is_an_exit_code_and_no_traceback(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "dlc_sentinel.cli.app", Interrupted("dlc_sentinel.cli.app"))

    assert cli("--version") == (130, "", "")


def test_version_is_printed_on_stdout(cli):
    assert cli("--version").out.startswith(f"dlc-sentinel {__version__} ")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["analize", "x"], "Did you mean 'analyze'?"),
        (["analyze", "--jso", "x"], "--json"),
        (["check", "--set", "ess.horzon=8"], "did you mean 'ess.horizon'?"),
        (["explain", "STALE_ENGIN"], "did you mean STALE_ENGINE?"),
        (["config", "innit"], "Did you mean 'init'?"),
        (["serve", "--act", "resink"], "wanted resync or abort"),
        (["serve", "--observe", "--act", "abort"], "exclude each other"),
        (["check", "--set", "ess.horizon"], "wanted KEY=VALUE"),
        (["check", "--set", "ess.horizon=many"], "Expected `int`"),
        (["check", "--config", "none.toml"], "`dlc-sentinel config init`"),
        (["serve", "--set", "serve.address=tcp://0.0.0.0:5000"], "`dlc-sentinel keys new`"),
    ],
)
def test_a_wrong_word_exits_2_and_names_the_way_out_on_stderr(cli, arguments, hint):
    done = cli(*arguments)

    assert done.code == 2 and done.out == ""
    assert hint in " ".join(done.err.split())


def test_a_misspelt_key_is_refused_wherever_it_stands_with_its_origin(cli, home, monkeypatch):
    (home / "mine.toml").write_text("[act]\nmod = 'observe'\n")
    in_file = cli("check", "--config", "mine.toml")
    monkeypatch.setenv("DLC_SENTINEL_CFG_ACT_MOD", "observe")
    in_environment = cli("check")

    assert (in_file.code, in_environment.code) == (2, 2)
    assert "mine.toml: unknown key 'act.mod'; did you mean 'act.mode'?" in in_file.err
    assert "$DLC_SENTINEL_CFG_ACT_MOD" in in_environment.err and "DLC_SENTINEL_CFG_ACT_MODE" in in_environment.err


def test_a_fault_of_ours_is_one_line_and_exit_code_70(cli, monkeypatch):
    monkeypatch.setattr(explain_module, "VERDICTS", None)

    done = cli("explain")

    assert done.code == 70 and done.out == ""
    assert done.err.count("\n") == 1 and "internal error: TypeError" in done.err


@pytest.fixture
def without(monkeypatch):
    """Makes a package one that is not installed."""

    def hide(module, *importers):
        for name in [name for name in sys.modules if name.partition(".")[0] == module or name in importers]:
            monkeypatch.delitem(sys.modules, name)
        for parent, _, name in (importer.rpartition(".") for importer in importers):
            # A package holds its modules as attributes, too.
            monkeypatch.delattr(sys.modules.get(parent), name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [_Hides(module), *sys.meta_path])

    return hide


class _Hides:
    def __init__(self, module):
        self.module = module

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("module", "importer", "arguments", "extra"),
    [
        ("grafana_api", "grafana_http", ["grafana", "push", "--url", "http://127.0.0.1:1"], "grafana"),
        ("apprise", "targets", ["test-fire", "--set", "notify.urls=json://127.0.0.1:9"], "serve"),
        ("jinja2", "html", ["report", "none.jsonl"], "serve"),
    ],
)
def test_a_package_that_is_not_installed_is_a_usage_error_that_names_its_extra(
    cli, without, module, importer, arguments, extra
):
    folder = "report" if importer == "html" else "sinks"
    without(module, f"dlc_sentinel.{folder}.{importer}", f"dlc_sentinel.{folder}.grafana_push")

    done = cli(*arguments)

    assert done.code == 2 and done.out == ""
    assert f"{module.replace('_', '-')} is not installed" in done.err
    assert f"pip install 'dlc-sentinel[{extra}]'" in done.err


def test_doctor_says_that_grafana_has_no_package_and_fails_only_where_one_is_set(cli, monkeypatch):
    known = checks._version
    monkeypatch.setattr(checks, "_version", lambda package: None if package == "grafana-api" else known(package))
    ports = ["--set", "serve.metrics_port=0"]

    def state(*arguments):
        found = {check["name"]: check for check in cli("doctor", "--json", *ports, *arguments).json()["checks"]}
        assert found["Grafana packages"]["fix"] == "pip install 'dlc-sentinel[grafana]'"
        return found["Grafana packages"]["state"]

    assert (state(), state("--set", "grafana.url=http://g:3000")) == ("warn", "fail")


def test_the_traceback_comes_with_debug_wherever_the_word_stands(cli, monkeypatch):
    monkeypatch.setattr(explain_module, "VERDICTS", None)

    for arguments in (["--debug", "explain"], ["explain", "--debug"]):
        done = cli(*arguments)
        assert done.code == 70 and "Traceback" in done.err


def test_check_says_the_origin_of_every_value(cli, home, monkeypatch):
    (home / "dlc-sentinel.toml").write_text("[ess]\nhorizon = 8\nsevere = 0.2\n[act]\nmode = 'observe'\n")
    monkeypatch.setenv("DLC_SENTINEL_CFG_ESS_SEVERE", "0.3")
    monkeypatch.setenv("DLC_SENTINEL", "tcp://127.0.0.1:5000")

    found = cli("check", "--set", "ess.closed=0.7", "--json").json()

    assert set(found) == set(known_keys())
    assert found["ess.horizon"] == {"value": 8, "origin": "dlc-sentinel.toml"}
    assert found["ess.severe"] == {"value": 0.3, "origin": "$DLC_SENTINEL_CFG_ESS_SEVERE"}
    assert found["ess.closed"] == {"value": 0.7, "origin": "--set ess.closed"}
    assert found["serve.address"] == {"value": "tcp://127.0.0.1:5000", "origin": "$DLC_SENTINEL"}
    assert found["ess.threshold"] == {"value": 0.5, "origin": "default"}


def test_check_as_text_has_one_line_per_key(cli):
    lines = cli("check").out.splitlines()

    assert [line.split()[0] for line in lines[1:]] == list(known_keys())
    assert lines[1].split() == ["ess.horizon", "32", "default"]


def test_config_init_writes_a_file_that_changes_nothing_until_a_key_is_switched_on(cli, home):
    assert cli("config", "init").code == 0
    path = home / "dlc-sentinel.toml"
    text = path.read_text()
    assert resolve(path)[0] == Config()

    path.write_text("".join(line.removeprefix("# ") if " = " in line else line for line in text.splitlines(True)))
    config, origins = resolve(path)

    assert config == Config() and set(origins.values()) == {str(path)}
    assert "## RESYNC when ESS_h* is below this in one step.\n# severe = 0.25\n" in text


def test_config_init_never_overwrites_without_force(cli, home):
    (home / "dlc-sentinel.toml").write_text("mine")

    refused = cli("config", "init")
    kept = (home / "dlc-sentinel.toml").read_text()

    assert refused.code == 2 and "--force" in refused.err and kept == "mine"
    assert cli("config", "init", "--force").code == 0
    assert (home / "dlc-sentinel.toml").read_text() != "mine"


def test_new_keys_are_private_and_never_overwritten(cli, home):
    first = cli("keys", "new", "k", "--json")
    files = [home / path for path in first.json()["files"]]
    held = [path.read_bytes() for path in files]

    second = cli("keys", "new", "k")

    assert first.code == 0 and len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((home / "k").stat().st_mode) == 0o700
    assert second.code == 2 and "already holds" in second.err
    assert [path.read_bytes() for path in files] == held


def test_explain_without_a_name_lists_every_verdict_worst_first(cli):
    done = cli("explain")

    assert [line.split()[0] for line in done.out.splitlines()[1:]] == [text.name for text in VERDICTS]
    assert [row["name"] for row in cli("explain", "--json").json()] == [text.name for text in VERDICTS]


def test_explain_says_what_to_check_and_what_to_do(cli):
    done = cli("explain", "stale-engine")
    words = " ".join(done.out.split())

    assert done.code == 0
    for text in VERDICTS:
        if text.name == "STALE_ENGINE":
            assert text.check_first[0] in words and text.do[0] in words and text.ignore_when in words


def test_no_escape_is_written_where_no_terminal_is(cli):
    assert not any("\x1b" in cli(*arguments).out for arguments in (["check"], ["explain"], ["--help"]))


def test_explain_fits_80_columns_where_no_terminal_says_its_own(cli):
    assert all(len(line) <= 80 for text in VERDICTS for line in cli("explain", text.name).out.splitlines())


@pytest.mark.parametrize(("words", "threads"), [(["serve"], "1"), (["run", "--", "train"], None)])
def test_serve_keeps_numpy_to_one_thread_and_run_leaves_the_job_alone(words, threads, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("dlc_sentinel.cli.app.run", lambda words: 0)

    assert main(words) == 0
    assert os.environ.get("OPENBLAS_NUM_THREADS") == threads
