"""The DLC loss inside a real GRPOTrainer on CPU: its gradient, a run that learns, and what it refuses."""

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dlc_sentinel.integrations import trl_dlc
from stacks.trl.job import PROMPT_TOKENS, Engine, grpo, prompts, reward, tiny_model, tokenizer

from dlc_sentinel.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # TRL's and torch's own warnings

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_dlc.py"
TEMPERATURE = 0.9
NOISE = 0.02
STEPS, PER_GENERATION = 24, 2


class ListingEngine(Engine):
    """Lists the most probable tokens as TRL's vLLM client does: by rank, the sampled one among them.

    Its weights are a little off the trainer's: discrepancy, in float32.
    """

    last = None

    def __init__(self, model, accelerator, **settings):
        super().__init__(model, accelerator, "float32", **settings)
        self.logprobs = 0
        self.synced = {}
        ListingEngine.last = self

    def sync_weights(self):
        super().sync_weights()
        self.synced = {name: value.clone() for name, value in self._model.state_dict().items()}
        torch.manual_seed(5)
        with torch.no_grad():
            for value in self._model.parameters():
                value.add_(NOISE * torch.randn_like(value))

    def logps(self, rows, num):
        with torch.no_grad():
            return (self._model(rows).logits[:, -num - 1 : -1].double() / TEMPERATURE).log_softmax(-1)

    def generate(self, prompts, images, num_generations, profiler=None):
        made, _ = self.sample(prompts)
        length = max(map(len, made))
        rows = torch.tensor([p + c + [0] * (length - len(c)) for p, c in zip(prompts, made, strict=True)])
        lists = [
            [self.one(logp_V, token) for logp_V, token in zip(logp_TV, row, strict=False)]
            for logp_TV, row in zip(self.logps(rows, length), made, strict=True)
        ]
        ids, values = ([[place[i] for place in row] for row in lists] for i in (0, 1))
        return prompts, made, values, ids

    def one(self, logp_V, token):
        best = logp_V.topk(self.logprobs).indices.tolist()
        ids = sorted({*best, token}, key=lambda i: -logp_V[i])
        return ids, logp_V[ids].tolist()


def logged(trainer):
    return [log for log in trainer.state.log_history if "dlc/centring" in log]


@pytest.fixture(scope="module")
def patch():
    import trl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl, "GRPOTrainer", trl_dlc.DlcGRPOTrainer)
        yield patch


@pytest.fixture(scope="module")
def learnt(patch, tmp_path_factory):
    """A finished run, and the micro-batches it trained on."""
    job = grpo(
        patch, tmp_path_factory.mktemp("trl"), max_steps=STEPS, engine=ListingEngine, temperature=TEMPERATURE,
        steps_per_generation=PER_GENERATION, max_completion_length=12,
    )  # fmt: skip
    seen, inner = [], job.trainer._compute_loss
    job.trainer._compute_loss = lambda model, inputs: seen.append(inputs) or inner(model, inputs)
    job.trainer.train()
    return job.trainer, seen


def test_rewards_climb(learnt):
    rewards = [log["reward"] for log in logged(learnt[0]) if "reward" in log]
    quarter = len(rewards) // 4

    assert quarter >= 3
    assert np.mean(rewards[-quarter:]) > np.mean(rewards[:quarter]) + 0.2


def test_the_log_tells_what_the_loss_rests_on(learnt):
    log = logged(learnt[0])

    assert len(log) == STEPS and {entry["dlc/centring"] for entry in log} == {1.0}
    assert all(0 < entry["dlc/weight_ess_ratio/1"] <= 1 and 0 < entry["dlc/tail_mass"] < 1 for entry in log)
    assert max(entry["dlc/log_ratio_rms_nats"] for entry in log[1::PER_GENERATION]) > 0.01
    assert max(entry["dlc/log_ratio_rms_nats"] for entry in log[::PER_GENERATION]) < 1e-5
    assert all(entry["dlc/centred_bias_l1"] > 1e-3 for entry in log)


def closed_form(trainer, inputs, mu, gen, logits_BTV):
    """Second implementation, a whole vector a token: - w A (e_a - q) over tokens of a step and temperature."""
    now = (logits_BTV.detach().double() / TEMPERATURE).softmax(-1)
    token = inputs["completion_ids"][..., None]
    rest = torch.ones_like(now, dtype=torch.bool)
    rest.scatter_(2, mu.topk(trl_dlc.TOP_K).indices, False).scatter_(2, token, False)
    weight = (now / gen).clamp(max=2.0)
    mass = [(p * rest).sum(-1, keepdim=True) for p in (mu, now, gen)]
    tail = mass[0] * (now / mass[1]) * (mass[1] / mass[2]).clamp(max=2.0)
    nu = torch.where(rest, tail, mu * weight)
    one = torch.zeros_like(now).scatter_(2, token, 1.0)
    pull = weight.gather(2, token) * inputs["advantages"][:, None, None] * inputs["completion_mask"][..., None]
    num = inputs["num_items_in_batch"] / trainer.args.steps_per_generation
    return -pull * (one - nu / nu.sum(-1, keepdim=True)) / num / TEMPERATURE


