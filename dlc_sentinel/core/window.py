"""Tokens of one step -> StepFacts. One accumulator set per optimizer update; the step's last quarter is published."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import NAN, Basis, ClosedStep, Kl, StepFacts, Values
from dlc_sentinel.core.join import Rows
from dlc_sentinel.core.tokens import Tokens, usable
from dlc_sentinel.maths.arrays import UNKNOWN_AGE
from dlc_sentinel.maths.bootstrap import GroupSums, ess_interval
from dlc_sentinel.maths.lag import LagStats
from dlc_sentinel.maths.ratio import log_ratio
from dlc_sentinel.maths.running import StreamStats
from dlc_sentinel.records import F64, UNKNOWN_VERSION, Bool

MIXED_SHARE = 0.01
"""A basis that covers more than this share of a step's tokens names the step's basis."""
CONFIDENT_NATS = -0.05
PROBE_TOKENS = 8192
"""Records longer than this are probed at every eighth token for the correlation of the two streams."""


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


@dataclass(slots=True)
class _Pairs:
    """Sums for the correlation of two streams."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x: F64, y: F64) -> None:
        self.n += len(x)
        self.x += float(x.sum())
        self.y += float(y.sum())
        self.xx += float(x @ x)
        self.yy += float(y @ y)
        self.xy += float(x @ y)

    def correlation(self) -> float:
        if self.n < 2:
            return NAN
        vx, vy = self.xx - self.x**2 / self.n, self.yy - self.y**2 / self.n
        if vx <= 0.0 or vy <= 0.0:
            return NAN
        return (self.xy - self.x * self.y / self.n) / math.sqrt(vx * vy)


