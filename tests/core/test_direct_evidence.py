"""What tells old weights, an unwired stream or a part of the requests at once, and what only looks like it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import Job, commands, make_source
from factories_streams import kept, log_softmax, make_noise, make_policy, make_sampled, make_streams

from dlc_sentinel.records import Hello

BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}
MOVES = {"lr": 1e-6, "grad_norm": 0.7}


@pytest.fixture
def job():
    return Job(mode="abort", dtypes=BF16)


def play(job, steps, streams_at, *, first=0, heal=None, **train):
    """Steps of `streams_at(step)` (streams or records); a RESYNC is answered, and does what `heal` does."""
    for step in range(first, first + steps):
        made = streams_at(step)
        records = made if isinstance(made, list) else [made.train(source=job.source, **train)]
        events = job.step(step, *records, scalars=MOVES)
        job.synced(step + 1, step, checksum=f"c{step}")
        for command in commands(events):
            if command["kind"] == "RESYNC" and command["sent"]:
                if heal:
                    heal()
                job.ack(command, version=step + 1, step=step)


def off(s, rms, rows=slice(None), places=slice(None)):
    """The same streams with numerics of that rms in some rows or places."""
    noisy = np.minimum(s.old - make_noise(s.old, rms, s.rng), -1e-6)
    s.engine[rows, places] = noisy[rows, places]
    return s


def kinds(job):
    return {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"]}


def still_open(job):
    return {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"] if f["state"] in ("suspected", "confirmed")}


def sent(job):
    return [c["kind"] for c in job.report()["commands"]]


# -- old weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rms", [0.15, 0.4])
def test_a_process_that_goes_on_with_an_engine_on_base_weights_gets_its_RESYNC_and_no_ABORT(job, rms):
    bad = []
    play(job, 20, lambda step: make_streams(step, disc=0.03))
    job.source, job.frame_no = make_source(producer="p1"), 0
    job.feed(Hello(job.source, "tiny", dtypes=BF16))
    bad.append(True)
    play(job, 12, lambda step: make_streams(step, disc=rms if bad else 0.03), first=20, heal=bad.clear)

    assert kinds(job) == {"STALE_ENGINE/after_resume"} and sent(job) == ["RESYNC"]


def test_an_engine_that_breaks_long_after_a_resume_gets_its_ABORT(job):
    play(job, 10, lambda step: make_streams(step, disc=0.03))
    job.source, job.frame_no = make_source(producer="p1"), 0
    play(job, 20, lambda step: make_streams(step, disc=0.4 if step >= 20 else 0.03), first=10)

    assert sent(job) == ["ABORT"]


def of_replicas(step, num, rms, rows=16):
    """Records of `num` replicas, of which the last has numerics of that rms."""
    records = []
    for replica in range(num):
        s = make_streams(step, rows=rows, disc=rms if replica == num - 1 else 0.03, seed=replica)
        names = tuple(f"{replica}-{step}-{i}" for i in range(rows))
        records.append(s.train(ids=names, groups=names, micro=replica, replica=str(replica)))
    return records


@pytest.mark.parametrize(("num", "rms"), [(4, 0.5), (2, 0.3), (16, 0.3)])
def test_one_replica_that_jumps_is_suspected_of_old_weights_and_one_RESYNC_tells(job, num, rms):
    bad = [True]
    play(job, 24, lambda step: of_replicas(step, num, rms if bad and step >= 10 else 0.03), heal=bad.clear)

    assert kinds(job) == {"STALE_ENGINE/one_replica"} and still_open(job) == set() and sent(job) == ["RESYNC"]


def test_two_replicas_of_eight_that_are_off_are_named(job):
    def records(step):
        made = of_replicas(step, 8, 0.36, rows=8)
        made[3] = off(make_streams(step, rows=8, disc=0.03, seed=3), 0.36).train(
            ids=made[3].ids, groups=made[3].groups, micro=3, replica="3"
        )
        return made

    play(job, 16, records)

    (found,) = [f for f in job.report()["findings"] if f["kind"] == "one_replica"]
    assert found["evidence"]["one_replica_differs"] == "3, 7" and "LABEL" not in str(kinds(job))


def on_prefix_cache(job, step, rms):
    """Rows of which every other one took its prompt from the cache, reported by the engine."""
    s = off(make_streams(step, rows=64, disc=0.03), rms, rows=slice(None, None, 2))
    job.feed(replace(s.rollout(version=step), cached_tokens_S=np.tile([256, 0], 32)), numbered=False)
    return [s.train(with_engine=False, span_start_K=None, span_version_K=None, source=job.source)]


@pytest.mark.parametrize("heals", [True, False])
def test_a_prefix_cache_of_old_weights_is_a_stale_engine_until_a_reset_changes_nothing(job, heals):
    bad = [True]
    heal = bad.clear if heals else None
    play(job, 30, lambda step: on_prefix_cache(job, step, 0.12 if bad and step >= 8 else 0.03), heal=heal)

    ended = {f["kind"] for f in job.report()["findings"] if f["verdict"] == "STALE_ENGINE"}
    assert ended == {"cached_prefix"} and "LABEL" not in str(kinds(job)) and sent(job) == ["RESYNC"]
    assert still_open(job) == (set() if heals else {"ENGINE/some_requests"})


@pytest.mark.parametrize(("dtype", "fresh", "cached"), [("float32", 1e-5, 1e-4), ("bfloat16", 0.001, 0.008)])
def test_cached_rows_that_are_noisier_than_others_but_at_their_floor_are_no_stale_cache(dtype, fresh, cached):
    job = Job(mode="abort", dtypes={"engine": dtype, "trainer": dtype})

    def records(step):
        s = off(make_streams(step, rows=64, disc=fresh), cached, rows=slice(None, None, 2))
        job.feed(replace(s.rollout(version=step), cached_tokens_S=np.tile([256, 0], 32)), numbered=False)
        return [s.train(with_engine=False, span_start_K=None, span_version_K=None, source=job.source)]

    play(job, 12, records)

    assert kinds(job) == set() and sent(job) == []


def test_cached_prompts_whose_answers_are_less_sure_are_no_stale_cache(job):
    def records(step):
        sure, open_ended = of_entropy(step, 0.94), of_entropy(step, 0.1)
        sure.engine[::2], sure.old[::2], sure.cur[::2] = (
            x[::2] for x in (open_ended.engine, open_ended.old, open_ended.old)
        )
        job.feed(replace(sure.rollout(version=step), cached_tokens_S=np.tile([256, 0], 24)), numbered=False)
        return [sure.train(with_engine=False, span_start_K=None, span_version_K=None, source=job.source)]

    play(job, 16, records)

    assert kinds(job) == set()


def in_flight(step, rms, disc=0.03):
    """Rows whose second half was generated by the newest weights, on the first half's cache."""
    s = off(make_streams(step, rows=32, length=192, disc=disc), rms, places=slice(96, None))
    s.cur = np.minimum(s.old + make_noise(s.old, 0.02, s.rng), 0.0)
    starts, before = np.arange(64) * 96, max(step - 1, 0)
    return [s.train(span_start_K=starts, span_version_K=np.tile([before, step], 32))]


