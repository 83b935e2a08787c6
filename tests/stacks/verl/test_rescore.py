"""Old rows scored again at the weights that generated them: which are drawn, then one real job of two ranks."""

import numpy as np
import pytest
import torch
from dlc_sentinel.integrations.verl_batch import select
from dlc_sentinel.integrations.verl_rescore import OPTION, Rescored, choose, rescored_columns
from dlc_sentinel.integrations.verl_rows import Facts
from stacks.verl.support.job import FLOAT32, JOB_S, SEPARATE, Size

from dlc_sentinel.config import Act, Config


def names(num):
    return [f"p{i}_0" for i in range(num)]


def test_rows_of_kept_versions_before_the_current_one_are_drawn_by_version():
    facts = [Facts(3, 3), Facts(4, 4), Facts(5, 5), Facts(3, 3)]

    chosen = choose(facts, names(4), kept={3, 4, 5}, current=5, quota=10)

    assert {version: sorted(rows) for version, rows in chosen.items()} == {3: [0, 3], 4: [1]}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Facts(5, 5), "it is at the current weights, which verl scores itself"),
        (Facts(2, 2), "its version is no longer kept"),
        (Facts(3, 4), "it is of two versions"),
        (Facts(-1, -1), "its version is unknown"),
    ],
)
def test_a_row_is_not_drawn_when(row, why):
    assert choose([row], names(1), kept={3, 4, 5}, current=5, quota=4) == {}, why


def test_a_name_on_two_rows_is_not_drawn_since_the_trained_row_could_be_the_other():
    assert choose([Facts(3, 3)] * 3, ["a", "b", "a"], kept={3}, current=5, quota=4) == {3: [1]}


def test_no_more_than_the_quota_are_drawn_and_not_by_their_place_in_the_batch():
    facts = [Facts(3, 3)] * 100
    order = np.random.default_rng(0).permutation(100)
    drawn = choose(facts, names(100), kept={3}, current=5, quota=8)[3]
    shuffled = choose(facts, [names(100)[i] for i in order], kept={3}, current=5, quota=8)[3]

    assert len(drawn) == 8
    assert sorted(drawn) == sorted(int(order[i]) for i in shuffled)


def test_what_was_found_stands_at_its_rows_padded_like_the_batch_it_is_trained_in():
    found = {2: Rescored(3, torch.tensor([-1.0, -2.0])), 0: Rescored(4, torch.tensor([-3.0, -4.0, -5.0, 0.0]))}

    old, versions = rescored_columns(found, torch.ones((5, 3), dtype=torch.bfloat16))

    assert old.dtype == torch.bfloat16 and old.tolist() == [[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]
    assert versions.tolist() == [3, 4]


def test_rows_are_picked_from_tensors_arrays_and_lists_alike():
    columns = {
        "cur": torch.arange(6.0).reshape(3, 2),
        "versions": np.array([7, 8, 9]),
        "group": list("abc"),
        "old": None,
    }

    picked = select(columns, [2, 0])

    assert picked["cur"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert (picked["versions"].tolist(), picked["group"], picked["old"]) == ([9, 7], ["c", "a"], None)


SIZE = Size(steps=5, prompts=8, samples=4, mini_batch=4, response=24, lr=4e-3)
MODE = (
    *FLOAT32,
    *SEPARATE,
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "trainer.v1.separate_async.num_warmup_batches=3",
)
ENGINE = {"VERL_CPU_IGNORE_EOS": "1"}


@pytest.fixture(scope="module")
def run(launch, watch):
    """(job, watch) of an asynchronous job whose actor keeps four versions."""
    listening = watch(Config(act=Act(mode="observe")))
    job = launch(SIZE, *MODE, env=listening.env | ENGINE | {OPTION: "4"}).ended_well(JOB_S)
    return job, listening


def rows(listening):
    """One dict per row and update of the job."""
    for t in listening.trains:
        ends = [*t.span_start_K[1:], t.offsets_S1[-1]]
        versions = np.repeat(t.span_version_K, np.diff([*t.span_start_K, ends[-1]]))
        for s, (a, b) in enumerate(zip(t.offsets_S1[:-1], t.offsets_S1[1:], strict=True)):
            yield {
                "id": t.ids[s],
                "rank": t.source.rank,
                "update": t.update,
                "exact": bool((versions[a:b] == t.old_version_S[s]).all()),
                "age": int(t.version - versions[a:b].max()),
                "discrepancy": float(np.abs(t.old_N[a:b].astype(np.float64) - t.engine_N[a:b]).max()),
                "lag": float(np.abs(t.cur_N[a:b].astype(np.float64) - t.old_N[a:b]).max()),
            }


@pytest.mark.slow
@pytest.mark.verl
def test_old_rows_of_both_ranks_are_scored_at_the_weights_that_generated_them(run):
    _, listening = run
    again = [row for row in rows(listening) if row["exact"] and row["age"] > 0]

    assert {row["rank"] for row in again} == {1, 2}
    # An engine in float32 agrees with the trainer at the same weights, and at no others.
    assert max(row["discrepancy"] for row in again) < 1e-4


@pytest.mark.slow
@pytest.mark.verl
def test_the_rest_of_the_old_rows_are_scored_at_the_trainers_weights_as_verl_does(run):
    _, listening = run
    rest = [row for row in rows(listening) if not row["exact"] and row["age"] > 0]

    assert rest and min(row["discrepancy"] for row in rest) > 1e-3


@pytest.mark.slow
@pytest.mark.verl
def test_the_job_trains_on_at_the_weights_it_had(run):
    job, listening = run
    fresh = [row for row in rows(listening) if row["update"] == 0 and not (row["exact"] and row["age"] > 0)]

    assert sorted(job.metrics()) == list(range(1, SIZE.steps + 1))
    assert max(row["lag"] for row in fresh) < 1e-5


@pytest.mark.slow
@pytest.mark.verl
def test_each_row_is_sent_once_an_update(run):
    _, listening = run
    places = [(t.step, t.update, row) for t in listening.trains for row in t.ids]

    assert len(places) == len(set(places)) == SIZE.steps * SIZE.prompts * SIZE.samples
