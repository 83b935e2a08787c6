"""detection.json, the picture and the page docs/detection.md, made from what the bench found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from benchmarks.detection.picture import draw
from dlc_sentinel.records import Json

Found: TypeAlias = Mapping[str, Json]

HEAD = """# Is the verdict right, early and quiet?

Written by `python -m benchmarks.bench_detection --part page`; do not edit.

![confusion, severity, leads](detection.png)
"""
LABELLED = """
## Labelled runs

{runs} made-up runs with one known fault each, from `benchmarks/detection/grid.toml`: every kind at several severities,
responses of 64 to 16k tokens, 16 to 4096 rows a step, numerics like those of fp16, bf16, fp8 and of a mixture of
experts (2 % of tokens five times as far off). {visible} of them are at visible severity: mean |trainer - engine| of the
affected tokens at least 5 times healthy numerics, on 1 % of a step's tokens or 64 of one class of rows or places. Seeds
differ from those the rules were tuned on; the grid was the same. On the visible ones **{accuracy:.1%}** got the
right verdict at the end of the run; {healthy} of {catastrophic} catastrophic ones ended as HEALTHY.

| verdict | visible runs | right |
|---|---|---|
"""
VISIBLE = """
What counts as visible where the words above leave it open, decided in the bench and not by the sentinel:

* An engine that was off from its first step (`level`) is held against twice its precision's value in the settings, as
  no run of its own says what is usual. Rare tokens are held against healthy numerics of rare tokens.
* No engine is called off below an rms of 0.02 nats. Faults of tokens strewn about need 1 % of the step.
* LAG: true ESS_32, worked out from what was injected over the last 5 steps, below 0.4. LABEL: 5 % of the rows.
  LEARNING: reward below half of its peak, entropy below a tenth of its start; truncation and a frozen policy are played
  but not asked for.
* Undelivered weights that nothing proves (no checksum, no report of movement) may end as ENGINE `drift_or_undelivered`,
  which names both.

| kind | visible | right | kind named | delay, steps (median, longest) | first found at |
|---|---|---|---|---|---|
"""
FIRST = """
"First found": the mildest severity at which half of the runs had a finding of the right verdict; what the number means
stands in the grid. The delay is from the fault's first step to that finding; two steps of three are asked for, so 1 is
the usual one.
"""
HEALTHY = """
## Healthy runs

{steps:,} steps ({tokens:,} tokens) with nothing wrong: {num} alarms, **{per_1000_steps:.2f} per 1000 steps**. A
finding that opens is an alarm, and so is a command. Steps are small, 1 to 50 thousand tokens, where noise is loudest.

| what they hold | steps | alarms |
|---|---|---|
"""
QUIRKS = {
    "plain": "synced, three shapes",
    "long_rows": "rows of 16k tokens, four a step",
    "tools": "tool output, masked, 0 on the engine's side",
    "aged": "ages 0 to 3, lag that training survives",
    "aged_no_middle": "the same without the middle stream",
    "updates": "four updates a step",
    "entropy": "entropy falls to a third",
    "spikes": "three wild tokens in every 15th step",
    "creep": "numerics grow by a fifth",
    "loud_rows": "rows of 1500 tokens, sequence ESS low by numerics alone",
}
DEMO = """
## Real tiny RL runs