class StepWindow:
    """Accumulates one step of one run. Rows may come in any order of updates, ranks and micro-batches."""

    def __init__(self, step: int, config: Config) -> None:
        self.step = step
        self.version = -1
        self._config = config
        self._updates: dict[int, _Update] = {}
        self._discrepancy = StreamStats()
        self._stale_kv = StreamStats()
        self._current = StreamStats()
        self._pairs = _Pairs()
        self._total_first: dict[int, dict[int, StreamStats]] = {}
        self._tokens_by_version: dict[int, int] = {}
        self._groups_by_version: dict[int, set[int]] = {}
        self._groups: set[int] = set()
        self._num_rows = 0
        self._num_tokens = 0
        self._num_exact = 0
        self._aged = [0, 0]
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
        self.version = max(self.version, rows.version)
        tokens = usable(rows, refuse)
        if tokens is None or tokens.cur_N is None:
            return
        self._count(tokens)
        total_N = log_ratio(tokens.cur_N, tokens.engine_N)
        update = self._update(tokens.update)
        update.total.add(total_N)
        self._first_totals(tokens, total_N)
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
        lengths = tokens.span_length_K
        self._num_tokens += tokens.num_tokens
        self._num_rows += len(tokens.group_S)
        self._num_exact += int(lengths[tokens.span_exact_K].sum())
        self._groups.update(tokens.group_S.tolist())
        self._copied = tokens.copied_from or self._copied
        for version in np.unique(tokens.span_version_K).tolist():
            at = tokens.span_version_K == version
            self._tokens_by_version[version] = self._tokens_by_version.get(version, 0) + int(lengths[at].sum())
            self._groups_by_version.setdefault(version, set()).update(tokens.group_S[tokens.span_row_K[at]].tolist())

    def _first_totals(self, tokens: Tokens, total_N: F64) -> None:
        """Total by age, kept for the lowest update only: the state right after a sync shows there."""
        if self._total_first and min(self._total_first) < tokens.update:
            return
        if tokens.update not in self._total_first:
            self._total_first = {tokens.update: {}}
        by_age = self._total_first[tokens.update]
        ages = tokens.span_age_K
        for age in np.unique(ages).tolist():
            at = ages == age
            part = total_N if at.all() else total_N[np.repeat(at, tokens.span_length_K)]
            by_age.setdefault(age, StreamStats()).add(part)

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
            aged_N = _pick(lag_N, tokens, aged_K)
            self._aged[0] += len(aged_N)
            self._aged[1] += int(np.count_nonzero(aged_N))
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
        self._pairs.add(engine[keep], trainer[keep])

    # -- closing -----------------------------------------------------------------------------------------------------

    def close(self, before: Sequence[ClosedStep], *, pool_after_step: int) -> ClosedStep:
        """The step's facts. `before`: closed steps, oldest first; only those after `pool_after_step` may be pooled."""
        order = sorted(self._updates)
        last = order[-max(1, len(order) // 4) :] if order else []
        horizon = self._config.ess.horizon
        pooled = _Update(LagStats(horizon), LagStats(horizon))
        for index in last:
            pooled.merge(self._updates[index])
        ages = self._ages()
        sums, bound_sums = pooled.lag_rows.group_sums(), pooled.bound_rows.group_sums()
        basis = self._basis()
        action, enough, blocks = self._pooled(sums, ages[0], before, pool_after_step)
        lag_known = basis == "exact"
        by_age = {str(age): value for age, value in sorted(pooled.lag_rows.by_age().items()) if age != UNKNOWN_AGE}
        both = GroupSums().merge(sums).merge(bound_sums)
        facts = StepFacts(
            step=self.step,
            version=self.version,
            first_update=last[0] if last else 0,
            last_update=last[-1] if last else 0,
            basis=basis,
            num_tokens=self._num_tokens,
            num_groups=len(self._groups),
            num_rows=self._num_rows,
            num_blocks=pooled.lag_rows.num_blocks(),
            age_mean=ages[0],
            age_max=ages[1],
            num_unknown_age=self._tokens_by_version.get(UNKNOWN_VERSION, 0),
            num_negative_age=sum(n for v, n in self._tokens_by_version.items() if v > self.version),
            lag_ess=pooled.lag_rows.ess() if lag_known else {},
            lag_ess_interval=ess_interval(sums, seed=self.step) if lag_known else (NAN, NAN),
            lag_ess_by_age=by_age if lag_known else {},
            half_horizon=pooled.lag_rows.half_horizon() if lag_known else NAN,
            coverage=pooled.lag_rows.coverage(),
            action_ess=action if lag_known else NAN,
            action_blocks=blocks,
            action_enough=enough,
            bound_ess=both.total().ratio,
            action_ess_youngest=next(iter(by_age.values()), NAN),
            discrepancy=_values(self._discrepancy),
            lag=_values(pooled.lag) if lag_known else Values(),
            total=_values(pooled.total),
            stale_kv=_values(self._stale_kv),
            current=_values(self._current),
            total_first=self._first_public(),
            by_version={str(v): (n, len(self._groups_by_version[v])) for v, n in self._tokens_by_version.items()},
            aged_tokens=self._aged[0],
            aged_moved=self._aged[1],
            correlation=self._pairs.correlation(),
            correlation_tokens=self._pairs.n,
            kl=_kl(pooled.lag_rows) if lag_known else Kl(),
            dropped=dict(self.dropped),
            scalars=dict(self.scalars),
            copied_from=self._copied,
        )
        return ClosedStep(facts, sums, bound_sums)

    def _basis(self) -> Basis:
        if not self._num_tokens:
            return "none"
        return "mixed" if self._num_tokens - self._num_exact > MIXED_SHARE * self._num_tokens else "exact"

    def _ages(self) -> tuple[float, float]:
        known = {self.version - v: n for v, n in self._tokens_by_version.items() if v >= 0}
        num = sum(known.values())
        if not num:
            return NAN, NAN
        return sum(age * n for age, n in known.items()) / num, float(max(known))

    def _first_public(self) -> dict[str, tuple[int, float]]:
        by_age = next(iter(self._total_first.values()), {})
        return {str(age): (stats.num, stats.rms) for age, stats in sorted(by_age.items()) if age != UNKNOWN_AGE}

    def _pooled(
        self, sums: GroupSums, age: float, before: Sequence[ClosedStep], pool_after_step: int
    ) -> tuple[float, bool, int]:
        """(ESS_h*, are there enough blocks, blocks): this step alone if it is large, else with steps before it."""
        need = self._config.window
        pool = GroupSums().merge(sums)
        num = _num_blocks(sums)
        for closed in reversed(before[-need.pool_steps :]):
            if (num >= need.min_blocks and pool.num_groups >= need.min_groups) or closed.facts.step <= pool_after_step:
                break
            if closed.facts.basis == "exact" and abs(closed.facts.age_mean - age) <= need.pool_age:
                pool.merge(closed.sums)
                num = _num_blocks(pool)
        return pool.total().ratio, num >= need.min_blocks, num


def _later_spans(tokens: Tokens) -> Bool:
    """Spans that go on after a weight change inside their response: the cache before them is of older weights."""
    later = np.zeros(len(tokens.span_row_K), np.bool_)
    later[1:] = tokens.span_row_K[1:] == tokens.span_row_K[:-1]
    return later


def _pick(x_N: F64, tokens: Tokens, which_K: Bool) -> F64:
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


def _num_blocks(sums: GroupSums) -> int:
    return int(sums.n_G.sum())


def _kl(stats: LagStats) -> Kl:
    kl = stats.kl()
    return Kl(
        kl.gen_now_prefix, kl.gen_now_full, kl.gen_now_k1, kl.now_gen_prefix, kl.now_gen_full, kl.blind_spot,
        kl.reliability,
    )  # fmt: skip
