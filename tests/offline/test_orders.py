"""The same recording in any order of lines, of ranks, in any chunking: the same verdict and the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from factories import make_source
from factories_job import live
from factories_streams import make_streams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.offline.analyze import judge
from dlc_sentinel.records import Scalars, StepEnd

STEPS = 8
ROWS = 16
LENGTH = 72
RUNS = ("healthy", "lagging", "shifted")


@cache
def steps_of(run):
    """Streams of a small run: at its floor, falling behind, or with a shifted stream."""
    out = []
    for step in range(STEPS):
        s = make_streams(step, rows=ROWS, length=LENGTH, disc=0.01, lag=0.1 * step if run == "lagging" else 0.0)
        if run == "shifted":
            s.old = s.cur = np.roll(s.old, 1, axis=1)
        out.append(s)
    return out


def generator_version(run, step):
    return 0 if run == "lagging" else step


@cache
def lines_of(run):
    """The lines of a run as text, in the order of their steps."""
    lines = [{"type": "meta", "run": "r1", "engine_dtype": "float32", "trainer_dtype": "float32"}]
    for step, s in enumerate(steps_of(run)):
        for row in range(ROWS):
            line = {"type": "seq", "step": step, "version": step, "id": f"s{step}-{row}", "group": f"g{row // 4}"}
            line |= {"versions": generator_version(run, step), "old_is": "generator"}
            line |= {name: getattr(s, name)[row].astype(np.float32).tolist() for name in ("engine", "old", "cur")}
            lines.append(line)
        lines.append({"type": "scalars", "step": step, "values": {"reward": 0.4, "lr": 1e-6, "grad_norm": 0.5}})
        lines.append({"type": "synced", "step": step, "version": step + 1, "checksum": f"c{step}"})
    return [json.dumps(line) + "\n" for line in lines]


def same(report, expected):
    """True when two reports say the same: words and counts alike, numbers up to the rounding of a sum."""
    if isinstance(expected, dict):
        return report.keys() == expected.keys() and all(same(report[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(report) == len(expected) and all(map(same, report, expected))
    if isinstance(expected, float) and isinstance(report, float):
        return report == pytest.approx(expected, rel=1e-6, abs=1e-9)
    return report == expected


@cache
def expected_of_lines(run, path):
    path.write_text("".join(lines_of(run)))
    return judge(path).report


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_may_come_in_any_order(run, seed, tmp_path):
    lines = list(lines_of(run))
    np.random.default_rng(seed).shuffle(lines)
    path = tmp_path / "r1.jsonl"
    path.write_text("".join(lines))

    report = judge(path).report

    assert same(report, expected_of_lines(run, tmp_path / "expected.jsonl"))


def test_the_runs_of_these_tests_are_not_all_alike(tmp_path):
    verdicts = {run: expected_of_lines(run, tmp_path / f"{run}.jsonl")["verdict"] for run in RUNS}

    assert verdicts == {"healthy": "HEALTHY", "lagging": "LAG", "shifted": "DATA"}


# -- frames: which rank sends a row, in which micro-batch, in how many chunks ----------------------------------------


def cut(record, row, edges):
    """The record's row as chunks that begin at `edges`."""
    start, end = int(record.offsets_S1[row]), int(record.offsets_S1[row + 1])
    for first, last in zip([0, *edges], [*edges, end - start], strict=True):
        at = slice(start + first, start + last)
        yield replace(
            record,
            ids=(record.ids[row],),
            groups=(record.groups[row],),
            offsets_S1=np.array([0, last - first]),
            token_offset_S=np.array([first]),
            final_S=np.array([start + last == end]),
            cur_N=record.cur_N[at],
            old_N=record.old_N[at],
            engine_N=record.engine_N[at],
            span_start_K=np.array([0]),
            span_version_K=record.span_version_K[row : row + 1],
        )


def played(run, plan):
    """The report of a run whose rows are dealt to ranks and cut as `plan(rng)` says for each step."""
    monitor, number = Monitor(Config(), replaying=True, keep_steps=None), 0
    ranks = [make_source(producer=f"p{rank}", rank=rank) for rank in range(3)]

    def feed(record):
        nonlocal number
        monitor.feed(record, -1, float(number))
        number += 1

    for source in ranks:
        feed(StepEnd(source, -1))
    for step, s in enumerate(steps_of(run)):
        record = s.train(gen_version=generator_version(run, step))
        record = replace(record, groups=tuple(f"g{row // 4}" for row in range(ROWS)))
        for rank, row, edges in plan(step):
            for chunk in cut(record, row, edges):
                feed(replace(chunk, source=ranks[rank]))
        feed(Scalars(ranks[0], step, {"reward": 0.4, "lr": 1e-6, "grad_norm": 0.5}))
        for source in ranks:
            feed(StepEnd(source, step))
    monitor.finish(float(number))
    return monitor.report("r1")


def dealt(seed):
    def plan(step):
        rng = np.random.default_rng([seed, step])
        for row in rng.permutation(ROWS).tolist():
            edges = sorted(rng.choice(np.arange(1, LENGTH), rng.integers(0, 4), replace=False).tolist())
            yield int(rng.integers(3)), row, edges

    return plan


@cache
def expected_of_frames(run):
    return played(run, lambda step: [(0, row, []) for row in range(ROWS)])


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3, deadline=None)
def test_rows_may_come_from_any_rank_in_any_order_and_any_chunks(run, seed):
    assert same(played(run, dealt(seed)), expected_of_frames(run))


# -- reading that is stopped -----------------------------------------------------------------------------------------


def test_a_reading_that_is_stopped_keeps_what_was_read(tmp_path):
    path = tmp_path / "r1.jsonl"
    whole = expected_of_lines("healthy", path)
    seen = []

    def watch(done, total):
        seen.append((done, total))
        return done < total / 2

    judged = judge(path, watch=watch)

    assert judged.partial and 0 < len(judged.report["steps"]) < STEPS
    assert judged.report["steps"][0] == whole["steps"][0]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_reading_that_is_not_stopped_reaches_all_its_bytes(tmp_path):
    path = tmp_path / "r1.jsonl"
    expected_of_lines("healthy", path)
    seen = []

    judged = judge(path, watch=lambda done, total: seen.append((done, total)) is None)

    # the first line names the run and is read before
    assert not judged.partial and seen[-1][1] == path.stat().st_size
    assert seen[-1][0] == path.stat().st_size - len(path.read_text().splitlines(keepends=True)[0])


def test_a_tape_that_is_stopped_keeps_what_was_read_too(tmp_path):
    records = [
        record for step, s in enumerate(steps_of("healthy")) for record in (s.train(), StepEnd(s.train().source, step))
    ]
    live(tmp_path / "tape", records)
    whole = judge(tmp_path / "tape").report

    judged = judge(tmp_path / "tape", watch=lambda done, total: done < total / 2)

    steps = judged.report["steps"]
    assert len(whole["steps"]) == STEPS
    assert judged.partial and 0 < len(steps) < STEPS and steps[:-1] == whole["steps"][: len(steps) - 1]