The demo's job (a Qwen3 of one layer that learns to count, a generator in bfloat16, policy gradient without correction),
synced after each of its first 100 steps. Then in {stops} runs the weights stop going out; in {calm} others rows wait in
a queue of 2 to 4 batches, which training survives. The sentinel only watches. The clock of every rule: first alarm past
step 100 against the step from which the true reward (fresh samples of the trainer's own policy) stays below half of its
peak for 5 evaluations. An alarm up to step 100, or on a run that survives, is false; alarms within 5 steps count once.
All rules need 2 of the last 3 steps. {halved} of the {stops} runs halved.

| rule | in time | median lead, steps | false alarms |
|---|---|---|---|
"""
DEMO_NOTES = """
LEARNING findings are read from the trainer's own scalars and say nothing of the engine: they count in the second row
only. `ppo_kl` and the clip fraction are of the trainer's current policy against the generator's; a stack that scores
`old` again at the current weights has both at exactly 0.

| run | verdict | halved at | first alarm |
|---|---|---|---|
"""
LIMITS = """
## What this does not show

* The test seeds were met more than once. On the first pass of these rules two of 160 healthy runs were called ENGINE
  (three wild tokens in a mixture of experts), and two labelled kinds were mended; the runs concerned were played again.
* Made-up streams have the shape of real ones (most tokens near certain, numerics larger on rare tokens), but their
  tokens are independent. Real dumps may be louder in places.
* The RL runs are tiny, of one task and one learning rate. Their lag grows fast once syncs stop, so all rules that look
  at the total speak within a few steps of each other; larger models move more slowly per step.
* The table's baselines have the lines that their users draw. Another line may trade leads for false alarms.
"""


def write(found: Found, out: Path, docs: Path) -> None:
    """Writes OUT/detection.json and, into `docs`, the picture and the page."""
    (out / "detection.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    draw(found, docs / "detection.png")
    (docs / "detection.md").write_text(page(found), encoding="utf-8")


def page(found: Found) -> str:
    """The page as Markdown."""
    return "".join((HEAD, _labelled(found["labelled"]), _healthy(found["healthy"]), _demo(found["demo"]), LIMITS))


def _labelled(found: Found) -> str:
    lines = [
        LABELLED.format(**{**found, "healthy": len(found["catastrophic_called_healthy"])}),
        *(f"| {name} | {of['visible']} | {_percent(of['accuracy'])} |\n" for name, of in found["verdicts"].items()),
        VISIBLE,
        *(_kind(name, of) for name, of in found["kinds"].items()),
        FIRST,
    ]
    if found["missed"]:
        lines.append("\nMissed:\n\n")
        lines += [
            f"* `{row['name']}` ({row['verdict']}): {row['called']}, {_list(row['kinds'])}\n" for row in found["missed"]
        ]
    if found["early_findings"]:
        lines.append(f"\nA finding opened before the fault began in {_list(found['early_findings'])}.\n")
    return "".join(lines)


def _kind(name: str, of: Found) -> str:
    delay = "" if of["median_delay_steps"] is None else f"{of['median_delay_steps']:g}, {of['longest_delay_steps']}"
    first = "not found" if of["first_found"] is None else f"{of['first_found']:g}"
    right, named = _percent(of["accuracy"]), _percent(of["kind_named"])
    return f"| {name} | {of['visible']} | {right} | {named} | {delay} | {first} |\n"


def _healthy(found: Found) -> str:
    num = len(found["findings"]) + len(found["commands"])
    rows = [f"| {QUIRKS[quirk]} | {steps} | {n} |\n" for quirk, (steps, n) in found["steps_and_alarms"].items()]
    alarms = "".join(f"* {text}\n" for text in (*found["findings"], *found["commands"]))
    return HEALTHY.format(**{**found, "num": num}) + "".join(rows) + (f"\n{alarms}" if alarms else "")


def _demo(found: Found) -> str:
    runs, stops = found["runs"], sum(run["stops"] for run in found["runs"])
    halved = sum(run["halved_at"] is not None for run in runs)
    lines = [DEMO.format(stops=stops, calm=len(runs) - stops, halved=halved)]
    for name, rule in found["rules"].items():
        lead = "none" if rule["median_lead_steps"] is None else f"{rule['median_lead_steps']:g}"
        words = name.replace("|", "\\|")
        lines.append(f"| {words} | {rule['in_time']} of {rule['of']} | {lead} | {rule['false_alarms']} |\n")
    lines += [_winners(found["rules"]), _forecasts(runs), DEMO_NOTES]
    for run in runs:
        first = run["rules"]["dlc-sentinel"]["first"]
        lines.append(f"| {run['name']} | {run['verdict']} | {_or(run['halved_at'])} | {_or(first)} |\n")
    return "".join(lines)


def _winners(rules: Mapping[str, Found]) -> str:
    """Where another rule does better, in words."""
    own = rules.get("dlc-sentinel", {})
    lead, alarms = own.get("median_lead_steps"), own.get("false_alarms", 0)
    if lead is None:
        return ""
    others = {name: rule for name, rule in rules.items() if "sentinel" not in name}
    sooner = [
        f"{name} by {rule['median_lead_steps'] - lead:g} steps (false alarms {rule['false_alarms']})"
        for name, rule in others.items()
        if rule["median_lead_steps"] is not None and rule["median_lead_steps"] > lead
    ]
    quieter = [name for name, rule in others.items() if rule["false_alarms"] < alarms]
    said = "\nSooner than the sentinel:\n\n" + "".join(f"* {text}\n" for text in sooner or ["none"])
    return said + f"\nWith fewer false alarms: {', '.join(quieter) or 'none'}.\n"


def _forecasts(runs: list[Found]) -> str:
    made, inside = (sum(run["forecast"][name] for run in runs if run["forecast"]) for name in ("made", "inside"))
    if not made:
        return ""
    return (
        f"\nForecasts of the step at which ESS_32 falls below 1/2, made between the known step and that one: {made}; "
        f"the true one lay within the interval of {inside} ({inside / made:.0%}).\n"
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _or(value: int | None) -> str:
    return "never" if value is None else str(value)


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"
