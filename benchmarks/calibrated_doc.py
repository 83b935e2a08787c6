"""The page docs/calibrated.md, made from the numbers of `bench_calibrated`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

HEAD = """# The split where the middle stream is missing, measured

Written by `python -m benchmarks.bench_calibrated --doc docs/calibrated.md`; do not edit.

An asynchronous job often lacks the trainer's logprob at the generator's weights. Then lag and discrepancy come as one
number, and the sentinel recovers the lag from rows that have none: their discrepancy gives one second moment per cell
of (engine logprob, position), which is taken out of the stale rows (`dlc_sentinel/maths/calibrated.py`). Here the true
split is known, so the error can be seen.

Every stream is real: a Hugging Face trainer in float32 with AdamW, a vLLM 0.32 engine on CPU that gets new weights at
every step, responses of 64 to 160 tokens, 64 rows a step. Runs that train on batches three versions old are judged at
lag 1 and 3, runs that train on batches six versions old at lag 6: rows not trained on before. {tokens:,} tokens;
learning rates 5e-4, 2e-4 and 1e-4 for each engine but fp32, the oracle, which has one. ESS_32 is the effective sample
size, as a share, of the lag's weights on blocks of 32 tokens; below 1/2 the sentinel resyncs.

* **pool**: three lag-0 rows (5 %) a step, pooled over the steps so far. This is what the sentinel does.
* **fresh**: the three lag-0 rows of the same step and nothing else.
* **re-scored**: no lag-0 row at all; after each sync the engine scores one stale row again (`prompt_logprobs`).
* **total**: the lag and the discrepancy together, which is what a job without the split would use.
"""
ROUNDED = """vLLM's CPU kernels keep an fp8 key-value cache only with AVX-512, which this machine lacks. For {engines}
keys and values were rounded to that type (scale 1, vLLM's default) before they went into a bfloat16 cache. That is the
rounding such a cache makes; the fp8 kernel itself did not run.
"""
LEGEND = """
rmse = root mean square error of ESS_32; cover = share of batches whose exact ESS_32 lies in the 90 % interval; valid =
share that may be called calibrated; kappa = rms of discrepancy over rms of lag, the middle one of the cell.
"""
TRAINED = """
## Rows that were trained on before

Not the usual case, but that of a replay buffer: batches at lag 6 in the runs that had trained on them at lag 3. What an
update pushes is the whole row that it saw, so the lag of these rows is not white across their tokens, as the estimate
takes it to be for its part that is drowned in discrepancy.
"""
NOTES = """
## What to know before relying on it

* Coverage is of the batch's own exact value, not of a population's. Where the lag is large the bootstrap of rows adds a
  spread that this truth does not have, and coverage is near 1 for that reason.
* The batches of one run share a model and follow one another; a run is one learning rate and one seed. Cells with few
  independent runs can be all good or all bad together.
* The interval's widening allows a correlation of 0.3 between a token's lag and its own discrepancy. That figure was
  taken from an earlier study of such streams, where 0.29 was the largest seen, and not from these.
* rms and KL are published only where the discrepancy is below half of the lag (kappa < 0.5).
* "Valid" is the share of batches whose checks allow the word calibrated: three rows, thirteen where the discrepancy
  outweighs the lag; rows that cover 90 % of the stale tokens; no negative variance. The errors are of all batches,
  valid or not. Coverage of tokens is judged by logp bin and by position bin, not by cell: three rows cannot fill 36.
* Three lag-0 rows show a change of engine when its noise changes by about half or more; a smaller one passes as none.
* Rows generated before a change of engine are calibrated by the law from before it. Rows generated in the gap between
  the last lag-0 row of the old law and the first of the new have none; those steps are `mixed`.
* Not measured: GPU kernels, mixtures of experts, quantised weights, responses above 160 tokens, top-p, models above a
  million parameters. On a GPU a re-scored row has prefill numerics; here prefill and decode agree exactly.
"""
Row = Mapping[str, object]


def document(results: Row) -> str:
    """The page as Markdown."""
    parts = [
        HEAD.format(tokens=results["tokens"]),
        *rounding(results),
        "## ESS_32 by engine and age of the rows\n",
        table(rows_of(results["cells"])),
        LEGEND,
        "## The same by run (engine and learning rate)\n",
        table(rows_of(results["runs"])),
        TRAINED,
        table(rows_of(results["trained_before"])),
        louder(rows_of(results["louder"])),
        changes(results),
        "\n## What is promised\n",
        *(f"* {'held' if kept else '**not held**'}: {text}" for text, kept in items(results["promises"])),
        NOTES,
    ]
    return "\n".join(parts)


def rounding(results: Row) -> list[str]:
    """What is to be said of engines whose fp8 cache this machine cannot keep."""
    engines = results["rounded_cache"]
    assert isinstance(engines, Sequence)
    return [ROUNDED.format(engines=" and ".join(map(str, engines)))] if engines else []


def table(rows: Sequence[Row]) -> str:
    """One line per engine (or run) and lag."""
    lines = [
        "| engine | lag | batches | kappa | exact ESS_32 (range) | total: rmse | pool: rmse | cover | width | valid "
        "| fresh: rmse | cover | valid | re-scored: rmse | cover | valid |",
        "|" + "---|" * 16,
    ]
    for row in rows:
        truth, pool, fresh, rescored = (part(row, name) for name in ("ess_32", "pool", "fresh", "rescored"))
        cells = [
            row["engine"],
            row["lag"],
            row["batches"],
            number(row["kappa"], 2),
            f"{number(truth['mean'], 3)} ({number(truth['low'], 2)} to {number(truth['high'], 2)})",
            number(part(row, "total")["rmse"], 3),
            number(pool["rmse"], 4),
            number(pool["coverage"], 2),
            number(pool["width"], 3),
            number(pool["valid"], 2),
        ]
        for source in (fresh, rescored):
            cells += [number(source["rmse"], 4), number(source["coverage"], 2), number(source["valid"], 2)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def louder(rows: Sequence[Row]) -> str:
    """The table of engines made louder."""
    lines = [
        "\n## Louder engines, at lag 3\n",
        "The same streams, every token's discrepancy multiplied: how loud may an engine be? (Pool; made streams.)\n",
        "| engine | factor | rms of discrepancy, nats | kappa | rmse | bias | cover | width | valid |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        digits = {"noise_rms": 3, "kappa": 2, "rmse": 4, "bias": 4, "coverage": 2, "width": 3, "valid": 2}
        cells = [row["engine"], number(row["factor"], 0), *(number(row[name], n) for name, n in digits.items())]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def changes(results: Row) -> str:
    """What was seen of engine changes and of a law that does not fit."""
    ends = part(results, "end_to_end")
    lines = [
        "\n## When the engine changes\n",
        f"Two engines' runs put end to end, three lag-0 rows a step: {ends['called_in_one_step']} of {ends['changes']} "
        f"changes called at the first step;",
        f"{ends['called_there']} false calls in {ends['steps_without_change']} steps without one.",
    ]
    for name, found in part(results, "replaced").items():
        assert isinstance(found, Mapping)
        lines += [
            f"\nOne job whose engine is replaced on the way ({name}), judged with the law of the rows' own time:",
            f"{found['called_in_one_step']} of {found['changes']} changes called at their step, "
            f"{found['called_elsewhere']} calls elsewhere; ESS_32 rmse {number(found['rmse'], 3)}, largest error "
            f"{number(found['largest_error'], 3)};",
            f"{found['read_as_lag']} batches read as lag (interval below 1/2 while the exact value is above).",
        ]
    lines += ["\nA pool of another engine, at lag 1 (share of batches where it is refused):\n"]
    lines += ["| law on data | by fresh rows (V1) | by the estimate's own checks (V2, V4, rows) |", "|---|---|---|"]
    for name, found in part(results, "wrong_law").items():
        assert isinstance(found, Mapping)
        lines.append(f"| {name} | {number(found['v1'], 2)} | {number(found['v2_or_v4'], 2)} |")
    return "\n".join(lines)


def part(row: Row, name: str) -> Row:
    """The mapping under a name."""
    found = row[name]
    assert isinstance(found, Mapping)
    return found


def items(found: object) -> Sequence[tuple[str, object]]:
    """Name and value of each entry."""
    assert isinstance(found, Mapping)
    return list(found.items())


def rows_of(found: object) -> Sequence[Row]:
    """A list of rows."""
    assert isinstance(found, Sequence)
    return found


def number(value: object, digits: int) -> str:
    """A number as the page shows it, or a dash where there is none."""
    if value is None:
        return "-"
    assert isinstance(value, (int, float))
    return f"{value:.{digits}f}"
