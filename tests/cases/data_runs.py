"""Public cases of plumbing and of sampling transforms."""

from __future__ import annotations

import numpy as np
from cases.play import MOVES, at_level, new_checksum, play
from factories import make_source
from factories_streams import kept, log_softmax, make_noise, make_policy, make_sampled, make_streams, shifted

from dlc_sentinel.records import Hello


def wrong_prompts(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        rows = s.rows(min(0.02 * step, 0.6))
        # another prompt's answer: unlikely here, and unrelated to what the engine saw
        s.old[rows] = make_policy((len(rows), s.shape[1]), s.rng, certain=0.4)
        s.cur[rows] = s.old[rows]
        return s.train()

    play(job, 36, records, scalars_at=lambda step: {"lr": 0.0, "grad_norm": 0.7}, checksum_at=new_checksum)


def shift_by_one(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        s.old = s.cur = shifted(s.old, 1, s.rng)
        return s.train()

    play(job, 6, records, checksum_at=new_checksum)


def short_by_three(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        whole = s.rollout()
        s.engine, s.old, s.cur = s.engine[:, :-3], s.old[:, :-3], s.cur[:, :-3]
        return [whole, s.train(with_engine=False, span_start_K=None, span_version_K=None)]

    play(job, 6, records)


def shifted_and_raw(job):
    def records(step):
        s = make_sampled(step, log_softmax, lambda x: log_softmax(x / 0.7), sampled_of=lambda x: log_softmax(x / 0.7))
        s.old = shifted(s.old, -1, s.rng)
        return s.train()

    play(job, 8, records, checksum_at=new_checksum)


def hand_made_end(job):
    def records(step):
        s = make_streams(step, disc=0.01, length=256)
        s.old[:, -1] = s.cur[:, -1] = -s.rng.exponential(0.8, len(s.old))
        s.engine[s.rows(0.95), -1] = 0.0
        return s.train()

    play(job, 10, records, checksum_at=new_checksum)


def second_end_id(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        return [s.rollout(finish="stop"), s.train(with_engine=False, span_start_K=None, span_version_K=None)]

    play(job, 10, records, scalars_at=lambda step: MOVES | {"truncated_ratio": 0.97, "response_length": 96.0})


def broken_prefix(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        engine_tokens = s.rng.integers(0, 1000, s.shape)
        s.tokens = engine_tokens.copy()
        for row in s.rows(0.3):
            at = int(s.rng.integers(10, 80))
            s.tokens[row, at:] = s.rng.integers(0, 1000, s.shape[1] - at)
            s.old[row, at:] = make_policy(s.shape[1] - at, s.rng, certain=0.5)
        s.cur = s.old.copy()
        rollout = s.rollout(tokens=engine_tokens)
        return [rollout, s.train(with_engine=False, span_start_K=None, span_version_K=None)]

    play(job, 8, records)


def tool_output_in_mask(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        for row in range(len(s.old)):
            at = int(s.rng.integers(20, 60))
            s.engine[row, at : at + 16] = 0.0
            s.old[row, at : at + 16] = -s.rng.exponential(4.0, 16)
        s.cur = s.old.copy()
        return s.train()

    play(job, 8, records, checksum_at=new_checksum)


def zero_rows(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        if step >= 4:
            s.engine[s.rows(0.15)] = 0.0
        return s.train()

    play(job, 12, records, checksum_at=new_checksum)


def nan_where_certain(job):
    def records(step):
        s = make_streams(step, disc=0.01, certain=0.6 + 0.39 * min(step, 10) / 10)
        if step >= 10:
            s.engine[(s.old > -1e-3) & (s.rng.random(s.shape) < 0.3)] = np.nan
        return s.train()

    def scalars(step):
        return MOVES | {"entropy": 0.3 * (4e-4 / 0.3) ** (min(step, 10) / 10)}

    play(job, 20, records, scalars_at=scalars, checksum_at=new_checksum)


def doubled_after_resume(job):
    at_level(job, 10, lambda step: 0.03)
    job.source = make_source(producer="p9")
    job.feed(Hello(job.source, "tiny"))

    def records(step):
        s = make_streams(step, disc=0.03)
        return [s.train(source=job.source), s.train(source=job.source, micro=1)]

    play(job, 6, records, first=10)


def tags_from_the_future(job):
    play(job, 10, lambda step: make_streams(step, disc=0.03).train(gen_version=4 * step + 4), checksum_at=new_checksum)


def tags_too_old(job):
    # true version = the trainer's, label = one before; `old` is scored at the label, 0.1 nats of movement away
    def records(step):
        s = make_streams(step, disc=0.02)
        wrong = s.rows(0.4) if step else s.rows(0.0)
        s.old[wrong] = np.minimum(s.cur[wrong] - make_noise(s.cur[wrong], 0.1, s.rng), 0.0)
        gen = np.full(len(s.old), step)
        gen[wrong] = step - 1
        return s.train(gen_version=gen)

    play(job, 16, records, checksum_at=new_checksum)


def too_many_logprobs(job):
    def records(step):
        good, bad = make_streams(step, disc=0.03, length=456), make_streams(step, disc=0.03, length=456, rows=8, seed=1)
        names = [f"b{step}-{i}" for i in range(8)]
        bare = {"with_engine": False, "span_start_K": None, "span_version_K": None}
        return [
            good.rollout(), bad.rollout(ids=names, length=812), good.train(**bare),
            bad.train(ids=tuple(names), groups=tuple(names), micro=1, **bare),
        ]  # fmt: skip

    play(job, 5, records)


def prompts_differ(job):
    def records(step):
        s = make_streams(step, disc=0.03)
        changed = set(s.rows(0.3).tolist())
        ids = [f"h:{step}-{i}" + ("-other" if i in changed else "") for i in range(len(s.old))]
        mine = tuple(f"h:{step}-{i}" for i in range(len(s.old)))
        return [s.rollout(ids=ids), s.train(ids=mine, with_engine=False, span_start_K=None, span_version_K=None)]

    play(job, 6, records)
    job.tick()
    job.tick()
    job.tick()


def transform(job, engine_of, trainer_of, sampled_of=None, steps=8):
    play(
        job,
        steps,
        lambda step: make_sampled(step, engine_of, trainer_of, sampled_of=sampled_of).train(),
        checksum_at=new_checksum,
    )


def temperature_on_the_engine(job):
    transform(job, lambda x: log_softmax(x / 0.6), log_softmax)


def top_p(job):
    transform(job, lambda x: kept(log_softmax(x), top_p=0.8), log_softmax)


def top_k(job):
    # of 48 entries here, 5 keep about what 20 keep of a whole vocabulary
    transform(job, lambda x: kept(log_softmax(x), top_k=5), log_softmax)


def divided_by_temperature(job):
    transform(job, lambda x: log_softmax(x) / 0.7, log_softmax, sampled_of=log_softmax)


def raw_against_processed(job):
    job.feed(
        Hello(
            make_source(role="engine", producer="e0"),
            "tiny",
            sampling={"temperature": 0.6, "logprobs_mode": "raw_logprobs"},
        )
    )
    tempered = lambda x: log_softmax(x / 0.6)  # noqa: E731  three sides, one line each
    transform(job, log_softmax, tempered, sampled_of=tempered)


def settings_only(job):
    facts = {"temperature": 0.7, "top_p": 1.0, "logprobs_mode": "raw_logprobs"}
    job.feed(Hello(make_source(role="engine", producer="e0"), "tiny", sampling=facts))
    job.feed(Hello(job.source, "tiny", sampling={"temperature": 0.7}))
    job.tick()
