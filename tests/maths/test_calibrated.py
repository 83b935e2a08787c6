import math

import numpy as np
import pytest

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths import LagStats, block_sums
from dlc_sentinel.maths import cells as cells_module
from dlc_sentinel.maths import stale as stale_module
from dlc_sentinel.maths.calibrated import CalibrationPool, calibrate
from dlc_sentinel.maths.cells import NUM_CELLS, DiscrepancyCells, cell_index, drifted, row_positions
from dlc_sentinel.maths.resample import resampled_noise
from dlc_sentinel.maths.signed import SignedSketch
from dlc_sentinel.maths.stale import StaleRows


class Job:
    """Stale rows with a known white lag, and rows without lag, of one engine's noise."""

    def __init__(self, *, rows=256, lag=0.1, noise=0.03, seed=0, length=(64, 257), first=0):
        rng = np.random.default_rng(seed)
        self.offsets = np.concatenate(([0], np.cumsum(rng.integers(*length, rows))))
        num = self.offsets[-1]
        self.engine = -rng.exponential(2.0, num)
        self.position = row_positions(self.offsets) + first
        self.noise = rng.normal(0.0, noise, num) - noise**2 / 2 if noise else np.zeros(num)
        self.lag = rng.normal(0.0, lag, num) - lag**2 / 2
        self.group = np.arange(rows) // 4

    def cells(self, rows=None):
        out, end = DiscrepancyCells(), self.offsets[-1 if rows is None else rows]
        offsets = self.offsets if rows is None else self.offsets[: rows + 1]
        out.add(self.engine[:end], self.position[:end], self.noise[:end], offsets)
        return out

    def stale(self, order=None, chunk=None, horizon=32):
        out, num = StaleRows(horizon), len(self.group)
        order = np.arange(num) if order is None else order
        for rows in np.array_split(order, chunk or 1):
            at = np.concatenate([np.arange(self.offsets[r], self.offsets[r + 1]) for r in rows])
            offsets = np.concatenate(([0], np.cumsum(np.diff(self.offsets)[rows])))
            total = self.lag[at] + self.noise[at]
            out.add(total, self.engine[at], self.position[at], offsets, self.group[rows])
        return out

    def exact(self):
        stats = LagStats()
        stats.add(self.lag, self.offsets, group_S=self.group)
        return stats


def noisy(rows, noise, seed=0):
    return Job(rows=rows, noise=noise, seed=seed).cells()


# -- cells -----------------------------------------------------------------------------------------------------------


def test_a_tokens_cell_is_its_engine_logprob_and_its_place_in_the_response():
    engine = np.array([-8.0, -7.0, -0.5, -0.01, -0.01])
    position = np.array([0, 31, 32, 160, 5000])

    assert cell_index(engine, position).tolist() == [0, 4, 4 * 6 + 1, 4 * 8 + 3, 4 * 8 + 3]


def test_a_cell_is_drawn_to_its_logp_bin_and_that_to_all_tokens_by_fifty_tokens_each():
    cells = DiscrepancyCells()
    engine = np.repeat([-8.0, -0.01], [50, 150])
    d = np.repeat([2.0, 1.0], [50, 150])
    cells.add(engine, np.zeros(200, np.int64), d, np.array([0, 200]))

    v = cells.second_moments()

    mean = (50 * 4.0 + 150 * 1.0) / 200
    row = (50 * 4.0 + 50 * mean) / 100
    assert v[0] == pytest.approx((50 * 4.0 + 50 * row) / 100)
    assert v[1] == pytest.approx(row)
    assert v[20] == pytest.approx(mean)


def test_rows_added_in_any_chunks_and_order_make_the_same_cells():
    job = Job(rows=40)
    at_once, in_turn = job.cells(), DiscrepancyCells()
    for row in np.random.default_rng(1).permutation(40):
        part, piece = slice(job.offsets[row], job.offsets[row + 1]), DiscrepancyCells()
        piece.add(job.engine[part], job.position[part], job.noise[part], np.array([0, part.stop - part.start]))
        in_turn.merge(piece)

    assert in_turn.num_rows == at_once.num_rows == 40
    assert in_turn.second_moments() == pytest.approx(at_once.second_moments(), rel=1e-12)
    assert in_turn.kurtosis() == pytest.approx(at_once.kurtosis(), rel=1e-12)


