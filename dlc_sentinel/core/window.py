"""Tokens of one step -> StepFacts. One accumulator set per optimizer update; the step's last quarter is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np

from dlc_sentinel.config import Config
from dlc_sentinel.core.ages import FirstByAge, VersionTally
from dlc_sentinel.core.calibration import StepCalibration
from dlc_sentinel.core.facts import NAN, Basis, ClosedStep, StepFacts, Values
from dlc_sentinel.core.lagfacts import LagSums, calibrated_action, values_of, with_calibrated_lag, with_exact_lag
from dlc_sentinel.core.probe import Probe
from dlc_sentinel.core.rows import Rows
from dlc_sentinel.core.tokens import INFORMATIVE_NATS, Tokens, usable
from dlc_sentinel.core.unsplit import SplitLag, UnsplitRows
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.calibrated import CalibrationPool
from dlc_sentinel.maths.ess import pooled_ess
from dlc_sentinel.maths.lag import LagStats
from dlc_sentinel.maths.ratio import log_ratio
from dlc_sentinel.maths.running import SquareSum, StreamStats
from dlc_sentinel.records import F32, F64, UNKNOWN_VERSION, Bool

MIXED_SHARE = 0.01
"""A basis that covers more than this share of a step's tokens names the step's basis."""
ArrayT = TypeVar("ArrayT", F32, F64)
Thins: TypeAlias = tuple[int, int, int]
NO_THINS: Thins = (0, 0, 0)


@dataclass(slots=True)
class _Update:
    """Everything summed over one optimizer update."""

    lag_rows: LagStats
    unsplit: UnsplitRows
    """Rows whose lag is not known apart from the discrepancy."""
    lag: StreamStats = field(default_factory=StreamStats)
    total: StreamStats = field(default_factory=StreamStats)

    @classmethod
    def of(cls, config: Config) -> _Update:
        return cls(LagStats(config.ess.horizon), UnsplitRows(config.ess.horizon))

    def merge(self, other: _Update) -> None:
        self.lag_rows.merge(other.lag_rows)
        self.unsplit.merge(other.unsplit)
        self.lag.merge(other.lag)
        self.total.merge(other.total)


class StepWindow:
    """Accumulates one step of one run. Rows may come in any order of updates, ranks and micro-batches."""

    def __init__(
        self, step: int, config: Config, *, thins: Thins = NO_THINS, tap: Callable[[Tokens], None] | None = None
    ) -> None:
        """`tap` is shown every batch of tokens that counts."""
        self.step = step
        self.version = UNKNOWN_VERSION
        """Newest trainer version of any record of the step."""
        self._config = config
        self._tap = tap
        self._updates: dict[int, _Update] = {}
        self._discrepancy = StreamStats()
        self._stale_kv = StreamStats()
        self._current = SquareSum()
        self._unmoved = SquareSum()
        self._exact_rows = Probe(thins[0], exact=True)
        self._other_rows = Probe(thins[1], exact=False)
        self._calibration = StepCalibration(thins[2])
        self._total_first = FirstByAge()
        self._engine_first = FirstByAge()
        self._versions = VersionTally()
        self._groups: set[int] = set()
        self._num_rows = 0
        self._num_tokens = 0
        self._num_exact = 0
        self._aged_tokens = 0
        self._aged_moved = 0
        self._aged_any = 0
        self._aged_apart = 0
        self._copied = ""
        self.dropped: dict[str, int] = {}
        self.scalars: dict[str, float] = {}

    def refuse(self, cause: str, tokens: int) -> None:
        self.dropped[cause] = self.dropped.get(cause, 0) + tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def probe(self) -> Probe:
        """The exact rows; the others where there is none."""
        return self._exact_rows or self._other_rows

    @property
    def thins_next(self) -> Thins:
        """`thins` (of exact rows, of the others, of the calibration) that suit a step like this one."""
        return self._exact_rows.thin_next, self._other_rows.thin_next, self._calibration.thin_next

    def add(self, rows: Rows, refuse: Callable[[int, str, int], None]) -> None:
        """Takes complete rows of this step."""
        tokens = usable(rows, refuse)
        if tokens is None:
            return
        if tokens.cur_N is None:
            refuse(rows.step, "unmatched", tokens.num_tokens)
            return
        self._count(tokens)
        if self._tap is not None:
            self._tap(tokens)
        total_N = log_ratio(tokens.cur_N, tokens.engine_N)
        update = self._update(tokens.update)
        update.total.add(total_N)
        self._total_first.add(tokens, total_N)
        self._note_apart(tokens, total_N)
        exact_S = tokens.row_exact_S
        if tokens.gen_N is not None and tokens.span_exact_K.any():
            self._exact_tokens(tokens, update)
        if not exact_S.all():
            update.unsplit.add(tokens, total_N, ~exact_S)
            if tokens.rescored_N is not None and tokens.update == 0:
                self._calibration.add_rescored(tokens)
            if tokens.update == 0:
                self._other_rows.add(tokens, total_N, tokens.cur_N, ~exact_S)

    def _update(self, index: int) -> _Update:
        update = self._updates.get(index)
        if update is None:
            update = self._updates[index] = _Update.of(self._config)
        return update

    def _note_apart(self, tokens: Tokens, total_N: F64) -> None:
        aged_K = (tokens.span_age_K > 0) & (tokens.span_age_K != UNKNOWN_AGE)
        if tokens.update == 0 and aged_K.any():
            self._aged_any += int(np.count_nonzero(_pick(tokens.engine_N, tokens, aged_K) < INFORMATIVE_NATS))
            self._aged_apart += int(np.count_nonzero(_pick(total_N, tokens, aged_K)))

    def _count(self, tokens: Tokens) -> None:
        self._num_tokens += tokens.num_tokens
        self._num_rows += len(tokens.group_S)
        self._num_exact += int(tokens.span_length_K[tokens.row_exact_S[tokens.span_row_K]].sum())
        self._groups.update(tokens.group_S.tolist())
        self._copied = tokens.copied_from or self._copied
        self._versions.add(tokens)

    def _exact_tokens(self, tokens: Tokens, update: _Update) -> None:
        assert tokens.gen_N is not None and tokens.cur_N is not None
        lag_N = log_ratio(tokens.cur_N, tokens.gen_N)
        disc_N = log_ratio(tokens.gen_N, tokens.engine_N)
        if tokens.update == 0:
            self._calibration.add_exact(tokens, disc_N)
            if tokens.row_exact_S.any():
                self._exact_rows.add(tokens, disc_N, tokens.gen_N, tokens.row_exact_S)
        mixed_kv_K = _later_spans(tokens)
        self._discrepancy.add(_pick(disc_N, tokens, tokens.span_exact_K & ~mixed_kv_K))
        self._engine_first.add(tokens, disc_N, tokens.span_exact_K & ~mixed_kv_K)
        if mixed_kv_K.any():
            self._stale_kv.add(_pick(disc_N, tokens, tokens.span_exact_K & mixed_kv_K))
        ages = tokens.span_age_K
        current_K = tokens.span_exact_K & ~mixed_kv_K & (ages == 0)
        if current_K.any():
            self._current.add(_pick(disc_N, tokens, current_K))
            if tokens.update == 0 and not tokens.copied_from:
                self._unmoved.add(_pick(lag_N, tokens, current_K))
        aged_K = tokens.span_exact_K & (ages > 0) & (ages != UNKNOWN_AGE)
        if aged_K.any() and tokens.update == 0:
            may_move_N = _pick(tokens.gen_N, tokens, aged_K) < INFORMATIVE_NATS
            self._aged_tokens += int(np.count_nonzero(may_move_N))
            self._aged_moved += int(np.count_nonzero(_pick(lag_N, tokens, aged_K)))
        update.lag.add(_pick(lag_N, tokens, tokens.span_exact_K))
        if tokens.row_exact_S.any():
            _add_rows(update.lag_rows, lag_N, tokens, tokens.row_exact_S)

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self, before: Sequence[ClosedStep], law: CalibrationPool, *, pool_after_step: int) -> ClosedStep:
        """The step's facts. `before`: closed steps, oldest first; only those after `pool_after_step` may be pooled.

        `law`: what lag-0 rows say of the discrepancy; this step's rows are added to it.
        """
        change = self._calibration.settle(law, self.version)
        order = sorted(self._updates)
        last = order[-max(1, len(order) // 4) :]
        pooled = _Update.of(self._config)
        for index in last:
            pooled.merge(self._updates[index])
        own = LagSums(pooled.lag_rows.group_sums(), pooled.unsplit)
        split = pooled.unsplit.split(law, self.step)
        facts = self._facts(pooled, last, split, change)
        if facts.basis in ("exact", "calibrated"):
            pool = own.with_steps_before(facts, before, pool_after_step, self._config)
            if facts.basis == "exact":
                facts = with_exact_lag(facts, pooled.lag_rows, pooled.lag, own, pool, self._config)
            else:
                action = calibrated_action(own, pool, split, law, self.step)
                facts = with_calibrated_lag(facts, pooled.lag_rows, pooled.lag, split, action, self._config)
        return ClosedStep(facts, own.exact, own.unsplit)

    def _facts(self, pooled: _Update, last: Sequence[int], split: SplitLag, change: float) -> StepFacts:
        """All but what needs the lag to be known."""
        age_mean, age_max = self._versions.age_mean_and_max()
        exact = pooled.lag_rows.group_sums().total()
        num_bound, bound = pooled.unsplit.bound()
        num_blocks, coverage = _blocks(pooled)
        return StepFacts(
            step=self.step,
            version=self.version,
            first_update=last[0] if last else 0,
            last_update=last[-1] if last else 0,
            basis=self._basis(split),
            num_tokens=self._num_tokens,
            num_groups=len(self._groups),
            num_rows=self._num_rows,
            num_blocks=num_blocks,
            age_mean=age_mean,
            age_max=age_max,
            num_unknown_age=self._versions.num_unknown,
            num_negative_age=self._versions.num_negative,
            coverage=coverage,
            unsplit=split.reason,
            engine_change=change,
            numerics=self._calibration.by_logp,
            rescored=self._calibration.rescored,
            rescored_interaction=self._calibration.interaction,
            bound_ess=pooled_ess((exact.n, num_bound), (exact.ratio, bound)),
            discrepancy=values_of(self._discrepancy),
            total=values_of(pooled.total),
            stale_kv=values_of(self._stale_kv),
            current=Values(rms=self._current.rms, num=self._current.num),
            unmoved=Values(rms=self._unmoved.rms, num=self._unmoved.num),
            total_first=self._total_first.public(),
            engine_first=self._engine_first.public(),
            by_version=self._versions.by_version(),
            aged_tokens=self._aged_tokens,
            aged_moved=self._aged_moved,
            aged_any=self._aged_any,
            aged_apart=self._aged_apart,
            dropped=dict(self.dropped),
            scalars=dict(self.scalars),
            copied_from=self._copied,
        )

    def _basis(self, split: SplitLag) -> Basis:
        """The weakest that covers more than MIXED_SHARE of the tokens; stale ones are judged by the last updates'."""
        if not self._num_tokens:
            return "none"
        if self._num_tokens - self._num_exact <= MIXED_SHARE * self._num_tokens:
            return "exact"
        is_split = split.num_tokens and split.num_left <= MIXED_SHARE * (split.num_tokens + split.num_left)
        return "calibrated" if is_split else "mixed"


