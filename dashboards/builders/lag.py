"""Lag: how old the rows are, which age hurts, and whether the lag feeds itself."""

from __future__ import annotations

from typing import Any

from dashboards.builders.panels import (
    BELOW_HALF,
    BLUE,
    GREEN,
    NATS,
    ORANGE,
    RED,
    Query,
    board,
    curve,
    number,
    series,
    timeline,
)  # fmt: skip


def build() -> dict[str, Any]:
    return board(
        "dlc-lag",
        "Lag",
        "How far the policy has moved since the rows were generated, at which age, and whether it feeds itself.",
        [("Effective sample size", _ess()), ("Age and versions", _ages()), ("Feedback", _feedback())],
    )


def _ess() -> list[Any]:
    action = [
        Query(series("action_lag_ess_ratio"), "{{run}} estimate"),
        Query(series("lag_ess_interval_ratio"), "{{run}} 90 % {{bound}}"),
    ]
    return [
        curve(
            "Lag ESS with its interval", "The share of blocks that still count, at the action horizon, with the 90 % "
            "interval from the prompt groups. A wide interval means few groups: look at the next steps before acting.",
            action, page="LAG", steps=BELOW_HALF, low=0, high=1,
        ),
        curve(
            "Lag ESS by version age", "The same share for the rows of one age alone. If age 0 is healthy and old rows "
            "are not, drop the old rows; if all fall, sync the weights.",
            [Query(series("lag_ess_by_age_ratio"), "{{run}} age {{age}}")], page="LAG", steps=BELOW_HALF, low=0, high=1,
        ),
        curve(
            "Half horizon", "Longest block for which the share still holds one half, in tokens; 2048 here stands for "
            "whole responses. It falls long before single tokens do.",
            [Query(f"clamp_max({series('half_horizon_tokens')}, 2048)", "{{run}}")], page="LAG", unit="short", low=0,
            steps=((None, RED), (8, ORANGE), (32, GREEN)), size=(8, 8),
        ),
        curve(
            "Blocks behind the numbers", "How many blocks each rung of the ladder rests on. Below 64 the rule waits or "
            "pools steps.",
            [Query(series("blocks"), "{{run}} h={{horizon}}")], page="LAG", unit="short", log=True, size=(8, 8),
        ),
        curve(
            "Coverage", "Share of the blocks that have all their tokens. Responses shorter than the block make it "
            "fall; below one half a rung is not used.",
            [Query(series("coverage_ratio"), "{{run}} h={{horizon}}")], page="LAG", low=0, high=1,
            steps=((None, ORANGE), (0.5, GREEN)), size=(8, 8),
        ),
    ]  # fmt: skip


def _ages() -> list[Any]:
    return [
        curve(
            "Version age of the trained rows", "Trainer version minus the version that generated: mean and largest. It "
            "grows when the engine is not synced, and with every batch that waits in a queue.",
            [Query(series("version_age"), "{{run}} {{stat}}")], page="LAG", unit="short", low=0,
            steps=((None, GREEN), (4, ORANGE), (16, RED)),
        ),
        curve(
            "Versions", "Version of the weights in training, and the newest known to be in the engine. The gap is what "
            "a sync closes; an engine line that stands still while lag stays zero by label is STALE_ENGINE.",
            [
                Query(series("trainer_version"), "{{run}} trainer"),
                Query(series("engine_version"), "{{run}} engine"),
            ],
            page="STALE_ENGINE", unit="short",
        ),
        curve(
            "Queue: tokens by age", "How many tokens of the step are of which age. A hump away from 0 is a queue: "
            "shorten it, or drop its old rows.",
            [Query(series("age_tokens"), "{{run}} age {{age}}")], page="LAG", unit="short", bars=True, low=0,
        ),
        timeline(
            "LAG, UNWIRED and LABEL", "When the lag was too large, and when its number or its labels could not be "
            "believed.",
            [Query(series("finding_active", verdict="LAG|UNWIRED|LABEL"), "{{run}} {{verdict}}")], page="UNWIRED",
        ),
    ]  # fmt: skip


def _feedback() -> list[Any]:
    return [
        curve(
            "Loop gain", "Lag per unit of age against the window before. Above 1 for several windows: each update "
            "makes the next one's lag larger, and a sync only buys time. Lower the learning rate.",
            [Query(series("loop_gain_ratio"), "{{run}}")], page="LAG", steps=((None, GREEN), (1, RED)), low=0,
        ),
        curve(
            "Size of the lag", "Trainer now minus trainer at the generator's weights, per token: typical size, and the "
            "largest hundredth. The tail decides what importance weights do.",
            [Query(series("lag_nats", stat="rms|p50_abs|p99_abs"), "{{run}} {{stat}}")], page="LAG", unit=NATS,
            log=True,
        ),
        curve(
            "KL by two estimators", "Generator to trained policy, whole responses. k3 is never negative and steadier; "
            "the plain sum is noisy. They part when the discrepancy is large.",
            [
                Query(series("kl_nats", direction="gen_now", scope="full"), "{{run}} k3"),
                Query(series("kl_k1_nats"), "{{run}} plain"),
            ],
            page="LAG", unit=NATS,
        ),
        number(
            "Action horizon", "Block length, in tokens, at which the rule for RESYNC looks (setting ess.horizon).",
            Query(series("action_horizon_tokens"), "{{run}}"), page="LAG", unit="short", steps=((None, BLUE),),
            size=(12, 8),
        ),
    ]  # fmt: skip
