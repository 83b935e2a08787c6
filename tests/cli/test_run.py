"""run -- CMD: the job's own exit code, its signals, and the end of one that does not obey ABORT."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from factories_cli import ROOT, ended, program

from dlc_sentinel.config import Config
from dlc_sentinel.runtime import replay

pytestmark = pytest.mark.slow

JOB = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(ROOT / "tests")!r})
import dlc_sentinel
from factories_cli import send_step, shuffled
hook = dlc_sentinel.connect()
wait = threading.Event().wait
"""


def run(*arguments, job):
    """`run` with a job of Python source."""
    return program("run", "--set", "serve.metrics_port=0", *arguments, "--", sys.executable, "-c", JOB + job)


def test_the_exit_code_is_the_jobs_and_it_knows_its_sentinel(home):
    done = ended(run("--run", "mine", job="print(os.environ['DLC_SENTINEL'], os.environ['DLC_SENTINEL_RUN']); exit(3)"))
    address, name = done.out.split()

    assert done.code == 3 and name == "mine"
    assert address.startswith("ipc://") and f"data     {address}" in done.err


def test_nothing_of_its_own_socket_is_left_behind(home):
    job = (
        "import pathlib; print(*pathlib.Path(os.environ['DLC_SENTINEL'].removeprefix('ipc://')).parent.glob('*.lock'))"
    )

    done = ended(run(job=job))

    assert done.out.strip().endswith(".sock.lock")
    assert [path for path in (home / "run").rglob("*") if path.is_file() or path.is_socket()] == []


def test_what_the_job_sends_is_recorded_and_its_verdict_is_the_last_word(home):
    done = ended(run("--run", "mine", "--tape", "tape", job="[send_step(hook, s) for s in range(4)]"))
    _, _, report = replay("tape", Config(), "mine")

    assert done.code == 0 and "run mine: HEALTHY at step 3" in done.err
    assert [step["step"] for step in report["steps"]] == [0, 1, 2, 3]


def test_a_job_that_names_its_own_run_is_summed_up_under_that_name(home):
    job = "own = dlc_sentinel.connect(run='r1'); [send_step(own, s) for s in range(4)]"

    done = ended(run("--run", "mine", job=job))

    assert done.code == 0
    assert "run r1 (the job named it so: connect(run=...) wins over DLC_SENTINEL_RUN=mine): HEALTHY" in done.err


def test_a_job_that_says_nothing_is_asked_whether_it_calls_the_hook(home):
    done = ended(program("run", "--set", "serve.metrics_port=0", "--run", "mine", "--", sys.executable, "-c", ""))

    assert "run mine: nothing came from the job; does it call the hook?" in done.err


def test_two_jobs_run_side_by_side_without_being_told_apart(home):
    first = program(
        "run", "--", sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()", stdin=-1
    )
    first.stdout.readline()

    second = ended(program("run", "--", sys.executable, "-c", "exit(4)"))
    first.stdin.close()
    first.stdin = None

    assert second.code == 4
    assert ended(first).code == 0


@pytest.mark.parametrize(("word", "code"), [("no-such-program", 127), (str(ROOT), 126)])
def test_a_job_that_cannot_start_is_said_as_shells_say_it(home, word, code):
    done = ended(program("run", "--set", "serve.metrics_port=0", "--", word))

    assert done.code == code and "cannot be started" in done.err


def test_a_job_killed_by_a_signal_gives_128_and_its_number(home):
    assert ended(run(job="os.kill(os.getpid(), signal.SIGKILL)")).code == 128 + signal.SIGKILL


def test_signals_are_passed_on_to_the_job(home):
    process = run(job="signal.signal(signal.SIGTERM, lambda *_: os._exit(5)); print('up', flush=True); wait(60)")
    process.stdout.readline()

    os.kill(process.pid, signal.SIGTERM)

    assert ended(process).code == 5


ABORTED = "step = 0\nwhile not (c := send_step(hook, step, **shuffled(step))): step += 1; wait(0.05)\n"


def test_a_job_that_obeys_abort_ends_by_itself(home):
    done = ended(run("--act", "abort", job=ABORTED + "hook.ack(c, 'applied'); hook.close(); exit(7)"))

    assert done.code == 7 and "ABORT was sent" in done.err and "SIGTERM" not in done.err


def test_a_job_that_does_not_gets_sigterm_after_the_grace_time(home):
    done = ended(run("--act", "abort", "--grace", "0.2", job=ABORTED + "wait(60)"))

    assert done.code == 128 + signal.SIGTERM and "SIGTERM to pid" in done.err and "SIGKILL" not in done.err


def test_a_job_that_will_not_end_is_killed_after_the_grace_time_again(home):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"

    done = ended(run("--act", "abort", "--grace", "0.2", job=deaf + ABORTED + "wait(60)"))

    assert done.code == 128 + signal.SIGKILL
    assert done.err.count("SIGTERM to pid") == done.err.count("SIGKILL to pid") == 1
    assert done.err.index("SIGTERM to pid") < done.err.index("SIGKILL to pid")


def test_without_act_abort_the_job_is_left_alone(home):
    job = "for s in range(6): send_step(hook, s, **shuffled(s)); wait(0.1)\nhook.close(); wait(0.5); exit(6)"

    done = ended(run("--grace", "0.01", job=job))

    assert done.code == 6 and "ABORT was sent" not in done.err and "DATA" in done.err
