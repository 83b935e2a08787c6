"""A real GRPOTrainer on CPU under a real sentinel: its three streams, and what RESYNC and ABORT do to it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from dlc_sentinel.integrations.trl_hook import attach
from stacks.trl.job import (
    HORIZON,
    LENGTH,
    PROMPT_TOKENS,
    Engine,
    ExactEngine,
    acting,
    blocks,
    ess,
    grpo,
    plain_logps,
    sentinel,
    tokenizer,
    until,
    watch_along,
)  # fmt: skip

from dlc_sentinel.records import Hello, Scalars, Synced

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's and torch's own warnings

STEPS, PER_GENERATION = 8, 4


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


class Seen:
    """One finished run."""

    def __init__(self, job, watched, attached):
        self.job, self.watched, self.attached = job, watched, attached
        self.rows = watched.rows
        self.steps = watched.ears.steps

    def generated(self, row):
        """(prompt ids, completion ids, engine logprobs) of the row, as the engine made it."""
        index, at = map(int, row.id.split("."))
        batch = self.job.engine.batches[index]
        return batch.prompts[at], batch.completions[at], batch.logprobs[at]

    def recomputed(self, rows, weights_step):
        """Logprobs of the rows at the weights before `weights_step`, by a plain forward; one array per row."""
        made = [self.generated(row) for row in rows]
        ids = [prompt + ids + [0] * (LENGTH - len(ids)) for prompt, ids, _ in made]
        logps = plain_logps(self.job.weights[weights_step], ids, LENGTH)
        return [logps[i, : len(ids)] for i, (_, ids, _) in enumerate(made)]


def run(patch, folder, config, *, max_steps, attach_with=None, before=None, **changes):
    with sentinel(patch, config) as watched:
        job = grpo(patch, folder, max_steps=max_steps, **changes)
        attached = attach(job.trainer, **(attach_with or {}))
        watch_along(job, watched.ears)
        if before is not None:
            before(job)
        job.trainer.train()
        attached.hook.close()
        watched.ears.wait_for(lambda event: event.kind == "producer" and "left" in event.text)
    return Seen(job, watched, attached)


# -- watching --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def observed(patch, tmp_path_factory):
    return run(patch, tmp_path_factory.mktemp("observed"), acting("observe"), max_steps=STEPS)


def test_every_row_is_sent_once_in_the_step_that_trains_it(observed):
    per_step = Counter(row.step for row in observed.rows)

    assert per_step == dict.fromkeys(range(STEPS), 16) and len({row.id for row in observed.rows}) == 16 * STEPS
    assert all(row.update == 0 and row.version == row.step for row in observed.rows)
    assert not any(sum(step["dropped"].values()) for step in observed.steps.values())
    assert observed.attached.num_errors == {}


def test_rows_carry_the_version_that_generated_them(observed):
    assert {(row.step, row.generated_at) for row in observed.rows} == {
        (step, step // PER_GENERATION * PER_GENERATION) for step in range(STEPS)
    }
    assert [step["version_age"]["mean"] for step in observed.steps.values()] == [0, 1, 2, 3] * (STEPS // 4)


def test_old_is_the_generators_because_its_version_is(observed):
    assert all(row.old_is == "generator" and row.old_version == row.generated_at for row in observed.rows)
    assert {step["basis"] for step in observed.steps.values()} == {"exact"}


def test_the_engine_stream_is_what_the_engine_said(observed):
    for row in observed.rows:
        np.testing.assert_array_equal(row.engine, np.float32(observed.generated(row)[2]))
        assert row.mask.all()


@pytest.mark.parametrize("step", [0, 2, 5])
def test_old_and_current_are_the_policys_at_their_weights(observed, step):
    rows = [row for row in observed.rows if row.step == step]

    for row, want in zip(rows, observed.recomputed(rows, step), strict=True):
        np.testing.assert_allclose(row.cur, want, atol=2e-5)
    for row, want in zip(rows, observed.recomputed(rows, rows[0].generated_at), strict=True):
        np.testing.assert_allclose(row.old, want, atol=2e-5)


@pytest.mark.parametrize("step", [2, 3, 7])
def test_the_sentinels_lag_is_that_of_an_independent_recomputation(observed, step):
    rows = [row for row in observed.rows if row.step == step]
    now, gen = observed.recomputed(rows, step), observed.recomputed(rows, rows[0].generated_at)
    lag = [a - b for a, b in zip(now, gen, strict=True)]
    disc = np.concatenate([b - np.array(observed.generated(r)[2]) for b, r in zip(gen, rows, strict=True)])
    seen = observed.steps[step]

    for name, horizon in (("1", 1), ("8", HORIZON), ("inf", 10**6)):
        assert seen["lag_ess"][name] == pytest.approx(ess([s for x in lag for s in blocks(x, horizon)]), abs=1e-3)
    assert seen["lag_ess"]["8"] < 0.98
    assert seen["lag"]["rms"] == pytest.approx(np.sqrt(np.mean(np.concatenate(lag) ** 2)), rel=1e-3)
    assert seen["discrepancy"]["rms"] == pytest.approx(np.sqrt(np.mean(disc**2)), rel=0.02)


def test_lag_is_zero_in_the_step_after_a_generation_and_not_later(observed):
    rms = {step: data["lag"]["rms"] for step, data in observed.steps.items()}

    assert [step for step in rms if rms[step] == 0.0] == [0, 4]
    assert rms[3] > rms[1] > 0.01


def test_discrepancy_agrees_with_trls_own_number(observed):
    (own,) = [log["sampling/sampling_logp_difference/mean"] for log in observed.job.logs[:1]]
    batch = [row for row in observed.rows if row.generated_at == 0]

    ours = np.abs(np.concatenate([row.old - row.engine for row in batch])).mean()
    assert ours == pytest.approx(own, rel=1e-4)


def test_groups_are_the_completions_of_one_prompt(observed):
    prompts_of = {}
    for row in observed.rows:
        prompts_of.setdefault(row.group, []).append(tuple(observed.generated(row)[0]))

    assert {len(found) for found in prompts_of.values()} == {4}
    assert all(len(set(found)) == 1 for found in prompts_of.values())


def test_syncs_and_the_first_words_name_what_is_known(observed):
    hello = observed.watched.of(Hello)[0]
    synced = observed.watched.of(Synced)

    assert [(record.version, record.step) for record in synced] == [(0, 0), (4, 4)]
    assert hello.stack == "trl" and hello.sampling["temperature"] == 1.0 and hello.versions["trl"]
    assert hello.sampling["logprobs_mode"] == "processed_logprobs"


def test_scalars_are_those_trl_logs_for_the_step(observed):
    sent = {record.step: record.values for record in observed.watched.of(Scalars)}
    names = {"reward": "reward", "entropy": "entropy", "grad_norm": "grad_norm", "learning_rate": "lr",
             "completions/mean_length": "response_length", "completions/clipped_ratio": "truncated_ratio"}  # fmt: skip

    assert sorted(sent) == list(range(STEPS))
    for step, log in enumerate(observed.job.logs[:STEPS]):
        for theirs, ours in names.items():
            assert sent[step].get(ours) == pytest.approx(log.get(theirs), nan_ok=True), (step, theirs)
    assert "reward" in sent[4] and "reward" not in sent[5]


def test_the_hooks_numbers_stand_in_the_trainers_own_log(observed):
    offered = [log["dlc/tokens_total"] for log in observed.job.logs[:STEPS]]

    assert offered[-1] == sum(len(row.cur) for row in observed.rows) and offered == sorted(offered)


class WhileAlive:
    """The ears of a sentinel that may die: nobody waits for it from then on."""

    def __init__(self, ears):
        self.ears, self.alive = ears, True

    def wait_for(self, wanted):
        if self.alive:
            self.ears.wait_for(wanted)


def test_the_sentinels_numbers_stand_in_the_trainers_own_log_until_it_dies(patch, tmp_path):
    last = 4
    with sentinel(patch, acting("observe"), metrics=True) as watched:
        job = grpo(patch, tmp_path, max_steps=last + 4)
        attached, ears = attach(job.trainer), WhileAlive(watched.ears)

        def at_step(step):
            if step < last:
                until(lambda: attached.numbers.get("dlc/last_step") == step)
            elif step == last:
                ears.alive = False
                watched.close()
            else:
                until(lambda: not attached.numbers)

        watch_along(job, ears, at_step)
        job.trainer.train()
        attached.hook.close()

    steps = watched.ears.steps
    for step, log in enumerate(job.logs[: last + 1]):
        assert log.get("dlc/last_step") == (step - 1 if step else None)
        if step:
            assert log["dlc/lag_ess_ratio/8"] == pytest.approx(steps[step - 1]["lag_ess"]["8"])
            assert log["dlc/lag_nats/rms"] == pytest.approx(steps[step - 1]["lag"]["rms"])
            assert log["dlc/finding_active/LAG"] == 0.0
    for log in job.logs[last + 2 : last + 4]:
        left = {name for name in log if name.startswith("dlc/")}
        assert "dlc/tokens_total" in left and not left & {"dlc/last_step", "dlc/lag_ess_ratio/8", "dlc/lag_nats/rms"}
    assert attached.num_errors == {} and job.trainer.state.global_step == last + 4


# -- acting ----------------------------------------------------------------------------------------------------------


def test_resync_brings_the_lag_down_and_is_acknowledged(patch, tmp_path):
    seen = run(
        patch, tmp_path, acting("resync"), max_steps=10, steps_per_generation=10, learning_rate=3e-2, engine=ExactEngine
    )

    first, ack = seen.watched.ears.of("command")[0], seen.watched.acks[0]
    ratio = {step: data["lag_ess"]["8"] for step, data in seen.steps.items()}
    assert ratio[first.step] < 0.5 and (first.data["kind"], first.data["id"]) == ("RESYNC", ack.command_id)
    assert ack.outcome == "applied" and 0 < ack.version <= first.step + 3 and "micro-batches" in ack.reason
    assert ratio[ack.version] == 1.0 and ratio[ack.version - 1] < 0.5
    assert {row.generated_at for row in seen.rows if row.step == ack.version} == {ack.version}
    assert any("worked" in event.text for event in seen.watched.ears.events)
    assert ack.version in {record.version for record in seen.watched.of(Synced)}
    later = [log for log in seen.job.logs if log.get("dlc/commands_total/RESYNC/applied")]
    assert later and later[0]["dlc/lag_ess_ratio/8"] < 0.5


def test_abort_saves_a_checkpoint_and_ends_the_run(patch, tmp_path):
    def spoil(job):
        job.engine.spoil = lambda logps: [logps[-1], *logps[:-1]]  # each token with its neighbour's logprob

    seen = run(patch, tmp_path, acting("abort"), max_steps=40, before=spoil, prompts_per_step=16)
    stopped = seen.job.trainer.state.global_step

    (command,) = [event.data for event in seen.watched.ears.of("command")]
    (ack,) = seen.watched.acks
    assert command["kind"] == "ABORT" and command["reason"].startswith("DATA") and stopped < 12
    assert (ack.outcome, ack.version) == ("applied", stopped) and "checkpoint saved" in ack.reason
    state = json.loads((tmp_path / f"checkpoint-{stopped}" / "trainer_state.json").read_text())
    assert state["global_step"] == stopped

    patch.delenv("DLC_SENTINEL")
    again = grpo(patch, tmp_path, max_steps=stopped + 1, prompts_per_step=16)
    again.trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stopped}"))
    assert again.trainer.state.global_step == stopped + 1


# -- other ways of TRL -----------------------------------------------------------------------------------------------


def test_a_rollout_func_that_loads_weights_by_itself_names_their_version(patch, tmp_path):
    source = {"at": -1, "call": 0}

    def rollout(prompts, trainer):
        engine = source.setdefault("engine", Engine(trainer.model, trainer.accelerator, max_completion_length=LENGTH))
        if source["call"] % 2 == 0:
            engine.sync_weights()
            source["at"] = trainer.state.global_step
        source["call"] += 1
        ids = tokenizer()(prompts)["input_ids"]
        completions, logprobs = engine.sample(ids)
        told = [[0] + [1] * (len(row) - 1) for row in completions]  # the first token as an environment's
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, "env_mask": told}

    seen = run(
        patch, tmp_path, acting("observe"), max_steps=4, steps_per_generation=2, rollout=rollout,
        attach_with={"engine_version": lambda: source["at"]},
    )  # fmt: skip

    assert {(r.step, r.generated_at, r.old_version, r.old_is) for r in seen.rows} == {
        (0, 0, 0, "generator"), (1, 0, 0, "generator"), (2, 0, 2, "proximal"), (3, 0, 2, "proximal"),
    }  # fmt: skip
    assert [seen.steps[step]["basis"] for step in range(4)] == ["exact", "exact", "calibrated", "calibrated"]
    assert all(not row.mask[0] and row.mask[1:].all() for row in seen.rows if len(row.mask))


def test_ids_stay_with_their_rows_over_two_iterations_and_accumulation(patch, tmp_path):
    seen = run(
        patch, tmp_path, acting("observe"), max_steps=4, num_iterations=2, gradient_accumulation_steps=2,
        steps_per_generation=4,
    )  # fmt: skip

    uses = {}
    for row in seen.rows:
        uses.setdefault(row.id, []).append(row.step)
        np.testing.assert_array_equal(row.engine, np.float32(seen.generated(row)[2]))
    assert len(uses) == 64 and all(steps in ([0, 2], [1, 3]) for steps in uses.values())
    assert [seen.steps[step]["lag"]["rms"] > 0 for step in range(4)] == [False, True, True, True]
    assert not any(sum(step["dropped"].values()) for step in seen.steps.values())


def test_a_row_seen_twice_within_one_optimizer_step_is_sent_once(patch, tmp_path):
    seen = run(
        patch, tmp_path, acting("observe"), max_steps=2, num_iterations=2, gradient_accumulation_steps=4,
        steps_per_generation=2,
    )  # fmt: skip

    assert Counter(row.step for row in seen.rows) == {0: 32, 1: 32} and len({row.id for row in seen.rows}) == 64
    assert not any(sum(step["dropped"].values()) for step in seen.steps.values())


def test_without_engine_logprobs_nothing_is_sent_and_one_line_says_so(patch, tmp_path, caplog):
    with sentinel(patch) as watched:
        job = grpo(patch, tmp_path, max_steps=2, use_vllm=False, max_completion_length=2 * PROMPT_TOKENS)
        attached = attach(job.trainer)
        job.trainer.train()
        attached.detach()
        watched.ears.wait_for(lambda event: event.kind == "producer" and "left" in event.text)

    assert watched.rows == [] and job.trainer.state.global_step == 2
    (line,) = [record.message for record in caplog.records if record.name == "dlc_sentinel.trl"]
    assert "returns no logprobs" in line and "rollout_func" in line


def test_where_no_sentinel_is_named_nothing_is_installed(patch, tmp_path):
    patch.delenv("DLC_SENTINEL", raising=False)
    job = grpo(patch, tmp_path, max_steps=1)
    before, callbacks = dict(vars(job.trainer)), list(job.trainer.callback_handler.callbacks)

    attached = attach(job.trainer)

    assert not attached.active and attached.wraps == ()
    assert vars(job.trainer) == before and job.trainer.callback_handler.callbacks == callbacks


def test_detach_puts_everything_back_and_the_trainer_trains_on(patch, tmp_path):
    with sentinel(patch) as watched:
        job = grpo(patch, tmp_path, max_steps=2)
        before, callbacks = dict(vars(job.trainer)), list(job.trainer.callback_handler.callbacks)
        syncing = job.engine.sync_weights
        attached = attach(job.trainer)
        assert attached.active and attach(job.trainer) is attached

        attached.detach()

        assert vars(job.trainer) == before and job.trainer.callback_handler.callbacks == callbacks
        assert job.engine.sync_weights == syncing and not attached.active
        job.trainer.train()
        watched.ears.wait_for(lambda event: event.kind == "producer" and "left" in event.text)
    assert watched.rows == []
