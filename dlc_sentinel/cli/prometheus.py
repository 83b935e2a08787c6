"""prometheus export: alert and recording rules, scrape settings, an Alertmanager example and the runbooks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import settings
from dlc_sentinel.cli.grafana import Runbooks, told, write_tree
from dlc_sentinel.sinks import shipped

DEFAULT_TARGET = "127.0.0.1:9877"

app = typer.Typer(no_args_is_help=True, help="Rules and scrape settings for Prometheus.", rich_markup_mode=None)


@app.command("export")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if missing; files of ours in it are replaced.")],
    target: Annotated[
        str, typer.Option("--target", metavar="HOST:PORT", help="Where Prometheus finds the sentinel's metrics.")
    ] = DEFAULT_TARGET,
    runbooks: Runbooks = None,
    as_json: settings.AsJson = False,
) -> None:
    """Write rules, scrape settings, an Alertmanager example and the runbooks.

    prometheus/dlc-rules.yml goes into rule_files; prometheus/prometheus.yml is a whole configuration: its scrape job
    is what to copy into yours; alertmanager/alertmanager.yml shows grouping and inhibition.
    """
    written = write_tree(shipped.dashboards(), folder, ("prometheus", "alertmanager"), runbooks)
    written += write_tree(shipped.runbooks().parent, folder, ("runbooks",), runbooks)
    config = folder / "prometheus" / "prometheus.yml"
    config.write_text(config.read_text(encoding="utf-8").replace(DEFAULT_TARGET, target), encoding="utf-8")
    told(written, as_json)


@app.callback()
def _prometheus() -> None:
    """A group stays a group while it has one command."""
