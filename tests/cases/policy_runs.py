"""Public cases of lag, of policies that collapse with the mismatch flat, and of false alarms."""

from __future__ import annotations

import numpy as np
from cases.play import MOVES, at_level, new_checksum, play
from factories_streams import Streams, make_noise, make_streams

from dlc_sentinel.records import Hello, Synced


def three_versions_behind(job):
    def records(step):
        age = min(step, 2 + step % 2)
        return make_streams(step, disc=0.03, lag=age * (0.02 + 0.003 * step)).train(gen_version=step - age)

    play(job, 40, records, checksum_at=new_checksum)


def entropy_stop_at_age_3(job):
    def records(step):
        age = min(step, 3)
        return make_streams(step, disc=0.02, lag=0.015 * age).train(gen_version=step - age)

    def scalars(step):
        reward = 0.137 + 0.1 * min(step, 50) / 50 if step < 60 else 0.237 * 0.9 ** (step - 60)
        return MOVES | {"entropy": 0.9 * (0.05 / 0.9) ** (step / 70), "reward": reward}

    play(job, 75, records, scalars_at=scalars, checksum_at=new_checksum)


def impossible_tokens(job):
    def records(step):
        s = make_streams(step, disc=0.02)
        hit = s.rng.random(s.shape) < 0.015
        s.old[hit] = s.cur[hit] = -2.0
        s.engine[hit] = -91.0
        return s.train()

    play(job, 6, records, checksum_at=new_checksum)


def ratio_of_one(job):
    play(
        job, 12, lambda step: make_streams(step, disc=0.1).train(gen_version=max(step - 2, 0)), checksum_at=new_checksum
    )


def resumed_on_old_weights(job):
    first, stale = 120, {"until": 125}

    def records(step):
        return make_streams(step, disc=0.3 if step < stale["until"] else 0.03).train()

    def obey(step):
        stale["until"] = step + 1

    play(job, 14, records, first=first, checksum_at=new_checksum, obey=obey)


def frozen_at_age_3(job):
    def records(step):
        return make_streams(step, disc=0.008).train(gen_version=max(step - 3, 0))

    scalars = {"lr": 1e-6, "grad_norm": 1e-9, "reward": 0.35, "entropy": 0.4}
    play(job, 60, records, scalars_at=lambda step: scalars, checksum_at=new_checksum)


def flat_mismatch(job, steps, scalars_at, disc=0.02, age=0):
    def records(step):
        behind = min(step, age)
        return make_streams(step, disc=disc, lag=0.01 * behind).train(gen_version=step - behind)

    play(job, steps, records, scalars_at=lambda step: MOVES | scalars_at(step), checksum_at=new_checksum)


def all_truncated(job):
    def scalars(step):
        part = min(step / 50, 1.0)
        return {
            "truncated_ratio": 0.05 + 0.934 * part, "response_length": 300 + 1700 * part,
            "reward": 0.6 * (1 - part) + 0.016, "entropy": 0.5 + 0.6 * part,
        }  # fmt: skip

    flat_mismatch(job, 64, scalars, age=1)


def entropy_collapse(job):
    def scalars(step):
        part = min(step / 60, 1.0)
        return {
            "entropy": 0.6 * (0.05 / 0.6) ** part, "response_length": 250 + 310 * part,
            "truncated_ratio": 0.02 + 0.13 * part, "reward": 0.88 - 0.11 * part,
        }  # fmt: skip

    flat_mismatch(job, 75, scalars, disc=0.03)


def barely_moving(job):
    def scalars(step):
        return {"reward": 0.35 + 0.05 * step / 80, "truncated_ratio": 0.69, "entropy": 0.4, "response_length": 900.0}

    flat_mismatch(job, 80, scalars)


def template_collapse(job):
    def scalars(step):
        return {"reward": 0.4 + 0.2 * step / 60, "truncated_ratio": 0.05, "entropy": 0.5, "response_length": 300.0}

    flat_mismatch(job, 60, scalars)


def masked_zeros(job):
    def records(step):
        s = make_streams(step, disc=0.02)
        s.mask = np.ones(s.shape, bool)
        s.mask[:, 30:60] = False
        s.engine[:, 30:60] = 0.0
        s.old[:, 30:60] = s.cur[:, 30:60] = -s.rng.exponential(8.0, (len(s.old), 30))
        return s.train()

    play(job, 10, records, checksum_at=new_checksum)


def spikes(job):
    def records(step):
        s = make_streams(step, disc=0.02)
        if step in (7, 18, 29):
            s.engine.reshape(-1)[s.rng.choice(s.engine.size, 3, replace=False)] = -9.0
        return s.train()

    play(job, 40, records, checksum_at=new_checksum)


def rising_average(job):
    at_level(job, 60, lambda step: 0.02 + 0.25 * step / 59)


def none_loaded_log(job):
    for step in range(12):
        job.step(step, make_streams(step, disc=0.03).train(), scalars=MOVES)
        job.feed(Synced(job.source, step + 1, step, label="0 of 310 loaded", tensors=0))


def nine_percent_out(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        s.cur = np.minimum(s.old + s.rng.normal(0.0, 0.06, s.shape), 0.0)
        return s.train()

    play(job, 20, records, checksum_at=new_checksum)


def wrong_metric(job):
    scalars = MOVES | {"rollout_corr/kl": -3.0, "sampling/sampling_logp_difference/mean": 0.9, "ppo_kl": 7.0}
    play(job, 12, lambda step: make_streams(step, disc=0.03).train(), scalars_at=lambda step: scalars)


def hidden_by_sign(job):
    def records(step):
        s = make_streams(step, disc=0.02)
        if step >= 6:
            x = make_noise(s.old, 0.25, s.rng)
            s.engine = np.minimum(s.old - (x - x.mean()), 0.0)
        return s.train()

    play(job, 14, records, checksum_at=new_checksum)


def every_fourth_step(job):
    def records(step):
        made = step // 4 * 4
        return make_streams(step, disc=0.03, lag=0.02 * (step - made)).train(gen_version=made)

    play(job, 40, records)


def clip_below_noise(job):
    job.feed(Hello(job.source, "tiny", sampling={"clip_ratio_low": 1e-5, "clip_ratio_high": 1e-5}))
    job.tick()


def offered_staleness(job):
    def records(step):
        age = min(step, step % 2)
        return make_streams(step, disc=0.02, lag=0.03 * age).train(gen_version=step - age)

    play(job, 20, records, scalars_at=lambda step: MOVES | {"sample/staleness_max": 3.0, "sample/staleness_mean": 0.75})


def shared_prefixes(job):
    def records(step):
        s: Streams = make_streams(step, disc=0.02, rows=40)
        for row in range(0, 40, 5):
            for other in range(row + 1, row + 5):
                shared = int(s.rng.integers(7, 57))
                for stream in (s.engine, s.old, s.cur):
                    stream[other, :shared] = stream[row, :shared]
        groups = tuple(f"g{step}-{i // 5}" for i in range(40))
        return s.train(groups=groups)

    play(job, 10, records, checksum_at=new_checksum)
