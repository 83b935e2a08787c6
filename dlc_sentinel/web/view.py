"""What the page shows of a snapshot, as one JSON object: columns for the curves, rows for the lists, inert texts.

Every text from outside passes `plain` here, and the page writes it as text only. NaN and infinity become null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dlc_sentinel import missing
from dlc_sentinel.catalog import HORIZONS, OPEN_STATES, number, part
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json, RunSnapshot, Snapshot
from dlc_sentinel.verdicts import VERDICTS, asked, text_of

MAX_RUNS = 64
MAX_LISTED = 64
MAX_EVIDENCE = 24
_SEVERITY = {verdict.name: rank for rank, verdict in enumerate(VERDICTS)}
_CURVES: Mapping[str, tuple[str, ...]] = {
    **{f"ess_{horizon}": ("lag_ess", horizon) for horizon in HORIZONS},
    "lag": ("lag", "rms"),
    "discrepancy": ("discrepancy", "rms"),
    "total": ("total", "rms"),
    "floor": ("floor", "rms"),
    "kl_gen_now": ("kl", "gen_now_full"),
    "kl_now_gen": ("kl", "now_gen_full"),
    "kl_prefix": ("kl", "gen_now_prefix"),
    "age_mean": ("version_age", "mean"),
    "age_max": ("version_age", "max"),
}


def page(snapshot: Snapshot, run: str | None = None, since: int = -1) -> dict[str, Json]:
    """The object of one answer. `run`: its name, else the one worst off; `since`: curves only of later steps."""
    shown = choose(snapshot, run)
    return {
        "t_s": _finite(snapshot.t_s),
        "started_s": _finite(snapshot.started_s),
        "version": plain(snapshot.version, 40),
        "runs": [
            {"run": each.run, "name": plain(each.run, 60), "verdict": plain(each.verdict, 24),
             "last_step": each.last_step}
            for each in snapshot.runs[:MAX_RUNS]
        ],
        "run": None if shown is None else _run(shown, snapshot.t_s, since),
    }  # fmt: skip


def choose(snapshot: Snapshot, run: str | None) -> RunSnapshot | None:
    """The run of that name, else the one with the most severe verdict; None if there is none."""
    named = [candidate for candidate in snapshot.runs if not run or candidate.run == run]
    return min(reversed(named), key=lambda candidate: _SEVERITY.get(candidate.verdict, 0), default=None)


def _run(run: RunSnapshot, now_s: float, since: int) -> dict[str, Json]:
    text = text_of(plain(run.verdict, 24))
    basis = plain((run.step or {}).get("basis") or "none", 20)
    is_open = [f for f in run.findings if f.get("state") in OPEN_STATES]
    head: Mapping[str, Json] = next((f for f in is_open if f.get("verdict") == run.verdict), {})
    return {
        "run": run.run,
        "name": plain(run.run, 120),
        "model": plain(run.model_name, 120) or "model unknown",
        "engines": plain(", ".join(run.engines[:8]) or "none", 120),
        "mode": plain(run.mode, 12),
        "verdict": text.name,
        "is_known": text.is_known,
        "is_trusted": text.is_known and basis not in ("mixed", "none"),
        "meaning": missing.line(text.name, run.history, run=run),
        "advice": plain(head.get("advice") or text.do[0], 400),
        "state": plain(head.get("state") or "", 20),
        "since_step": head.get("since_step"),
        "last_step": run.last_step,
        "basis": basis,
        "breaker_open": run.breaker_open,
        "horizon": str(run.action_horizon),
        "forecast": [_number(run.step, "forecast_steps", bound) for bound in ("low", "mid", "high")],
        "ladder": _ladder(run),
        "interval": _interval(run.step),
        "reliability": plain(part(run.step, "kl").get("reliability") or "none", 12),
        "columns": _columns(run, since),
        "scalars": _scalars(run, since),
        "findings": [_finding(finding) for finding in run.findings[:MAX_LISTED]],
        "commands": [_command(command) for command in reversed(run.commands[-MAX_LISTED:])],
        "events": [_event(event) for event in reversed(run.events[-MAX_LISTED:])],
        "producers": [_producer(producer, now_s) for producer in run.producers[:MAX_LISTED]],
        "tokens": {plain(name, 20): count for name, count in run.num_tokens.items()},
        "dropped": {plain(cause, 40): count for cause, count in run.dropped_tokens.items() if count},
        "refused": {plain(cause, 40): count for cause, count in run.refused_frames.items() if count},
        "num_frames": run.num_frames,
        "gaps": run.sequence_gaps,
        "latency_s": _finite(run.verdict_latency_s),
        "worst": [dict(strip) for strip in run.worst[:8]],
    }


def _columns(run: RunSnapshot, since: int) -> dict[str, list[Json]]:
    steps = [step for step in run.history if number(step, "step") > since]
    columns: dict[str, list[Json]] = {"step": [int(number(step, "step")) for step in steps]}
    own = f"ess_{run.action_horizon}"
    for name, keys in {**_CURVES, own: ("lag_ess", str(run.action_horizon))}.items():
        columns[name] = [_number(step, *keys) for step in steps]
    return columns


def _scalars(run: RunSnapshot, since: int) -> list[dict[str, Json]]:
    """Step and value of the scalars that the page draws: reward and entropy, as the stack names them."""
    names = sorted({str(name) for row in run.scalars for name in row if name != "step"}, key=len)
    chosen = []
    for wanted in ("reward", "entropy"):
        match = next((name for name in names if wanted in name.lower()), None)
        if match is not None:
            rows = [row for row in run.scalars if match in row and number(row, "step") > since]
            chosen.append({
                "kind": wanted, "name": plain(match, 60), "step": [int(number(row, "step")) for row in rows],
                "value": [_number(row, match) for row in rows],
            })  # fmt: skip
    return chosen


def _ladder(run: RunSnapshot) -> list[dict[str, Json]]:
    own = str(run.action_horizon)
    rungs = sorted({*HORIZONS, own}, key=lambda horizon: math.inf if horizon == "inf" else int(horizon))
    return [
        {"h": rung, "ess": _number(run.step, "lag_ess", rung), "coverage": _number(run.step, "coverage", rung),
         "acts": rung == own}
        for rung in rungs
    ]  # fmt: skip


def _interval(step: Mapping[str, Json] | None) -> list[float | None]:
    pair = (step or {}).get("lag_ess_interval")
    return [_number(value) for value in pair] if isinstance(pair, Sequence) and len(pair) == 2 else [None, None]


def _finding(finding: Mapping[str, Json]) -> dict[str, Json]:
    text = text_of(plain(finding.get("verdict"), 24))
    evidence = finding.get("evidence")
    pairs = list(evidence.items())[:MAX_EVIDENCE] if isinstance(evidence, Mapping) else []
    return {
        "verdict": text.name,
        "kind": plain(finding.get("kind") or "", 40),
        "state": plain(finding.get("state"), 20),
        "is_open": finding.get("state") in OPEN_STATES,
        "is_known": text.is_known,
        "since_step": _number(finding, "since_step"),
        "confidence": _number(finding, "confidence"),
        "catastrophic": finding.get("catastrophic") is True,
        "asked": asked(finding),
        "advice": plain(finding.get("advice") or text.do[0], 400),
        "means": text.means,
        "how_sure": text.how_sure,
        "check_first": list(text.check_first),
        "evidence": [[plain(key, 60), _word(value)] for key, value in pairs],
    }


def _command(command: Mapping[str, Json]) -> dict[str, Json]:
    return {
        "step": _number(command, "step"),
        "kind": plain(command.get("kind"), 12),
        "action": plain(command.get("action") or "", 20),
        "reason": plain(command.get("reason") or "", 300),
        "outcome": plain(command.get("outcome") or "sent", 16),
        "version": _number(command, "version"),
    }


def _event(event: Event) -> dict[str, Json]:
    return {
        "step": event.step, "t_s": _finite(event.t_s), "level": event.level, "kind": event.kind,
        "text": plain(event.text, 300),
    }  # fmt: skip


def _producer(producer: Mapping[str, Json], now_s: float) -> dict[str, Json]:
    role = plain(producer.get("role"), 12)
    place = f"replica {plain(producer.get('replica'), 40)}" if role == "engine" else f"rank {producer.get('rank')}"
    return {
        "name": f"{role} {plain(place, 60)}",
        "host": plain(producer.get("host") or "", 60),
        "state": plain(producer.get("state") or "unknown", 12),
        "silence_s": _finite(now_s - number(producer, "last_seen_s")),
        "last_step": _number(producer, "last_step"),
    }


def _word(value: Json) -> str:
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else "not known"
    if isinstance(value, (list, tuple)):
        return ", ".join(_word(item) for item in value[:12])
    return plain(value, 200)


def _number(tree: Json, *keys: str) -> float | None:
    return _finite(number(tree, *keys))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
