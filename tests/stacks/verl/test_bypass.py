"""Real verl in bypass mode, watched in every other step: what is seen where verl logs nothing, and what it costs."""

import numpy as np
import pytest
from stacks.verl.support.job import SYNC, SYNC_ENV, SYNC_MODE
from stacks.verl.support.watch import is_slow_machine

from benchmarks import bench_verl

pytestmark = [pytest.mark.slow, pytest.mark.verl]
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
PAIRS = 10


@pytest.fixture(scope="module")
def bypass(tiny, warm, tmp_path_factory):
    """A job that was watched in its first steps, then in every other one, and whose sentinel stood still half way."""
    folder = tmp_path_factory.mktemp("verl-job")
    return bench_verl.watched_job(tiny, folder, SYNC, PAIRS, *SYNC_MODE, BYPASS, env=SYNC_ENV, warm=warm)


def test_the_first_mini_batch_shows_the_discrepancy_that_decoupled_mode_shows(decoupled, bypass):
    rows = decoupled[1].rows(1, update=0)
    x = np.concatenate([(t.cur_N.astype(np.float64) - t.engine_N)[t.mask_N] for t in rows])
    found = bypass.seen.history[0]

    assert found["step"] == 1 and "rollout_corr/kl" not in bypass.logged[1]
    assert x.std() > 1e-3
    assert found["discrepancy"]["mean"] == pytest.approx(x.mean(), abs=1e-5)
    assert found["discrepancy"]["rms"] == pytest.approx(np.sqrt((x * x).mean()), abs=1e-5)


def test_the_rest_of_a_step_is_calibrated_by_its_first_mini_batch(bypass):
    assert {step["basis"] for step in bypass.seen.history} == {"calibrated"}


def test_the_copy_of_the_engines_values_is_not_sent_as_a_middle_stream(bypass):
    assert bypass.seen.num_tokens["old"] == 0 < bypass.seen.num_tokens["cur"]


def test_a_job_whose_sentinel_stands_still_half_way_trains_to_its_end(bypass):
    assert bypass.exit_code == 0
    assert 0 < bypass.stopped_at < max(bypass.logged) == 2 * (PAIRS + bench_verl.SKIPPED)


def test_our_own_thread_takes_a_small_share_of_a_steps_cpu(bypass):
    # Its idle looks go on while a step waits for other programs, so on a busy machine the share says little.
    limit = bench_verl.MAX_SHARE * (5 if is_slow_machine() else 1)

    assert bench_verl.figures(bypass)["thread_share_of_cpu"] <= limit
