"""All commands, listed; and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from dlc_sentinel.cli import (
    actions,
    attach,
    codes,
    config,
    demo,
    doctor,
    explain,
    extras,
    fire,
    grafana,
    judge,
    keys,
    prometheus,
    report,
    screen,
    watch,
)
from dlc_sentinel.cli import run as run_command
from dlc_sentinel.cli import serve as serve_command
from dlc_sentinel.errors import SentinelError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.version import __version__

DEBUG = "--debug"


def _version(wanted: bool) -> None:
    if wanted:
        screen.data(f"dlc-sentinel {__version__} (Python {sys.version.split()[0]})")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more on stderr.")] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Watches LLM reinforcement-learning runs: splits engine discrepancy from policy lag, says what is wrong, and acts.

    Exit codes: 0 did its work, 1 degraded or blind, 2 usage, 70 internal error; analyze and replay also 10 (a finding)
    and 20 (ABORT is due); run gives the job's own.
    """
    screen.log_to_stderr(logging.INFO if verbose or debug else logging.WARNING)


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, callback=_root)
    commands: tuple[Callable[..., None], ...] = (
        serve_command.serve,
        watch.watch,
        demo.demo,
        judge.replay,
        judge.analyze,
        report.report,
        doctor.doctor,
        config.check,
        explain.explain,
        attach.attach,
        attach.detach,
    )
    for command in commands:
        app.command()(command)
    app.command("test-fire")(fire.fire)
    # What follows CMD belongs to the job, with or without the two dashes.
    app.command(context_settings={"allow_interspersed_args": False})(run_command.run)
    app.add_typer(config.app, name="config")
    app.add_typer(keys.app, name="keys")
    app.add_typer(actions.app, name="actions")
    app.add_typer(grafana.app, name="grafana")
    app.add_typer(prometheus.app, name="prometheus")
    return app


def run(argv: Sequence[str]) -> int:
    """Exit code of one command line."""
    arguments, debug = _take_debug(argv)
    try:
        build()(args=arguments, prog_name="dlc-sentinel")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else codes.OK if done.code is None else codes.USAGE
    except SentinelError as error:
        return _failed(str(error), codes.USAGE, debug)
    except OSError as error:
        if error.filename is None:
            return _failed(f"internal error: {_named(error)}", codes.INTERNAL, debug)
        return _failed(f"{error.filename}: {error.strerror}", codes.USAGE, debug)
    except ModuleNotFoundError as error:
        text = extras.missing(error)
        if text is None:
            return _failed(f"internal error: {_named(error)}; --debug shows where", codes.INTERNAL, debug)
        return _failed(text, codes.USAGE, debug)
    except Exception as error:  # noqa: BLE001  # the outermost door: a fault of ours is one line and exit code 70
        return _failed(f"internal error: {_named(error)}; --debug shows where", codes.INTERNAL, debug)
    return codes.OK


def _take_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments with --debug in front wherever it stood before `--`, and whether it was there."""
    end = argv.index("--") if "--" in argv else len(argv)
    mine = [word for word in argv[:end] if word != DEBUG]
    debug = len(mine) < end
    return [*([DEBUG] if debug else []), *mine, *argv[end:]], debug


def _failed(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    screen.say(plain(text, 2000))
    return code


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
