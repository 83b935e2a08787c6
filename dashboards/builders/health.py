"""Sentinel health: does it hear everything, and does it keep up. A blind watcher must not look healthy."""

from __future__ import annotations

from typing import Any

from dashboards.builders.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    SELECTOR,
    Query,
    board,
    curve,
    number,
    rows,
    series,
)  # fmt: skip


def build() -> dict[str, Any]:
    return board(
        "dlc-health",
        "Sentinel health",
        "Whether the sentinel is up, hears every producer, loses nothing and keeps up.",
        [
            ("The sentinel", _process()),
            ("What comes in", _ingest()),
            ("What is lost", _losses()),
            ("Who sends", _who()),
        ],
    )


def _process() -> list[Any]:
    return [
        number(
            "Sentinels", "Versions that are being scraped now. Empty: no sentinel can be reached, and no verdict here "
            "is current.",
            Query(series("build_info"), "{{instance}} {{version}}"), page="DlcSentinelDown", name_only=True,
            no_value="none reached", size=(6, 5),
        ),
        number(
            "Up for", "Time since the sentinel started.",
            Query(f"time() - {series('start_timestamp_seconds')}", "{{instance}}"), page="DlcSentinelDown", unit="s",
            size=(4, 5),
        ),
        number(
            "Picture is old by", "Time since the sentinel last published. It does so twice a second; minutes mean that "
            "it is stuck although its port still answers.",
            Query(f"time() - {series('published_timestamp_seconds')}", "{{instance}}"), page="DlcSentinelStuck",
            unit="s", steps=((None, GREEN), (10, ORANGE), (30, RED)), decimals=1, size=(4, 5),
        ),
        number(
            "Runs", "Runs it has heard of since it started.",
            Query(series("runs"), "{{instance}}"), page="DlcNoData", unit="short", size=(4, 5),
        ),
        number(
            "Breaker", "1 = RESYNCs without effect have opened the breaker: nothing is sent until somebody runs "
            "`dlc-sentinel actions reset`.",
            Query(series("breaker_open"), "{{run}}"), page="DlcBreakerOpen", steps=((None, GREEN), (1, RED)),
            size=(6, 5),
        ),
    ]  # fmt: skip


def _ingest() -> list[Any]:
    return [
        curve(
            "Tokens in", "Logprobs received per second by stream: engine, old (trainer at the generator's weights), "
            "cur (trainer now). A stream that is missing is why a verdict may be BLIND.",
            [Query(f"rate({series('tokens_total')}[$__rate_interval])", "{{run}} {{stream}}")], page="DlcNoData",
            unit="short", low=0, size=(8, 8),
        ),
        curve(
            "Frames in", "Messages received per second from the hooks, heartbeats included.",
            [Query(f"rate({series('frames_total')}[$__rate_interval])", "{{run}}")], page="DlcNoData", unit="short",
            low=0, size=(8, 8),
        ),
        curve(
            "Verdict latency", "Time from the last message of a step to its verdict. Promised: under 0.1 s.",
            [Query(series("verdict_latency_seconds"), "{{run}}")], page="DlcSentinelStuck", unit="s", low=0,
            steps=((None, GREEN), (0.1, ORANGE), (1, RED)), size=(8, 8),
        ),
        curve(
            "Tokens and groups of a step", "Usable tokens and prompt groups of the last closed step. Under 1,000 "
            "tokens a step proves nothing.",
            [
                Query(series("step_tokens"), "{{run}} tokens"),
                Query(series("step_groups"), "{{run}} groups"),
            ],
            page="BLIND", unit="short", log=True, size=(12, 8),
        ),
        curve(
            "Waiting for the other half", "Memory held by rows whose engine or trainer half has not come. It grows "
            "when ids differ between the two sides; the limit is join.max_bytes (256 MiB).",
            [Query(series("join_bytes"), "{{run}}")], page="DlcDropsHigh", unit="bytes", low=0,
            steps=((None, GREEN), (134217728, ORANGE), (241591910, RED)), size=(12, 8),
        ),
    ]  # fmt: skip


def _losses() -> list[Any]:
    named = f'run!="",{SELECTOR}'
    refused = series("refused_frames_total").replace(SELECTOR, named)
    return [
        curve(
            "Usable share of a step", "Usable tokens of the last step over all that were offered. Under 99 % something "
            "is wrong with the plumbing; under 50 % the verdict is BLIND.",
            [Query(series("usable_tokens_ratio"), "{{run}}")], page="DlcDropsHigh", unit="percentunit", low=0, high=1,
            steps=((None, RED), (0.5, ORANGE), (0.99, GREEN)), size=(8, 8),
        ),
        curve(
            "Dropped tokens by cause", "Tokens that were sent and not used, each under one cause. unmatched = ids "
            "differ between the two sides; queue_full = the link is too slow; non_finite = NaN in a stream.",
            [
                Query(
                    f"sum by (run, cause) (increase({series('dropped_tokens_total')}[$__rate_interval])) > 0 "
                    f"or sum by (run) (increase({series('dropped_tokens_total')}[$__rate_interval]))",
                    "{{run}} {{cause}}",
                )
            ],
            page="DlcDropsHigh", unit="short", bars=True, low=0, size=(8, 8),
        ),
        curve(
            "Lost and refused frames", "Whole messages that never came (gaps in their numbers) or could not be read. "
            "Without a run: the sender could not be told.",
            [
                Query(f"sum by (run, cause) ({refused})", "{{run}} {{cause}}"),
                Query(
                    "sum by (cause) (" + series("refused_frames_total").replace(SELECTOR, 'run=""') + ")",
                    "nobody {{cause}}",
                ),
                Query(series("sequence_gaps_total"), "{{run}} gaps"),
            ],
            page="DlcFramesLost", unit="short", low=0, steps=((None, BLUE),), size=(8, 8),
        ),
    ]  # fmt: skip


def _who() -> list[Any]:
    return [
        curve(
            "Producers by state", "Hooks that are alive, silent (nothing for 6 s) or gone. A run that ended in order "
            "has only gone ones.",
            [Query(series("producers"), "{{run}} {{role}} {{state}}")], page="DlcNoData", unit="short", low=0,
            size=(8, 8),
        ),
        curve(
            "Last sign of life", "Age of the newest message of each hook. They send a heartbeat every 2 s.",
            [
                Query(
                    f"time() - {series('producer_last_seen_timestamp_seconds')}",
                    "{{run}} {{role}} {{rank}} engine {{engine}}",
                )
            ],
            page="DlcNoData", unit="s", low=0, steps=((None, GREEN), (6, ORANGE), (60, RED)), size=(8, 8),
        ),
        rows(
            "Step of each producer", "Newest step every hook has named. One that lags behind holds up the verdict of "
            "the step.",
            Query(series("producer_last_step"), "", instant=True, is_table=True), page="DlcNoData", size=(8, 8),
        ),
    ]  # fmt: skip
