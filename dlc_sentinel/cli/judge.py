"""replay, analyze: a run that is over, judged by what was recorded of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dlc_sentinel import missing
from dlc_sentinel.cli import screen, settings
from dlc_sentinel.config import Config
from dlc_sentinel.offline import analyze as offline
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.report.story import outcomes
from dlc_sentinel.sinks.alert_lines import AlertLines
from dlc_sentinel.verdicts import asked

SHOWN_STEPS = 12
SHOWN_LINES = 10

RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Which run of a tape; else the worst.")]


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
    judged = offline.judge(path, chosen, run)
    report = judged.report
    for note in judged.notes:
        screen.say(note)
    if as_json:
        screen.data_json(report)
    else:
        lines = AlertLines(sys.stdout, no_color=screen.no_color(), min_interval_s=0.0)
        for event in judged.events:
            if run is None or event.run in (report["run"], ""):
                lines.handle(event)
        summary(judged, chosen)
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
    corrections: Annotated[
        bool, typer.Option("--corrections", help="What each correction would have done, and which one the run needs.")
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
        judged = offline.judge(path, chosen, run, on_policy=on_policy, corrections=corrections, watch=watch)
    report = judged.report
    for note in judged.notes:
        screen.say(note)
    if export is not None and not judged.partial:
        from dlc_sentinel.offline.export import export as write

        screen.say(f"{write(path, export, report['run'])} lines written to {export}")
    if as_json:
        screen.data_json(report)
    else:
        summary(judged, chosen)
    if judged.partial:
        screen.say("stopped early: this is the verdict of what was read until then")
        raise typer.Exit(offline.EXIT_BLIND)
    raise typer.Exit(offline.exit_code(report))


def summary(judged: offline.Judged, config: Config) -> None:
    """The report for a reader, on stdout: what is wrong and what to do first."""
    report = judged.report
    verdict, unused = plain(report["verdict"], 40), report["unparsed_lines"]
    screen.wrapped(f"{verdict}: {missing.line(verdict, report['steps'], config.window, len(unused))}")
    if report["run"]:
        screen.wrapped(f"run {plain(report['run'], 60)}{others(report['other_runs'])}")
    for finding in report["findings"]:
        _finding(finding, judged.hypothetical)
    if report["commands"]:
        _commands(judged)
    _steps(report["steps"], str(config.ess.horizon))
    if report["corrections"]:
        _corrections(report["corrections"])
    if unused:
        shown = ", ".join(map(str, unused[:SHOWN_LINES])) + (", ..." if len(unused) > SHOWN_LINES else "")
        screen.say(f"{len(unused)} {'line was' if len(unused) == 1 else 'lines were'} not used: {shown}")


def others(runs: list[Mapping[str, Json]]) -> str:
    """What to put behind a run's name: the other runs of the tape with their verdicts; "" for none."""
    if not runs:
        return ""
    shown = ", ".join(f"{plain(other['run'], 60)} {plain(other['verdict'], 24)}" for other in runs[:SHOWN_LINES])
    return f"; also on this tape: {shown}{', ...' if len(runs) > SHOWN_LINES else ''} (--run NAME shows one)"


def _finding(finding: Mapping[str, Json], hypothetical: bool) -> None:
    name, kind = plain(finding["verdict"], 40), plain(finding["kind"] or "", 40)
    marks = [plain(finding["state"], 20)]
    marks += ["catastrophic"] if finding["catastrophic"] else []
    marks += [what] if (what := asked(finding, hypothetical=hypothetical)) else []
    screen.data("")
    screen.wrapped(
        f"  {name}{f' ({kind})' if kind else ''}, since step {finding['since_step']}: {', '.join(marks)}, "
        f"confidence {_word(finding['confidence'])}"
    )
    screen.wrapped(f"    do: {plain(finding['advice'], 400)}", " " * 8)
    evidence = [f"{plain(key, 40)} {_word(value)}" for key, value in finding["evidence"].items()]
    if evidence:
        screen.wrapped(f"    evidence: {', '.join(evidence)}", " " * 8)


def _commands(judged: offline.Judged) -> None:
    """Each command with what came of it; those of an earlier life, which no event tells of, with a dash."""
    columns = ("step", "kind", "action", "reason")
    own = [event for event in judged.events if event.run == judged.report["run"]]
    came_of = {
        (event.step, event.data.get("kind"), event.data.get("action"), event.data.get("reason")): outcome
        for event, _, outcome in outcomes(own, hypothetical=judged.hypothetical)
    }
    rows = [[command[name] for name in columns] for command in judged.report["commands"]]
    why = (
        "of this replay, all hypothetical: nobody was there to act on them"
        if judged.hypothetical
        else "of this replay; with other settings than the run's, one without an answer is hypothetical"
    )
    screen.data(f"\ncommands ({why})")
    shown = [[*map(_word, row[:3]), came_of.get(tuple(row), "-"), _word(row[3])] for row in rows]
    screen.table((*columns[:3], "outcome", columns[3]), shown)


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


def _corrections(found: Mapping[str, Json]) -> None:
    need, steps = found["need"], found["steps_that_need"]
    screen.data(f"\ncorrection this run needs: {need} (in {steps.get(need, 0)} of {found['num_steps']} steps)")
    screen.data(f"  {found['reason']}")
    screen.data(f"  {_compared(found)}")
    if not found["num_steps"]:
        return
    rows = [
        [
            effect["name"] + (" *" if effect["name"] == need else ""), _word(effect["ess"]), _word(effect["raw_ess"]),
            _word(effect["clipped_share"]), _word(effect["bias_left"]), _word(effect["variance_factor"]),
        ]
        for effect in found["effects"]
    ]  # fmt: skip
    screen.table(("correction", "ESS", "ESS unclipped", "clipped", "bias left", "variance x"), rows)
    if len(steps) > 1:
        screen.data("  steps that need: " + ", ".join(f"{name} {number}" for name, number in steps.items()))


def _compared(found: Mapping[str, Json]) -> str:
    """Which tokens the comparison rests on."""
    kind = {"exact": "with exact lag", "total": "by their total ratio only, lag is not known", "none": ""}
    text = f"medians over those steps; {found['num_tokens_compared']} tokens {kind[found['basis']]}".rstrip()
    if found["num_tokens_compared"] < found["num_tokens"]:
        text += f", of {found['num_tokens']} (large steps are thinned by rows)"
    if found["num_tokens_left_out"]:
        text += f"; {found['num_tokens_left_out']} without exact lag are left out"
    return text


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
    if isinstance(value, list):
        return f"[{', '.join(map(_word, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{plain(key, 40)}: {_word(item)}' for key, item in value.items())}}}"
    return f"{value:.3g}" if isinstance(value, float) else plain(value, 300)
