"""Engine: does the engine compute what the trainer computes, and which tokens carry the difference."""

from __future__ import annotations

from typing import Any

from dashboards.builders.panels import GREEN, NATS, ORANGE, RED, Query, board, curve, rows, series, timeline

TIMES_FLOOR = ((None, GREEN), (3, ORANGE), (5, RED))


def build() -> dict[str, Any]:
    return board(
        "dlc-engine",
        "Engine",
        "The discrepancy: the same weights on both sides, different numbers. Which tokens, which replica, since when.",
        [("Discrepancy", _size()), ("Which tokens", _where()), ("Since when", _when())],
    )


def _size() -> list[Any]:
    ratio = f"{series('discrepancy_nats', stat='rms')} / ignoring(stat) {series('floor_nats', stat='rms')}"
    return [
        curve(
            "Discrepancy and its floor", "Trainer minus engine at equal weights, per token, and what counts as healthy "
            "for this run. bf16 against bf16 is about 0.01 to 0.05 nats.",
            [
                Query(series("discrepancy_nats", stat="rms|p50_abs|p99_abs"), "{{run}} {{stat}}"),
                Query(series("floor_nats"), "{{run}} floor {{stat}}"),
            ],
            page="ENGINE", unit=NATS, log=True,
        ),
        curve(
            "Times the floor", "Discrepancy over its healthy floor. Above 3 something differs that did not; above 5 "
            "and 0.2 nats nothing should be trained on.",
            [Query(ratio, "{{run}}")], page="ENGINE", steps=TIMES_FLOOR, low=0,
        ),
        curve(
            "Mean: which way it leans", "A mean away from zero is a bias, not noise: below zero the engine is surer "
            "than the trainer (top-p, top-k or a temperature on one side), see TRANSFORM.",
            [
                Query(series("discrepancy_nats", stat="mean"), "{{run}} discrepancy"),
                Query(series("total_nats", stat="mean"), "{{run}} total"),
            ],
            page="TRANSFORM", unit=NATS,
        ),
        curve(
            "Tokens on an old cache", "Discrepancy of tokens made by new weights on a cache of the old ones, after a "
            "weight change inside a response. No version label shows it; a cache reset cures it.",
            [Query(series("stale_kv_nats", stat="rms|p99_abs"), "{{run}} {{stat}}")], page="STALE_ENGINE", unit=NATS,
            log=True,
        ),
    ]  # fmt: skip


def _where() -> list[Any]:
    return [
        curve(
            "By token probability", "Discrepancy of rare and of sure tokens. Numerics hurt rare tokens most; a shift "
            "or a wrong mask hurts all alike.",
            [Query(series("discrepancy_by_probability_nats"), "{{run}} p {{probability}}")], page="ENGINE", unit=NATS,
            log=True, size=(8, 8),
        ),
        curve(
            "By position", "Discrepancy by place in the response. A step at one position is plumbing (turn ends, "
            "padding, a cached prefix), a slow rise is a kernel or the cache.",
            [Query(series("discrepancy_by_position_nats"), "{{run}} {{position}}")], page="DATA", unit=NATS, log=True,
            size=(8, 8),
        ),
        curve(
            "By replica", "Discrepancy of each engine replica. One that stands out has old weights or a bad node.",
            [Query(series("discrepancy_by_replica_nats"), "{{run}} engine {{engine}}")], page="STALE_ENGINE", unit=NATS,
            log=True, size=(8, 8),
        ),
    ]  # fmt: skip


def _when() -> list[Any]:
    now = series("discrepancy_nats", stat="rms")
    return [
        curve(
            "Change-points: against the last hour", "Discrepancy over its own mean of the last hour. 1 = as before; a "
            "jump is a change of engine, kernel, weights or data at that moment.",
            [Query(f"{now} / avg_over_time({now}[1h])", "{{run}}")], page="ENGINE",
            steps=((None, GREEN), (1.5, ORANGE), (3, RED)), low=0,
        ),
        timeline(
            "Engine verdicts", "When the engine side was accused: other numbers, other weights, another transform, or "
            "wrong rows.",
            [Query(series("finding_active", verdict="ENGINE|STALE_ENGINE|TRANSFORM|DATA"), "{{run}} {{verdict}}")],
            page="STALE_ENGINE",
        ),
        rows(
            "Since which step", "First step of the evidence of every open finding: compare with your own log of what "
            "changed there.",
            Query(series("finding_since_step"), "", instant=True, is_table=True), page="README", unit="none",
            size=(24, 7),
        ),
    ]  # fmt: skip
