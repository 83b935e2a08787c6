"""What to send, and whether it helped. Counts in steps with data only, so that a replay decides alike.

Rule (a): LAG is below its threshold now -> RESYNC. Rule (b): STALE_ENGINE is suspected -> one RESYNC with cache reset.
After a command nothing of its kind follows until rows of the acknowledged version were trained on (PENDING); its effect
is judged on those rows by the total, since lag by label is near zero even when nothing was delivered.

Over 300 lines: the rules of one state, each of which reads what another one wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from dlc_sentinel.config import Config
from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.detect import Finding, Findings
from dlc_sentinel.core.effect import Pending
from dlc_sentinel.core.facts import StepFacts, no_nan
from dlc_sentinel.core.floors import MIN_TOKENS
from dlc_sentinel.core.rules.base import (
    ABOVE_FLOOR,
    FIRST_STEP,
    MIN_ENGINE_NATS,
    Candidate,
    View,
    at_floor,
    engine_values,
    is_noise,
    lag_level,
    wants_drop,
)
from dlc_sentinel.core.rules.engine import STALE_KV
from dlc_sentinel.core.rules.label import ROW_SHARE
from dlc_sentinel.core.strides import STRIDE_STEPS, last_number, num_since, num_steps
from dlc_sentinel.records import UNKNOWN_VERSION, Ack, Action, Command, Json

FLAG_STEPS, FLAGS_NEEDED = 3, 2
LASTING_STEPS = 12
"""A rise takes 6 steps to show and a RESYNC waits 3 more: an engine that is off again sooner was not mended."""
CALM_NATS_FACTOR = 2.0
FELL = 3.0
QUIET_FLOORS = 1.5
HISTORY = 200
MAX_CALM_AGES = 64
QUEUE_ROUNDS = 2
CHATTY_STEPS, CHATTY_RATE = 200, 0.25


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing the decider did: a command issued, an outcome, a breaker, a note."""

    kind: str
    text: str
    command: Command | None = None
    sent: bool = False
    outcome: str = ""
    version: int = UNKNOWN_VERSION


@dataclass(slots=True)
class State:
    """All that the decider remembers; plain, for the state file."""

    num_commands: int = 0
    steps_with_data: int = 0
    data_steps: list[int] = field(default_factory=list)
    """Their numbers, the newest ones: as many as anything here looks back."""
    versions: list[int] = field(default_factory=list)
    """Of the trainer at the newest of them, where known."""
    flags: list[tuple[int, int]] = field(default_factory=list)
    """(step, lag level) of the last steps that count."""
    pending: Pending | None = None
    drain_version: int = UNKNOWN_VERSION
    count_after: int = -1
    """Steps up to this one are neither counted nor pooled."""
    last_sent_step: int = -1
    sent_steps: list[int] = field(default_factory=list)
    blocked: bool = False
    """The trainer refused, or mode is observe: no further RESYNC of rule (a) until the finding has closed."""
    calm_total: dict[str, list[float]] = field(default_factory=dict)
    """age -> rms of total of first updates while the engine was not suspected."""
    resync_without_effect: bool = False
    off_step: int = -1
    """Newest step at which the engine was not at its floor."""
    worked_step: int = -1
    """Step at which the last RESYNC of rule (b) was judged to have worked; -1 = that is settled."""
    stale_tried: bool = False
    stale_refuted: bool = False
    stale_proven: bool = False
    stale_kv_since: int = -1
    """Since when the cache was stale for which a RESYNC was sent: the next change in flight makes another."""
    rows_off_from_start: bool = False
    resumed_step: int = -1
    """First step of the newest process that went on where another one had stopped."""
    queue_rounds: int = 0
    last_drop: tuple[int, int] = (-1, 0)
    """(step at which a drop_stale took effect, steps that the queue was deep before it)."""
    fails_in_row: int = 0
    breaker_open: bool = False
    abort_issued: bool = False
    chatty_said: bool = False
    displacement_nats: float = 0.0
    """Sum of the trainer's own reported movement since the engine was last at its floor."""
    displacement_quiet_nats: float = 0.0
    """The same since it was last within QUIET_FLOORS of its floor: weights are missed before an alarm is due."""
    missing_version: int = UNKNOWN_VERSION
    """Acknowledged, but no row of it came within `pending_steps`; unknown = none is missing."""
    missing_since: int = -1
    """Step of that acknowledgement."""


