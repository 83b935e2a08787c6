"""The lag part of a closed step's facts: exact, or calibrated where only lag-0 rows tell the discrepancy.

A small step is judged together with the steps before it; `LagSums` is what is summed for that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from dlc_sentinel.config import Config
from dlc_sentinel.core.facts import MAX_PUBLISHED_AGES, NAN, ClosedStep, Kl, StepFacts, Values
from dlc_sentinel.core.unsplit import SplitLag, UnsplitRows
from dlc_sentinel.maths.bootstrap import GroupSums, ess_interval
from dlc_sentinel.maths.calibrated import CalibrationPool
from dlc_sentinel.maths.ess import RUNGS, half_horizon, pooled_ess
from dlc_sentinel.maths.lag import LagStats
from dlc_sentinel.maths.running import StreamStats

MAX_LOTS = 1024
"""Groups the bootstrap draws from: with 100,000 of them a verdict would come seconds late."""


@dataclass(frozen=True, slots=True)
class LagSums:
    """Sums at the action horizon of one window or several: rows whose lag is exact, and rows whose is not."""

    exact: GroupSums
    unsplit: UnsplitRows

    @property
    def num_blocks(self) -> int:
        return int(self.exact.n_G.sum()) + self.unsplit.bound()[0]

    @property
    def num_groups(self) -> int:
        return len(np.union1d(self.exact.keys_G, self.unsplit.groups()))

    def with_steps_before(self, facts: StepFacts, before: Sequence[ClosedStep], after: int, config: Config) -> LagSums:
        """These where they are enough, else with those of steps before of about the same age and of the same basis."""
        need, pool = config.window, self
        for closed in reversed(before[-need.pool_steps :]):
            enough = pool.num_blocks >= need.min_blocks and pool.num_groups >= need.min_groups
            if enough or closed.facts.step <= after:
                break
            if closed.facts.basis == facts.basis and abs(closed.facts.age_mean - facts.age_mean) <= need.pool_age:
                exact = GroupSums().merge(pool.exact).merge(closed.sums)
                unsplit = UnsplitRows(config.ess.horizon).merge(pool.unsplit)
                pool = LagSums(exact, unsplit.merge(closed.unsplit) if closed.unsplit else unsplit)
        return pool


def with_exact_lag(
    facts: StepFacts, rows: LagStats, lag: StreamStats, own: LagSums, pool: LagSums, config: Config
) -> StepFacts:
    """The facts with the lag of the last updates' exact rows; `pool`: the sums behind the value the rules use."""
    by_age = _published(rows.by_age())
    interval = group_interval(own.exact, facts.step)
    action_ess, num_blocks = pool.exact.total().ratio, int(pool.exact.n_G.sum())
    low = action_ess < config.ess.threshold
    return replace(
        facts,
        lag=values_of(lag),
        lag_ess=rows.ess(),
        lag_ess_interval=interval,
        lag_ess_by_age=by_age,
        half_horizon=rows.half_horizon(),
        action_ess=action_ess,
        action_interval=interval if pool is own else group_interval(pool.exact, facts.step) if low else (NAN, NAN),
        action_blocks=num_blocks,
        action_enough=num_blocks >= config.window.min_blocks,
        action_ess_youngest=next(iter(by_age.values()), NAN),
        kl=_exact_kl(rows),
    )


def with_calibrated_lag(
    facts: StepFacts, rows: LagStats, lag: StreamStats, split: SplitLag, action: Action, config: Config
) -> StepFacts:
    """The facts with the lag of the last updates: rows whose lag is exact, and rows that a calibration split."""
    exact_blocks, exact_ess = rows.num_blocks(), rows.ess()
    ess = {rung: _both(exact_blocks[rung], exact_ess[rung], split.num_blocks[rung], split.ess[rung]) for rung in RUNGS}
    ages = {**split.by_age, **{age: value for age, value in rows.by_age().items() if age not in split.by_age}}
    by_age = _published(dict(sorted(ages.items())))
    return replace(
        facts,
        lag=_calibrated_values(lag, split),
        lag_ess=ess,
        lag_ess_interval=action.own_interval,
        lag_ess_by_age=by_age,
        half_horizon=half_horizon(ess, facts.coverage),
        action_ess=action.ess,
        action_interval=action.interval,
        action_blocks=action.num_blocks,
        action_enough=action.num_blocks >= config.window.min_blocks,
        action_ess_youngest=next(iter(by_age.values()), NAN),
        kl=_calibrated_kl(rows, split),
    )


