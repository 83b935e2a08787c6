"""grafana export, grafana push: the boards and alert rules into files, or into a running Grafana."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.errors import GrafanaError
from dlc_sentinel.sinks import shipped

if TYPE_CHECKING:
    from dlc_sentinel.sinks.grafana_http import Grafana

TOKEN_VARIABLE = "GRAFANA_TOKEN"

Runbooks = Annotated[
    str | None,
    typer.Option("--runbooks", metavar="URL", help="Where your runbooks are; else links lead to the sentinel itself."),
]

app = typer.Typer(no_args_is_help=True, help="Boards and alert rules for Grafana.", rich_markup_mode=None)


@app.command("export")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if missing; files of ours in it are replaced.")],
    runbooks: Runbooks = None,
    as_json: settings.AsJson = False,
) -> None:
    """Write boards, alert rules and provisioning files.

    grafana/*.json are the boards (schema v1, Grafana 10 to 13) and alert-rules.json; provisioning/ makes a Grafana load
    them from disk: mount grafana/ at /var/lib/grafana/dashboards/dlc and provisioning/ at /etc/grafana/provisioning.
    """
    written = write_tree(shipped.dashboards(), folder, ("grafana", "provisioning"), runbooks)
    told(written, as_json)


@app.command("push")
def push(
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="Of Grafana; else grafana.url.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help=f"Token, or user:password; else ${TOKEN_VARIABLE}."),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option("--prometheus", metavar="URL", help="As Grafana sees it; else its default Prometheus is used."),
    ] = None,
    runbooks: Runbooks = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what was changed in Grafana.")] = False,
    config: settings.ConfigFile = None,
    as_json: settings.AsJson = False,
) -> None:
    """Put folder, data source, boards and alert rules into a running Grafana.

    A second push changes nothing. What somebody changed in Grafana is left alone and named (exit code 1); --force
    overwrites it. A push that failed half-way goes on where it stopped when it is run again.
    """
    from dlc_sentinel.sinks.grafana_push import push as provision

    chosen = settings.load(config).config.grafana
    address = url or chosen.url
    if not address:
        raise typer.BadParameter("no Grafana: give --url URL, or set grafana.url")
    api = server(address, str(token_file or chosen.token_file))
    outcomes = []
    for outcome in provision(api, prometheus_url=prometheus, runbooks=runbooks, force=force):
        outcomes.append(outcome)
        if not as_json:
            screen.data(
                f"{outcome.what:9}  {outcome.kind} {outcome.name}" + (f": {outcome.why}" if outcome.why else "")
            )
    if as_json:
        screen.data_json([{"kind": o.kind, "name": o.name, "what": o.what, "why": o.why} for o in outcomes])
    if any(outcome.what == "refused" for outcome in outcomes):
        raise typer.Exit(codes.DEGRADED)


def server(url: str, token_file: str) -> Grafana:
    """The Grafana at `url`. Raises: GrafanaError if there is no token."""
    from dlc_sentinel.sinks.grafana_http import Grafana

    secret = os.environ.get(TOKEN_VARIABLE, "")
    if token_file:
        try:
            secret = Path(token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GrafanaError(f"{token_file}: the token cannot be read ({error})") from error
    return Grafana(url, secret)


def write_tree(source: Path, folder: Path, parts: tuple[str, ...], runbooks: str | None) -> list[Path]:
    """Copies these parts of the shipped files; returns what was written."""
    written = []
    for part in parts:
        for name, text in shipped.files(source / part):
            path = folder / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(shipped.with_runbooks(text, runbooks), encoding="utf-8")
            written.append(path)
    return written


def told(written: list[Path], as_json: bool) -> None:
    """The written paths, for people or scripts."""
    if as_json:
        screen.data_json({"files": [str(path) for path in written]})
    else:
        screen.data("\n".join(str(path) for path in written))