@pytest.mark.parametrize("rms", [0.3, 0.6])
def test_tokens_on_a_kept_cache_that_are_far_off_are_a_stale_engine_and_get_one_RESYNC(job, rms):
    play(job, 40, lambda step: in_flight(step, rms if step >= 8 else 0.03))

    assert kinds(job) == {"STALE_ENGINE/stale_kv"} == still_open(job) and sent(job) == ["RESYNC"]
    assert [c for c in commands(job.events) if c["reset_cache"]]


@pytest.mark.parametrize(("dtype", "disc", "rms"), [("bfloat16", 0.03, 0.075), ("float32", 0.0008, 0.04)])
def test_a_kept_cache_of_the_last_weights_is_no_fault(dtype, disc, rms):
    job = Job(mode="abort", dtypes={"engine": dtype, "trainer": dtype})
    play(job, 24, lambda step: in_flight(step, rms, disc))

    assert kinds(job) == set()


def test_an_engine_that_is_off_from_the_first_update_on_gets_a_RESYNC_before_any_ABORT(job):
    bad = [True]
    play(job, 14, lambda step: make_streams(step, disc=0.3 if bad and step >= 1 else 0.03), heal=bad.clear)

    assert kinds(job) == {"STALE_ENGINE/stale_or_drift"} and sent(job) == ["RESYNC"]


