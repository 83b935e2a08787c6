"""Into a real verl job that already runs, unmodified, and out of it again."""

import json
import subprocess
import time

import pytest
from stacks.verl.support import job as jobs
from stacks.verl.support.job import JOB_S, SYNC, SYNC_ENV, SYNC_MODE, Size
from stacks.verl.support.watch import RUN, is_slow_machine

from dlc_sentinel.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.verl]
SIZE = Size(**{**vars(SYNC), "steps": 200})


def tool(job, *arguments):
    """The JSON that a command of ours prints, run with the job's own Python and account."""
    done = subprocess.run(
        [str(jobs.PYTHON), "-m", "dlc_sentinel", *arguments, "--ray", "auto", "--json"],
        capture_output=True, text=True, timeout=300, check=False, env=jobs.environment(job.folder, job.temp, job.name),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def wait_for_step(job, step, timeout_s=JOB_S):
    deadline_s = time.monotonic() + timeout_s
    while max(job.metrics(), default=0) < step:
        assert job.process.poll() is None and time.monotonic() < deadline_s, job.log[-3000:]
        time.sleep(0.2)  # the file of another program: there is nothing to wait on


@pytest.fixture(scope="module")
def visit(launch, watch):
    """(job, watch, answers, seconds to the first number) of a job that was attached to and left while it ran."""
    listening = watch(Config())
    job = launch(SIZE, *SYNC_MODE, env=SYNC_ENV)
    wait_for_step(job, 2)
    attached = tool(job, "attach", "--sentinel", listening.env["DLC_SENTINEL"], "--run", RUN)
    attached_s = time.monotonic()
    listening.until(lambda: listening.steps, 120)
    took_s = time.monotonic() - attached_s
    listening.until(lambda: len(listening.steps) >= 3, 120)
    detached = tool(job, "detach")
    left = max(job.metrics())
    wait_for_step(job, left + 2)
    job.stop()
    return job, listening, (attached, detached), left, took_s


def test_attach_reaches_the_training_rank_and_the_agent_loop_and_says_what_it_cannot_do(visit):
    attached = visit[2][0]
    done = {actor["actor"]: actor["outcome"] for actor in attached["actors"]}

    assert sorted(done.values()) == ["attached", "attached"]
    assert any("WorkerDict" in name for name in done) and any("agent_loop_worker" in name for name in done)
    assert "RESYNC and ABORT need the plug-in at launch" in attached["note"]


def test_numbers_come_within_ten_seconds_of_the_attach(visit):
    print(f"the first number came {visit[4]:.1f} s after the attach")
    assert visit[4] <= (90 if is_slow_machine() else 10)


def test_the_numbers_equal_what_the_job_logs_itself(visit):
    job, listening, *_ = visit
    steps = [step for step in listening.steps if listening.steps[step]["basis"] == "exact"]

    assert len(steps) >= 2
    for step in steps[1:]:
        logged = job.metrics()[step]["rollout_corr/kl"]
        assert listening.steps[step]["discrepancy"]["mean"] == pytest.approx(-logged, abs=1e-5)


def test_after_detach_nothing_is_sent(visit):
    _, listening, (_, detached), left, _ = visit

    assert {actor["outcome"] for actor in detached["actors"]} == {"detached"}
    assert max(t.step for t in listening.trains) <= left + 1


def test_the_jobs_own_metrics_are_the_same_before_during_and_after(visit):
    job, *_ = visit
    keys = [sorted(logged) for logged in job.metrics().values()]

    assert all(each == keys[0] for each in keys)
    assert not any(key.startswith("dlc/") for key in keys[0])


def test_a_job_trains_the_same_with_the_plugin_and_without(visit, decoupled):
    without, plugged = visit[0].metrics(), decoupled[0].metrics()
    for step in (1, 2):
        for key in ("actor/grad_norm", "actor/ppo_kl", "critic/rewards/mean", "rollout_corr/k3_kl"):
            assert plugged[step][key] == pytest.approx(without[step][key], rel=1e-2, abs=1e-5)
