"""Hysteresis: candidates of single steps become findings that open, change and close.

A finding opens on 2 of the last 3 steps with data (a catastrophic one at once) and closes after 3 steps without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from dlc_sentinel.core.facts import no_nan
from dlc_sentinel.core.rules.base import SEVERITY, Candidate
from dlc_sentinel.records import Json

WINDOW = 3
NEEDED = 2
CLOSE_AFTER = 3
KEPT = 256


@dataclass(slots=True)
class Finding:
    """One open or past finding."""

    verdict: str
    kind: str
    confidence: float
    since_step: int
    state: str
    evidence: Mapping[str, Json]
    advice: str
    catastrophic: bool = False
    acted: bool = False
    last_step: int = -1
    quiet_steps: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in ("suspected", "confirmed")

    @property
    def rank(self) -> tuple[bool, int]:
        return (not self.catastrophic, SEVERITY.index(self.verdict))

    def to_public(self) -> dict[str, Json]:
        """The finding object of the file format."""
        public = {
            "verdict": self.verdict,
            "kind": self.kind,
            "confidence": self.confidence,
            "since_step": self.since_step,
            "state": self.state,
            "acted": self.acted,
            "catastrophic": self.catastrophic,
            "evidence": dict(self.evidence),
            "advice": self.advice,
        }
        clean = no_nan(public)
        assert isinstance(clean, dict)
        return clean


@dataclass(slots=True)
class Findings:
    """All findings of a run. `update` returns those that opened, changed or closed at this step."""

    items: list[Finding] = field(default_factory=list)
    _hits: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)

    def open(self) -> list[Finding]:
        return sorted((f for f in self.items if f.is_open), key=lambda f: f.rank)

    def get(self, verdict: str) -> Finding | None:
        """The open finding of this verdict, if there is one."""
        return next((f for f in self.open() if f.verdict == verdict), None)

    def update(
        self, step: int, candidates: Sequence[Candidate], *, hold: Iterable[str] = (), still: Iterable[str] = ()
    ) -> list[Finding]:
        """`hold`: verdicts for which this step counts for nothing. `still`: verdicts that may not close on it."""
        held, kept = set(hold), set(still)
        now = {f"{c.verdict}/{c.kind}": c for c in candidates if c.verdict not in held}
        changed = [f for key, c in now.items() if (f := self._hit(key, c, step))]
        for key, hits in self._hits.items():
            if key not in now and key.split("/")[0] not in held:
                hits.append((step, False))
                del hits[:-WINDOW]
        for finding in self.items:
            key = f"{finding.verdict}/{finding.kind}"
            if not finding.is_open or key in now or finding.verdict in held or finding.verdict in kept:
                continue
            finding.quiet_steps += 1
            if finding.quiet_steps >= CLOSE_AFTER:
                finding.state = "closed"
                changed.append(finding)
        return changed

    def _hit(self, key: str, candidate: Candidate, step: int) -> Finding | None:
        hits = self._hits.setdefault(key, [])
        hits.append((step, True))
        del hits[:-WINDOW]
        finding = next((f for f in self.items if f.is_open and f"{f.verdict}/{f.kind}" == key), None)
        state = "suspected" if candidate.suspected else "confirmed"
        if finding is not None:
            escalated = (candidate.catastrophic and not finding.catastrophic) or (finding.state, state) == (
                "suspected",
                "confirmed",
            )
            finding.evidence, finding.advice, finding.confidence = (
                candidate.evidence,
                candidate.advice,
                candidate.confidence,
            )
            finding.catastrophic |= candidate.catastrophic
            finding.state = "confirmed" if finding.state == "confirmed" else state
            finding.last_step, finding.quiet_steps = step, 0
            return finding if escalated else None
        if sum(hit for _, hit in hits) < NEEDED and not (candidate.catastrophic or candidate.at_once):
            return None
        first = min(at for at, hit in hits if hit)
        since = min(first, candidate.since_step) if candidate.since_step >= 0 else first
        finding = Finding(
            candidate.verdict, candidate.kind, candidate.confidence, since, state, candidate.evidence,
            candidate.advice, candidate.catastrophic, last_step=step,
        )  # fmt: skip
        self.add(finding)
        return finding

    def add(self, finding: Finding) -> None:
        """Enters a finding that needs no steps to be sure of."""
        self.items.append(finding)
        if len(self.items) > KEPT:
            self.items.remove(next((f for f in self.items if not f.is_open), self.items[0]))

    def end(self, verdict: str, state: str, kind: str | None = None) -> list[Finding]:
        """Closes or supersedes the open findings of a verdict (and kind); returns them."""
        ended = [f for f in self.open() if f.verdict == verdict and kind in (None, f.kind)]
        for finding in ended:
            finding.state = state
        return ended

    def restart(self) -> list[Finding]:
        """Supersedes all findings, the closed ones too, and forgets all hits; returns those that were open."""
        ended = self.open()
        for finding in self.items:
            finding.state = "superseded"
        self._hits.clear()
        return ended

    def abort_due(self) -> Finding | None:
        """The finding for which an ABORT is due: a proven STALE_ENGINE, a catastrophic DATA or ENGINE."""
        for finding in sorted(self.items, key=lambda f: f.rank):
            if finding.state == "superseded" or (finding.state == "closed" and not finding.acted):
                continue
            if finding.verdict == "STALE_ENGINE" and finding.state == "confirmed":
                return finding
            if finding.verdict in ("DATA", "ENGINE") and finding.catastrophic:
                return finding
        return None

    def to_json(self) -> Json:
        return no_nan({"items": [asdict(f) for f in self.items], "hits": self._hits})

    @classmethod
    def from_json(cls, tree: Mapping[str, Json]) -> Findings:
        hits = {key: [(int(step), bool(hit)) for step, hit in pairs] for key, pairs in tree["hits"].items()}
        return cls([Finding(**item) for item in tree["items"]], hits)