def test_garbage_from_the_first_update_on_is_a_catastrophe_at_once(job):
    def streams(step):
        s = make_streams(step, disc=0.03, certain=0.3)
        if step >= 1:
            s.engine = np.where(s.rng.random(s.shape) < 0.35, s.old, make_policy(s.shape, s.rng, certain=0.3))
        return s

    play(job, 4, streams)

    assert "ENGINE/level" in still_open(job)
    assert sent(job) == ["ABORT"] and job.report()["commands"][0]["step"] == 1


# -- numbers that cannot move -----------------------------------------------------------------------------------------


def recomputed(step, updates, rms):
    """Rows two versions old whose `old` is what the trainer makes of them now: all of the lag is in `engine`."""
    records = []
    for update in range(updates):
        s = make_streams(step, rows=24, disc=rms, seed=update)
        s.cur = np.minimum(s.old + make_noise(s.old, 0.01 * update, s.rng), 0.0) if update else s.old.copy()
        names = tuple(f"{update}-{step}-{i}" for i in range(24))
        records.append(s.train(update=update, gen_version=max(step - 2, 0), ids=names))
    return records


@pytest.mark.parametrize("updates", [1, 4])
def test_a_recomputed_old_is_unwired_however_many_updates_there_are_and_accuses_no_engine(job, updates):
    play(job, 24, lambda step: recomputed(step, updates, 0.2 if step > 8 else 0.036))

    assert kinds(job) == {"UNWIRED/lag_always_zero"} and sent(job) == []


@pytest.mark.parametrize(("age", "wanted"), [(2, {"UNWIRED/total_always_zero"}), (0, set())])
def test_an_engine_stream_that_equals_the_trainers_bit_by_bit_is_a_copy_where_the_rows_are_old(job, age, wanted):
    def streams(step):
        s = make_streams(step)
        s.engine = s.cur.copy()
        return [s.train(gen_version=max(step - age, 0), old_N=None, old_is="absent")]

    play(job, 12, streams)

    assert kinds(job) == wanted


@pytest.mark.parametrize("stream", ["cur", "engine"])
def test_a_step_without_a_single_value_gets_its_ABORT(job, stream):
    def streams(step):
        s = make_streams(step, disc=0.03)
        if step >= 10:
            setattr(s, stream, np.full(s.shape, np.nan))
        return s

    play(job, 16, streams)

    assert still_open(job) >= {"DATA/non_finite"} and sent(job) == ["ABORT"]


def test_rows_that_fit_the_present_weights_and_not_their_label_send_nothing(job):
    def streams(step):
        s = make_streams(step, disc=0.03)
        if step:
            s.cur, s.old = s.old.copy(), np.minimum(s.old + make_noise(s.old, 0.2, s.rng), 0.0)
        return [s.train(gen_version=max(step - 1, 0))]

    play(job, 24, streams)

    assert "LABEL/other_version" in still_open(job) and sent(job) == []


# -- a part of the requests -------------------------------------------------------------------------------------------


