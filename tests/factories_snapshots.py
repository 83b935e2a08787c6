"""Keyword factories for snapshots: each test names only what it is about. Every key of the file format is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dlc_sentinel.records import FRAME_CAUSES, TOKEN_CAUSES, Event, RunSnapshot, Snapshot

NOW_S = 1_800_000_000.0
TERM = {"mean": -0.0002, "rms": 0.0121, "p50_abs": 0.004, "p99_abs": 0.043}


def make_step(step: int = 12, **changes: Any) -> dict[str, Any]:
    """A step object of a healthy run; `changes` replace whole values, or parts of them where a dict meets a dict."""
    tree: dict[str, Any] = {
        "step": step,
        "version": step,
        "updates": [0, 0],
        "basis": "exact",
        "num_tokens": 65536,
        "num_groups": 16,
        "num_blocks": {"1": 65536, "8": 8192, "32": 2048, "128": 512, "512": 128, "inf": 128},
        "version_age": {"mean": 0.6, "max": 1},
        "lag_ess": {"1": 0.999, "8": 0.992, "32": 0.968, "128": 0.88, "512": 0.61, "inf": 0.61},
        "lag_ess_interval": [0.955, 0.975],
        "lag_ess_by_age": {"0": 1.0, "1": 0.95},
        "half_horizon": 512,
        "coverage": {"1": 1.0, "8": 1.0, "32": 1.0, "128": 1.0, "512": 0.7, "inf": 1.0},
        "discrepancy": dict(TERM),
        "lag": {"mean": 0.0001, "rms": 0.0082, "p50_abs": 0.002, "p99_abs": 0.031},
        "total": {"mean": -0.0001, "rms": 0.0146, "p50_abs": 0.005, "p99_abs": 0.052},
        "stale_kv": None,
        "floor": {"rms": 0.0118, "mean_abs": 0.0085},
        "loop_gain": 0.4,
        "forecast_steps": {"low": None, "mid": None, "high": None},
        "kl": {
            "gen_now_prefix": 0.0000336, "gen_now_full": 0.0172, "gen_now_k1": 0.0169, "now_gen_prefix": 0.0000341,
            "now_gen_full": 0.0179, "blind_spot": 1.02, "reliability": "ok",
        },
        "dropped": dict.fromkeys(TOKEN_CAUSES, 0),
        "tokens_by_age": {"0": 32768, "1": 32768},
        "discrepancy_by": {
            "probability": {"0.9..1": 0.004, "0..0.1": 0.03}, "position": {"0..63": 0.012}, "replica": {"0": 0.0121},
        },
    }  # fmt: skip
    return _merged(tree, changes)


def make_finding(verdict: str = "LAG", **changes: Any) -> dict[str, Any]:
    finding: dict[str, Any] = {
        "verdict": verdict,
        "kind": "queue",
        "confidence": 0.97,
        "since_step": 31,
        "state": "confirmed",
        "acted": False,
        "catastrophic": False,
        "evidence": {"lag_ess": 0.43, "version_age": 3.1},
        "advice": "sync the weights now",
    }
    return _merged(finding, changes)


def make_command(**changes: Any) -> dict[str, Any]:
    command: dict[str, Any] = {
        "step": 33, "kind": "RESYNC", "action": "sync_weights", "reason": "lag ESS 0.43 below 0.5 in 2 of 3 steps",
        "id": "c-1", "outcome": "applied", "version": 34,
    }  # fmt: skip
    return _merged(command, changes)


def make_producer(role: str = "trainer", **changes: Any) -> dict[str, Any]:
    producer: dict[str, Any] = {
        "producer": f"{role}-0", "role": role, "rank": 0, "replica": "0", "host": "node-1", "pid": 4711,
        "last_seen_s": NOW_S - 1.0, "last_step": 12, "state": "alive",
    }  # fmt: skip
    return _merged(producer, changes)


def make_event(kind: str = "finding", **changes: Any) -> Event:
    event = Event(kind="finding", run="r1", step=33, t_s=NOW_S, level="WARN", text="", data={})
    return replace(event, **{"kind": kind, **changes})


def make_run(**changes: Any) -> RunSnapshot:
    """A healthy run of 13 steps; name only what differs. `step` alone also ends the history."""
    step = changes.get("step", make_step())
    history = changes.get("history", tuple(make_step(n) for n in range(12)) + ((step,) if step else ()))
    run = RunSnapshot(
        run="r1", model_name="Qwen3-0.6B", engines=("0",), mode="resync", verdict="HEALTHY", last_step=12, step=step,
        history=history, findings=(), commands=(), events=(),
        producers=(make_producer("trainer"), make_producer("engine")),
        num_tokens={"engine": 851_968, "old": 851_968, "cur": 851_968},
        dropped_tokens=dict.fromkeys(TOKEN_CAUSES, 0), refused_frames=dict.fromkeys(FRAME_CAUSES, 0),
        num_frames=260, sequence_gaps=0, join_bytes=1_048_576, num_commands={}, verdict_latency_s=0.012,
    )  # fmt: skip
    return replace(run, **changes)


def make_snapshot(*runs: RunSnapshot, **changes: Any) -> Snapshot:
    snapshot = Snapshot(t_s=NOW_S, started_s=NOW_S - 600.0, version="0.1.0", runs=runs or (make_run(),))
    return replace(snapshot, **changes)


def _merged(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    unknown = set(changes) - set(tree)
    if unknown:
        raise KeyError(f"no such key in the file format: {sorted(unknown)}")
    merged = dict(tree)
    for key, value in changes.items():
        is_part = (
            isinstance(value, Mapping) and isinstance(tree[key], Mapping) and key not in ("lag_ess_by_age", "evidence")
        )
        merged[key] = {**tree[key], **value} if is_part else value
    return merged
