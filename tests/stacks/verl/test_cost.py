"""Watching costs a real verl job little, and a sentinel that stands still costs it nothing."""

import pytest
from stacks.verl.support import job as jobs

from benchmarks import bench_verl

pytestmark = [pytest.mark.slow, pytest.mark.verl]


@pytest.fixture(scope="module")
def figures():
    if not jobs.PYTHON.exists():
        pytest.skip(f"{jobs.PYTHON} is not there")
    return bench_verl.run(pairs=10)


def test_a_job_whose_sentinel_is_stopped_half_way_trains_to_its_end(figures):
    assert figures["exit_code"] == 0
    assert figures["wall_after_over_before_sigstop"] is not None


def test_our_own_cpu_is_a_small_share_of_a_step(figures):
    assert figures["own_share_of_cpu"] <= bench_verl.MAX_SHARE
