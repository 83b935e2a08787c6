"""Laws every accumulator of the maths floor keeps: merge = concatenation, chunked = at once, order-free, empty = nan.

A case is a way to build one, to add ragged rows to it, and to read numbers from it with the scale that rounding is
measured against. 1e-12 relative throughout.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlc_sentinel.maths import EssSums, LagStats, StreamStats
from dlc_sentinel.maths.action import ActionSums
from dlc_sentinel.maths.kl import KlSums
from dlc_sentinel.maths.positions import PositionSums


def packed(rows):
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return (np.concatenate(rows) if rows else np.zeros(0)), offsets


class Stream:
    def new(self):
        return StreamStats()

    def add(self, stats, rows, keys):
        stats.add(packed(rows)[0])

    def read(self, stats):
        names = ("rms", "mean_abs", "max_abs", "p50_abs", "p99_abs")
        out = {name: (getattr(stats, name), None) for name in names}
        out |= {"mean": (stats.mean, stats.mean_abs), "share": (stats.share_above(0.125), None)}
        return out | {"num": (stats.num, 0)}


class Ess:
    def new(self):
        return EssSums()

    def add(self, stats, rows, keys):
        stats.merge(EssSums.of(packed(rows)[0]))

    def read(self, stats):
        return {"ratio": (stats.ratio, None), "share": (stats.max_share, None), "n": (stats.n, 0)}


class Kl:
    def new(self):
        return KlSums()

    def add(self, stats, rows, keys):
        stats.merge(KlSums.of(packed(rows)[0]))

    def read(self, stats):
        if not stats.num_tokens:
            return {"num": (0, 0)}
        scale = math.exp(stats.m) if stats.m < 300 else 1.0  # both orders reach the same m
        k3, j3 = stats.k3 * scale, stats.j3 * scale
        return {"num": (stats.num_tokens, 0), "m": (stats.m, 0), "k3": (k3, None), "j3": (j3, None)}


class Positions:
    def new(self):
        return PositionSums()

    def add(self, stats, rows, keys):
        for row in rows:
            if len(row) and np.abs(np.cumsum(row)).max() > 300:
                stats.add_log(row, np.cumsum(row))
            elif len(row):
                w = np.exp(np.cumsum(row))
                stats.add_weights(row, w, w[-1:], np.ones(1), np.array([0, len(row)]))

    def read(self, stats):
        return {"value": (stats.value(), 2000.0), "rows": (stats.num_rows, 0)}


class Action:
    def new(self):
        return ActionSums()

    def add(self, stats, rows, keys):
        for row, key in zip(rows, keys, strict=True):
            if len(row):
                stats.add(row.copy(), np.array([len(row)]), np.array([key]), np.full(len(row), key % 3))

    def read(self, stats):
        groups, ages = stats.groups(), stats.by_age()
        out = {f"age {age}": (ages[age].ratio, None) for age in ages}
        for key, s1, s2, n in zip(groups.keys_G, groups.s1_G, groups.s2_G, groups.n_G, strict=True):
            out[f"group {key}"] = (s1 * s1 / n / s2, None)
        return out


class Lag:
    def __init__(self, horizon=32):
        self.horizon = horizon

    def new(self):
        return LagStats(action_horizon=self.horizon)

    def add(self, stats, rows, keys):
        x, offsets = packed(rows)
        keys = np.asarray(keys, dtype=np.int64)
        stats.add(x, offsets, group_S=keys, span_start_K=offsets[:-1], span_age_K=keys % 3)

    def read(self, stats):
        kl, groups = stats.kl(), stats.group_sums()
        out = {f"ess {name}": (value, None) for name, value in stats.ess().items()}
        out |= {f"age {age}": (value, None) for age, value in stats.by_age().items()}
        out |= {f"blocks {name}": (n, 0) for name, n in stats.num_blocks().items()}
        out |= {f"coverage {name}": (value, None) for name, value in stats.coverage().items()}
        for key, s1, s2, n in zip(groups.keys_G, groups.s1_G, groups.s2_G, groups.n_G, strict=True):
            out[f"group {key}"] = (s1 * s1 / n / s2, None)
        scale = max(1.0, stats.num_tokens / max(stats.num_rows, 1)) * 2000.0
        out |= {"prefix": (kl.gen_now_prefix, None), "full": (kl.gen_now_full, None)}
        out |= {"reverse": (kl.now_gen_prefix, None)}
        out |= {"k1": (kl.gen_now_k1, scale), "now_gen_full": (kl.now_gen_full, scale), "rows": (stats.num_rows, 0)}
        return out | {"action": (stats.action_ess, None), "half": (stats.half_horizon(), 0)}


CASES = {"StreamStats": Stream(), "EssSums": Ess(), "KlSums": Kl(), "PositionSums": Positions(), "ActionSums": Action()}
CASES |= {"LagStats": Lag(), "LagStats, horizon 1": Lag(1), "LagStats, horizon 5": Lag(5)}
case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
DATA = given(
    st.lists(st.integers(0, 90), min_size=1, max_size=14),
    st.sampled_from([0.0, 0.02, 1.0, 90.0, 700.0]),
    st.integers(0, 2**32),
)
FEW = settings(deadline=None, max_examples=15)


def drawn(lengths, scale, seed):
    rng = np.random.default_rng(seed)
    return [rng.uniform(-scale, scale, length) for length in lengths], rng.integers(0, 4, len(lengths)).tolist(), rng


def filled(case, rows, keys):
    stats = case.new()
    case.add(stats, rows, keys)
    return stats


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, (value, scale) in want.items():
        mine = got[name][0]
        if math.isnan(value):
            assert math.isnan(mine), name
        elif math.isinf(value):
            assert mine == value, name
        else:
            assert mine == pytest.approx(value, rel=1e-12, abs=1e-12 * scale if scale else 1e-300), name


@case
@DATA
@FEW
def test_merging_two_equals_adding_all_to_one(case, lengths, scale, seed):
    rows, keys, rng = drawn(lengths, scale, seed)
    cut = int(rng.integers(0, len(rows) + 1))
    left, right = filled(case, rows[:cut], keys[:cut]), filled(case, rows[cut:], keys[cut:])
    before = case.read(right)

    left.merge(right)

    assert_same(case.read(left), case.read(filled(case, rows, keys)))
    assert_same(case.read(right), before)


@case
@DATA
@FEW
def test_adding_row_by_row_equals_adding_at_once(case, lengths, scale, seed):
    rows, keys, _ = drawn(lengths, scale, seed)
    stats = case.new()
    for row, key in zip(rows, keys, strict=True):
        case.add(stats, [row], [key])

    assert_same(case.read(stats), case.read(filled(case, rows, keys)))


@case
@DATA
@FEW
def test_order_does_not_matter(case, lengths, scale, seed):
    rows, keys, rng = drawn(lengths, scale, seed)
    order = rng.permutation(len(rows))

    got = filled(case, [rows[i] for i in order], [keys[i] for i in order])

    assert_same(case.read(got), case.read(filled(case, rows, keys)))


@case
@DATA
@FEW
def test_finite_input_never_gives_infinity_or_nan(case, lengths, scale, seed):
    rows, keys, _ = drawn([length + 1 for length in lengths], scale, seed)

    read = case.read(filled(case, rows, keys))

    allowed = {"half": math.inf}
    assert all(math.isfinite(value) or allowed.get(name) == value for name, (value, _) in read.items())


@case
def test_merging_with_an_empty_one_changes_nothing(case):
    rows, keys, _ = drawn([5, 40, 7], 0.5, 0)
    want = case.read(filled(case, rows, keys))

    empty = case.new()
    empty.merge(filled(case, rows, keys))

    assert_same(case.read(empty), want)
    assert_same(case.read(filled(case, rows, keys).merge(case.new())), want)


@case
def test_an_empty_one_holds_nothing_but_nan_and_zero_counts(case):
    assert all(math.isnan(value) or value == 0 for value, _ in case.read(case.new()).values())


@case
def test_many_chunks_equal_small_pieces(case):
    rng = np.random.default_rng(0)
    rows = [rng.normal(0.0, 0.05, length) for length in (70_000, 3, 40_000, 30_000, 1, 100_000)]
    pieces = case.new()
    for row in rows:
        case.add(pieces, [row], [1])

    assert_same(case.read(filled(case, rows, [1] * len(rows))), case.read(pieces))
