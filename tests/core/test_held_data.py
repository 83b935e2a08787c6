"""Faults of data that a second pair of eyes found missed, and what a healthy job may look like beside them."""

from __future__ import annotations

import numpy as np
import pytest
from factories import Job
from factories_streams import make_noise, make_policy, make_streams

MOVES = {"lr": 1e-6, "grad_norm": 0.7}
BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}
FP32 = {"engine": "float32", "trainer": "float32"}
FP8 = {"engine": "float8_e4m3", "trainer": "bfloat16"}
ARRAYS = {"cur": "float32", "old": "float32", "engine": "float32"}
POSITIVE = 1.0


def names(job):
    return {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"]}


def played(streams_at, *, steps=4, said=BF16, arrays=None):
    """The job after `steps` steps of `streams_at(step)`; `said` at connect, `arrays` on every record."""
    job = Job(dtypes=said)
    for step in range(steps):
        job.step(step, streams_at(step).train(dtypes=arrays or {}), scalars=MOVES)
    return job


# -- what the numerics are said to be --------------------------------------------------------------------------------


@pytest.mark.parametrize("arrays", [ARRAYS, {}])
@pytest.mark.parametrize(
    ("said", "disc"),
    [
        ({"x": ""}, 0.04),
        ({"trainer": "float32"}, 0.04),
        ({"engine": "float32"}, 0.04),
        ({"engine": "bfloat16", "cur": "float32"}, 0.04),
        ({"engine": "auto", "trainer": "float32"}, 0.04),
        ({"engine": "moe", "trainer": "float32"}, 0.07),
        ({"engine": "float8_e4m3", "trainer": "bfloat16"}, 0.3),
    ],
)
def test_float32_arrays_say_nothing_of_the_numerics_that_filled_them(said, disc, arrays):
    job = played(lambda step: make_streams(step, disc=disc), steps=8, said=said, arrays=arrays)

    assert (job.report()["verdict"], names(job)) == ("HEALTHY", set())


@pytest.mark.parametrize("said", [FP32, {"engine": "float32", "cur": "torch.float32"}])
def test_a_job_that_says_float32_of_both_sides_is_held_to_it(said):
    job = played(lambda step: make_streams(step, disc=0.04), said=said, arrays=ARRAYS)

    assert "ENGINE/level" in names(job)


@pytest.mark.parametrize("arrays", [{"cur": "bfloat16", "engine": "float32"}, {"engine": "torch.bfloat16"}])
def test_a_16_bit_array_makes_the_floor_coarser_than_what_was_said(arrays):
    job = played(lambda step: make_streams(step, disc=0.04), said=FP32, arrays=arrays)

    assert names(job) == set()


def test_a_16_bit_array_makes_no_floor_finer():
    half = {"cur": "float16", "engine": "float16"}

    assert names(played(lambda step: make_streams(step, disc=0.04), said={"x": ""}, arrays=half)) == set()
    assert names(played(lambda step: make_streams(step, disc=0.07), said={"engine": "moe"}, arrays=half)) == set()


# -- values above 0 ---------------------------------------------------------------------------------------------------


def with_values(num, value, rows=128, length=160):
    """Streams of 20480 tokens with `value` at the end of `num` rows."""

    def streams(step):
        s = make_streams(step, rows=rows, length=length, disc=0.03)
        s.engine[:num, -1] = value
        return s

    return streams


def test_64_values_above_0_are_a_finding_in_rows_of_any_length():
    assert names(played(with_values(64, POSITIVE))) == {"DATA/positive"}


def test_fewer_than_64_values_above_0_or_ones_as_small_as_numerics_make_them_are_none():
    assert names(played(with_values(63, POSITIVE))) == set()
    assert names(played(lambda step: touched(make_streams(step, disc=0.03), 5e-4))) == set()


def touched(s, value):
    """All but certain tokens of both sides lie a little above 0."""
    s.engine[s.old > -0.005] = value
    return s


def test_values_above_0_at_more_than_a_hundredth_of_the_tokens_are_logits_and_nothing_else():
    assert names(played(with_values(128, POSITIVE, length=96))) == {"TRANSFORM/logits"}


# -- the first tokens after a masked span ----------------------------------------------------------------------------

GAPS = (100, 200, 300)
GAP = 25


def turns(step, rows=64, length=400):
    s = make_streams(step, rows=rows, length=length, disc=0.03)
    s.mask = np.ones(s.shape, np.bool_)
    for gap in GAPS:
        s.mask[:, gap : gap + GAP] = False
    return s


def after_gaps(num, share, late=0):
    """Engine values of other tokens at the `num` tokens from `late` after each masked span, in a `share` of rows."""

    def streams(step):
        s = turns(step)
        hit = s.rows(share)
        for gap in GAPS:
            place = slice(gap + GAP + late, gap + GAP + late + num)
            s.engine[hit, place] = -s.rng.uniform(2.0, 6.0, (len(hit), num))
        return s

    return streams


@pytest.mark.parametrize("num", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("clean", [0, 5])
def test_a_run_of_tokens_that_begins_after_a_masked_span_belongs_to_its_edge(num, share, clean):
    damaged = after_gaps(num, share)
    job = played(lambda step: turns(step) if step < clean else damaged(step), steps=clean + 4)

    assert (job.report()["verdict"], names(job)) == ("DATA", {"DATA/turn_edge"})


def test_long_runs_after_masked_spans_belong_to_the_span():
    assert names(played(after_gaps(20, 1.0))) == {"DATA/masked_span"}


def test_runs_that_begin_elsewhere_are_of_no_edge():
    assert "DATA/turn_edge" not in names(played(after_gaps(3, 1.0, late=2)))


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_where_masks_leave_hardly_a_token_without_an_edge_tokens_off_anywhere_are_of_no_edge(share):
    def streams(step):
        s = make_streams(step, rows=64, length=200, disc=0.03)
        s.mask = np.arange(200) % 3 != 1
        s.mask = np.broadcast_to(s.mask, s.shape).copy()
        s.engine = np.where(s.rng.random(s.shape) < share, make_policy(s.shape, s.rng, certain=0.0), s.engine)
        return s

    assert "DATA/turn_edge" not in names(played(streams))


def test_healthy_turns_have_no_edge():
    assert names(played(turns, steps=8)) == set()


# -- rows that look unpaired -----------------------------------------------------------------------------------------


def noisier(share, times, disc, rows=128, length=160, clean=4):
    """Numerics of rms `disc`, and of so many times that in a `share` of the rows from step `clean` on."""

    def streams(step):
        s = make_streams(step, rows=rows, length=length, disc=disc)
        hit = s.rows(share if step >= clean else 0.0)
        s.engine[hit] = np.minimum(s.old[hit] - make_noise(s.old[hit], times * disc, s.rng), -1e-6)
        return s

    return streams


def mixed_up(share, disc, rows=128, length=160, noisy=None):
    """In a `share` of the rows the engine's values are of other texts."""

    def streams(step):
        s = noisy(step) if noisy else make_streams(step, rows=rows, length=length, disc=disc)
        hit = s.rows(share)
        s.engine[hit] = make_policy((len(hit), length), s.rng)
        return s

    return streams


def test_a_few_rows_that_noise_leaves_unpaired_beside_more_that_it_does_not_are_no_wrong_pairing():
    found = names(played(noisier(0.2, 5, 0.18), steps=14, said=FP8))

    assert found
    assert not any(name.startswith("DATA") for name in found)


@pytest.mark.parametrize(("share", "disc", "said"), [(0.02, 0.03, BF16), (0.05, 0.03, BF16), (0.05, 0.16, FP8)])
@pytest.mark.parametrize(("rows", "length"), [(128, 160), (512, 20)])
def test_few_wrong_pairs_in_a_quiet_engine_are_found(share, disc, said, rows, length):
    assert "DATA/wrong_pairing" in names(played(mixed_up(share, disc, rows, length), said=said))


def test_wrong_pairs_are_found_beside_more_rows_that_are_noisy_but_clearly_pairs():
    noisy = noisier(0.2, 6, 0.03, clean=0)

    assert "DATA/wrong_pairing" in names(played(mixed_up(0.05, 0.03, noisy=noisy)))


def test_wrong_pairs_too_short_to_tell_do_not_hide_the_others():
    damaged = mixed_up(0.1, 0.03, rows=512, length=40)

    def streams(step):
        s = damaged(step)
        s.mask = np.ones(s.shape, np.bool_)
        s.mask[s.rows(0.7), 10:] = False
        return s

    assert "DATA/wrong_pairing" in names(played(streams))


@pytest.mark.parametrize(("rows", "exact_share"), [(61, 1.0), (600, 0.1), (2048, 0.03)])
def test_a_few_rows_of_current_weights_tell_their_fault_however_many_old_rows_are_in_the_step(rows, exact_share):
    """Without the trainer's old logprobs only rows of the current weights are exact."""
    job = Job(mode="observe", dtypes={"engine": "bfloat16", "trainer": "bfloat16"})
    for step in range(6):
        s = make_streams(step, rows=rows, length=128, disc=0.03)
        fresh = s.rng.permutation(rows) < exact_share * rows
        s.cur = np.where(fresh[:, None], s.old, np.minimum(s.old + make_noise(s.old, 0.1, s.rng), 0.0))
        s.engine = np.roll(s.engine, 1, axis=1)
        versions = np.where(fresh, step + 3, step + 1)
        job.step(step, s.train(version=step + 3, gen_version=versions, old_N=None, old_is="absent"))

    report = job.report()
    assert {(f["verdict"], f["kind"]) for f in report["findings"] if f["state"] == "confirmed"} == {("DATA", "offset")}
    assert report["steps"][-1]["discrepancy_by"]["position"]  # known of exact rows alone


def test_rows_that_name_no_version_have_no_wrong_label():
    job = Job(mode="observe", dtypes={"engine": "bfloat16", "trainer": "bfloat16"})
    for step in range(6):
        s = make_streams(step, disc=0.03)
        s.cur, s.old = s.old.copy(), np.minimum(s.old + make_noise(s.old, 0.2, s.rng), 0.0)
        job.step(step, s.train(span_start_K=None, span_version_K=None))

    assert "LABEL" not in {f["verdict"] for f in job.report()["findings"]}
