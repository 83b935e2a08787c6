"""What the hook relies on in TRL is there under the names and arguments it knows; what does not fit is left alone."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import warnings

import pytest
from dlc_sentinel.integrations import trl_async, trl_grpo
from dlc_sentinel.integrations.trl_wraps import Quiet, Wraps, misfit
from factories_http import says

from dlc_sentinel.records import Command


def trl():
    """TRL's modules, imported without their deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOTrainer
        from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker, packing
        from trl.generation.vllm_generation import VLLMGeneration
    return (
        GRPOTrainer, VLLMGeneration, AsyncGRPOTrainer, async_grpo_trainer, async_rollout_worker.RolloutSample,
        packing.TreeRow,
    )  # fmt: skip


@pytest.mark.slow
def test_every_wrapped_method_has_the_arguments_it_is_wrapped_for():
    grpo, engine, asynchronous, module, _, _ = trl()
    wrapped = [
        *((grpo, name, args) for name, args in trl_grpo.WRAPPED.items()),
        *((engine, name, args) for name, args in trl_grpo.ENGINE_WRAPPED.items()),
        *((asynchronous, name, args) for name, args in (trl_async.WRAPPED | trl_async.USED).items()),
        *((module.DataCollatorForRollout, name, args) for name, args in trl_async.COLLATOR_WRAPPED.items()),
        *((kind, "_get_grad_norm", ("model", "grad_norm")) for kind in (grpo, asynchronous)),
    ]

    assert [f"{kind.__name__}.{name}: {misfit(kind, name, args)}" for kind, name, args in wrapped
            if misfit(kind, name, args)] == []  # fmt: skip


@pytest.mark.slow
def test_every_attribute_that_is_read_or_set_is_one_of_trls():
    grpo, _, asynchronous, module, sample, row = trl()
    sources = {kind: inspect.getsource(kind) for kind in (grpo, asynchronous, module.RolloutQueueDataset, row)}
    wanted = {
        grpo: ("_buffered_inputs", "_last_loaded_step", "_step", "num_iterations", "num_generations", "use_vllm",
               "vllm_mode", "vllm_tensor_parallel_size", "vllm_generation", "_metrics"),
        asynchronous: ("model_version", "_rollout_dataset", "_metrics"),
        module.RolloutQueueDataset: ("queue",),
        row: ("samples",),
    }  # fmt: skip

    for kind, names in wanted.items():
        assert [name for name in names if f"self.{name} = " not in sources[kind]
                and f"self.{name}: " not in sources[kind]] == []  # fmt: skip
    for column in ("sampling_per_token_logps", "old_per_token_logps", "completion_mask", "tool_mask", "advantages"):
        assert f'output["{column}"]' in sources[grpo] or f'"{column}": ' in sources[grpo]
    assert {"input_ids", "completion_mask", "model_version", "group_id"} <= {f.name for f in dataclasses.fields(sample)}


class Trainer:
    """Some trainer whose method may have changed."""

    def scores(self, model, batch):
        return model + batch


def doubled(original):
    return lambda *args, **named: 2 * original(*args, **named)


def test_a_method_that_fits_is_replaced_on_this_instance_only_and_put_back():
    trainer, other = Trainer(), Trainer()
    wraps = Wraps(Quiet(), "TRL 0")

    assert wraps.method(trainer, "scores", ("model", "batch"), doubled, "scores")
    assert (trainer.scores(1, 2), other.scores(1, 2), wraps.names) == (6, 3, ["Trainer.scores"])

    wraps.undo()
    assert trainer.scores(1, 2) == 3 and vars(trainer) == {} and wraps.names == []


def test_a_method_wrapped_again_by_someone_else_only_passes_calls_on_after_undo():
    trainer = Trainer()
    wraps = Wraps(Quiet(), "TRL 0")
    wraps.method(trainer, "scores", ("model",), doubled, "scores")
    theirs = trainer.scores = lambda *args, inner=trainer.scores: inner(*args) + 100

    wraps.undo()

    assert trainer.scores is theirs and trainer.scores(1, 2) == 103


@pytest.mark.parametrize(
    ("name", "args", "complaint"),
    [
        ("gone", (), "Trainer.gone does not exist"),
        ("scores", ("batch", "model"), "takes (model, batch), wanted (batch, model, ...) first"),
    ],
)
def test_a_method_that_does_not_fit_is_left_alone_with_one_line(caplog, name, args, complaint):
    trainer, quiet = Trainer(), Quiet()
    wraps = Wraps(quiet, "TRL 0")

    fits = [wraps.method(trainer, name, args, doubled, "the streams") for _ in range(2)]

    (line,) = [record.message for record in caplog.records]
    assert fits == [False, False] and complaint in line and line.endswith("off: the streams")
    assert vars(trainer) == {} and wraps.names == []


def test_a_failure_of_ours_is_said_once_and_does_not_reach_training(caplog):
    quiet = Quiet()

    def fail():
        raise KeyError("cur")

    assert [quiet.do("sending", fail) for _ in range(3)] == [None] * 3
    assert quiet.num_errors["sending"] == 3
    assert [record.message for record in caplog.records] == [
        "dlc-sentinel: sending: KeyError: 'cur'; training goes on without it (said once)"
    ]


def test_the_numbers_of_a_command_get_the_names_they_have_in_a_stacks_log():
    from dlc_sentinel.integrations.trl_control import numbers

    evidence = {"lag_ess_32": 0.4, "lag_ess_1": 0.9, "interval": [0.3, 0.5], "blocks": 70, "lag_rms_nats": 0.1,
                "discrepancy_rms_nats": None, "age_max": 3.0}  # fmt: skip

    assert numbers(Command("r-RESYNC-1", "r", "RESYNC", evidence=evidence)) == {
        "dlc/lag_ess_ratio/32": 0.4, "dlc/lag_ess_ratio/1": 0.9, "dlc/lag_nats/rms": 0.1, "dlc/version_age/max": 3.0,
    }  # fmt: skip


def test_numbers_that_nobody_wants_any_more_end_their_thread():
    from dlc_sentinel.integrations.job_numbers import Numbers

    before = set(threading.enumerate())
    numbers = Numbers("r", "http://127.0.0.1:9")
    (own,) = set(threading.enumerate()) - before

    numbers.close()
    own.join(30)

    assert not own.is_alive() and numbers.values() == {}


def test_the_numbers_go_on_where_another_program_has_the_metrics_port_and_say_it_once(monkeypatch, caplog):
    from dlc_sentinel.integrations import job_numbers

    tried = threading.Semaphore(0)
    fetch = job_numbers.snapshot_json.fetch
    monkeypatch.setattr(job_numbers.snapshot_json, "fetch", lambda *a, **k: (tried.release(), fetch(*a, **k))[1])
    before = set(threading.enumerate())
    with says(b"\x05\x00\x00 not HTTP\r\n") as url:
        numbers = job_numbers.Numbers("r", url)
        (own,) = [t for t in set(threading.enumerate()) - before if t.name == "dlc-sentinel-numbers"]
        for step in range(3):
            numbers.refresh(step)
            assert tried.acquire(timeout=30)

    numbers.close()
    own.join(30)

    assert numbers.values() == {}
    (said,) = [record.message for record in caplog.records]
    assert "no whole HTTP answer (BadStatusLine" in said and "set DLC_SENTINEL_METRICS=http://host:port" in said
