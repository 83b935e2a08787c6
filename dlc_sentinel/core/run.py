"""The path of one run; see `monitor`. Holds the state machines and passes each record along them.

Over 300 lines because it is the one place where they all meet; every rule and every number lives in the part it calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from dlc_sentinel.config import Config
from dlc_sentinel.core.advice import ADVICE
from dlc_sentinel.core.decide import Decider
from dlc_sentinel.core.detect import Finding, Findings
from dlc_sentinel.core.diagnose import LIFTS_FLOOR, diagnose, healthy
from dlc_sentinel.core.dtypes import UNSAID, carried, said
from dlc_sentinel.core.facts import ClosedStep, StepFacts, from_json
from dlc_sentinel.core.floors import MIN_TOKENS, Floors
from dlc_sentinel.core.join import Join
from dlc_sentinel.core.learning import Learning
from dlc_sentinel.core.ledger import SHOWN, Ledger
from dlc_sentinel.core.parts import discrepancy_by
from dlc_sentinel.core.probe import Probe
from dlc_sentinel.core.producers import Producer, Producers
from dlc_sentinel.core.profile import profile_of
from dlc_sentinel.core.rules.base import UNREPORTED, passes_apart
from dlc_sentinel.core.rules.data import hides_lag
from dlc_sentinel.core.settings import unreported, warnings
from dlc_sentinel.core.tokens import Tokens
from dlc_sentinel.core.trend import with_pooled, with_trend
from dlc_sentinel.core.window import NO_THINS, StepWindow
from dlc_sentinel.maths.bootstrap import GroupSums
from dlc_sentinel.maths.calibrated import CalibrationPool
from dlc_sentinel.records import (
    UNKNOWN_VERSION,
    Ack,
    Bye,
    Command,
    Event,
    Heartbeat,
    Hello,
    Json,
    Record,
    Rollout,
    RunSnapshot,
    Scalars,
    Synced,
    Train,
)  # fmt: skip

HISTORY = 64
"""Closed steps the rules look back on."""
SHOWN_STEPS = 512
GRACE_TICKS, PATIENT_TICKS = 2, 10
"""Ticks that a step which some trainers have ended waits for late rollouts and for trainers that end none; and for the
others: the rows of a rank may take as long to come as a slow network needs."""
MAX_PENDING_SCALARS = 64
"""Steps whose scalars may come before any of their tokens."""
NO_STEP = -1
Tap = Callable[[str, Tokens], None]
"""Shown the run's name and every batch of its tokens that counts."""