class Decider:
    """The acting half of one run's monitor."""

    def __init__(self, config: Config, run: str) -> None:
        self._config = config
        self._run = run
        self.state = State()

    # -- what the rules may know -------------------------------------------------------------------------------------

    @property
    def pool_after_step(self) -> int:
        return self.state.count_after

    def view(self) -> View:
        s = self.state
        return View(
            self._config,
            resync_without_effect=s.resync_without_effect,
            resync_pending=s.pending is not None,
            stale_refuted=s.stale_refuted,
            stale_proven=s.stale_proven,
            stale_untested=s.stale_tried and s.pending is None and not (s.stale_refuted or s.stale_proven),
            hopeless_queue=s.queue_rounds >= QUEUE_ROUNDS,
            resumed_step=s.resumed_step,
            rows_off_from_start=s.rows_off_from_start,
        )

    def resumed(self, step: int) -> None:
        """A process goes on from `step` where another one of its rank had stopped."""
        self.state.resumed_step = step

    def held(self) -> tuple[str, ...]:
        """Verdicts for which the present steps count for nothing."""
        return ("LAG", "STALE_ENGINE") if self.state.pending is not None else ()

    def still(self, facts: StepFacts) -> tuple[str, ...]:
        """Verdicts that this step may not help to close."""
        return ("LAG",) if not facts.action_ess > self._config.ess.closed and not is_noise(facts) else ()

    # -- a step closed -----------------------------------------------------------------------------------------------

    def before_rules(self, facts: StepFacts) -> list[Decision]:
        """Judges what is pending; call with each step that has data, before the rules are asked."""
        s, act = self.state, self._config.act
        s.steps_with_data += 1
        num_kept = 1 + max(CHATTY_STEPS, act.ttl_steps, act.pending_steps, act.min_interval_steps)
        s.data_steps = [*s.data_steps, facts.step][-num_kept:]
        if facts.version != UNKNOWN_VERSION:
            s.versions = [*s.versions, facts.version][-STRIDE_STEPS - 1 :]
        self._remember(facts)
        if s.pending is None:
            return []
        if s.pending.acked_version == UNKNOWN_VERSION:
            if self._since(s.pending.issued_step) <= act.ttl_steps:
                return []
            text = f"{s.pending.id}: no answer within {act.ttl_steps} steps: no trainer, or no poll()"
            command_id = s.pending.id
            self._end_pending(facts.step)
            return [Decision("outcome", text, outcome="expired", command=_named(command_id, self._run))]
        return self._judge(facts, s.pending)

    def after_rules(self, facts: StepFacts, findings: Findings, *, lag_hidden: bool = False) -> list[Decision]:
        """Decides, once the findings of the step are known. `lag_hidden`: the step shows a fault that hides its lag."""
        s = self.state
        abort = self._abort(facts, findings)
        if abort is not None or not facts.num_tokens:
            return [abort] if abort is not None else []
        level = lag_level(facts, self._config)
        done: list[Decision] = []
        if findings.get("LAG") is None and not level:
            s.blocked, s.queue_rounds = False, 0
        if s.pending is None and facts.step > s.count_after:
            s.flags = [*s.flags, (facts.step, level)][-FLAG_STEPS:]
        stale = findings.get("STALE_ENGINE")
        if s.pending is not None or self._too_early() or s.breaker_open or s.abort_issued:
            return done
        suspected_now = stale is not None and stale.state == "suspected" and stale.last_step == facts.step
        if stale is not None and suspected_now and not self._was_tried(stale):
            s.stale_tried = True
            if stale.kind == STALE_KV:
                s.stale_kv_since = stale.since_step
            gone = self._effect_gone(facts)
            if gone is not None:
                done.append(gone)
                if gone.kind == "breaker":
                    return done
            stale.acted = self._sends
            done.append(self._resync(facts, "b", "sync_weights", stale, reset_cache=True))
        elif stale is None and not (lag_hidden or _has_wrong_label(findings)) and self._lag_due(facts, level):
            done += self._lag_resync(facts, findings)
        return done

    def _was_tried(self, stale: Finding) -> bool:
        s = self.state
        if stale.kind != STALE_KV:
            return s.stale_tried
        return s.stale_kv_since == stale.since_step

    def _effect_gone(self, facts: StepFacts) -> Decision | None:
        """The engine is off again so soon that its last RESYNC counts as one without effect."""
        s = self.state
        if s.worked_step < 0:
            return None
        text = f"the effect of the RESYNC judged at step {s.worked_step} is gone"
        s.worked_step, s.fails_in_row = -1, s.fails_in_row + 1
        return self._failed(text)

    def _lag_due(self, facts: StepFacts, level: int) -> bool:
        s = self.state
        if not level or s.blocked or s.queue_rounds >= QUEUE_ROUNDS or facts.step <= s.count_after:
            return False
        if s.drain_version != UNKNOWN_VERSION:
            drained = facts.older_share(s.drain_version) < self._config.act.drained
            if not drained and self._since(s.count_after) <= self._config.act.pending_steps:
                return False
            s.drain_version = UNKNOWN_VERSION
        if level == 2 and facts.action_enough:
            return True
        return sum(past >= (1 if facts.action_enough else 2) for _, past in s.flags) >= FLAGS_NEEDED

    def _lag_resync(self, facts: StepFacts, findings: Findings) -> list[Decision]:
        s = self.state
        finding = findings.get("LAG")
        action: Action = "drop_stale" if wants_drop(facts, self._config) else "sync_weights"
        if action == "drop_stale" and s.last_drop[0] >= 0:
            since = self._since(s.last_drop[0])
            soon = since <= s.last_drop[1] + FLAG_STEPS
            s.queue_rounds = s.queue_rounds + 1 if soon else 0
            if s.queue_rounds >= QUEUE_ROUNDS:
                text = (
                    f"drop_stale is due again after {since} steps, within the queue's depth of "
                    f"{s.last_drop[1]}: no further RESYNC; shorten the queue or lower the learning rate"
                )
                return [Decision("note", text)]
        if finding is not None:
            finding.acted = self._sends
        return [self._resync(facts, "a", action, finding)]

    def _resync(
        self, facts: StepFacts, rule: str, action: Action, finding: Finding | None, *, reset_cache: bool = False
    ) -> Decision:
        s, act = self.state, self._config.act
        horizon = self._config.ess.horizon
        if rule == "a":
            low = facts.action_ess
            reason = f"lag ESS_{horizon} {low:.2f} < {self._config.ess.threshold:g} at step {facts.step}"
        else:
            which = "labelled current" if facts.current.num >= MIN_TOKENS else "at the weights of their label"
            reason = f"rows {which} are {engine_values(facts).rms:.3g} nats off, floor {facts.floor_rms:.2g}"
        command = Command(
            id=self._next_id("RESYNC"), run=self._run, kind="RESYNC", action=action, reset_cache=reset_cache,
            reason=reason, evidence=dict(finding.evidence) if finding else {f"lag_ess_{horizon}": facts.action_ess},
            issued_step=facts.step, not_before_step=facts.step, version_at_least=facts.version,
            expires_step=last_number(s.data_steps, facts.step, act.ttl_steps),
        )  # fmt: skip
        s.last_sent_step = facts.step
        s.sent_steps = [step for step in s.sent_steps if self._since(step) < CHATTY_STEPS] + [facts.step]
        if self._sends:
            asked = engine_values(facts).rms if rule == "b" else math.nan
            s.pending = Pending(command.id, rule, action, facts.step, command.expires_step, facts.version, asked)
            s.last_drop = (s.last_drop[0], num_steps(s.versions, facts.age_max))
        else:
            s.blocked = True
        return Decision("command", f"RESYNC {action}: {reason}", command, sent=self._sends)

    @property
    def _sends(self) -> bool:
        return self._config.act.mode != "observe"

    def _since(self, step: int) -> int:
        return num_since(self.state.data_steps, step)

    def _too_early(self) -> bool:
        act, s = self._config.act, self.state
        return s.steps_with_data <= act.warmup_steps or self._since(s.last_sent_step) < act.min_interval_steps

    def _abort(self, facts: StepFacts, findings: Findings) -> Decision | None:
        s = self.state
        due = findings.abort_due()
        if due is None or s.abort_issued:
            return None
        s.abort_issued = True
        sends = self._config.act.mode == "abort"
        due.acted = due.acted or sends
        reason = f"{due.verdict} {due.kind} since step {due.since_step}"
        command = Command(
            id=self._next_id("ABORT"), run=self._run, kind="ABORT", reason=reason, evidence=dict(due.evidence),
            issued_step=facts.step, not_before_step=facts.step,
            expires_step=last_number(s.data_steps, facts.step, self._config.act.ttl_steps),
        )  # fmt: skip
        return Decision("command", f"ABORT: {reason}", command, sent=sends)

    def _next_id(self, kind: str) -> str:
        self.state.num_commands += 1
        return f"{self._run}-{kind}-{self.state.num_commands:04d}"

    # -- answers -----------------------------------------------------------------------------------------------------

    def ack(self, ack: Ack) -> list[Decision]:
        """Takes the trainer's answer. An answer to nothing pending is only reported."""
        s = self.state
        text = f"{ack.command_id}: {ack.outcome}" + (f" at version {ack.version}" if ack.version >= 0 else "")
        text += f" ({ack.reason})" if ack.reason else ""
        if s.pending is not None and s.pending.id == ack.command_id:
            if ack.outcome == "applied":
                self._delivered(ack.version, ack.step)
            else:
                s.blocked = s.blocked or ack.outcome == "refused"
                self._end_pending(max(ack.step, s.pending.issued_step))
        return [Decision("outcome", text, _named(ack.command_id, self._run), outcome=ack.outcome, version=ack.version)]

    @property
    def expires_step(self) -> int:
        """The last step at which the command that waits may be applied, -1 where there is none or that is not known.

        An answer may overtake the rows of the step it was given at, but not this one.
        """
        return -1 if self.state.pending is None else self.state.pending.expires_step

    def synced(self, version: int, step: int) -> None:
        """Weights newer than those the command was issued at were delivered: stands in for an ack that never came."""
        s = self.state
        if s.pending is not None and s.pending.acked_version == UNKNOWN_VERSION and version > s.pending.issued_version:
            self._delivered(version, step)

    def awaits(self, command: Command, step: int) -> bool:
        """True while the command can still do good: at `step` it has neither lapsed nor been overtaken by a sync."""
        if command.kind == "ABORT":
            return self.state.abort_issued and (command.expires_step < 0 or step <= command.expires_step)
        pending = self.state.pending
        return pending is not None and pending.id == command.id and pending.acked_version == UNKNOWN_VERSION

    def _delivered(self, version: int, step: int) -> None:
        pending = self.state.pending
        assert pending is not None
        pending.acked_version = version if version != UNKNOWN_VERSION else pending.issued_version + 1
        pending.acked_step = max(step, pending.issued_step)

    # -- the effect --------------------------------------------------------------------------------------------------

    def _remember(self, facts: StepFacts) -> None:
        s = self.state
        moved = facts.scalars.get("displacement_nats", math.nan)
        starts = s.steps_with_data == 1 and facts.step <= FIRST_STEP
        s.rows_off_from_start = (starts or s.rows_off_from_start) and facts.profile.fitting_rows >= ROW_SHARE
        values = engine_values(facts)
        if values.num and at_floor(facts):
            s.displacement_nats = 0.0
        if values.rms <= QUIET_FLOORS * facts.floor_rms:
            s.displacement_quiet_nats = 0.0
        if s.missing_version != UNKNOWN_VERSION and facts.tokens_since(s.missing_version)[0]:
            s.missing_version = UNKNOWN_VERSION
        if math.isfinite(moved):
            s.displacement_nats += moved
            s.displacement_quiet_nats += moved
        if s.worked_step >= 0 and self._since(s.worked_step) > LASTING_STEPS:
            s.worked_step, s.fails_in_row = -1, 0
        if not at_floor(facts):
            s.off_step = facts.step
        if s.pending is not None or s.off_step == facts.step:
            return
        for age, (_, rms) in facts.total_first.items():
            if age in s.calm_total or len(s.calm_total) < MAX_CALM_AGES:
                s.calm_total[age] = [*s.calm_total.get(age, []), rms][-HISTORY:]
        # What a RESYNC showed holds for a level that hovers about the line, too.
        back = self._since(s.off_step) > LASTING_STEPS or values.rms <= QUIET_FLOORS * facts.floor_rms
        if values.num and back and self._since(s.count_after) > FLAG_STEPS:
            s.stale_tried = s.resync_without_effect = s.stale_refuted = s.stale_proven = False

    def _judge(self, facts: StepFacts, pending: Pending) -> list[Decision]:
        act = self._config.act
        pending.take(facts)
        enough = pending.tokens >= act.pending_tokens and pending.groups >= act.pending_groups
        if not enough and self._since(pending.acked_step) <= act.pending_steps:
            return []
        if not pending.tokens:
            self.state.missing_version, self.state.missing_since = pending.acked_version, pending.acked_step
            self._end_pending(facts.step)
            text = f"{pending.id}: no row of version {pending.acked_version} after {act.pending_steps} steps"
            return [Decision("note", text)]
        self._end_pending(facts.step, drain_version=pending.acked_version)
        if pending.action == "drop_stale":
            self.state.last_drop = (facts.step, self.state.last_drop[1])
        seen, limit = pending.first_rms, self._limit(facts, pending)
        by_discrepancy = pending.by_discrepancy(facts)
        compared = f"{'discrepancy' if by_discrepancy else 'total'} rms {seen:.3g} {{}} {limit:.3g} nats on new rows"
        if math.isnan(seen) or not (pending.youngest_age == 0 or by_discrepancy):
            text = f"delivered, rows of version {pending.acked_version} arrived"
        elif seen <= limit:
            text = f"worked, {compared.format('<=')}"
        else:
            return [self._not_down(facts, pending, f"no effect, {compared.format('>')}", seen)]
        self._worked(pending)
        return [Decision("effect", f"{pending.id}: {text}", outcome="worked")]

    def _limit(self, facts: StepFacts, pending: Pending) -> float:
        """rms of the total, or of the discrepancy where that is in question, nats, up to which a RESYNC has worked."""
        factor = self._config.act.effect_factor
        is_total = pending.youngest_age == 0 or not pending.by_discrepancy(facts)
        calm = self.state.calm_total.get(str(pending.youngest_age), []) if is_total else []
        expected = factor * median(calm) if calm else CALM_NATS_FACTOR * facts.floor_rms
        if math.isnan(pending.issued_rms):
            # Below this no rule calls an engine stale: numerics that move with the policy are no failed sync.
            return max(expected, MIN_ENGINE_NATS)
        # The same of an engine that was off and has come down; one that hovers about the line has not.
        line = max(ABOVE_FLOOR * facts.floor_rms, MIN_ENGINE_NATS)
        return max(expected, min(line, pending.issued_rms / FELL))

    def _worked(self, pending: Pending) -> None:
        s = self.state
        s.resync_without_effect = False
        if pending.rule == "b":
            s.stale_tried, s.worked_step = False, s.count_after
        else:
            s.fails_in_row = 0

    def _not_down(self, facts: StepFacts, pending: Pending, text: str, rms: float) -> Decision:
        s = self.state
        s.fails_in_row += 1
        if pending.rule == "a":
            s.resync_without_effect = True
        else:
            s.stale_proven = facts.repeated_checksum or self._explained_by_movement(rms)
            s.stale_refuted = not s.stale_proven
        return self._failed(f"{pending.id}: {text}")

    def _failed(self, text: str) -> Decision:
        s = self.state
        if s.fails_in_row >= self._config.act.breaker:
            s.breaker_open = True
            text += f"; {s.fails_in_row} in a row: breaker open, `dlc-sentinel actions reset` closes it"
        return Decision("breaker" if s.breaker_open else "effect", text, outcome="failed")

    def _explained_by_movement(self, rms: float) -> bool:
        s, factor = self.state, self._config.act.effect_factor
        moved = (s.displacement_nats, s.displacement_quiet_nats)
        return any(nats > 0 and rms / factor <= nats <= rms * factor for nats in moved)

    def _end_pending(self, step: int, *, drain_version: int = UNKNOWN_VERSION) -> None:
        s = self.state
        s.pending = None
        s.flags = []
        s.count_after = step
        s.drain_version = drain_version

    def chatty(self, facts: StepFacts) -> Decision | None:
        """Advice, once, when RESYNC is sent in more than a quarter of 200 steps."""
        s = self.state
        if s.chatty_said or len(s.sent_steps) <= CHATTY_RATE * CHATTY_STEPS:
            return None
        s.chatty_said = True
        text = f"{len(s.sent_steps)} RESYNCs in {CHATTY_STEPS} steps: lower the learning rate, or sync on a period"
        return Decision("note", text)

    def blind(self, facts: StepFacts) -> list[Candidate]:
        """BLIND while no row of an acknowledged version has come."""
        if self.state.missing_version == UNKNOWN_VERSION:
            return []
        since = self.state.missing_since
        advice = ADVICE["BLIND", "no_rows_of_acknowledged_version"]
        return [Candidate("BLIND", "no_rows_of_acknowledged_version", 0.9, advice, {"since_step": since}, since)]

    def reset_breaker(self) -> None:
        self.state.breaker_open = False
        self.state.fails_in_row = 0

    # -- state file --------------------------------------------------------------------------------------------------

    def to_json(self) -> Json:
        return no_nan(asdict(self.state))

    def load(self, tree: Mapping[str, Json]) -> None:
        kept = dict(tree)
        pending = kept.pop("pending", None)
        flags = [(int(a), int(b)) for a, b in kept.pop("flags", [])]
        last_drop = tuple(kept.pop("last_drop", (-1, 0)))
        self.state = replace(State(**kept), flags=flags, last_drop=(int(last_drop[0]), int(last_drop[1])))
        if pending is not None:
            asked = pending.get("issued_rms")
            self.state.pending = Pending(**{**pending, "issued_rms": math.nan if asked is None else asked})


def _has_wrong_label(findings: Findings) -> bool:
    """True where rows fit the present weights and not those of their label: what they call lag is none."""
    label = findings.get("LABEL")
    return label is not None and label.kind == "other_version"


def _named(command_id: str, run: str) -> Command:
    kind = "ABORT" if "-ABORT-" in command_id else "RESYNC"
    return Command(id=command_id, run=run, kind=kind)  # type: ignore[arg-type]  # one of the two literals