def test_thousands_of_rows_are_kept_in_lots_that_do_not_depend_on_order():
    job = Job(rows=6000, length=(1, 5))
    halves = [DiscrepancyCells(), DiscrepancyCells()]
    for half, (first, last) in zip(halves, [(3000, 6000), (0, 3000)], strict=True):
        part = slice(job.offsets[first], job.offsets[last])
        offsets = job.offsets[first : last + 1] - job.offsets[first]
        half.add(job.engine[part], job.position[part], job.noise[part], offsets)
    merged, at_once = halves[0].merge(halves[1]), job.cells()

    assert merged.num_rows == at_once.num_rows == 6000
    assert len(merged.count_RC) == len(at_once.count_RC) <= cells_module.LOTS
    assert merged.count_RC.tolist() == at_once.count_RC.tolist()
    assert merged.count_C.sum() == job.offsets[-1]


def test_merging_leaves_the_other_as_it_was():
    one, other = noisy(3, 0.03), noisy(5, 0.03, seed=1)
    before = other.second_moments().tolist()

    one.merge(other).merge(other)

    assert (one.num_rows, other.num_rows, other.second_moments().tolist()) == (13, 5, before)


def test_cells_without_a_token_have_no_moment():
    assert np.isnan(DiscrepancyCells().second_moments()).all()
    assert math.isnan(DiscrepancyCells().kurtosis())
    assert len(DiscrepancyCells().second_moments()) == NUM_CELLS


def test_streams_of_other_lengths_are_refused():
    with pytest.raises(ShapeError, match="3 engine logprobs"):
        DiscrepancyCells().add(np.zeros(3), np.zeros(4, np.int64), np.zeros(4), np.array([0, 4]))
    with pytest.raises(ShapeError, match="2 group keys for 1 rows"):
        StaleRows().add(np.zeros(4), np.zeros(4), np.zeros(4, np.int64), np.array([0, 4]), np.zeros(2, np.int64))


# -- drift -----------------------------------------------------------------------------------------------------------


def test_three_rows_of_the_same_engine_are_rarely_called_another():
    calls = [drifted(noisy(64, 0.03, seed=s), noisy(3, 0.03, seed=1000 + s)) for s in range(200)]

    assert sum(calls) <= 4


def test_three_short_rows_that_lie_close_by_luck_do_not_make_a_change_of_the_next_three():
    def rows(seed):
        return Job(rows=3, length=(20, 30), seed=seed).cells()

    calls = [drifted(rows(seed), rows(1000 + seed)) for seed in range(200)]

    assert sum(calls) <= 6


@pytest.mark.parametrize("noise", [0.06, 0.015])
def test_three_rows_of_an_engine_with_twice_or_half_the_noise_are_called(noise):
    assert all(drifted(noisy(9, 0.03, seed=s), noisy(3, noise, seed=1000 + s)) for s in range(50))


def test_a_difference_of_no_consequence_is_not_called_however_many_rows_prove_it():
    assert not drifted(noisy(2000, 0.030), noisy(2000, 0.032, seed=1))


def test_nothing_is_called_where_one_side_is_empty():
    assert not drifted(DiscrepancyCells(), noisy(3, 0.03))
    assert not drifted(noisy(3, 0.03), DiscrepancyCells())


# -- the sketch of block sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0])
def test_the_sketch_gives_the_ess_of_scaled_values(reference, scale):
    x = np.random.default_rng(0).normal(-0.5, 1.3, 5000)
    sketch = SignedSketch()
    sketch.add(x[:3000])
    sketch.add(x[3000:])

    assert sketch.ess(scale) == pytest.approx(reference.ess(scale * x), rel=2e-3)
    assert sketch.variance == pytest.approx(x.var(), rel=1e-12)