def test_a_long_rows_kernel_is_named_and_is_no_wrong_label(job):
    def records(step):
        made = []
        for k, (rows, length) in enumerate([(24, 120), (12, 700)]):
            s = make_streams(step, rows=rows, length=length, disc=0.36 if length > 500 and step >= 4 else 0.03, seed=k)
            names = tuple(f"{k}-{step}-{i}" for i in range(rows))
            made.append(s.train(ids=names, groups=names, micro=k))
        return made

    play(job, 14, records)

    (found,) = [f for f in job.report()["findings"] if f["verdict"] == "ENGINE" and f["state"] == "confirmed"]
    assert found["kind"] == "long_rows" and "LABEL" not in str(kinds(job))


@pytest.mark.parametrize("share", [0.01, 0.03])
def test_a_tail_that_was_there_from_the_start_and_lifts_the_floor_is_found(job, share):
    def streams(step):
        s = make_streams(step, rows=48, length=256, disc=0.03)
        hit = (s.rng.random(s.shape) < share / 0.38) & (s.old < -0.1)
        jump = s.rng.choice([-1.0, 1.0], s.shape) * s.rng.uniform(0.8, 2.5, s.shape)
        s.engine = np.where(hit, np.minimum(s.engine + jump, -1e-6), s.engine)
        return s

    play(job, 10, streams)

    assert still_open(job) == {"ENGINE/tail"}


@pytest.mark.parametrize(("length", "rms"), [(64, 0.5), (256, 0.5), (256, 1.0)])
def test_an_engine_that_is_off_in_all_requests_from_the_start_is_so_at_its_level(length, rms):
    job = Job(mode="observe", dtypes=BF16)
    play(job, 8, lambda step: make_streams(step, rows=48, length=length, disc=rms))

    assert still_open(job) == {"ENGINE/level"}


def test_prompts_that_were_off_from_the_start_are_named(job):
    play(job, 10, lambda step: off(make_streams(step, rows=64, disc=0.03), 0.36, rows=slice(0, 16)))

    assert still_open(job) == {"ENGINE/prompt_keyed"}


@pytest.mark.parametrize(("share", "clean"), [(0.25, 0), (0.5, 0), (0.25, 4)])
def test_a_temperature_on_some_of_the_rows_is_a_transform_and_no_wrong_label(job, share, clean):
    def streams(step):
        cold = lambda x: log_softmax(x / 0.6)  # noqa: E731  two sides, one line each
        s = make_sampled(step, log_softmax, log_softmax, rows=64)
        if step < clean:
            return s
        other = make_sampled(step, cold, log_softmax, sampled_of=cold, rows=64, seed=1)
        which = s.rows(share)
        s.engine[which], s.old[which] = other.engine[which], other.old[which]
        s.cur = s.old.copy()
        return s

    play(job, 10, streams)

    assert kinds(job) == {"TRANSFORM/temperature"}


def test_a_cut_distribution_on_one_replica_is_a_transform(job):
    def records(step):
        made = []
        for replica in range(4):
            side = (lambda x: kept(log_softmax(x), top_p=0.7)) if replica == 3 else log_softmax
            s = make_sampled(step, side, log_softmax, rows=24, seed=replica)
            names = tuple(f"{replica}-{step}-{i}" for i in range(24))
            made.append(s.train(ids=names, groups=names, micro=replica, replica=str(replica)))
        return made

    play(job, 12, records)

    assert "TRANSFORM/kept_mass" in still_open(job) and "LABEL/some_rows" not in kinds(job)


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("offset", [-2, 1])
def test_a_sampling_transform_is_found_beside_rows_that_are_shifted(job, share, offset):
    def streams(step):
        s = make_sampled(step, lambda x: log_softmax(x / 0.8), log_softmax, rows=48)
        shifted = slice(round(share * 48))
        s.engine[shifted] = np.roll(s.engine[shifted], offset, axis=1)
        return s

    play(job, 12, streams)

    assert still_open(job) == {"DATA/offset", "TRANSFORM/temperature"}


