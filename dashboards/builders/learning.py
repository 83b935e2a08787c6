"""Learning: what the stack itself reports, beside the mismatch that may be the cause."""

from __future__ import annotations

from typing import Any

from dashboards.builders.panels import BELOW_HALF, GREEN, NATS, ORANGE, RED, Query, board, curve, series, timeline


def build() -> dict[str, Any]:
    return board(
        "dlc-learning",
        "Learning",
        "Reward, entropy, length and truncation beside the mismatch: is it the plumbing, or the learning itself.",
        [("What the stack reports", _reported()), ("Beside it: the mismatch", _mismatch())],
    )


def _reported() -> list[Any]:
    return [
        curve(
            "Reward", "Mean reward of the rows as the stack reports it. These rows come from the generator: while it "
            "holds old weights this curve can look well although the trained policy is not.",
            [Query(series("scalar", name="reward"), "{{run}}")], page="LEARNING", size=(8, 8),
        ),
        curve(
            "Entropy", "Mean entropy of the policy. A fall towards zero is a collapse: the policy says one thing only.",
            [Query(series("scalar", name="entropy"), "{{run}}")], page="LEARNING", unit=NATS, low=0, size=(8, 8),
        ),
        curve(
            "Response length", "Mean number of tokens. A steady rise with more truncation is length gaming; a fall to "
            "almost nothing is a collapse.",
            [Query(series("scalar", name="response_length"), "{{run}}")], page="LEARNING", unit="short", low=0,
            size=(8, 8),
        ),
        curve(
            "Truncation", "Share of the responses that were cut at the length limit. They carry no proper end and "
            "often no proper reward.",
            [Query(series("scalar", name="truncated_ratio"), "{{run}}")], page="LEARNING", unit="percentunit",
            steps=((None, GREEN), (0.2, ORANGE), (0.5, RED)), low=0, high=1, size=(8, 8),
        ),
        curve(
            "Gradient norm", "Size of the update's gradient. Zero means that nothing learns; spikes often come with "
            "rows of large lag.",
            [Query(series("scalar", name="grad_norm"), "{{run}}")], page="LEARNING", unit="short", low=0, size=(8, 8),
        ),
        curve(
            "Learning rate", "As the stack reports it. With rate zero nothing can move, and a lag of zero proves "
            "nothing.",
            [Query(series("scalar", name="lr"), "{{run}}")], page="UNWIRED", unit="sci", low=0, size=(8, 8),
        ),
    ]  # fmt: skip


def _mismatch() -> list[Any]:
    return [
        curve(
            "Lag ESS", "If this falls before reward and entropy do, the lag is the cause; if it stays high, look at "
            "reward, advantage and the loss.",
            [Query(series("action_lag_ess_ratio"), "{{run}}")], page="LAG", steps=BELOW_HALF, low=0, high=1,
            size=(8, 8),
        ),
        curve(
            "Total mismatch", "Size of trainer now minus engine, per token: what the updates really see.",
            [Query(series("total_nats", stat="rms"), "{{run}}")], page="ENGINE", unit=NATS, log=True, size=(8, 8),
        ),
        timeline(
            "LEARNING", "When the stack's own numbers said that the policy collapses or is frozen, though trainer and "
            "engine agree.",
            [Query(series("finding_active", verdict="LEARNING"), "{{run}}")], page="LEARNING", size=(8, 8),
        ),
        curve(
            "All numbers of the stack", "Everything that was reported with hook.scalars, by name.",
            [Query(series("scalar"), "{{run}} {{name}}")], page="LEARNING", log=True, size=(24, 9),
        ),
    ]  # fmt: skip
