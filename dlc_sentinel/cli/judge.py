"""replay, analyze: a run that is over, judged by what was recorded of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel.cli import screen, settings
from dlc_sentinel.offline import analyze as offline
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.sinks.alert_lines import AlertLines
from dlc_sentinel.verdicts import text_of

SHOWN_STEPS = 12

RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run of a tape; else the newest.")]


def replay(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A tape folder; a .jsonl or .jsonl.gz works, too.")],
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    run: RunName = None,
    to_tsdb: Annotated[
        Path | None,
        typer.Option("--to-tsdb", metavar="DIR", help="Put the run into a Prometheus data folder, for the boards."),
    ] = None,
    ends_now: Annotated[
        bool, typer.Option("--now", help="With --to-tsdb: move its times so that it ends now.")
    ] = False,
    as_json: settings.AsJson = False,
) -> None:
    """Play a recorded run again, with these settings.

    Prints the alert lines as they would fall, then the summary of `analyze`; --json: the report object only.
    Exit code: 0 healthy, 1 blind, 20 where an ABORT is due, 10 for any other finding.
    """
    chosen = settings.load(config, sets).config
    if to_tsdb is not None:
        from dlc_sentinel.cli import tsdb

        tsdb.write(path, to_tsdb, chosen, ends_now=ends_now)
    events, _, report = offline.replay(path, chosen, run)
    if as_json:
        screen.data_json(report)
    else:
        lines = AlertLines(sys.stdout, no_color=screen.no_color(), min_interval_s=0.0)
        for event in events:
            lines.handle(event)
        summary(report, chosen.ess.horizon)
    raise typer.Exit(offline.exit_code(report))


def analyze(
    path: Annotated[
        Path,
        typer.Argument(
            help="A tape folder, a .jsonl or .jsonl.gz, or what a stack kept: metrics.jsonl, a transfer_queue "
            "checkpoint or a skip dump of verl, trainer_state.json of TRL, token_exports of prime-rl, "
            "train_data_step*.jsonl of NeMo-RL, rollouts of NeMo Gym."
        ),
    ],
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    run: RunName = None,
    on_policy: Annotated[
        bool,
        typer.Option("--on-policy", help="Every row was trained by the weights that made it, where nothing says so."),
    ] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="OUT", help="Write a tape as .jsonl or .jsonl.gz, too.")
    ] = None,
    as_json: settings.AsJson = False,
) -> None:
    """Judge a run that is over.

    Prints verdict, findings with advice, commands and the last steps; --json: the report object. Ctrl-C judges what was
    read until then. Exit code: 0 healthy, 1 blind or stopped early, 20 where an ABORT is due, 10 for any other finding.
    """
    from dlc_sentinel.cli.reading import reading

    chosen = settings.load(config, sets).config
    with reading(path.name) as watch:
        judged = offline.judge(path, chosen, run, on_policy=on_policy, watch=watch)
    report = judged.report
    for note in judged.notes:
        screen.say(note)
    if export is not None and not judged.partial:
        from dlc_sentinel.offline.export import export as write

        screen.say(f"{write(path, export, run)} lines written to {export}")
    if as_json:
        screen.data_json(report)
    else:
        summary(report, chosen.ess.horizon)
    if judged.partial:
        screen.say("stopped early: this is the verdict of what was read until then")
        raise typer.Exit(offline.EXIT_BLIND)
    raise typer.Exit(offline.exit_code(report))


def summary(report: Mapping[str, Json], horizon: int) -> None:
    """The report for a reader, on stdout: what is wrong and what to do first."""
    verdict = plain(report["verdict"], 40)
    screen.data(f"{verdict}: {text_of(verdict).line}")
    for finding in report["findings"]:
        _finding(finding)
    if report["commands"]:
        screen.data("\ncommands (of this replay; those that the recording does not answer are hypothetical)")
        columns = ("step", "kind", "action", "reason")
        screen.table(columns, [[_word(command[name]) for name in columns] for command in report["commands"]])
    _steps(report["steps"], str(horizon))
    if report["unparsed_lines"]:
        shown = ", ".join(str(number) for number in report["unparsed_lines"][:10])
        screen.say(f"{len(report['unparsed_lines'])} lines were not used: {shown} ...")


def _finding(finding: Mapping[str, Json]) -> None:
    name, kind = plain(finding["verdict"], 40), plain(finding["kind"] or "", 40)
    marks = [plain(finding["state"], 20)]
    marks += ["catastrophic"] if finding["catastrophic"] else []
    marks += ["acted on"] if finding["acted"] else []
    screen.data(
        f"\n  {name}{f' ({kind})' if kind else ''}, since step {finding['since_step']}: {', '.join(marks)}, "
        f"confidence {_word(finding['confidence'])}"
    )
    screen.data(f"    do: {plain(finding['advice'], 400)}")
    evidence = [f"{plain(key, 40)} {_word(value)}" for key, value in finding["evidence"].items()]
    if evidence:
        screen.data(f"    evidence: {', '.join(evidence)}")


def _steps(steps: list[Mapping[str, Json]], horizon: str) -> None:
    if not steps:
        screen.data("\nno step was closed")
        return
    if "total_ess" in steps[0]:
        _metric_steps(steps)
        return
    rows = [
        [
            step["step"], step["version"], step["basis"], step["num_tokens"], _word(step["version_age"]["mean"]),
            _word(step["lag_ess"].get(horizon)), _word(step["lag"]["rms"]), _word(step["discrepancy"]["rms"]),
            _word(step["floor"]["rms"]), sum(step["dropped"].values()),
        ]
        for step in steps[-SHOWN_STEPS:]
    ]  # fmt: skip
    screen.data(f"\nsteps {steps[0]['step']} to {steps[-1]['step']}, the last {len(rows)} (nats, rms)")
    names = ("step", "version", "basis", "tokens", "age", f"ESS_{horizon}", "lag", "discrepancy", "floor", "dropped")
    screen.table(names, rows)


def _metric_steps(steps: list[Mapping[str, Json]]) -> None:
    """Steps of a log without tokens: the little that it holds."""
    rows = [
        [
            step["step"], step["basis"], _word(step["version_age"]["mean"]), _word(step["total_ess"]["1"]),
            _word(step["total"]["mean"]), _word(step["floor"]["rms"]),
        ]
        for step in steps[-SHOWN_STEPS:]
    ]  # fmt: skip
    screen.data(f"\nsteps {steps[0]['step']} to {steps[-1]['step']}, the last {len(rows)} (nats)")
    screen.table(("step", "basis", "age", "total ESS_1", "total mean", "floor rms"), rows)


def _word(value: Json) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else plain(value, 300)