def test_the_gradient_is_the_closed_form_for_a_batch_of_older_weights(learnt):
    trainer, seen = learnt
    inputs, engine = seen[-1], ListingEngine.last
    rows, num = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1), inputs["completion_ids"].shape[1]
    assert bool(inputs["prompt_mask"].all()) and inputs["prompt_ids"].shape[1] == PROMPT_TOKENS
    before = tiny_model()
    before.load_state_dict(engine.synced)
    with torch.no_grad():
        gen = (before(rows).logits[:, -num - 1 : -1].double() / TEMPERATURE).softmax(-1)
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, inputs).backward()

    logits_BTV = trainer.model(input_ids=rows).logits[:, -num - 1 : -1]
    want_BTV = closed_form(trainer, inputs, engine.logps(rows, num).exp(), gen, logits_BTV)
    names, values = zip(*trainer.model.named_parameters(), strict=True)
    want = torch.autograd.grad(logits_BTV, values, want_BTV.to(logits_BTV.dtype))

    largest = max(float(grad.abs().max()) for grad in want)
    for name, value, grad in zip(names, values, want, strict=True):
        assert float((value.grad - grad).abs().max()) < 1e-4 * largest, name


def test_a_batch_trained_at_once_needs_no_weight_and_is_still_centred(patch, tmp_path):
    job = grpo(
        patch, tmp_path, max_steps=1, engine=ListingEngine, temperature=TEMPERATURE, steps_per_generation=1,
        max_completion_length=6,
    )  # fmt: skip
    job.trainer.train()
    (log,) = logged(job.trainer)

    assert log["dlc/centring"] == 1.0 and log["dlc/mean_weight"] == 1.0 and log["dlc/tail_mass"] > 0


def test_without_a_vllm_engine_the_run_says_that_it_is_not_centred(patch, tmp_path):
    job = grpo(patch, tmp_path, max_steps=2, use_vllm=False, steps_per_generation=2, max_completion_length=6)
    job.trainer.train()

    assert [log["dlc/centring"] for log in logged(job.trainer)] == [0.0, 0.0]
    assert all("dlc/tail_mass" not in log for log in logged(job.trainer))


@pytest.mark.parametrize("change", [{"beta": 0.1}, {"importance_sampling_level": "sequence"}])
def test_what_would_take_the_centred_gradient_for_its_own_is_refused(change):
    given = {"beta": 0.0, "importance_sampling_level": "token"} | change

    with pytest.raises(ConfigError, match="wanted beta=0\\.0 and 'token'"):
        trl_dlc.settings(SimpleNamespace(**given), 2.0)


def test_the_users_own_config_stays_as_it_is():
    args = SimpleNamespace(beta=0.0, importance_sampling_level="token", loss_type="dapo")

    assert trl_dlc.settings(args, 3.0).loss_type == "cispo" and vars(args).get("epsilon_high") is None


class Tiny:
    """DlcGRPOTrainer, with a tiny model in place of what its first argument names."""

    made = None

    def __new__(cls, _, *args, **named):
        Tiny.made = trl_dlc.trainer_class.__wrapped__()(tiny_model(), *args, processing_class=tokenizer(), **named)
        return Tiny.made


def test_the_example_trains(patch, tmp_path, monkeypatch):
    """Its own lines; tiny model, data and engine stand in for what it downloads."""
    import datasets
    import trl.rewards
    import trl.trainer.grpo_trainer as module

    config = functools.partial(
        trl.GRPOConfig, max_completion_length=6, max_steps=4, per_device_train_batch_size=8, use_cpu=True, bf16=False,
        report_to="none", save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "VLLMGeneration", ListingEngine)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: prompts(64))
    monkeypatch.setattr(trl.rewards, "accuracy_reward", reward)
    monkeypatch.setattr(trl, "GRPOConfig", config)
    monkeypatch.setattr(trl_dlc, "DlcGRPOTrainer", Tiny, raising=False)
    monkeypatch.setattr(trl, "GRPOTrainer", module.GRPOTrainer)

    runpy.run_path(str(EXAMPLE))

    assert [log["dlc/centring"] for log in logged(Tiny.made)] == [1.0] * 4
