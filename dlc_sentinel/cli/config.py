"""check, config init: the settings as they are, and a file to change them in."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Annotated, TypeGuard

import typer

from dlc_sentinel import config as tree
from dlc_sentinel.cli import codes, screen, settings

app = typer.Typer(no_args_is_help=True, help="The settings file.", rich_markup_mode=None)


def check(config: settings.ConfigFile = None, sets: settings.Sets = None, as_json: settings.AsJson = False) -> None:
    """Print every setting and where it comes from. Exit code 2 where one is wrong."""
    chosen = settings.load(config, sets)
    values = {key: getattr(getattr(chosen.config, (at := key.split("."))[0]), at[1]) for key in tree.known_keys()}
    if as_json:
        hidden = {key: tree.HIDDEN for key in tree.SECRET_KEYS if values[key]}
        screen.data_json({k: {"value": v, "origin": chosen.origins[k]} for k, v in (values | hidden).items()})
        return
    rows = [(key, tree.shown(key, value), chosen.origins[key]) for key, value in values.items()]
    screen.table(("key", "value", "origin"), rows)
    screen.say(f"file: {chosen.file or 'none'}")


@app.command("init")
def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to write it.")] = Path(settings.FILE_NAME),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Write a commented settings file. Every key stands in it at its default, switched off."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError as error:
        screen.say(f"{path} is there; --force overwrites it, or name another file")
        raise typer.Exit(codes.USAGE) from error
    screen.data(str(path))


@app.callback()
def _config() -> None:
    """A group stays a group while it has one command."""


def template() -> str:
    """TOML text that changes nothing: keys commented out at their defaults, each under what it means."""
    values = tree.to_toml(tree.Config()).splitlines()
    notes = field_notes()
    section = ""
    lines = ["# dlc-sentinel settings. `dlc-sentinel check` shows what holds and why; delete the # to change a key."]
    for line in values:
        if line.startswith("["):
            section = line.strip("[]")
            lines += ["", line, *_comment(notes.get(section, ""))]
        elif line:
            lines += [*_comment(notes.get(f"{section}.{line.split(' = ')[0]}", "")), f"# {line}"]
    return "\n".join(lines) + "\n"


def field_notes() -> dict[str, str]:
    """{section or dotted key: the text that stands under it in config.py}, so that it is written once."""
    classes = {node.name: node for node in ast.parse(inspect.getsource(tree)).body if isinstance(node, ast.ClassDef)}
    notes: dict[str, str] = {}
    for name, node in classes.items():
        section = name.lower()
        notes[section] = ast.get_docstring(node) or ""
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and _is_text(after):
                notes[f"{section}.{before.target.id}"] = inspect.cleandoc(ast.literal_eval(after.value))
    return notes


def _is_text(node: ast.stmt) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 110, initial_indent="## ", subsequent_indent="## ")