@pytest.mark.parametrize("first", [0, 5])
def test_prefixes_that_are_broken_in_all_rows_stay_found(job, first):
    def streams(step):
        s = make_streams(step, rows=48, length=256, disc=0.03)
        for row in range(48 if step >= first else 0):
            at = int(s.rng.integers(60, 160))
            s.old[row, at:] = s.cur[row, at:] = make_policy(256 - at, s.rng)
        return s

    play(job, 12, streams)

    assert still_open(job) == {"DATA/broken_prefix"}


@pytest.mark.parametrize(("every", "rms"), [(3, 0.06), (5, 0.03), (10, 0.06)])
def test_an_engine_that_gets_only_some_of_the_syncs_its_labels_name_is_stale_and_no_broken_engine(job, every, rms):
    last, now = [0], [0]

    def streams(step):
        now[0] = step
        if step < 8 or step - last[0] >= every:
            last[0] = step
        s = make_streams(step, rows=48, length=200, lag=rms * (step - last[0]))
        s.old = s.cur.copy()
        return s

    play(job, 48, streams, heal=lambda: last.__setitem__(0, now[0] + 1))

    assert still_open(job) == {"STALE_ENGINE/some_syncs"}
    assert sent(job) == ["RESYNC"] * 3


def some_syncs(step, rms, *, every=3, first=8, last=10**9):
    """Weights that arrive at every third step only, `rms` nats of movement a step."""
    s = make_streams(step, rows=48, length=200, lag=rms * ((step - first) % every) if first <= step <= last else 0.0)
    s.old = s.cur.copy()
    return s


def test_missed_syncs_that_grow_are_no_catastrophe_of_the_engine(job):
    play(job, 44, lambda step: some_syncs(step, 0.06 if step < 28 else 0.3))

    assert "ABORT" not in sent(job) and still_open(job) == {"STALE_ENGINE/some_syncs"}


def test_missed_syncs_that_have_ended_are_no_longer_said(job):
    play(job, 48, lambda step: some_syncs(step, 0.06, last=26))

    assert "STALE_ENGINE/some_syncs" in kinds(job) and still_open(job) == set()


@pytest.mark.parametrize(("off_steps", "of"), [(2, 4), (3, 5), (3, 4)])
def test_numerics_that_come_and_go_and_do_not_grow_are_no_missed_syncs(job, off_steps, of):
    play(job, 48, lambda step: make_streams(step, disc=0.12 if step >= 8 and step % of < off_steps else 0.02))

    assert still_open(job) == {"ENGINE/level"} and sent(job) == []


# -- what only looks like it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("certain", "length"), [(0.9, 24), (0.95, 96), (0.95, 256), (0.8, 32)])
@pytest.mark.parametrize(("dtype", "disc"), [("bfloat16", 0.03), ("moe", 0.06)])
def test_rows_of_a_policy_that_is_all_but_sure_are_not_of_two_kinds(certain, length, dtype, disc):
    job = Job(mode="abort", dtypes={"engine": dtype, "trainer": "bfloat16"})
    play(job, 20, lambda step: make_streams(step, rows=48, length=length, disc=disc, certain=certain))

    assert kinds(job) == set()


def of_entropy(step, certain, sigma=0.03):
    """Numerics that are the same for each token, whatever the others are."""
    s = make_streams(step, rows=48, length=200, certain=certain)
    weight = -np.expm1(s.old) * (1 - s.old / 2)
    s.engine = np.minimum(s.old - sigma * weight * s.rng.normal(size=s.shape), 0.0)
    return s


@pytest.mark.parametrize("certain_at", [lambda k: 0.95 - 0.022 * min(k, 30), lambda k: 0.85 if k < 12 else 0.3])
def test_numerics_that_grow_because_the_policy_is_less_sure_are_no_fault(job, certain_at):
    play(job, 40, lambda step: of_entropy(step, certain_at(step)))

    assert kinds(job) == set()