def _blocks(pooled: _Update) -> tuple[dict[str, int], dict[str, float]]:
    """({rung: blocks}, {rung: share of them as long as it asks}) of exact rows and others."""
    exact, coverage = pooled.lag_rows.num_blocks(), pooled.lag_rows.coverage()
    stale, stale_full = pooled.unsplit.blocks()
    nums = {rung: exact[rung] + stale[rung] for rung in exact}
    full = {rung: (coverage[rung] * exact[rung] if exact[rung] else 0.0) + stale_full[rung] for rung in exact}
    return nums, {rung: full[rung] / num if num else NAN for rung, num in nums.items()}


def _later_spans(tokens: Tokens) -> Bool:
    """Spans that go on after a weight change inside their response: the cache before them is of older weights."""
    later = np.zeros(len(tokens.span_row_K), np.bool_)
    later[1:] = tokens.span_row_K[1:] == tokens.span_row_K[:-1]
    return later


def _pick(x_N: ArrayT, tokens: Tokens, which_K: Bool) -> ArrayT:
    """Values of the tokens in the spans chosen."""
    return x_N if which_K.all() else x_N[np.repeat(which_K, tokens.span_length_K)]


def _add_rows(stats: LagStats, x_N: F64, tokens: Tokens, which_S: Bool) -> None:
    """Adds whole rows to a ladder."""
    ages = tokens.span_age_K
    offsets, groups, starts = tokens.offsets_S1, tokens.group_S, tokens.span_start_K
    if not which_S.all():
        lengths = np.diff(offsets)
        x_N = x_N[np.repeat(which_S, lengths)]
        span_kept = which_S[tokens.span_row_K]
        starts = np.concatenate([[0], np.cumsum(tokens.span_length_K[span_kept])])[:-1]
        ages, groups = ages[span_kept], groups[which_S]
        offsets = np.concatenate([[0], np.cumsum(lengths[which_S])])
    stats.add(x_N, offsets, group_S=groups, span_start_K=starts, span_age_K=ages)
