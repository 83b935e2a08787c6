"""Public cases of engines: numerics, stale caches and failed syncs, MoE and quantisation."""

from __future__ import annotations

import numpy as np
from cases.play import MOVES, at_level, new_checksum, play, shrug
from factories_streams import make_policy, make_streams


def bf16_floor(job):
    play(job, 8, lambda step: make_streams(step, disc=0.045, length=1500).train(), checksum_at=new_checksum)


def trainer_against_itself(job):
    # 60 % of ratios outside [0.9, 1.1] = an rms of 0.19, whichever token: batch shape, not rarity, decides
    def records(step):
        s = make_streams(step, disc=0.03)
        s.cur = np.minimum(s.old + s.rng.normal(0.0, 0.19, s.shape), 0.0)
        return s.train()

    play(job, 12, records, checksum_at=new_checksum)


def one_sided_head(job):
    at_level(job, 24, lambda step: 0.0022 if step < 12 else 0.040)


def slow_drift(job):
    # rms is about three times mean |x| on these streams
    def mean_abs(step):
        return 0.011 + 0.025 * step / 30 if step < 30 else 0.036 * (1.09 / 0.036) ** ((step - 30) / 66)

    at_level(job, 96, lambda step: 3.0 * mean_abs(step))


def engine_off_from_the_start(job):
    at_level(job, 10, lambda step: 0.15)


def high_and_rising(job):
    # correlation of the probabilities 0.95 at step 0, 0.5 at the end
    def records(step):
        return make_streams(step, disc=0.40 + 0.024 * step, certain=0.4).train()

    play(job, 30, records, checksum_at=new_checksum, obey=shrug)


def wrong_angles(job):
    def records(step):
        s = make_streams(step, disc=0.33, rows=128)
        s.engine[0, 50] = -44.0
        return s.train()

    play(job, 3, records)


def rare_tokens_after_tools(job):
    def records(step):
        s = make_streams(step, disc=0.02)
        after_tool = np.zeros(s.shape, bool)
        after_tool[:, 48:64] = True
        rare = after_tool & (s.old < -1.5)
        s.engine = np.where(rare & (step >= 6), np.minimum(s.old - s.rng.normal(0.0, 1.0, s.shape), 0.0), s.engine)
        return s.train()

    play(job, 14, records, checksum_at=new_checksum)


def never_delivered(job):
    # labels alternate between ages 0 and 1 with the little lag that honest labels would show
    def records(step):
        disc = max(0.01, 0.012 * (step - 8))
        young = make_streams(step, disc=disc)
        aged = make_streams(step, disc=disc, lag=0.01, seed=1)
        ids = tuple(f"a{step}-{i}" for i in range(32))
        return [young.train(), aged.train(gen_version=max(step - 1, 0), ids=ids, micro=1)]

    play(job, 45, records, checksum_at=lambda step: f"c{min(step, 8)}", obey=shrug)


def dropped_by_sleep(job):
    weights = {"lost": False}

    def records(step):
        if step == 5:
            weights["lost"] = True
        # mean |x| 0.010, 0.018, then 0.20; the control stays at 0.015
        rms = 0.33 if weights["lost"] else 0.017 if step < 3 else 0.031 if step < 5 else 0.025
        return make_streams(step, disc=rms, certain=0.1).train()

    def obey(step):
        weights["lost"] = False

    def scalars(step):
        return {"lr": 0.0 if step < 4 else 1e-6, "grad_norm": 0.7}

    play(job, 14, records, scalars_at=scalars, checksum_at=lambda step: f"c{max(step, 3)}", obey=obey)


def stale_decode_cache(job):
    cache = {"since": 1}

    def records(step):
        return make_streams(step, disc=max(0.03, 0.04 * (step - cache["since"]))).train()

    def obey(step):
        cache["since"] = 10**6

    play(job, 30, records, checksum_at=new_checksum, obey=obey)


def garbage_after_first_update(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        if step:
            s.engine = make_policy(s.shape, s.rng, certain=0.05)
        return s.train()

    play(job, 4, records, scalars_at=lambda step: MOVES | {"entropy": 2.5 if step else 0.4}, checksum_at=new_checksum)


def bad_release(job):
    # mismatch KL 0.19 = an rms of about 0.62
    play(job, 8, lambda step: make_streams(step, disc=0.62, rows=64).train(), checksum_at=new_checksum)


def good_release(job):
    at_level(job, 8, lambda step: 0.22)


def adapter_unused(job):
    stuck = lambda step: 0.03 * max(step - 10, 0)  # noqa: E731
    play(
        job,
        32,
        lambda step: make_streams(step, disc=max(0.01, stuck(step))).train(),
        scalars_at=lambda step: MOVES | {"displacement_nats": 0.03},
        checksum_at=new_checksum,
        obey=shrug,
    )


def cached_reload(job):
    play(
        job,
        40,
        lambda step: make_streams(step, disc=max(0.01, 0.02 * (step - 3))).train(),
        checksum_at=lambda step: f"c{min(step, 3)}",
        obey=shrug,
    )


def kl_course(job, first_kl, last_kl, steps=64):
    # k3 = rms^2 / 2 for small noise
    at_level(job, steps, lambda step: float(np.sqrt(2 * (first_kl + (last_kl - first_kl) * step / (steps - 1)))))


def fp8_tensorwise(job):
    kl_course(job, 0.0100, 0.0313)


def bf16_slow(job):
    kl_course(job, 0.0063, 0.0089)


def mxfp8_flat(job):
    kl_course(job, 0.0095, 0.0087)


def intermittent(job):
    bad = {3, 5, 6, 9, 10, 12, 14, 15}
    at_level(job, 16, lambda step: 0.28 if step in bad else 0.06)


def router_tail(job):
    def records(step):
        s = make_streams(step, disc=0.05)
        share = 0.001 + 0.03 * max(step - 10, 0) / 30
        hit = (s.rng.random(s.shape) < share / 0.38) & (s.old < -0.1)
        jump = s.rng.choice([-1.0, 1.0], s.shape) * s.rng.uniform(0.8, 2.0, s.shape)
        s.engine = np.where(hit, np.minimum(s.old + jump, 0.0), s.engine)
        return s.train()

    play(job, 40, records, checksum_at=new_checksum, obey=shrug)


def rounded_away(job):
    # the part that rounding loses is a fifth of the movement
    play(
        job,
        36,
        lambda step: make_streams(step, disc=max(0.01, 0.02 * (step - 8))).train(),
        scalars_at=lambda step: MOVES | {"displacement_nats": 0.1},
        checksum_at=new_checksum,
        obey=shrug,
    )
