"""Tokens of one step -> StepFacts. One accumulator set per optimizer update; the step's last quarter is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import numpy as np

from dlc_sentinel.config import Config
from dlc_sentinel.core.ages import FirstTotals, VersionTally
from dlc_sentinel.core.correlation import Correlation
from dlc_sentinel.core.facts import NAN, Basis, ClosedStep, Kl, StepFacts, Values
from dlc_sentinel.core.rows import Rows
from dlc_sentinel.core.tokens import INFORMATIVE_NATS, Tokens, usable
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.bootstrap import GroupSums, ess_interval
from dlc_sentinel.maths.lag import LagStats
from dlc_sentinel.maths.ratio import log_ratio
from dlc_sentinel.maths.running import SquareSum, StreamStats
from dlc_sentinel.records import F32, F64, UNKNOWN_VERSION, Bool

MIXED_SHARE = 0.01
"""A basis that covers more than this share of a step's tokens names the step's basis."""
CONFIDENT_NATS = -0.05
MAX_PUBLISHED_AGES = 64
"""The youngest ages of `lag_ess_by_age`."""
MAX_LOTS = 1024
"""Groups the bootstrap draws from: with 100,000 of them a verdict would come seconds late."""
PROBE_TOKENS = 8192
"""Records longer than this are probed at every eighth token for the correlation of the two streams."""

ArrayT = TypeVar("ArrayT", F32, F64)


@dataclass(slots=True)
class _Update:
    """Everything summed over one optimizer update."""

    lag_rows: LagStats
    bound_rows: LagStats
    """Rows whose lag is unknown, weighted by the total ratio."""
    lag: StreamStats = field(default_factory=StreamStats)
    total: StreamStats = field(default_factory=StreamStats)

    def merge(self, other: _Update) -> None:
        self.lag_rows.merge(other.lag_rows)
        self.bound_rows.merge(other.bound_rows)
        self.lag.merge(other.lag)
        self.total.merge(other.total)


class StepWindow:
    """Accumulates one step of one run. Rows may come in any order of updates, ranks and micro-batches."""

    def __init__(self, step: int, config: Config) -> None:
        self.step = step
        self.version = UNKNOWN_VERSION
        """Newest trainer version of any record of the step."""
        self._config = config
        self._updates: dict[int, _Update] = {}
        self._discrepancy = StreamStats()
        self._stale_kv = StreamStats()
        self._current = SquareSum()
        self._correlation = Correlation()
        self._total_first = FirstTotals()
        self._versions = VersionTally()
        self._groups: set[int] = set()
        self._num_rows = 0
        self._num_tokens = 0
        self._num_exact = 0
        self._aged_tokens = 0
        self._aged_moved = 0
        self._copied = ""
        self.dropped: dict[str, int] = {}
        self.scalars: dict[str, float] = {}

    def refuse(self, cause: str, tokens: int) -> None:
        self.dropped[cause] = self.dropped.get(cause, 0) + tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, rows: Rows, refuse: Callable[[int, str, int], None]) -> None:
        """Takes complete rows of this step."""
        tokens = usable(rows, refuse)
        if tokens is None:
            return
        if tokens.cur_N is None:
            refuse(rows.step, "unmatched", tokens.num_tokens)
            return
        self._count(tokens)
        total_N = log_ratio(tokens.cur_N, tokens.engine_N)
        update = self._update(tokens.update)
        update.total.add(total_N)
        self._total_first.add(tokens, total_N)
        exact_S = tokens.row_exact_S
        if tokens.gen_N is not None and tokens.span_exact_K.any():
            self._exact_tokens(tokens, update)
        if not exact_S.all():
            _add_rows(update.bound_rows, total_N, tokens, ~exact_S)

    def _update(self, index: int) -> _Update:
        update = self._updates.get(index)
        if update is None:
            horizon = self._config.ess.horizon
            update = self._updates[index] = _Update(LagStats(horizon), LagStats(horizon))
        return update

    def _count(self, tokens: Tokens) -> None:
        self._num_tokens += tokens.num_tokens
        self._num_rows += len(tokens.group_S)
        # a block's lag needs all its tokens: a row is as exact as its weakest one
        exact_K = tokens.row_exact_S[tokens.span_row_K]
        self._num_exact += int(tokens.span_length_K[exact_K].sum())
        self._groups.update(tokens.group_S.tolist())
        self._copied = tokens.copied_from or self._copied
        self._versions.add(tokens)

    def _exact_tokens(self, tokens: Tokens, update: _Update) -> None:
        assert tokens.gen_N is not None and tokens.cur_N is not None
        lag_N = log_ratio(tokens.cur_N, tokens.gen_N)
        disc_N = log_ratio(tokens.gen_N, tokens.engine_N)
        self._correlate(tokens)
        mixed_kv_K = _later_spans(tokens)
        self._discrepancy.add(_pick(disc_N, tokens, tokens.span_exact_K & ~mixed_kv_K))
        if mixed_kv_K.any():
            self._stale_kv.add(_pick(disc_N, tokens, tokens.span_exact_K & mixed_kv_K))
        ages = tokens.span_age_K
        current_K = tokens.span_exact_K & ~mixed_kv_K & (ages == 0)
        if current_K.any():
            self._current.add(_pick(disc_N, tokens, current_K))
        aged_K = tokens.span_exact_K & (ages > 0) & (ages != UNKNOWN_AGE)
        if aged_K.any():
            may_move_N = _pick(tokens.gen_N, tokens, aged_K) < INFORMATIVE_NATS
            self._aged_tokens += int(np.count_nonzero(may_move_N))
            self._aged_moved += int(np.count_nonzero(_pick(lag_N, tokens, aged_K)))
        update.lag.add(_pick(lag_N, tokens, tokens.span_exact_K))
        if tokens.row_exact_S.any():
            _add_rows(update.lag_rows, lag_N, tokens, tokens.row_exact_S)

    def _correlate(self, tokens: Tokens) -> None:
        assert tokens.gen_N is not None
        probe = slice(None, None, 8 if tokens.num_tokens > PROBE_TOKENS else 1)
        engine = tokens.engine_N[probe].astype(np.float64)
        trainer = tokens.gen_N[probe].astype(np.float64)
        keep = engine < CONFIDENT_NATS
        if not tokens.span_exact_K.all():
            keep &= np.repeat(tokens.span_exact_K, tokens.span_length_K)[probe]
        self._correlation.add(engine[keep], trainer[keep])

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self, before: Sequence[ClosedStep], *, pool_after_step: int) -> ClosedStep:
        """The step's facts. `before`: closed steps, oldest first; only those after `pool_after_step` may be pooled."""
        order = sorted(self._updates)
        last = order[-max(1, len(order) // 4) :]
        horizon = self._config.ess.horizon
        pooled = _Update(LagStats(horizon), LagStats(horizon))
        for index in last:
            pooled.merge(self._updates[index])
        facts = self._facts(pooled, last)
        sums = pooled.lag_rows.group_sums()
        if facts.basis == "exact":
            pool = self._pool(sums, facts.age_mean, before, pool_after_step)
            facts = self._with_lag(facts, pooled, sums, pool)
        return ClosedStep(facts, sums)

    def _facts(self, pooled: _Update, last: Sequence[int]) -> StepFacts:
        """All but what needs the lag to be known."""
        age_mean, age_max = self._versions.age_mean_and_max()
        both = GroupSums().merge(pooled.lag_rows.group_sums()).merge(pooled.bound_rows.group_sums())
        return StepFacts(
            step=self.step,
            version=self.version,
            first_update=last[0] if last else 0,
            last_update=last[-1] if last else 0,
            basis=self._basis(),
            num_tokens=self._num_tokens,
            num_groups=len(self._groups),
            num_rows=self._num_rows,
            num_blocks=pooled.lag_rows.num_blocks(),
            age_mean=age_mean,
            age_max=age_max,
            num_unknown_age=self._versions.num_unknown,
            num_negative_age=self._versions.num_negative,
            coverage=pooled.lag_rows.coverage(),
            bound_ess=both.total().ratio,
            discrepancy=_values(self._discrepancy),
            total=_values(pooled.total),
            stale_kv=_values(self._stale_kv),
            current=Values(rms=self._current.rms, num=self._current.num),
            total_first=self._total_first.public(),
            by_version=self._versions.by_version(),
            aged_tokens=self._aged_tokens,
            aged_moved=self._aged_moved,
            correlation=self._correlation.value(),
            correlation_tokens=self._correlation.num,
            dropped=dict(self.dropped),
            scalars=dict(self.scalars),
            copied_from=self._copied,
        )

    def _with_lag(self, facts: StepFacts, pooled: _Update, sums: GroupSums, pool: GroupSums) -> StepFacts:
        """The facts with the lag of the last updates; `pool`: the sums behind the value that the rules use."""
        rows = pooled.lag_rows
        by_age = {str(age): ess for age, ess in islice(rows.by_age().items(), MAX_PUBLISHED_AGES)}
        interval = _interval(sums, self.step)
        action_ess, num_blocks = pool.total().ratio, _num_blocks(pool)
        low = action_ess < self._config.ess.threshold
        return replace(
            facts,
            lag=_values(pooled.lag),
            lag_ess=rows.ess(),
            lag_ess_interval=interval,
            lag_ess_by_age=by_age,
            half_horizon=rows.half_horizon(),
            action_ess=action_ess,
            action_interval=interval if pool is sums else _interval(pool, self.step) if low else (NAN, NAN),
            action_blocks=num_blocks,
            action_enough=num_blocks >= self._config.window.min_blocks,
            action_ess_youngest=next(iter(by_age.values()), NAN),
            kl=_kl(rows),
        )

    def _basis(self) -> Basis:
        if not self._num_tokens:
            return "none"
        return "mixed" if self._num_tokens - self._num_exact > MIXED_SHARE * self._num_tokens else "exact"

    def _pool(self, sums: GroupSums, age: float, before: Sequence[ClosedStep], pool_after_step: int) -> GroupSums:
        """The step's own sums where they are enough, else with those of steps before it of about the same age."""
        need = self._config.window
        pool = sums
        for closed in reversed(before[-need.pool_steps :]):
            enough = _num_blocks(pool) >= need.min_blocks and pool.num_groups >= need.min_groups
            if enough or closed.facts.step <= pool_after_step:
                break
            if closed.facts.basis == "exact" and abs(closed.facts.age_mean - age) <= need.pool_age:
                pool = GroupSums().merge(pool).merge(closed.sums)
        return pool


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


def _values(stats: StreamStats) -> Values:
    return Values(stats.mean, stats.rms, stats.p50_abs, stats.p99_abs, stats.mean_abs, stats.num)


def _interval(sums: GroupSums, seed: int) -> tuple[float, float]:
    """Bootstrap interval of ESS_h*; where groups are very many, over lots of several, by their (hashed) key."""
    if sums.num_groups > MAX_LOTS:
        lots = GroupSums()
        lots.add(sums.keys_G % MAX_LOTS, sums.m_G, sums.s1_G, sums.s2_G, sums.n_G)
        sums = lots
    return ess_interval(sums, seed=seed)


def _num_blocks(sums: GroupSums) -> int:
    return int(sums.n_G.sum())


def _kl(stats: LagStats) -> Kl:
    kl = stats.kl()
    return Kl(
        kl.gen_now_prefix, kl.gen_now_full, kl.gen_now_k1, kl.now_gen_prefix, kl.now_gen_full, kl.blind_spot,
        kl.reliability,
    )  # fmt: skip