def test_numerics_that_grow_while_the_policy_is_as_sure_as_before_are_a_fault(job):
    play(job, 20, lambda step: of_entropy(step, 0.8, 0.03 if step < 8 else 0.15))

    assert any(name.startswith("ENGINE") for name in still_open(job))


def test_numerics_that_shrink_because_the_policy_is_surer_again_are_no_fault(job):
    play(job, 48, lambda step: of_entropy(step, 0.2 if 8 <= step <= 40 else 0.9))

    assert kinds(job) == set()


def test_a_change_of_the_engine_is_found_between_steps_of_sure_and_of_open_ended_data(job):
    play(job, 36, lambda step: of_entropy(step, 0.85 if step % 2 else 0.3, 0.03 if step < 12 else 0.07))

    assert kinds(job) == {"ENGINE/changed", "ENGINE/level"} and still_open(job) == {"ENGINE/level"}


def test_a_step_in_fifteen_that_is_three_times_as_far_off_is_no_change_of_the_engine(job):
    play(job, 60, lambda step: make_streams(step, disc=0.09 if step % 15 == 14 else 0.03))

    assert kinds(job) == set()


# -- steps of few tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("disc", "wanted"), [(0.3, {"ENGINE/level"}), (0.03, set())])
def test_an_engine_that_is_off_is_found_though_no_step_has_tokens_enough_to_tell(job, disc, wanted):
    play(job, 30, lambda step: make_streams(step, rows=8, length=20, disc=disc if step >= 8 else 0.03))

    assert {name for name in kinds(job) if name != "ENGINE/changed"} == wanted


def test_a_few_strays_in_small_steps_are_no_tail(job):
    def streams(step):
        s = make_streams(step, rows=8, length=40, disc=0.03)
        if step >= 12:
            s.engine.reshape(-1)[s.rng.choice(s.engine.size, 2, replace=False)] -= 0.33
        return s

    play(job, 30, streams)

    assert kinds(job) == set()


# -- lag that is none -------------------------------------------------------------------------------------------------


def with_noise(job, noise, *, first=0, per_age=0.0, steps=50):
    """A job that syncs at a RESYNC only; the trainer's two passes differ by `noise` nats from `first` on."""
    generated = 0
    for step in range(steps):
        s = make_streams(step, rows=32, length=200, disc=0.01)
        rms = np.hypot(noise if step >= first else 0.0, per_age * (step - generated))
        s.cur = np.minimum(s.old + s.rng.normal(0.0, 1.0, s.shape) * rms, 0.0)
        for command in commands(job.step(step, s.train(version=step, gen_version=generated), scalars=MOVES)):
            if command["sent"]:
                generated = step + 1
                job.ack(command, version=step + 1, step=step)


@pytest.mark.parametrize(("first", "resyncs"), [(0, 0), (15, 1)])
def test_what_the_trainers_own_two_passes_differ_by_is_no_lag_that_a_RESYNC_could_cure(job, first, resyncs):
    with_noise(job, 0.3, first=first)

    assert still_open(job) == {"ENGINE/trainer_noise"} and sent(job) == ["RESYNC"] * resyncs


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_lag_is_lag_beside_a_trainer_that_is_a_little_noisy(job, noise):
    with_noise(job, noise, per_age=0.05)

    assert kinds(job) == {"LAG/old_weights"} and len(sent(job)) >= 5


def test_an_engine_that_hovers_about_the_line_from_the_start_is_not_stale(job):
    def streams(step):
        s = make_streams(step, rows=48, length=256)
        s.engine = np.minimum(s.old - s.rng.normal(0.0, 0.3, s.shape), 0.0)
        return s

    play(job, 16, streams)

    assert "STALE_ENGINE" not in str(kinds(job)) and sent(job) == []
