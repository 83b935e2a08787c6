"""What healthy jobs do that looks like a fault: rows nobody generated, warm-up, skipped steps, turns, open ends."""

from __future__ import annotations

import numpy as np
import pytest
from factories import Job, commands
from factories_streams import make_noise, make_policy, make_streams

BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}
MOVES = {"lr": 1e-6, "grad_norm": 0.7}


@pytest.fixture
def job():
    return Job(mode="abort", dtypes=BF16)


def kinds(job):
    return {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"]}


def sent(job):
    return [command["kind"] for command in commands(job.events) if command["sent"]]


def without_engine(which):
    """16 rows; the engine has no value in those that `which` picks."""

    def streams(step):
        s = make_streams(step, rows=16, disc=0.03)
        s.engine[which(s)] = np.nan
        return s

    return streams


def test_demonstrations_among_the_rows_are_named_and_end_no_job(job):
    streams = without_engine(lambda s: np.arange(16) % 8 == 0)
    for step in range(8):
        job.step(step, streams(step).train(), scalars=MOVES)

    assert kinds(job) == {"DATA/no_engine"} and sent(job) == []
    assert job.report()["steps"][-1]["dropped"]["no_engine"] == 2 * 96
    assert "demonstrations" in job.report()["findings"][0]["advice"]


@pytest.mark.parametrize(
    "which",
    [
        lambda s: np.s_[:],  # every row
        lambda s: np.s_[:3, :50],  # parts of rows
        lambda s: tuple(np.nonzero(s.rng.random(s.shape) < 0.02)),
    ],
)
def test_an_engine_that_writes_NaN_still_ends_the_job(job, which):
    streams = without_engine(which)
    for step in range(8):
        job.step(step, streams(step).train(), scalars=MOVES)

    assert "DATA/non_finite" in kinds(job) and sent(job) == ["ABORT"]


WARM = 20
"""Steps in which only a critic learns."""


def critic_warm_up(job, scalars, seed):
    """Every sync delivers the same weights until the actor moves; four rows a step, now and then a loud one."""
    rng = np.random.default_rng(seed)
    for step in range(40):
        s = make_streams(step, rows=4, length=150, disc=0.034 if rng.random() < 0.8 else 0.07, seed=seed)
        job.step(step, s.train(), scalars=scalars(step))
        job.synced(step + 1, step, checksum=f"c{max(step, WARM)}")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scalars", [lambda _: {}, lambda step: MOVES if step > WARM else {"vf_loss": 0.1}])
def test_weights_that_were_not_updated_are_rightly_delivered_again(job, scalars, seed):
    critic_warm_up(job, scalars, seed)

    assert sent(job) == [] and not any(kind.startswith("STALE_ENGINE") for kind in kinds(job))


def test_the_same_checksums_of_a_trainer_that_moves_are_undelivered_weights(job):
    for step in range(30):
        s = make_streams(step, disc=0.03 * (1 + max(step - 8, 0)))
        job.step(step, s.train(), scalars=MOVES)
        job.synced(step + 1, step, checksum=f"c{min(step, 8)}")

    assert "STALE_ENGINE/never_delivered" in kinds(job)


@pytest.mark.parametrize(("norms", "wanted"), [([np.inf] * 6 + [0.7], set()), ([0.7], {"UNWIRED/lag_always_zero"})])
def test_a_step_that_the_loss_scaler_skips_moves_nothing(job, norms, wanted):
    for step in range(12):
        moved = step > len(norms) > 1
        s = make_streams(step, disc=0.03, lag=0.05 if moved else 0.0)
        norm = norms[min(step, len(norms) - 1)]
        job.step(step, s.train(gen_version=max(step - 1, 0)), scalars={"lr": 1e-6, "grad_norm": norm})

    assert kinds(job) == wanted


def test_an_episode_of_many_turns_is_cut_though_each_of_its_turns_ends(job):
    for step in range(6):
        turns = [make_streams(step, rows=12, length=60, disc=0.03, seed=turn) for turn in range(3)]
        for turn, s in enumerate(turns):
            job.feed(s.rollout(ids=[f"a{step}-{row}-{turn}" for row in range(12)], finish="stop"), numbered=False)
        whole = turns[0]
        whole.old, whole.cur, whole.engine = (
            np.concatenate([getattr(s, name) for s in turns], 1) for name in ("old", "cur", "engine")
        )
        segments = tuple(tuple((f"a{step}-{row}-{turn}", 0, 60) for turn in range(3)) for row in range(12))
        train = whole.train(with_engine=False, span_start_K=None, span_version_K=None, segments=segments)
        job.step(step, train, scalars=MOVES | {"truncated_ratio": 0.45})

    assert kinds(job) == set() and job.report()["verdict"] == "HEALTHY"


def templated(step, place, off=0.0):
    """64 rows that are all but certain, and open at one end; `off` nats of fault there."""
    s = make_streams(step, rows=64, length=80, disc=0.0, certain=0.93)
    s.old[:, place] = make_policy((64,), s.rng, certain=0.0) - 0.5
    s.cur = s.old
    s.engine = np.minimum(s.old + make_noise(s.old, 0.06, s.rng), 0.0)
    s.engine[:, place] -= off
    return s


@pytest.mark.parametrize("place", [0, -1])
def test_the_one_open_token_of_a_templated_answer_is_no_worse_than_others_like_it(job, place):
    for step in range(30):
        job.step(step, templated(step, place).train(), scalars=MOVES)

    assert kinds(job) == set()


@pytest.mark.parametrize(("place", "kind"), [(0, "first_token"), (-1, "last_token")])
def test_an_open_token_that_is_off_beyond_its_like_is_found(job, place, kind):
    for step in range(6):
        job.step(step, templated(step, place, off=2.0).train(), scalars=MOVES)

    assert kinds(job) == {f"DATA/{kind}"}


def test_which_rows_count_as_ungenerated_does_not_hang_on_how_they_were_sent(job):
    whole, apart = Job(dtypes=BF16), Job(dtypes=BF16)
    for step in range(4):
        s = make_streams(step, rows=16, disc=0.03)
        s.engine[0], s.engine[1, :20] = np.nan, np.nan
        whole.step(step, s.train(), scalars=MOVES)
        parts = []
        for row in range(16):
            part = make_streams(step, rows=1)
            part.old, part.cur, part.engine = s.old[[row]], s.cur[[row]], s.engine[[row]]
            parts.append(part.train(ids=(f"s{step}-{row}",), groups=(f"g{step}-{row // 8}",), micro=row))
        apart.step(step, *parts, scalars=MOVES)

    assert whole.report()["steps"][-1]["dropped"] == apart.report()["steps"][-1]["dropped"]
    assert kinds(whole) == kinds(apart) == {"DATA/non_finite"}
