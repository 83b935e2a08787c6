"""Real verl jobs: a model made once, a sentinel and a job per module, all gone at the end."""

import subprocess

import pytest
from stacks.verl.support import job as jobs
from stacks.verl.support.watch import Watch

from dlc_sentinel.config import Act, Config


@pytest.fixture(scope="session")
def warm():
    """The socket of the process that the jobs' own are forked from; skips where real verl is not installed."""
    if not jobs.PYTHON.exists():
        pytest.skip(f"{jobs.PYTHON} is not there: `make .venv-verl/.ready` installs real verl")
    with jobs.warm_up() as path:
        yield path


@pytest.fixture(scope="session")
def tiny(warm, tmp_path_factory):
    """Folder with a tiny model, its prompts and a reward function."""
    folder = tmp_path_factory.mktemp("verl-model")
    made = subprocess.run(
        [str(jobs.PYTHON), str(jobs.SUPPORT / "make_model.py"), str(folder)],
        capture_output=True, text=True, timeout=300, check=False,
        env=jobs.environment(folder, folder, "model") | {"VERL_CPU_WARM": warm},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def launch(tiny, warm, tmp_path_factory):
    """launch(size, *overrides, env=..., ...) -> a running Job in a folder of its own."""
    running = []

    def start(size, *overrides, folder=None, **rest):
        where = folder or tmp_path_factory.mktemp("verl-job")
        running.append(jobs.start(where, tiny, size, *overrides, warm=warm, **rest))
        return running[-1]

    yield start
    for job in running:
        job.stop()


@pytest.fixture(scope="session")
def watch():
    """watch(config, rule=None) -> a listening Watch."""
    listening = []

    def listen(config, rule=None):
        listening.append(Watch(config, rule))
        return listening[-1]

    yield listen
    for one in listening:
        one.stop()


@pytest.fixture(scope="session")
def decoupled(launch, watch):
    """(job, watch) of verl's default trainer in its default mode; weights stop reaching its engine after a while.

    Its first steps are those of a healthy job (test_sync); of the others test_stale tells.
    """
    listening = watch(Config(act=Act(mode="abort", pending_tokens=1024)))
    env = listening.env | jobs.SYNC_ENV | jobs.UNDELIVERED
    job = launch(jobs.SYNC, *jobs.SYNC_MODE, env=env).ended_well(jobs.JOB_S)
    return job, listening