class RunMonitor:
    """All that is known of one run."""

    def __init__(
        self, run: str, config: Config, keep_steps: int | None, replaying: bool, tap: Tap | None = None
    ) -> None:
        self.run = run
        self._tap = None if tap is None else partial(tap, run)
        self._config = config
        self._replaying = replaying
        self._join = Join(self._refuse, max_bytes=config.join.max_bytes, max_age_steps=config.join.max_age_steps)
        self._producers = Producers()
        self._floors = Floors(config.floor)
        self._floors.note_dtypes(UNSAID)
        self._learning = Learning()
        self._findings = Findings()
        self._decider = Decider(config, run)
        self._law = CalibrationPool()
        self._thins = NO_THINS
        self._windows: dict[int, StepWindow] = {}
        self._ended_ticks: dict[int, int] = {}
        self._closed: deque[ClosedStep] = deque(maxlen=HISTORY)
        self._steps: deque[dict[str, Json]] = deque(maxlen=keep_steps)
        self._ledger = Ledger(run, keep_all=keep_steps is None)
        self._last_closed = -1
        self._newest_version = UNKNOWN_VERSION
        """Newest trainer version of the closed steps."""
        self._engine_version = UNKNOWN_VERSION
        self._checksums: dict[str, tuple[int, str, bool]] = {}
        """Replica -> (version delivered last, its checksum, whether that was also an older version's)."""
        self._model_name = ""
        self._engines: set[str] = set()
        self._settings: dict[str, dict[str, Json]] = {"engine": {}, "trainer": {}}
        self._warned: set[str] = set()
        self._finishes = {"whole": 0, "cut": 0}
        self._has_turns = False
        """Some rows are of several requests, each with a finish of its own."""
        """Sequences that the engine said it finished, and cut at a limit, since the last step."""
        self._num_tokens = {"engine": 0, "old": 0, "cur": 0}
        self._dropped: dict[str, int] = {}
        self._num_frames = 0
        self._pending_scalars: dict[int, dict[str, float]] = {}
        self._unplaced: dict[str, int] = {}
        """Tokens lost when no step was open: they count against the next one."""

    # -- records -----------------------------------------------------------------------------------------------------

    def feed(self, record: Record, frame_no: int, now_s: float) -> list[Event]:
        events: list[Event] = []
        self._num_frames += 1
        restarts = isinstance(record, Train) and self._producers.has_predecessor(record.source)
        producer, news = self._producers.see(record, frame_no, now_s)
        events += self._news(producer, news, now_s)
        if isinstance(record, Train):
            events += self._train(record, producer, restarts, now_s)
        elif isinstance(record, Rollout):
            self._rollout(record)
        elif isinstance(record, Hello):
            events += self._hello(record, now_s)
        elif isinstance(record, Synced):
            self._synced(record)
        elif isinstance(record, Scalars):
            self._scalars(record)
        elif isinstance(record, Ack):
            newest = max(self._windows, default=self._last_closed)
            answer = replace(record, step=min(record.step, max(newest, self._decider.expires_step)))
            events += self._ledger.decided(self._decider.ack(answer), answer.step, now_s)
        elif isinstance(record, (Heartbeat, Bye)):
            self._sender_drops(record)
        return events + self._close_ready(now_s)

    def _news(self, producer: Producer, news: str, now_s: float) -> list[Event]:
        if not news:
            return []
        who = f"{producer.source.role} rank {producer.source.rank}"
        if producer.source.role == "engine":
            who = f"engine {producer.source.replica}"
        events = [
            self._ledger.event("producer", f"{who} {news}", "INFO", now_s, self._last_closed, producer.to_public())
        ]
        if not self._producers.all_silent():
            heard = self._findings.end("BLIND", "closed", "silent")
            events += self._ledger.findings(heard, self._last_closed, now_s)
        return events

    def _hello(self, record: Hello, now_s: float) -> list[Event]:
        self._model_name = record.model_name or self._model_name
        if record.source.role == "engine":
            self._engines.add(record.source.replica)
        self._floors.note_dtypes(said(record.dtypes))
        return self._told(record.source.role, record.sampling, now_s)

    def _told(self, role: str, settings: Mapping[str, Json], now_s: float) -> list[Event]:
        self._settings[role].update(settings)
        new = [t for t in warnings(self._settings["engine"], self._settings["trainer"]) if t not in self._warned]
        self._warned.update(new)
        return [self._ledger.event("note", text, "WARN", now_s, self._last_closed) for text in new]

    def _train(self, record: Train, producer: Producer, restarts: bool, now_s: float) -> list[Event]:
        """`restarts`: if the record goes back, then because the run was restarted under its old name."""
        num = int(record.offsets_S1[-1])
        for name, stream in (("engine", record.engine_N), ("old", record.old_N), ("cur", record.cur_N)):
            self._num_tokens[name] += num if stream is not None else 0
        late = record.step <= self._last_closed
        back = UNKNOWN_VERSION < record.version < self._version_before(record.step)
        events: list[Event] = []
        if restarts and (late or back):
            events = self._restart(record, now_s)
        elif late or producer.retired:
            self._refuse(record.step, "restarted_version" if producer.retired else "late", num)
            return events
        window = self._window(record.step)
        window.version = max(window.version, record.version)
        if back and not restarts:
            self._refuse(record.step, "restarted_version", num)
            return events
        producer.has_trained = True
        if restarts:
            self._decider.resumed(record.step)
        self._floors.note_dtypes(carried(record.dtypes))
        self._engines.update([record.replica] if record.replica else ())
        self._has_turns = self._has_turns or any(len(requests) > 1 for requests in record.segments)
        for rows in self._join.feed_train(record):
            window.add(rows, self._refuse)
        return events

    def _version_before(self, step: int) -> int:
        """Newest trainer version of the steps before `step`: another rank may be a step ahead."""
        open_versions = [window.version for earlier, window in self._windows.items() if earlier < step]
        return max([self._newest_version, *open_versions])

    def _restart(self, record: Train, now_s: float) -> list[Event]:
        """The run begins again under its old name: what was open belongs to a life that is over."""
        self._producers.retire_trained()
        for window in self._windows.values():
            self._refuse(NO_STEP, "restarted_version", window.num_tokens)
        self._windows.clear()
        self._ended_ticks.clear()
        self._pending_scalars.clear()
        self._unplaced.clear()
        self._join.restart(record.version)
        self._closed.clear()
        was = self._last_closed
        self._last_closed = record.step - 1
        self._newest_version = UNKNOWN_VERSION
        self._engine_version = min(self._engine_version, record.version)
        self._checksums.clear()
        self._law = CalibrationPool()
        self._learning = Learning()
        num_commands = self._decider.state.num_commands
        self._decider = Decider(self._config, self.run)
        self._decider.state.num_commands = num_commands
        ended = self._findings.restart()
        text = (
            f"run restarted under its old name: step {record.step} version {record.version} after step {was}; "
            "open steps were dropped; a new DLC_SENTINEL_RUN keeps lives apart"
        )
        return [
            self._ledger.event("producer", text, "WARN", now_s, record.step),
            *self._ledger.findings(ended, record.step, now_s),
        ]

    def _rollout(self, record: Rollout) -> None:
        self._num_tokens["engine"] += int(record.offsets_S1[-1])
        self._engines.add(record.source.replica)
        for reason in record.finish:
            self._finishes["cut" if reason == "length" else "whole"] += reason != ""
        if len(record.span_version_K):
            self._engine_version = max(self._engine_version, int(record.span_version_K.max()))
        for rows in self._join.feed_rollout(record, max(self._windows, default=self._last_closed)):
            self._window(rows.step).add(rows, self._refuse)

    def _synced(self, record: Synced) -> None:
        self._engine_version = max(self._engine_version, record.version)
        version, checksum, _ = self._checksums.get(record.source.replica, (UNKNOWN_VERSION, "", False))
        if record.checksum and record.version > version:
            repeated = version >= 0 and checksum == record.checksum
            self._checksums[record.source.replica] = (record.version, record.checksum, repeated)
        self._decider.synced(record.version, record.step)

    def _scalars(self, record: Scalars) -> None:
        if record.step > self._last_closed:
            window = self._windows.get(record.step)
            target = window.scalars if window else self._pending_scalars.setdefault(record.step, {})
            target.update(record.values)
            if len(self._pending_scalars) > MAX_PENDING_SCALARS:
                del self._pending_scalars[next(iter(self._pending_scalars))]

    def _sender_drops(self, record: Heartbeat | Bye) -> None:
        newest = max(self._windows, default=self._last_closed + 1)
        for cause, num in self._producers.newly_dropped(record).items():
            self._refuse(newest, cause, num)

    def _refuse(self, step: int, cause: str, tokens: int) -> None:
        """Counts lost tokens against their step; where that is not open, against the next one that closes."""
        self._dropped[cause] = self._dropped.get(cause, 0) + tokens
        window = self._windows.get(step)
        if window is not None:
            window.refuse(cause, tokens)
        elif step != NO_STEP:
            self._unplaced[cause] = self._unplaced.get(cause, 0) + tokens

    def _window(self, step: int) -> StepWindow:
        window = self._windows.get(step)
        if window is None:
            window = self._windows[step] = StepWindow(step, self._config, thins=self._thins, tap=self._tap)
            window.scalars.update(self._pending_scalars.pop(step, {}))
        return window

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        for producer, state in self._producers.silenced(now_s):
            where = f"pid {producer.pid} on {producer.host or 'unknown host'}"
            who = f"{producer.source.role} rank {producer.source.rank} ({where})"
            quiet = now_s - producer.last_seen_s
            text = f"{who} is {state}: nothing for {quiet:.0f} s; last step {producer.last_step}"
            events.append(self._ledger.event("producer", text, "WARN", now_s, self._last_closed, producer.to_public()))
        if self._producers.all_silent() and not any(f.kind == "silent" for f in self._findings.open()):
            events += self._silent(now_s)
        for step in self._windows:
            if self._producers.ended(step):
                self._ended_ticks[step] = self._ended_ticks.get(step, 0) + 1
        return events + self._close_ready(now_s)

    def _silent(self, now_s: float) -> list[Event]:
        advice, evidence = ADVICE["BLIND", "silent"], {"last_step": self._last_closed}
        silent = Finding("BLIND", "silent", 0.95, self._last_closed + 1, "confirmed", evidence, advice)
        self._findings.add(silent)
        return self._ledger.findings([silent], self._last_closed, now_s)

    def awaits(self, command: Command) -> bool:
        return self._decider.awaits(command, self._last_closed)

    def finish(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        while self._windows:
            events += self._close(min(self._windows), now_s)
        return events

    # -- closing a step ----------------------------------------------------------------------------------------------

    def _close_ready(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        while self._windows:
            step = min(self._windows)
            if not self._is_ready(step):
                break
            events += self._close(step, now_s)
        return events

    def _is_ready(self, step: int) -> bool:
        if not self._producers.ended(step):
            return False
        if self._producers.ahead_of(step):
            return True
        since_step = self._last_closed if self._closed else NO_STEP
        awaited, ticks = self._producers.awaited(step, since_step), self._ended_ticks.get(step, 0)
        if any(producer.ends_steps for producer in awaited):
            return ticks >= PATIENT_TICKS
        return ticks >= GRACE_TICKS or not (awaited or self._join.num_waiting(step))

    def _close(self, step: int, now_s: float) -> list[Event]:
        for rows in self._join.close_step(step):
            self._window(rows.step).add(rows, self._refuse)
        events = [event for facts in self._join.take_sampling() for event in self._told("engine", facts, now_s)]
        window = self._windows.pop(step)
        self._ended_ticks.pop(step, None)
        self._last_closed = step
        self._newest_version = max(self._newest_version, window.version)
        self._pending_scalars = {at: values for at, values in self._pending_scalars.items() if at > step}
        for cause, num in self._unplaced.items():
            window.refuse(cause, num)
        self._unplaced.clear()
        closed = window.close(list(self._closed), self._law, pool_after_step=self._decider.pool_after_step)
        self._thins = window.thins_next
        facts = self._complete(closed.facts, window.probe)
        self._keep(replace(closed, facts=facts, state=facts.to_json()))
        public = facts.to_public()
        self._steps.append(public)
        events += [self._ledger.step(facts, public, self._config.ess.horizon, now_s)]
        if facts.offered_tokens:
            events += self._judge(facts, now_s)
        return events

    def _keep(self, closed: ClosedStep) -> None:
        """Sums, one entry per group, are held only as long as a later step may be pooled with them."""
        self._closed.append(closed)
        past = len(self._closed) - 1 - self._config.window.pool_steps
        if past >= 0:
            self._closed[past] = replace(self._closed[past], sums=GroupSums(), unsplit=None)

    def _complete(self, facts: StepFacts, probe: Probe) -> StepFacts:
        history = [c.facts for c in self._closed]
        rms, mean_abs = self._floors.of(facts)
        facts = replace(
            with_pooled(facts, history, self._config),
            floor_rms=rms,
            floor_mean_abs=mean_abs,
            noise_rms=facts.unmoved.rms if facts.unmoved.num >= MIN_TOKENS or not history else history[-1].noise_rms,
            profile=profile_of(probe, rms),
            discrepancy_by=discrepancy_by(probe),
            learning=self._learning.update(facts.scalars),
            finished_share=self._take_finished_share(),
            missing_tokens=self._join.missing_tokens,
            engine_version=self._engine_version,
            repeated_checksum=any(repeated for _, _, repeated in self._checksums.values()),
        )
        facts = replace(facts, passes_apart=passes_apart(facts, history))
        return with_trend(facts, history, self._config)

    def _take_finished_share(self) -> float:
        num = sum(self._finishes.values())
        share = self._finishes["whole"] / num if num and not self._has_turns else float("nan")
        self._finishes = dict.fromkeys(self._finishes, 0)
        return share

    def _judge(self, facts: StepFacts, now_s: float) -> list[Event]:
        decider, history = self._decider, [c.facts for c in self._closed]
        early = decider.before_rules(facts) if facts.num_tokens else []
        view = replace(decider.view(), unreported=unreported(self._settings["engine"]))
        candidates = [*diagnose(history, view), *decider.blind(facts)]
        if view.stale_refuted:
            self._findings.end("STALE_ENGINE", "superseded")
        changed = self._findings.update(facts.step, candidates, hold=decider.held(), still=decider.still(facts))
        wrong = {c.verdict for c in candidates if c.kind != UNREPORTED}
        wrong |= {f.verdict for f in self._findings.open() if f.kind != UNREPORTED}
        self._floors.learn(facts, doubtful=not wrong.isdisjoint(LIFTS_FLOOR))
        stale = self._findings.get("STALE_ENGINE")
        if stale is not None and stale.state == "confirmed":
            changed += self._findings.end("LAG", "superseded")
        late = decider.after_rules(facts, self._findings, lag_hidden=hides_lag(candidates, facts))
        chatty = decider.chatty(facts)
        return [
            *self._ledger.decided(early, facts.step, now_s),
            *self._ledger.findings(changed, facts.step, now_s),
            *self._ledger.decided(late + ([chatty] if chatty else []), facts.step, now_s),
        ]

    def reset_breaker(self, now_s: float) -> list[Event]:
        self._decider.reset_breaker()
        return [
            self._ledger.event(
                "breaker", "breaker reset by hand", "INFO", now_s, self._last_closed, {"outcome": "reset"}
            )
        ]

    # -- what is shown -----------------------------------------------------------------------------------------------

    def verdict(self) -> str:
        """The most severe open finding; else HEALTHY where the last step proves it, else BLIND."""
        found = self._findings.open()
        return found[0].verdict if found else self._quiet_verdict()

    def _quiet_verdict(self) -> str:
        return "HEALTHY" if healthy([c.facts for c in self._closed], self._config) else "BLIND"

    def report(self) -> dict[str, Json]:
        """verdict, findings, steps and commands of the file format."""
        counted = [f for f in self._findings.items if f.is_open or (f.acted and f.state != "superseded")]
        worst = min(counted, key=lambda f: f.rank, default=None)
        return {
            "verdict": worst.verdict if worst else self._quiet_verdict(),
            "findings": [f.to_public() for f in sorted(self._findings.items, key=lambda f: (not f.is_open, f.rank))],
            "steps": list(self._steps),
            "commands": [
                {key: entry[key] for key in ("step", "kind", "action", "reason")} for entry in self._ledger.commands
            ],
        }

    def snapshot(self) -> RunSnapshot:
        shown = [f.to_public() for f in self._findings.open()]
        shown += [f.to_public() for f in reversed(self._findings.items) if not f.is_open][:SHOWN]
        refused = {"frame_gap": self._producers.gaps} if self._producers.gaps else {}
        steps = list(self._steps)[-SHOWN_STEPS:]
        return RunSnapshot(
            run=self.run,
            model_name=self._model_name,
            engines=tuple(sorted(self._engines)),
            mode=self._config.act.mode,
            verdict=self.verdict(),
            last_step=self._last_closed,
            step=steps[-1] if steps else None,
            history=tuple(steps),
            findings=tuple(shown),
            commands=tuple(self._ledger.shown(hypothetical=self._replaying)),
            events=tuple(self._ledger.newest),
            producers=tuple(p.to_public() for p in self._producers),
            num_tokens=dict(self._num_tokens),
            dropped_tokens=dict(self._dropped),
            refused_frames=refused,
            num_frames=self._num_frames,
            sequence_gaps=self._producers.gaps,
            join_bytes=self._join.num_bytes,
            num_commands=dict(self._ledger.counts),
            verdict_latency_s=float("nan"),
            breaker_open=self._decider.state.breaker_open,
            action_horizon=self._config.ess.horizon,
        )

    # -- state file --------------------------------------------------------------------------------------------------

    def to_json(self) -> Json:
        return {
            "last_closed": self._last_closed,
            "newest_version": self._newest_version,
            "engine_version": self._engine_version,
            "checksums": {replica: list(entry) for replica, entry in self._checksums.items()},
            "model_name": self._model_name,
            "engines": sorted(self._engines),
            "floors": self._floors.to_json(),
            "learning": self._learning.to_json(),
            "findings": self._findings.to_json(),
            "decider": self._decider.to_json(),
            "facts": [c.state for c in self._closed],
            "ledger": self._ledger.to_json(),
            "num_tokens": self._num_tokens,
            "dropped": self._dropped,
            "unplaced": self._unplaced,
            "num_frames": self._num_frames,
            "gaps": self._producers.gaps,
            "producers": self._producers.to_json(),
        }

    def load(self, tree: Mapping[str, Json]) -> None:
        """Goes on from what `to_json` wrote; open steps and sums for pooling are not part of it."""
        self._last_closed = tree["last_closed"]
        self._newest_version, self._engine_version = tree["newest_version"], tree["engine_version"]
        self._checksums = {replica: (int(v), str(c), bool(r)) for replica, (v, c, r) in tree["checksums"].items()}
        self._model_name, self._engines = tree["model_name"], set(tree["engines"])
        self._floors.load(tree["floors"])
        self._learning = Learning.from_json(tree["learning"])
        self._findings = Findings.from_json(tree["findings"])
        self._decider.load(tree["decider"])
        for item in tree["facts"]:
            facts = from_json(item)
            self._closed.append(ClosedStep(facts, GroupSums(), state=dict(item)))
            self._steps.append(facts.to_public())
        self._ledger.load(tree["ledger"])
        self._num_tokens = dict(tree["num_tokens"])
        self._dropped, self._unplaced = dict(tree["dropped"]), dict(tree["unplaced"])
        self._num_frames = tree["num_frames"]
        self._producers.gaps = tree["gaps"]
        self._producers.load(tree["producers"])