def test_a_sketch_holds_zeros_and_extremes_of_both_signs():
    sketch = SignedSketch()
    sketch.add(np.array([0.0, 1e-9, -1e-9, 1e6, -1e6]))

    assert sketch.num == 5
    assert sketch.ess(1.0) == pytest.approx(1 / 5)


def test_an_empty_sketch_has_no_value():
    assert math.isnan(SignedSketch().ess(1.0))
    assert math.isnan(SignedSketch().variance)


# -- stale rows ------------------------------------------------------------------------------------------------------


def test_stale_rows_in_any_chunks_and_order_calibrate_alike():
    job = Job(rows=600, seed=3)
    law = noisy(16, 0.03)
    at_once = calibrate(job.stale(), law)
    shuffled = calibrate(job.stale(order=np.random.default_rng(2).permutation(600), chunk=7), law)
    halves = job.stale(order=np.arange(300, 600)).merge(job.stale(order=np.arange(300)))

    assert halves.coverage() == job.stale().coverage()
    for other in (shuffled, calibrate(halves, law)):
        assert other.coverage == pytest.approx(at_once.coverage, rel=1e-12)
        assert list(other.ess.values()) == pytest.approx(list(at_once.ess.values()), rel=1e-9)
        assert other.interval == pytest.approx(at_once.interval, rel=1e-6)
        assert (other.kl, other.rms) == pytest.approx((at_once.kl, at_once.rms), rel=1e-9)


def test_the_total_ess_blocks_and_coverage_are_those_of_the_exact_ladder():
    job = Job(noise=0.0)

    stale, exact = job.stale(), job.exact()

    assert stale.num_blocks() == exact.num_blocks()
    assert stale.coverage() == exact.coverage()
    assert list(stale.total_ess().values()) == pytest.approx(list(exact.ess().values()), rel=1e-2)


def test_rows_without_a_token_count_for_nothing():
    job, stale = Job(rows=8), StaleRows()
    offsets = np.insert(job.offsets, [0, 4, 9], job.offsets[[0, 4, 8]])
    group = np.insert(job.group, [0, 4, 8], 99)
    stale.add(job.lag + job.noise, job.engine, job.position, offsets, group)

    assert calibrate(stale, noisy(8, 0.03)) == calibrate(job.stale(), noisy(8, 0.03))


def test_more_blocks_than_are_kept_widen_the_interval_and_leave_the_value(monkeypatch):
    job, law = Job(rows=1200, seed=5), noisy(64, 0.03)
    whole = calibrate(job.stale(), law)
    monkeypatch.setattr(stale_module, "MAX_BLOCKS", 2000)
    thin, turned = job.stale(chunk=3), job.stale(order=np.arange(1200)[::-1], chunk=5)

    assert thin.kept().num_blocks_S.sum() <= 2000
    assert thin.kept().block_B.tolist() == turned.kept().block_B.tolist()
    got = calibrate(thin, law)
    assert got.action_ess == pytest.approx(whole.action_ess, rel=1e-12)
    assert got.interval[0] < got.action_ess < got.interval[1]
    assert got.interval[1] - got.interval[0] > 1.02 * (whole.interval[1] - whole.interval[0])


def test_windows_of_other_horizons_do_not_merge():
    with pytest.raises(ValueError, match="horizons 32 and 8"):
        StaleRows(32).merge(StaleRows(8))


# -- the estimate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [1, 8, 32, 128])
def test_the_estimate_is_x_as_written_down(reference, horizon):
    job, law = Job(rows=128, lag=0.08, noise=0.04), noisy(20, 0.04, seed=9)
    total = job.lag + job.noise
    blocks, row, _ = block_sums(total, job.offsets, horizon)
    length = np.minimum(np.diff(job.offsets)[row], horizon).mean()
    v_total = np.mean(total**2)
    v_noise = law.second_moments()[cell_index(job.engine, job.position)].mean()
    scaled = np.sqrt(1 - v_noise * length / blocks.var()) * blocks
    share = v_noise / v_total
    expected = np.exp((1 - share) * np.log(reference.ess(scaled)) - share * length * (v_total - v_noise))

    assert calibrate(job.stale(), law).ess[str(horizon)] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("lag", "noise"), [(0.05, 0.02), (0.1, 0.03), (0.1, 0.08), (0.2, 0.05)])
