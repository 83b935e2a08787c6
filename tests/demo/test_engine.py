"""The generator: what it reports, its faults, and its process. A recording hook stands in for the sentinel's."""

import io
import os
import sys

import numpy as np
import pytest
import torch
from demo.recorder import CountingBackend, RecordingHook

from dlc_sentinel.demo import engine as engine_module
from dlc_sentinel.demo.client import EngineDied, EngineProcess, launch
from dlc_sentinel.demo.engine import Engine, EngineSettings, serve
from dlc_sentinel.demo.policy import make_policy, score, weights_of
from dlc_sentinel.demo.protocol import Link, checksum
from dlc_sentinel.demo.shape import PolicyShape

WEIGHTS = [{"w": np.full(3, value, dtype=np.float32)} for value in range(4)]
PROMPTS = np.zeros((2, 4), dtype=np.int64)


@pytest.fixture
def hook(monkeypatch) -> RecordingHook:
    hook = RecordingHook()
    monkeypatch.setattr(engine_module, "connect", lambda **_: hook)
    return hook


def test_a_batch_carries_the_version_and_the_names_its_hook_reported(hook):
    engine = Engine(EngineSettings(), CountingBackend())
    engine.sync(5, 4, WEIGHTS[0])

    _, logprobs, version = engine.generate("b9", PROMPTS, 3)

    (((ids, sent), told),) = hook.of("rollout")
    assert (ids, told["version"], version) == (["b9:0", "b9:1"], 5, 5)
    np.testing.assert_array_equal(sent, logprobs)


def test_a_push_is_reported_with_its_version_step_and_the_checksum_of_the_weights_held(hook):
    engine = Engine(EngineSettings(), CountingBackend())

    held = engine.sync(5, 4, WEIGHTS[1])

    assert held == checksum(WEIGHTS[1])
    assert hook.of("synced") == [((5, 4), {"checksum": held, "tensors": 1})]


def test_undelivered_weights_advance_the_label_and_nothing_else(hook):
    backend = CountingBackend()
    engine = Engine(EngineSettings(fault="undelivered", fault_from_version=1), backend)

    held = [engine.sync(version, version, WEIGHTS[version]) for version in range(4)]

    assert engine.generate("b", PROMPTS, 2)[2] == 3
    assert backend.loads == [WEIGHTS[0], WEIGHTS[1]]
    assert held[1:] == [checksum(WEIGHTS[1])] * 3
    assert [told["checksum"] for _, told in hook.of("synced")] == held


def test_an_engine_that_sends_no_checksum_reports_none(hook):
    Engine(EngineSettings(sends_checksum=False), CountingBackend()).sync(0, 0, WEIGHTS[0])

    assert hook.of("synced")[0][1]["checksum"] is None


def test_drift_coarsens_the_logits_more_with_every_batch_while_weights_are_delivered(hook):
    backend = CountingBackend()
    engine = Engine(EngineSettings(fault="drift", fault_from_version=1, drift_per_step=0.5), backend)
    grids = []
    for version in range(4):
        engine.sync(version, version, WEIGHTS[version])
        engine.generate("b", PROMPTS, 1)
        grids.append(backend.grid)

    assert grids == [0.0, 0.5, 1.0, 1.5]
    assert len(backend.loads) == 4


def conversation(*messages: tuple[str, dict, dict]) -> list[str]:
    """Kinds of the answers that `serve` gives to a start and then `messages`."""
    asked, answered = io.BytesIO(), io.BytesIO()
    for message in (("start", {"settings": {}}, {}), *messages):
        Link(io.BytesIO(), asked).send(*message)
    serve(Link(io.BytesIO(asked.getvalue()), answered), lambda settings: CountingBackend())
    answers = Link(io.BytesIO(answered.getvalue()), io.BytesIO())
    return [message.kind for message in iter(answers.receive, None)]


def test_the_engine_answers_each_message_until_it_is_stopped(hook):
    ask = ("generate", {"request": "b", "num_tokens": 2}, {"prompts": PROMPTS})

    assert conversation(("sync", {"version": 0, "step": 0}, WEIGHTS[0]), ask, ("stop", {}, {}), ask) == [
        "ready",
        "synced",
        "batch",
    ]
    assert hook.calls[-1][0] == "close"


def test_an_unknown_message_is_answered_with_an_error(hook, capsys):
    assert conversation(("dance", {}, {})) == ["ready", "error"]
    assert "message 'dance'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_generator_process_samples_from_the_weights_it_was_last_given_until_it_is_given_others(tmp_path):
    shape = PolicyShape()
    old, new = make_policy(shape, 1), make_policy(shape, 2)
    prompts = np.arange(16, dtype=np.int64).reshape(4, 4)

    with launch("tiny", EngineSettings(dtype="float32", num_rows=4, num_tokens=24), tmp_path) as engine:
        held = engine.sync(weights_of(old), version=3, step=2)
        stale = engine.generate("a", prompts, 20)
        engine.sync(weights_of(new), version=4, step=3)
        fresh = engine.generate("b", prompts, 20)

    assert held == checksum(weights_of(old))
    for batch, policy, version in ((stale, old, 3), (fresh, new, 4)):
        logprobs = score(policy, torch.from_numpy(prompts), torch.from_numpy(batch.tokens_ST)).numpy()
        np.testing.assert_allclose(batch.engine_ST, logprobs, atol=1e-5)
        assert batch.version == version


@pytest.mark.slow
def test_a_generator_that_dies_is_an_error_with_its_exit_code(tmp_path):
    with (
        pytest.raises(EngineDied, match="exit code 3"),
        EngineProcess(EngineSettings(), [sys.executable, "-c", "import sys; sys.exit(3)"], {}) as engine,
    ):
        engine.wait_ready()


@pytest.mark.slow
def test_what_the_engines_libraries_print_does_not_reach_the_pipe(tmp_path):
    code = (
        "from dlc_sentinel.demo.engine import own_pipe\n"
        "link = own_pipe(); print('Loading weights: 100%', flush=True); link.receive(); link.send('ready')\n"
    )
    package = os.path.dirname(os.path.dirname(os.path.dirname(engine_module.__file__)))
    with EngineProcess(EngineSettings(), [sys.executable, "-c", code], {"PYTHONPATH": package}) as engine:
        engine.wait_ready()