@dataclass(frozen=True, slots=True)
class Action:
    """ESS at the action horizon with its interval, of the step and the steps pooled with it, and the step's own."""

    ess: float
    interval: tuple[float, float]
    num_blocks: int
    own_interval: tuple[float, float]


def calibrated_action(own: LagSums, pool: LagSums, split: SplitLag, law: CalibrationPool, step: int) -> Action:
    """`split`: what the law makes of `own`."""
    ess, interval = _action(own, split, step)
    if pool is own:
        return Action(ess, interval, own.num_blocks, interval)
    wider = pool.unsplit.split(law, step)
    if not wider.num_tokens:
        return Action(ess, interval, own.num_blocks, interval)
    pooled_value, pooled_interval = _action(pool, wider, step)
    return Action(pooled_value, pooled_interval, pool.num_blocks, interval)


def _action(sums: LagSums, split: SplitLag, step: int) -> tuple[float, tuple[float, float]]:
    num, stale = int(sums.exact.n_G.sum()), sums.unsplit.bound()[0]
    low, high = group_interval(sums.exact, step) if num else (NAN, NAN)
    ends = (_both(num, low, stale, split.interval[0]), _both(num, high, stale, split.interval[1]))
    return _both(num, sums.exact.total().ratio, stale, split.action_ess), ends


def _both(num_exact: int, exact: float, num_split: int, split: float) -> float:
    return pooled_ess((num_exact, num_split), (exact, split))


def _calibrated_values(lag: StreamStats, split: SplitLag) -> Values:
    """rms only: the estimator says nothing of a single token."""
    num = lag.num + split.num_tokens
    exact = lag.num * lag.rms**2 if lag.num else 0.0
    return Values(rms=math.sqrt((exact + split.num_tokens * split.second_moment) / num), num=num)


def _calibrated_kl(rows: LagStats, split: SplitLag) -> Kl:
    """KL(gen || now) only; nan where the discrepancy is too large beside the lag."""
    exact = rows.num_tokens * rows.kl().gen_now_prefix if rows.num_tokens else 0.0
    total = exact + split.num_tokens * split.kl
    return Kl(
        gen_now_prefix=total / (rows.num_tokens + split.num_tokens),
        gen_now_full=total / (rows.num_rows + split.num_rows),
    )


def values_of(stats: StreamStats) -> Values:
    """The published statistics of a stream."""
    return Values(stats.mean, stats.rms, stats.p50_abs, stats.p99_abs, stats.mean_abs, stats.num)


def group_interval(sums: GroupSums, seed: int) -> tuple[float, float]:
    """Bootstrap interval of ESS_h*; where groups are very many, over lots of several, by their (hashed) key."""
    if sums.num_groups > MAX_LOTS:
        lots = GroupSums()
        lots.add(sums.keys_G % MAX_LOTS, sums.m_G, sums.s1_G, sums.s2_G, sums.n_G)
        sums = lots
    return ess_interval(sums, seed=seed)


def _published(by_age: dict[int, float]) -> dict[str, float]:
    return {str(age): ess for age, ess in islice(by_age.items(), MAX_PUBLISHED_AGES)}


def _exact_kl(stats: LagStats) -> Kl:
    kl = stats.kl()
    return Kl(
        kl.gen_now_prefix, kl.gen_now_full, kl.gen_now_k1, kl.now_gen_prefix, kl.now_gen_full, kl.blind_spot,
        kl.reliability,
    )  # fmt: skip