def test_the_lag_under_the_noise_is_found(lag, noise):
    job = Job(rows=1024, lag=lag, noise=noise)

    found, exact = calibrate(job.stale(), noisy(16, noise, seed=7)), job.exact().ess()

    assert found.valid
    assert found.action_ess == pytest.approx(exact["32"], abs=0.02)
    assert found.ess["8"] == pytest.approx(exact["8"], abs=0.01)
    assert found.interval[0] < exact["32"] < found.interval[1]
    assert found.kappa == pytest.approx(noise / lag, rel=0.1)


def test_rms_and_kl_are_numbers_only_where_the_lag_stands_out():
    clear, drowned = Job(rows=512, lag=0.1, noise=0.03), Job(rows=512, lag=0.03, noise=0.03)

    seen, unseen = calibrate(clear.stale(), noisy(16, 0.03)), calibrate(drowned.stale(), noisy(16, 0.03))

    assert seen.rms == pytest.approx(0.1, rel=0.02)
    assert seen.kl == pytest.approx(0.1**2 / 2, rel=0.05)
    assert math.isnan(unseen.rms)
    assert math.isnan(unseen.kl)
    assert unseen.action_ess == pytest.approx(drowned.exact().ess()["32"], abs=0.01)


def test_an_engine_without_noise_leaves_the_exact_lag():
    job = Job(noise=0.0)

    found = calibrate(job.stale(), noisy(3, 0.0))

    assert found.ess["32"] == pytest.approx(job.exact().ess()["32"], rel=5e-3)
    assert found.kappa == 0.0


def test_another_action_horizon_is_answered_at_that_horizon():
    job, law = Job(), noisy(16, 0.03)

    found = calibrate(job.stale(horizon=8), law)

    assert found.action_ess == found.ess["8"] == calibrate(job.stale(), law).ess["8"]
    assert found.interval[0] < found.action_ess < found.interval[1]


def test_the_interval_holds_the_estimate_and_depends_on_the_seed_and_the_data_only():
    job, law = Job(rows=64), noisy(3, 0.03)

    one, same, other = (calibrate(job.stale(), law, seed=seed) for seed in (1, 1, 2))

    assert one == same
    assert one.interval != other.interval
    assert one.interval[0] < one.action_ess < one.interval[1]


def test_few_calibration_rows_make_a_wider_interval():
    job = Job(rows=2048, lag=0.05, noise=0.05, length=(256, 257))

    few = [calibrate(job.stale(), noisy(3, 0.05, seed=s)).interval for s in range(8)]
    many = [calibrate(job.stale(), noisy(192, 0.05, seed=s)).interval for s in range(8)]

    assert np.diff(few).mean() > 1.05 * np.diff(many).mean()


def test_resampled_calibration_rows_spread_as_fresh_ones_do_even_when_there_are_three():
    mix = Job(rows=2000).cells().count_C
    mix /= mix.sum()
    laws = [Job(rows=3, length=(512, 513), seed=seed).cells() for seed in range(300)]

    draws = [resampled_noise(law, mix, 40, np.random.default_rng(seed)) for seed, law in enumerate(laws)]

    fresh = np.var([noise[0] for noise in draws])
    assert np.mean([np.var(noise[1:], ddof=1) for noise in draws]) == pytest.approx(fresh, rel=0.2)


@pytest.mark.parametrize("correlation", [-0.15, 0.15])
def test_a_lag_correlated_with_the_noise_stays_inside_the_interval(correlation):
    inside = 0
    for seed in range(20):
        job = Job(rows=128, lag=0.1, noise=0.03, seed=seed)
        job.noise = correlation * 0.3 * (job.lag - job.lag.mean()) + math.sqrt(1 - correlation**2) * job.noise
        found = calibrate(job.stale(), noisy(16, 0.03, seed=100 + seed), seed=seed)
        inside += found.interval[0] <= job.exact().ess()["32"] <= found.interval[1]

    assert inside >= 17


