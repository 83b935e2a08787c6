"""A RESYNC whose effect is not yet known, and the rows that will tell."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.records import UNKNOWN_VERSION


@dataclass(slots=True)
class Pending:
    """Waits for rows of the version that was acknowledged; plain, for the state file."""

    id: str
    rule: str
    action: str
    issued_step: int
    expires_step: int
    issued_version: int
    issued_rms: float = math.nan
    """rms of the discrepancy that asked for it, nats; nan where the lag did."""
    acked_version: int = UNKNOWN_VERSION
    acked_step: int = -1
    tokens: int = 0
    """Tokens of rows at or after the acknowledged version ..."""
    groups: int = 0
    """... and their groups, summed over steps."""
    youngest_age: int = -1
    """The youngest age at which those rows were seen; -1 = not yet."""
    first_tokens: int = 0
    """Their tokens at that age in the first updates of steps ..."""
    first_square_sum: float = 0.0
    """... and the sum of squares of their total, or (`by_discrepancy`) of their discrepancy, nats^2."""

    def take(self, facts: StepFacts) -> None:
        """Adds the step's rows at or after the acknowledged version."""
        tokens, groups = facts.tokens_since(self.acked_version)
        self.tokens += tokens
        self.groups += groups
        by_age = facts.engine_first if self.by_discrepancy(facts) else facts.total_first
        new = [int(age) for age in by_age if facts.version - int(age) >= self.acked_version]
        if not new or (self.first_tokens and min(new) > self.youngest_age):
            return
        if min(new) != self.youngest_age:
            self.youngest_age, self.first_tokens, self.first_square_sum = min(new), 0, 0.0
        num, rms = by_age[str(self.youngest_age)]
        self.first_tokens += num
        self.first_square_sum += rms * rms * num

    def by_discrepancy(self, facts: StepFacts) -> bool:
        """The engine is in question and rows are exact: the discrepancy tells, at any age; else the total at age 0."""
        return self.rule == "b" and bool(facts.engine_first)

    @property
    def first_rms(self) -> float:
        """rms of the total (of the discrepancy) over those rows, nats; nan before any came."""
        return math.sqrt(self.first_square_sum / self.first_tokens) if self.first_tokens else math.nan
