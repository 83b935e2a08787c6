"""Two gloo ranks of a real GRPOTrainer: their rows are one step, and a command is obeyed by both alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from dlc_sentinel.integrations.trl_control import settle
from stacks.trl.job import DEADLINE_S, acting, sentinel

STEPS = 16
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def resynced(tmp_path_factory):
    """(sentinel, what each rank reported) of a run on two ranks that is due for a RESYNC."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch, sentinel(patch, acting("resync")) as watched:
        command = [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(Path(__file__).with_name("ranks_job.py")), str(folder), str(STEPS),
        ]  # fmt: skip
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=4 * DEADLINE_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        watched.ears.wait_for(lambda _: [e.text for e in watched.ears.events if "left" in e.text][1:])
    return watched, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_rows_of_both_ranks_are_pooled_into_one_step(resynced):
    watched, _ = resynced
    rows = [row for row in watched.rows if row.step == 0]

    assert Counter(row.rank for row in rows) == {0: 8, 1: 8} and len({row.id for row in rows}) == 16
    assert {row.group for row in rows if row.rank == 0}.isdisjoint(row.group for row in rows if row.rank == 1)
    assert all(int(row.group.split("g")[1]) == int(row.id.split(".")[1]) // 4 for row in rows)
    assert watched.ears.steps[0]["num_tokens"] == sum(len(row.cur) for row in rows)
    # a step here takes 50 ms: a rank that a busy machine holds up for two of them is late, and counted so
    lost = {cause for step in watched.ears.steps.values() for cause, num in step["dropped"].items() if num}
    assert lost <= {"late"}


@pytest.mark.slow
def test_a_resync_is_applied_by_both_ranks_in_the_same_step(resynced):
    watched, reports = resynced
    ack = watched.acks[0]
    made_at = {(row.step, row.rank): set() for row in watched.rows}
    for row in watched.rows:
        made_at[row.step, row.rank].add(row.generated_at)

    assert ack.outcome == "applied" and 0 < ack.version < STEPS and ack.source.rank == 0
    assert made_at[ack.version, 0] == made_at[ack.version, 1] == {ack.version}
    assert made_at[ack.version - 1, 0] == made_at[ack.version - 1, 1] == {0}
    assert all(made_at[step, 0] == made_at[step, 1] for step, _ in made_at)
    assert watched.ears.steps[ack.version]["lag_ess"]["8"] == 1.0
    assert [report["trained"] for report in reports] == [STEPS, STEPS]
    assert reports[0]["syncs"] == reports[1]["syncs"] >= 2 and all(report["errors"] == {} for report in reports)


# -- the ranks meet at attach ------------------------------------------------------------------------------------------


def meet(store, ranks, timeout_s, wrapped=lambda rank: "a,b"):
    """What each of the given ranks is told, in a world of two."""
    told = {}

    def one(rank):
        told[rank] = settle(store, rank, 2, wrapped(rank), timeout_s)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return told


@pytest.fixture
def store():
    from torch.distributed import HashStore

    return HashStore()


def test_ranks_that_all_attach_act_together(store):
    assert meet(store, [0, 1], DEADLINE_S) == {0: True, 1: True}
    assert meet(store, [0, 1], DEADLINE_S) == {0: True, 1: True}


def test_a_rank_without_the_hook_keeps_the_others_from_collectives(store):
    assert meet(store, [0], 0.05) == {0: False}


def test_a_rank_that_comes_late_gets_the_answer_the_others_got(store):
    assert meet(store, [1], 0.05) == {1: False}
    assert meet(store, [0], DEADLINE_S) == {0: False}


def test_ranks_that_could_wrap_different_things_do_not_act_together(store):
    assert meet(store, [0, 1], DEADLINE_S, wrapped=lambda rank: f"a{rank}") == {0: False, 1: False}