# -- when not to believe it ------------------------------------------------------------------------------------------


def test_two_rows_without_lag_are_too_few_and_three_are_enough():
    job = Job(length=(300, 301))

    assert "2 rows without lag, 3 are needed" in calibrate(job.stale(), job.cells(2)).reason
    assert calibrate(job.stale(), job.cells(3)).valid


def test_more_discrepancy_than_lag_needs_thirteen_rows():
    job = Job(lag=0.03, noise=0.05)

    assert "13 are needed" in calibrate(job.stale(), job.cells(12)).reason
    assert calibrate(job.stale(), job.cells(13)).valid


def test_rows_without_lag_from_the_start_of_responses_only_do_not_speak_for_the_rest():
    early = Job(length=(32, 33))

    found = calibrate(Job().stale(), early.cells())

    assert "another kind" in found.reason
    assert found.coverage < 0.5


def test_a_law_larger_than_the_total_is_of_another_engine():
    job = Job(lag=0.01, noise=0.01)

    found = calibrate(job.stale(), noisy(64, 0.03))

    assert "another engine" in found.reason
    assert found.kappa == math.inf


def test_chance_alone_is_not_taken_for_another_engine():
    valid = [
        calibrate(Job(lag=0.002, seed=s).stale(), noisy(16, 0.03, seed=1000 + s), draws=2).valid for s in range(60)
    ]

    assert sum(valid) >= 57


def test_without_rows_there_are_no_numbers_and_a_reason():
    nothing, no_law = calibrate(StaleRows(), noisy(3, 0.03)), calibrate(Job().stale(), DiscrepancyCells())

    for found in (nothing, no_law):
        assert not found.valid
        assert math.isnan(found.action_ess)
        assert all(map(math.isnan, found.interval))
    assert "no stale rows" in nothing.reason
    assert "no row without lag" in no_law.reason


# -- the pool --------------------------------------------------------------------------------------------------------


def test_the_pool_keeps_the_newest_steps_that_make_up_its_rows():
    pool = CalibrationPool()
    for version in range(6):
        pool.add(noisy(64, 0.03, seed=version), version)

    assert pool.cells().num_rows == 192


def test_small_steps_add_up():
    pool = CalibrationPool()
    calls = [pool.add(noisy(3, 0.03, seed=version), version) for version in range(20)]

    assert not any(calls)
    assert pool.cells().num_rows == 60


def test_a_change_of_engine_begins_the_pool_anew_and_keeps_the_old_law_for_older_rows():
    pool = CalibrationPool()
    for version in range(10):
        pool.add(noisy(8, 0.02, seed=version), version)
    old = pool.cells()

    called = pool.add(noisy(3, 0.06, seed=50), 12)

    assert called
    assert (pool.since_version, pool.cells().num_rows) == (12, 3)
    assert pool.law(12, 15).num_rows == 3
    assert pool.law(5, 9).second_moments() == pytest.approx(old.second_moments())
    assert pool.law(9, 12) is None
    assert pool.law(10, 11) is None


def test_a_change_of_engine_is_not_read_as_lag():
    pool = CalibrationPool()
    for version in range(10):
        pool.add(noisy(8, 0.01, seed=version), version)
    pool.add(noisy(8, 0.2, seed=50), 10)
    job = Job(lag=0.02, noise=0.2, rows=512)

    exact, naive = job.exact().ess()["32"], job.stale().total_ess()["32"]

    assert naive < 0.5 < exact
    assert calibrate(job.stale(), pool.law(10, 10)).interval[1] > 0.5


def test_a_step_without_such_rows_changes_nothing():
    pool = CalibrationPool()
    pool.add(noisy(3, 0.03), 0)

    assert not pool.add(DiscrepancyCells(), 1)
    assert pool.cells().num_rows == 3
