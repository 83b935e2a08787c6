"""docs/claims.md: words around numbers that come from claims.json only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.experiments import tables, words
from benchmarks.experiments.claims import figures
from benchmarks.experiments.picture import draw
from benchmarks.experiments.tables import interval, number
from dlc_sentinel.records import Json

Found = Mapping[str, Json]

HEAD = """# Do the claims behind the threshold hold?

Written by `python -m benchmarks.experiments page`; do not edit. Every number is from {num_runs} runs of four small
testbeds: A, a tabular tree of 5 to 13 tokens; B, a trap of 63 states; C, a tiny transformer with a bfloat16 engine
({length} tokens); D, a Markov chain of 64 to 1024 tokens. In A, B and D every KL, return and population ESS is exact.
Definitions, arms and seeds were written down before the results were looked at (`benchmarks/experiments/__init__.py`;
what came later is named there). Intervals are 95 % bootstraps over runs, four seeds an arm and world. KL ratio =
KL(method || on-policy) over the KL between two on-policy runs, same step; the band is a ratio of 2.

"""
CONSTANT = """
## 1. Discrepancy is roughly constant over training, lag is not

![discrepancy and lag over training](claims-constant.png)

C, rms over the tokens of a step: mean of the last quarter of the run over that of the first, after the warm-up. An
engine that is never synced keeps its weights, so its discrepancy can hardly move; the `synced` arm is the harder
half.

"""
CROSSING = """
## 2. Importance weighting fails at the step where token ESS crosses 1/2

![failure minus crossing](claims-crossing.png)

Failure: the KL ratio stays above 2 for 5 steps. Steps from the crossing of ESS_h to the failure, in runs that did
both: quartiles. Above 0 the crossing came first. No sync in any of these arms.

"""
BAND = """
## 3. DLC stays within twice the seed-to-seed KL, and what carries it

![KL ratio over training](claims-band.png)

DLC = centred score, lag ratio truncated at 2, resync when ESS_32 < 1/2 (on a response of less than 32 tokens: the
whole response). "Largest": over judged steps, of the mean over seeds. "Reverse": KL(on-policy || method), over the
same. `synced` = no correction, synced after every step: the engine's noise alone; where that leaves the band, no rule
can be asked to stay in it.

"""
PARTS = """
The parts, alone and together; "largest" is of the worst world. "Clip" = the lag ratio, truncated at 2; "IS" = the lag
ratio, not truncated.
"""
TRAP = """
## 4. A collapse that the generator's prefixes do not show

![the trap](claims-trap.png)

B is a counterexample, built on pilot seeds until corrected runs without syncs collapsed unseen: it shows that such a
collapse exists, not that it is common, and whether a rule prevents it. Means of the last 10 % of the steps; "seen" =
what the generator's own samples earn. Crossings: quartiles of the step.

"""
FRONTIER = """
## 5. Syncs against KL: rules of horizon h, and fixed periods

![the frontier](claims-frontier.png)

DLC with every rule, and with a fixed period that has, run by run, as many syncs. "Rule over period": the ratio of
their mean KL ratios, paired by seed; below 1 the rule wins. "Lead": steps from the crossing of ESS_h to the failure
of corrected runs that are never synced.

"""
MOVEMENT = """
What a rule certifies while it is quiet: ESS_h >= 1/2 means that the rms of the lag is at most sqrt(ln 2 / h) a token,
if its sum over a block is about normal; and what healthy long runs show at that h (public long-CoT logs, token ESS
0.996 to 0.998, tokens taken as independent): a rule that healthy runs break is of no use.

"""
TINY = """
## The tiny transformer, all arms

Testbed C, the demo's job with fewer steps and shorter responses, evaluated every 10 steps on fresh samples of the
trainer. On-policy runs end at a return of {on_policy}, but {apart} nats a response apart from one another: here two
good runs differ so much that the KL ratio says little, and the return has to be read beside it. "Seen": what the
generator's own samples earn at the end. Failed: the KL ratio above 2 at two evaluations in a row.

"""


def write(out: Path, docs: Path) -> None:
    """claims.json into `out`; claims.md and its pictures into `docs`."""
    found = figures(out)
    out.mkdir(parents=True, exist_ok=True)
    docs.mkdir(parents=True, exist_ok=True)
    (out / "claims.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (docs / "claims.md").write_text(page(found), encoding="utf-8")
    draw(found, out, docs)


def page(found: Found) -> str:
    """The page as Markdown."""
    crossing, band, frontier, tiny = (found[key] for key in ("crossing", "band", "frontier", "tiny"))
    parts = [f"\n**{group}**\n\n" + tables.parts(rows) for group, rows in band["parts"].items()]
    return "".join(
        [
            HEAD.format(num_runs=found["num_runs"], length=tiny["length"]) + tables.summary(words.summary(found)),
            CONSTANT + tables.constant(found["constant"]["table"]) + words.constant(found["constant"]),
            CROSSING + tables.crossing(crossing["table"]) + words.crossing(crossing),
            BAND + tables.worlds(band["worlds"]) + PARTS + "".join(parts) + words.band(band),
            TRAP + tables.trap(found["trap"]["table"]),
            FRONTIER + tables.frontier(frontier["table"]),
            MOVEMENT + tables.movement(frontier["movement"]) + words.horizon(frontier),
            TINY.format(on_policy=interval(tiny["on_policy"]), apart=number(tiny["apart"], 0))
            + tables.tiny(tiny["table"]),
        ]
    )
