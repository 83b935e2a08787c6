"""What a run's monitor says: decisions and findings as events, and the list of commands with what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from dlc_sentinel.core.decide import Decision
from dlc_sentinel.core.detect import Finding
from dlc_sentinel.core.facts import StepFacts, no_nan
from dlc_sentinel.records import Event, EventKind, Json, Level

SHOWN = 64
KEPT = 256


class Ledger:
    """Makes the events of one run and remembers the newest of them, and every command."""

    def __init__(self, run: str, *, keep_all: bool) -> None:
        self._run = run
        self.newest: deque[Event] = deque(maxlen=SHOWN)
        self.commands: deque[dict[str, Json]] = deque(maxlen=None if keep_all else KEPT)
        self.counts: dict[str, int] = {}
        """Keys "KIND/outcome"."""

    def event(
        self, kind: EventKind, text: str, level: Level, now_s: float, step: int, data: Mapping[str, Json] | None = None
    ) -> Event:
        event = Event(kind, self._run, step, now_s, level, text, dict(data or {}))
        if level != "INFO" or kind in ("command", "ack"):
            self.newest.append(event)
        return event

    def step(self, facts: StepFacts, public: Mapping[str, Json], horizon: int, now_s: float) -> Event:
        """A step that closed. `public`: its facts in the file format; `horizon`: action horizon, tokens."""
        text = (
            f"step {facts.step}: lag ESS_{horizon} {facts.action_ess:.2f}, lag rms {facts.lag.rms:.3g}, "
            f"discrepancy rms {facts.discrepancy.rms:.3g} (floor {facts.floor_rms:.2g}), basis {facts.basis}"
        )
        return self.event("step", text, "INFO", now_s, facts.step, public)

    def findings(self, changed: Sequence[Finding], step: int, now_s: float) -> list[Event]:
        """One event per finding that opened, changed or closed."""
        return [self._finding(finding, step, now_s) for finding in changed]

    def _finding(self, finding: Finding, step: int, now_s: float) -> Event:
        grave = finding.catastrophic or (finding.verdict, finding.state) == ("STALE_ENGINE", "confirmed")
        level: Level = "INFO" if not finding.is_open else "CRITICAL" if grave else "WARN"
        text = f"{finding.verdict} {finding.kind} {finding.state} since step {finding.since_step}"
        return self.event("finding", text, level, now_s, step, finding.to_public())

    def decided(self, decisions: Sequence[Decision], step: int, now_s: float) -> list[Event]:
        """One event per decision; commands and outcomes are entered in the list of commands."""
        return [self._decision(decision, step, now_s) for decision in decisions]

    def _decision(self, decision: Decision, step: int, now_s: float) -> Event:
        command = decision.command
        if decision.kind == "command" and command is not None:
            outcome = "sent" if decision.sent else "hypothetical"
            self.commands.append({
                "step": step, "kind": command.kind, "action": command.action, "reason": command.reason,
                "id": command.id, "outcome": outcome, "version": None,
            })  # fmt: skip
            self._count(command.kind, outcome)
            level: Level = "CRITICAL" if command.kind == "ABORT" else "WARN"
            data = no_nan({**asdict(command), "sent": decision.sent})
            return self.event("command", decision.text, level, now_s, step, data)
        if decision.kind == "outcome" and command is not None:
            self._settle(command.id, decision)
            level = "INFO" if decision.outcome == "applied" else "WARN"
            data = {"id": command.id, "outcome": decision.outcome, "version": decision.version}
            return self.event("ack", decision.text, level, now_s, step, data)
        kind: EventKind = "breaker" if decision.kind == "breaker" else "note"
        level = "INFO" if decision.outcome == "worked" else "WARN"
        return self.event(kind, decision.text, level, now_s, step, {"outcome": decision.outcome})

    def _settle(self, command_id: str, decision: Decision) -> None:
        for entry in reversed(self.commands):
            if entry["id"] == command_id and entry["outcome"] == "sent":
                entry["outcome"] = decision.outcome
                entry["version"] = decision.version if decision.version >= 0 else None
                self._count(str(entry["kind"]), decision.outcome)
                return

    def _count(self, kind: str, outcome: str) -> None:
        key = f"{kind}/{outcome}"
        self.counts[key] = self.counts.get(key, 0) + 1

    def shown(self, *, hypothetical: bool) -> list[dict[str, Json]]:
        """The newest commands; those that nobody answered are called hypothetical where nobody could."""
        shown = [dict(entry) for entry in list(self.commands)[-SHOWN:]]
        for entry in shown:
            if hypothetical and entry["outcome"] == "sent":
                entry["outcome"] = "hypothetical"
        return shown

    def to_json(self) -> Json:
        return {"commands": list(self.commands)[-KEPT:], "counts": self.counts}

    def load(self, tree: Mapping[str, Json]) -> None:
        self.commands.extend(dict(entry) for entry in tree["commands"])
        self.counts = dict(tree["counts"])
