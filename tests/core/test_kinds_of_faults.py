"""Kinds of faults in shapes that the public cases do not have: noisier, one by one, two at once, early, ragged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import Job, commands, of_kind
from factories_streams import (
    kept,
    log_softmax,
    make_noise,
    make_policy,
    make_sampled,
    make_streams,
    shifted,
)  # fmt: skip

from dlc_sentinel.records import StepEnd

BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}
MOVES = {"lr": 1e-6, "grad_norm": 0.7}


@pytest.fixture
def job():
    return Job(dtypes=BF16)


def play(job, steps, streams_at, *, checksum="c{}", first=0, obey=None):
    """Steps of `streams_at(step)`; weights go out after each; RESYNCs are answered where `obey(step)` is given."""
    for step in range(first, first + steps):
        s = streams_at(step)
        events = job.step(step, s.train(), scalars=MOVES)
        job.synced(step + 1, step, checksum=checksum.format(step))
        for command in commands(events):
            if obey and command["kind"] == "RESYNC" and command["sent"]:
                obey(step)
                job.ack(command, version=step + 1, step=step)


def shrug(step):
    """Obeys, and nothing changes."""


def kinds(job, *, still_open=False):
    return {
        f"{f['verdict']}/{f['kind']}"
        for f in job.report()["findings"]
        if not still_open or f["state"] in ("suspected", "confirmed")
    }


def verdicts(job):
    return {name.split("/")[0] for name in kinds(job)}


def sent(job, kind):
    return [c["step"] for c in job.report()["commands"] if c["kind"] == kind]


def off(s, rms):
    """The same streams with numerics of that rms."""
    s.engine = np.minimum(s.old - make_noise(s.old, rms, s.rng), -1e-6)
    return s


def other_text(s, share):
    rows = s.rows(share)
    s.old[rows] = make_policy((len(rows), s.shape[1]), s.rng, certain=0.4)
    s.cur = s.old.copy()
    return s


def hand_made_ends(s, share=0.9):
    s.old[:, -1] = s.cur[:, -1] = -s.rng.exponential(0.8, len(s.old)) - 0.05
    s.engine[s.rows(share), -1] = 0.0
    return s


# -- after a resume --------------------------------------------------------------------------------------------------


def test_an_engine_that_is_wildly_off_right_after_a_resume_gets_its_RESYNC_before_any_ABORT():
    job, stale = Job(mode="abort", dtypes=BF16), [True]
    play(
        job, 10, lambda step: make_streams(step, disc=0.6 if stale[0] else 0.03), first=120,
        obey=lambda step: stale.clear() or stale.append(False),
    )  # fmt: skip

    assert kinds(job) == {"STALE_ENGINE/after_resume"}
    assert sent(job, "ABORT") == [] and len(sent(job, "RESYNC")) == 1


# -- noise that looks like torn rows ---------------------------------------------------------------------------------


def test_noise_that_grows_until_no_row_fits_any_more_stays_ENGINE(job):
    play(job, 30, lambda step: make_streams(step, disc=0.6 + 0.05 * step, certain=0.4), obey=shrug)

    last = job.monitor.snapshot(0.0).runs[0]
    assert last.verdict == "ENGINE"
    assert "DATA" not in verdicts(job)


def test_rows_that_all_shift_by_one_are_an_offset_though_it_shows_by_degrees(job):
    """A new policy is as sure of one token as of the next; the shift shows as it learns to tell them apart."""

    def streams_at(step):
        s = make_streams(step, rows=96, length=32)
        spread = 0.1 + 0.1 * step
        s.old = s.cur = -3.5 + np.clip(s.rng.normal(0.0, spread, s.shape), -3.0, 3.0)
        s.engine = np.roll(s.old, 1, axis=1) + s.rng.normal(0.0, 0.02, s.shape)
        return s

    play(job, 12, streams_at)

    assert "DATA/offset" in kinds(job, still_open=True) and sent(job, "ABORT")
    (found,) = [f for f in job.report()["findings"] if f["kind"] == "offset"]
    assert found["evidence"]["offset"] == -1


def test_noise_in_short_rows_makes_no_offset(job):
    play(job, 24, lambda step: make_streams(step, rows=96, length=32, disc=0.5 + 0.12 * step), obey=shrug)

    assert "DATA/offset" not in kinds(job)


def test_rows_paired_wrongly_one_by_one_are_still_DATA_when_all_of_them_are(job):
    play(job, 26, lambda step: other_text(make_streams(step, disc=0.03), min(0.05 * step, 1.0)))

    assert kinds(job, still_open=True) == {"DATA/wrong_pairing"}


# -- what rises --------------------------------------------------------------------------------------------------------


def with_tail(step, share):
    s = make_streams(step, disc=0.03, rows=48)
    hit = (s.rng.random(s.shape) < share / 0.38) & (s.old < -0.1)
    jump = s.rng.choice([-1.0, 1.0], s.shape) * s.rng.uniform(0.8, 2.0, s.shape)
    s.engine = np.where(hit, np.minimum(s.old + jump, -1e-6), s.engine)
    return s


def test_a_tail_that_grows_while_the_median_stays_is_no_stale_engine(job):
    play(job, 36, lambda step: with_tail(step, 0.0015 * max(step - 10, 0)), obey=shrug)

    assert "ENGINE/tail" in kinds(job, still_open=True)
    assert "STALE_ENGINE" not in verdicts(job) and sent(job, "RESYNC") == []


def test_a_tail_that_never_reaches_three_floors_is_named_a_tail_too(job):
    play(job, 44, lambda step: with_tail(step, 0.00011 * max(step - 10, 0)), obey=shrug)

    assert kinds(job) == {"ENGINE/tail"}


def test_a_rise_that_steps_of_few_tokens_hide_is_seen_over_windows(job):
    play(job, 60, lambda step: make_streams(step, rows=8, length=64, disc=0.03 + 0.004 * max(step - 10, 0)), obey=shrug)

    assert "STALE_ENGINE/stale_or_drift" in kinds(job)
    assert sent(job, "RESYNC")


def test_an_engine_that_was_off_from_the_first_step_and_rises_is_ENGINE(job):
    play(job, 30, lambda step: make_streams(step, rows=64, disc=0.4 + 0.02 * step), obey=shrug)

    assert "STALE_ENGINE" not in verdicts(job)
    assert job.report()["verdict"] == "ENGINE"


# -- the floor and faults in the first steps -------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 4, 7])
def test_a_fault_inside_the_first_ten_steps_does_not_lift_the_floor(job, start):
    play(job, 14, lambda step: off(make_streams(step), 0.2) if step >= start else make_streams(step, disc=0.03))

    assert job.report()["steps"][-1]["floor"]["rms"] == pytest.approx(0.03, rel=0.2)
    assert job.report()["verdict"] == "ENGINE"


def test_the_floor_is_learnt_from_the_steps_after_a_fault_has_ended(job):
    play(job, 24, lambda step: hand_made_ends(make_streams(step, disc=0.03)) if step < 6 else make_streams(step))

    assert job.report()["steps"][-1]["floor"]["rms"] == pytest.approx(0.02, rel=0.2)


def test_what_a_floor_has_learnt_and_doubted_survives_a_restart_of_the_sentinel(job):
    play(job, 6, lambda step: hand_made_ends(make_streams(step, disc=0.03)))
    before = job.report()["steps"][-1]["floor"]["rms"]
    again = Job(dtypes=BF16)

    again.monitor.load_state("r1", job.monitor.dump_state("r1"))
    again.step(6, hand_made_ends(make_streams(6, disc=0.03)).train())

    assert again.report()["steps"][-1]["floor"]["rms"] == pytest.approx(before, rel=0.05)


# -- RESYNCs that do not last ----------------------------------------------------------------------------------------


def resynced(job, disc_at, steps=60, rows=64):
    """`disc_at(step, step of the last RESYNC or None)`."""
    healed = []
    play(
        job, steps, lambda step: make_streams(step, rows=rows, disc=disc_at(step, healed[-1] if healed else None)),
        obey=healed.append,
    )  # fmt: skip


def test_a_RESYNC_that_helped_is_not_sent_again_while_its_finding_is_closing(job):
    resynced(job, lambda step, at: 0.03 if at is not None or step < 8 else 0.03 * (step - 6), 30, rows=32)

    assert len(sent(job, "RESYNC")) == 1


def test_a_level_that_hovers_about_the_line_has_not_come_down():
    job = Job(dtypes={"engine": "float16", "trainer": "float16"})

    def disc(step, at):
        climbed = 0.004 + 0.002 * max(step - 8, 0) if at is None else 0.0185 + 0.0008 * (step - at)
        return min(climbed, 0.025)

    resynced(job, disc)

    assert len(sent(job, "RESYNC")) == 1
    assert "ENGINE/drift_or_undelivered" in kinds(job)


def test_what_a_RESYNC_showed_holds_while_the_level_swings_about_the_line():
    job = Job(dtypes={"engine": "float16", "trainer": "float16"})
    resynced(job, lambda step, at: min(0.004 + 0.0009 * max(step - 4, 0), 0.0205) + 0.0022 * np.sin(0.7 * step), 70)

    assert len(sent(job, "RESYNC")) == 1


def test_an_engine_that_falls_far_but_not_to_its_first_steps_has_come_down(job):
    resynced(job, lambda step, at: 0.02 if step < 8 else 0.04 if at is not None else 0.05 * (step - 6), steps=30)

    assert [e.data["outcome"] for e in of_kind(job.events, "note") if "RESYNC" in e.text] == ["worked"]


def test_an_effect_that_is_gone_at_the_next_trigger_counts_towards_the_breaker():
    job = Job(dtypes={"engine": "float16", "trainer": "float16"})
    resynced(job, lambda step, at: 0.004 + 0.006 * max(step - (8 if at is None else at + 1), 0))

    assert len(sent(job, "RESYNC")) == 3
    assert "is gone; 3 in a row: breaker open" in of_kind(job.events, "breaker")[0].text


def test_an_effect_that_lasts_a_while_does_not_count_towards_the_breaker():
    job = Job(dtypes={"engine": "float16", "trainer": "float16"})
    resynced(job, lambda step, at: 0.004 + 0.0012 * max(step - (8 if at is None else at + 1), 0), steps=100)

    assert len(sent(job, "RESYNC")) >= 4 and of_kind(job.events, "breaker") == []


# -- fill-ins --------------------------------------------------------------------------------------------------------


def ragged(s, shortest):
    """The same rows with ends at different places; what is cut off is masked."""
    lengths = s.rng.integers(shortest, s.shape[1] + 1, len(s.old))
    s.mask = np.arange(s.shape[1]) < lengths[:, None]
    return s, lengths - 1


def test_hand_made_ends_of_rows_of_all_lengths_are_last_tokens(job):
    def streams(step):
        s, last = ragged(make_streams(step, disc=0.03), 40)
        at = (np.arange(len(last)), last)
        s.old[at] = s.cur[at] = -s.rng.exponential(0.8, len(last)) - 0.05
        s.engine[at] = 0.0
        return s

    play(job, 8, streams)

    assert kinds(job) == {"DATA/last_token"}


def test_requests_that_come_back_as_zeros_are_no_masked_span(job):
    def streams(step):
        s = make_streams(step, disc=0.03, certain=0.2)
        s.engine[s.rows(0.15)] = 0.0
        return s

    play(job, 8, streams)

    assert kinds(job) == {"DATA/exact_zeros"}


def test_a_masked_span_in_a_few_of_many_long_rows_is_found_in_every_step():
    job = Job(dtypes={"engine": "float16", "trainer": "float16"})

    def streams(step):
        s = make_streams(step, rows=40, length=1536, disc=0.004)
        for row in s.rows(0.05):
            at = int(s.rng.integers(0, 1500))
            s.engine[row, at : at + 32] = 0.0
            s.old[row, at : at + 32] = s.cur[row, at : at + 32] = -1.1 - s.rng.exponential(3.0, 32)
        return s

    play(job, 12, streams)

    (finding,) = job.report()["findings"]
    assert (finding["verdict"], finding["kind"]) == ("DATA", "masked_span")
    assert finding["evidence"]["share_of_tokens"] == pytest.approx(2 * 32 / (40 * 1536), rel=0.05)


def test_a_handful_of_impossible_values_is_DATA_and_no_broken_engine(job):
    def streams(step):
        s = make_streams(step, disc=0.02)
        hit = s.rng.random(s.shape) < 0.006
        s.old[hit] = s.cur[hit] = -2.0
        s.engine[hit] = -91.0
        return s

    play(job, 8, streams)

    assert kinds(job) == {"DATA/wild_values"}


# -- two at once -----------------------------------------------------------------------------------------------------


def test_hand_made_ends_and_an_engine_that_is_off_are_two_faults(job):
    play(job, 14, lambda step: hand_made_ends(off(make_streams(step), 0.2)) if step >= 6 else make_streams(step))

    assert {"DATA/last_token", "ENGINE/level"} <= kinds(job, still_open=True)


def test_requests_of_zeros_and_an_engine_that_is_off_are_two_faults(job):
    def streams(step):
        s = off(make_streams(step), 0.2)
        s.engine[s.rows(0.15)] = 0.0
        return s

    play(job, 14, lambda step: streams(step) if step >= 6 else make_streams(step))

    assert {"DATA/exact_zeros", "ENGINE/level"} <= kinds(job, still_open=True)


def test_wrong_pairing_and_an_engine_that_is_off_are_two_faults(job):
    play(job, 14, lambda step: other_text(off(make_streams(step), 0.2), 0.2) if step >= 6 else make_streams(step))

    assert {"DATA/wrong_pairing", "ENGINE/level"} <= kinds(job, still_open=True)


def test_broken_prefixes_and_an_engine_that_is_off_are_two_faults_and_no_growth_with_position(job):
    def streams(step):
        s = off(make_streams(step, rows=64, length=256), 0.2)
        s.old[:16, 100:] = s.cur[:16, 100:] = make_policy((16, 156), s.rng)
        return s

    play(job, 14, lambda step: streams(step) if step >= 6 else make_streams(step, rows=64, length=256))

    assert "DATA/broken_prefix" in kinds(job, still_open=True) and "ENGINE/position" not in kinds(job)
    assert any(kind.startswith("ENGINE/") for kind in kinds(job, still_open=True))


def cut(step):
    return make_sampled(step, lambda x: kept(log_softmax(x), top_p=0.8), log_softmax)


def test_a_cut_distribution_and_hand_made_ends_are_two_faults(job):
    play(job, 8, lambda step: hand_made_ends(cut(step)))

    assert kinds(job) == {"DATA/last_token", "TRANSFORM/kept_mass"}


def test_a_cut_distribution_and_rows_paired_wrongly_are_two_faults(job):
    play(job, 8, lambda step: other_text(cut(step), 0.1))

    assert kinds(job) == {"DATA/wrong_pairing", "TRANSFORM/kept_mass"}


def test_a_shift_and_a_temperature_are_two_faults_of_a_noisy_engine_too():
    job = Job(dtypes={"engine": "float8_e4m3", "trainer": "bfloat16"})

    def streams(step):
        tempered = lambda x: log_softmax(x / 0.7)  # noqa: E731  two sides, one line each
        s = make_sampled(step, log_softmax, tempered, sampled_of=tempered, disc=0.05)
        s.old = shifted(s.old, -1, s.rng)
        return s

    play(job, 6, streams)

    assert kinds(job) == {"DATA/offset", "TRANSFORM/temperature"}


def some_shifted(s):
    which = s.rows(0.3)
    s.old[which] = shifted(s.old, 2, s.rng)[which]
    return s


def some_zeros(s):
    s.engine[s.rows(0.1)] = 0.0
    return s


def broken(s):
    for row in s.rows(0.3):
        at = int(s.rng.integers(40, 70))
        s.engine[row, at:] = make_policy(s.shape[1] - at, s.rng, certain=0.2)
    return s


def chunked(s):
    hit = (np.arange(s.shape[1]) % 32 == 16) & (s.rng.random(s.shape) < 0.5)
    s.engine = np.where(hit, make_policy(s.shape, s.rng, certain=0.2), s.engine)
    return s


def masked(s):
    for row in range(len(s.old)):
        at = int(s.rng.integers(5, 60))
        s.engine[row, at : at + 12] = s.old[row, at : at + 12] - s.rng.uniform(2.0, 4.0, 12)
    return s


def tempered(step):
    cold = lambda x: log_softmax(x / 0.8)  # noqa: E731  two sides, one line each
    return make_sampled(step, cold, log_softmax, sampled_of=cold)


@pytest.mark.parametrize(("transform", "kind"), [(cut, "kept_mass"), (tempered, "temperature")])
@pytest.mark.parametrize(
    ("damaged", "name"),
    [
        (some_shifted, "offset"), (some_zeros, "exact_zeros"), (broken, "broken_prefix"), (chunked, "chunk_edge"),
        (masked, "masked_span"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("clean", [0, 4])
def test_a_transform_and_damage_of_rows_or_places_are_two_faults(job, transform, kind, damaged, name, clean):
    def streams(step):
        return damaged(transform(step)) if step >= clean else make_sampled(step, log_softmax, log_softmax)

    play(job, 8 + clean, streams)

    assert kinds(job) == {f"DATA/{name}", f"TRANSFORM/{kind}"}


def test_a_cut_distribution_is_fitted_without_rows_whose_last_tokens_are_of_another_text(job):
    """Too few of them for a broken prefix, and most by less than a token may be off."""

    def streams(step):
        s = cut(step)
        s.engine[s.rows(0.3), -11:] = make_policy((10, 11), s.rng, certain=0.2)
        return s

    play(job, 8, streams)

    assert "TRANSFORM/kept_mass" in kinds(job, still_open=True) and "ENGINE" not in verdicts(job)


@pytest.mark.parametrize("up", [0.5, 0.3])
def test_a_tail_is_no_cut_distribution_although_it_leans_to_one_side(job, up):
    def streams(step):
        s = make_streams(step, disc=0.03, rows=48)
        hit = (s.rng.random(s.shape) < 0.1) & (s.old < -0.1)
        sign = np.where(s.rng.random(s.shape) < up, 1.0, -1.0)
        s.engine = np.where(hit, np.minimum(s.old - sign * s.rng.uniform(0.3, 0.9, s.shape), -1e-6), s.engine)
        return s

    play(job, 14, lambda step: streams(step) if step >= 6 else make_streams(step, disc=0.03, rows=48))

    assert "ENGINE" in verdicts(job) and "TRANSFORM" not in verdicts(job)


def test_a_temperature_and_zeros_in_the_mask_are_two_faults(job):
    def streams(step):
        tempered = lambda x: log_softmax(x / 0.7)  # noqa: E731  two sides, one line each
        s = make_sampled(step, tempered, log_softmax, sampled_of=tempered)
        s.engine[:20, 30:46] = 0.0
        s.old[:20, 30:46] = s.cur[:20, 30:46] = -s.rng.exponential(4.0, (20, 16))
        return s

    play(job, 8, streams)

    assert "TRANSFORM/temperature" in kinds(job, still_open=True)
    assert kinds(job) <= {"TRANSFORM/temperature", "DATA/masked_span"}


def test_zeros_in_the_mask_make_no_cut_distribution(job):
    def streams(step):
        s = make_streams(step, disc=0.03)
        s.engine[:, 30:46] = 0.0
        s.old[:, 30:46] = s.cur[:, 30:46] = -s.rng.exponential(4.0, (len(s.old), 16))
        return s

    play(job, 14, lambda step: streams(step) if step >= 6 else make_streams(step, disc=0.03))

    assert kinds(job) == {"DATA/masked_span"}


# -- few steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "found"), [(1, set()), (4, {"ENGINE/changed"})])
def test_a_small_change_of_the_engine_needs_steps_before_it_to_be_told_from_chance(job, known, found):
    play(job, known + 3, lambda step: make_streams(step, rows=96, disc=0.006 if step < known else 0.0105))

    assert kinds(job) == found


# -- jobs without a middle stream, and a training pass that is broken alone ------------------------------------------


def asynchronous(step, damage, *, rows=64, since=6, with_old=True):
    """Rows two versions old from step 2 on; `damage(streams)` from step `since` on."""
    s = make_streams(step, rows=rows, disc=0.03, lag=0.02 * min(step, 2))
    if step >= since:
        damage(s)
    old = {} if with_old else {"old_N": None, "old_is": "absent"}
    return s.train(gen_version=max(step - 2, 0), **old)


def roll_engine(s):
    s.engine = np.roll(s.engine, 1, 0)


def shift_engine(s):
    s.engine = shifted(s.engine, 1, s.rng)


def halve_engine(s):
    """Base 2 for base e."""
    s.engine = s.engine / np.log(2.0)


@pytest.mark.parametrize("since", [0, 6])
@pytest.mark.parametrize(
    ("damage", "wanted"),
    [(roll_engine, "DATA/wrong_pairing"), (shift_engine, "DATA/offset"), (halve_engine, "TRANSFORM/temperature")],
)
def test_torn_or_transformed_rows_of_old_weights_are_no_lag_where_no_middle_stream_tells_it(job, damage, wanted, since):
    for step in range(14):
        job.step(step, asynchronous(step, damage, since=since, with_old=False), scalars=MOVES)

    assert wanted in kinds(job) and "LAG" not in verdicts(job) and not sent(job, "RESYNC")


def roll_cur(s):
    s.cur = np.roll(s.cur, 1, 0)


def shift_cur(s):
    s.cur = shifted(s.cur, 1, s.rng)


@pytest.mark.parametrize("damage", [roll_cur, shift_cur])
def test_a_training_pass_over_other_rows_is_no_lag(job, damage):
    for step in range(14):
        job.step(step, asynchronous(step, damage), scalars=MOVES)

    assert kinds(job) == {"ENGINE/trainer_noise"} and not sent(job, "RESYNC")


def test_lag_so_large_that_the_two_passes_hardly_agree_is_lag_all_the_same(job):
    for step in range(14):
        s = make_streams(step, rows=64, disc=0.02, lag=0.4 * step)
        job.step(step, s.train(gen_version=0), scalars=MOVES)

    assert "LAG" in verdicts(job) and "ENGINE/trainer_noise" not in kinds(job) and sent(job, "RESYNC")


def test_a_few_torn_rows_beside_many_old_ones_end_no_job(job):
    job = Job(mode="abort", dtypes=BF16)
    for step in range(10):
        s = make_streams(step, rows=96, disc=0.03)
        if step >= 3:
            old = s.rows(0.3)
            s.engine[old] = np.minimum(s.engine[old] + s.rng.normal(size=s.engine[old].shape) * 1.5, -1e-4)
            s.engine[:2] = np.roll(s.engine[:2], 3, 1)
        job.step(step, s.train(), scalars=MOVES)

    assert not [f for f in job.report()["findings"] if f["verdict"] == "DATA" and f["catastrophic"]]


def test_a_column_of_zeros_ends_the_job(job):
    job = Job(mode="abort", dtypes=BF16)
    for step in range(8):
        s = make_streams(step, disc=0.03)
        if step >= 4:
            s.engine[:] = 0.0
        job.step(step, s.train(), scalars=MOVES)

    assert "DATA/exact_zeros" in kinds(job) and sent(job, "ABORT") == [4]


def test_hand_made_last_tokens_leave_the_sample_of_rows_whole():
    """The draw of a row is made of its ends: of equal ones alone it would be of few values."""
    job = Job(dtypes={"engine": "float16", "trainer": "float16"})
    for step in range(40):
        s = make_streams(step, rows=64, length=1024, disc=0.005)
        s.engine[:, -1] = 0.0
        s.old[:, -1] = s.cur[:, -1] = make_policy((64,), s.rng, certain=0.0)
        job.step(step, s.train(), scalars=MOVES)

    assert kinds(job) == {"DATA/last_token"}


@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_cache_that_one_request_of_eight_fills_is_found(job, seed):
    for step in range(14):
        s = make_streams(step, rows=32, disc=0.03, seed=seed)
        fresh = np.arange(32) % 8 == 0
        if step >= 6:
            s.engine[~fresh] -= make_noise(s.old[~fresh], 0.25, s.rng)
        for name, rows in (("fresh", fresh), ("cached", ~fresh)):
            part = make_streams(step, rows=int(rows.sum()))
            part.old, part.cur, part.engine = s.old[rows], s.cur[rows], s.engine[rows]
            ids = tuple(f"{name}{step}-{i}" for i in range(int(rows.sum())))
            rollout = part.rollout(ids=ids)
            cached = np.full(len(ids), 64 if name == "cached" else 0, np.int64)
            job.feed(replace(rollout, cached_tokens_S=cached), numbered=False)
            train = part.train(ids=ids, with_engine=False, span_start_K=None, span_version_K=None, micro=len(name))
            job.feed(train, numbered=False)
        job.feed(StepEnd(job.source, step), numbered=False)

    assert "STALE_ENGINE/cached_prefix" in kinds(job)


def test_an_engine_column_that_is_the_trainers_own_is_unwired_and_nothing_else(job):
    for step in range(14):
        s = make_streams(step, disc=0.03, lag=0.05 * min(step, 2))
        s.engine = s.cur.copy()
        job.step(step, s.train(gen_version=max(step - 2, 0)), scalars=MOVES)

    assert kinds(job, still_open=True) == {"UNWIRED/total_always_zero"}


# -- places ------------------------------------------------------------------------------------------------------------


def with_tools(step, seed=0):
    """32 rows with three masked spans each, at places of their own."""
    s = make_streams(step, rows=32, length=256, disc=0.03, seed=seed)
    starts = 10 + 80 * np.arange(3)[None, :] + s.rng.integers(0, 60, (32, 3))
    s.mask = np.ones(s.shape, np.bool_)
    for row, at in np.ndindex(starts.shape):
        s.mask[row, starts[row, at] : starts[row, at] + 12] = False
    return s, starts


@pytest.mark.parametrize("late", [True, False])
def test_a_mask_that_begins_a_token_late_is_a_turn_edge_like_one_that_ends_early(job, late):
    for step in range(8):
        s, starts = with_tools(step)
        for row, at in np.ndindex(starts.shape):
            edge = starts[row, at] - 1 if late else starts[row, at] + 12
            # the value of another token
            s.old[row, edge] = s.cur[row, edge] = -s.rng.exponential(4.0)
            s.engine[row, edge] = -s.rng.exponential(4.0)
        job.step(step, s.train(), scalars=MOVES)

    assert kinds(job) == {"DATA/turn_edge"}


def test_numerics_that_grow_along_long_rows_are_no_wrong_labels(job):
    rng = np.random.default_rng(0)
    for step in range(16):
        s = make_streams(step, rows=48, length=512, disc=0.03)
        s.mask = np.arange(512)[None, :] < rng.integers(40, 512, (48, 1))
        if step >= 6:
            s.engine = np.minimum(s.old - make_noise(s.old, 0.6, s.rng) * (np.arange(512) / 512) ** 2, 0.0)
        job.step(step, s.train(), scalars=MOVES)

    assert "ENGINE/position" in kinds(job) and verdicts(job) == {"ENGINE"}
