"""Testbed C: one training run of the demo's Qwen3 with a bf16 generator, a correction's loss and a sync rule.

Axes: S responses, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.experiments.job import EVAL_ROWS, EVERY, INIT_SEED, SPEC, TinyArm
from dlc_sentinel.correction import Batch, EngineFull, Logits, Weight, dlc_loss, tis_loss
from dlc_sentinel.demo.policy import load_weights, make_policy, response_log_softmax, sampled, weights_of
from dlc_sentinel.demo.sampler import Sampler
from dlc_sentinel.demo.shape import PolicyShape
from dlc_sentinel.demo.spec import ArmSpec
from dlc_sentinel.demo.task import CountingTask, group_advantages
from dlc_sentinel.maths.ess import rung_name
from dlc_sentinel.maths.lag import LagStats


class FullSampler(Sampler):
    """The demo's sampler, which also says what every other token's logprob was: exact centring needs them."""

    def full(self, prompts_SP: Tensor, num_tokens: int, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """([S, T] sampled tokens, [S, T, V] logprobs of all tokens in nats)."""
        self._kept: list[Tensor] = []
        tokens_ST, _ = self.generate(prompts_SP, num_tokens, noise)
        return tokens_ST, torch.log_softmax(torch.stack(self._kept[-num_tokens:], dim=1), dim=-1)

    def _step(self, token_S: Tensor, place: int) -> Tensor:
        logits_SV = super()._step(token_S, place)
        self._kept.append(logits_SV)
        return logits_SV


@dataclass(frozen=True, slots=True)
class Probe:
    """Samples whose prefixes a KL is taken over: prompts [S, P], tokens [S, T]."""

    prompts_SP: Tensor
    tokens_ST: Tensor


@dataclass(slots=True)
class Course:
    """What a run leaves, a value a step."""

    reward: list[float] = field(default_factory=list)
    """Of the generator's samples: what a dashboard shows."""
    true_reward: list[float] = field(default_factory=list)
    """Of fresh samples of the trainer, at evaluated steps."""
    discrepancy_rms: list[float] = field(default_factory=list)
    lag_rms: list[float] = field(default_factory=list)
    ess: dict[str, list[float]] = field(default_factory=dict)
    syncs: list[int] = field(default_factory=list)


class TinyRun:
    """A run, a step at a time. `own` is a fresh probe of the trainer, `seen` the generator's last batch.

    `measure` is called at every EVERYth step, before the update, with both of that step.
    """

    def __init__(
        self,
        arm: TinyArm,
        seed: int,
        *,
        measure: Callable[[TinyRun, int], None],
        syncs_at: frozenset[int] = frozenset(),
        spec: ArmSpec = SPEC,
    ) -> None:
        self.arm, self.spec, self.course = arm, spec, Course()
        self._measure, self._syncs_at = measure, syncs_at
        self._task = CountingTask(vocab_size=spec.vocab_size, response_tokens=spec.response_tokens)
        shape = PolicyShape(vocab_size=spec.vocab_size)
        self.policy = make_policy(shape, INIT_SEED)
        self._pushed = make_policy(shape, INIT_SEED)
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=spec.learning_rate)
        self._prompt_rng, self._eval_rng = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
        self._noise, self._eval_noise = (torch.Generator().manual_seed(2 * seed + odd) for odd in (0, 1))
        longest = self._task.prompt_tokens + spec.response_tokens
        self._engine = FullSampler(shape, spec.rows, longest, "float32" if arm.trainer_numerics else "bfloat16")
        self._fresh = Sampler(shape, EVAL_ROWS, longest)
        self._engine.load(weights_of(self.policy))
        self.own = self.seen = Probe(torch.empty(0), torch.empty(0))

    def step(self, step: int) -> None:
        """One batch, one update, perhaps a sync."""
        prompts = self._task.prompts(self._prompt_rng, self.spec.num_groups, self.spec.rows_per_group)
        prompts_SP = torch.from_numpy(prompts)
        tokens_ST, mu_STV = self._engine.full(prompts_SP, self.spec.response_tokens, self._noise)
        self.seen = Probe(prompts_SP, tokens_ST)
        if step % EVERY == 0:
            self._evaluate()
            self._measure(self, step)
        rewards = self._task.rewards(prompts, tokens_ST.numpy())
        with torch.no_grad():
            gen_STV = response_log_softmax(self._pushed, prompts_SP, tokens_ST)
        now_STV = response_log_softmax(self.policy, prompts_SP, tokens_ST)
        self._note(sampled(now_STV.detach(), tokens_ST), sampled(gen_STV, tokens_ST), sampled(mu_STV, tokens_ST))
        self.course.reward.append(float(rewards.mean()))
        advantages_S = torch.from_numpy(group_advantages(rewards, self.spec.rows_per_group))
        self._update(step, self._loss(now_STV, gen_STV, mu_STV, tokens_ST, advantages_S), now_STV)
        if self._is_due(step):
            self._sync(step)

    def _loss(
        self, now_STV: Tensor, gen_STV: Tensor, mu_STV: Tensor, tokens_ST: Tensor, advantages_S: Tensor
    ) -> Tensor:
        is_centred = self.arm.loss == "dlc"
        batch = Batch.padded(
            tokens_ST,
            advantages_S,
            mask_BT=torch.ones_like(tokens_ST, dtype=torch.bool),
            gen_logp_BT=sampled(gen_STV, tokens_ST),
            engine_logp_BT=sampled(mu_STV, tokens_ST),
            engine=EngineFull(mu_STV, gen_STV) if is_centred else None,
        )
        # log-probabilities are logits too: log-softmax leaves them as they are
        source = Logits(now_STV)
        if self.arm.loss == "plain":
            return dlc_loss(source, batch, weight=Weight("one")).loss
        if self.arm.loss == "dlc":
            return dlc_loss(source, batch).loss
        weight = Weight("unclipped") if self.arm.loss == "is" else Weight("truncate", high=2.0)
        return tis_loss(source, batch, weight=weight).loss

    def _update(self, step: int, loss: Tensor, now_STV: Tensor) -> None:
        """The demo's optimizer step: falling rate, entropy bonus, clipped gradient."""
        spec = self.spec
        fall = (1.0 - spec.last_rate_ratio) * step / spec.num_steps
        self._optimizer.param_groups[0]["lr"] = spec.learning_rate * (1.0 - fall)
        entropy = -(now_STV.exp() * now_STV).sum(-1).mean()
        self._optimizer.zero_grad()
        (loss - spec.entropy_bonus * entropy).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), spec.clip_norm)
        self._optimizer.step()

    def _note(self, now_ST: Tensor, gen_ST: Tensor, mu_ST: Tensor) -> None:
        lag, discrepancy = (now_ST - gen_ST).double().numpy(), (gen_ST - mu_ST).double().numpy()
        self.course.lag_rms.append(float(np.sqrt(np.mean(lag**2))))
        self.course.discrepancy_rms.append(float(np.sqrt(np.mean(discrepancy**2))))
        num_rows, num_tokens = lag.shape
        stats = LagStats()
        rows = np.arange(num_rows, dtype=np.int64)
        stats.add(lag.ravel(), np.arange(num_rows + 1, dtype=np.int64) * num_tokens, group_S=rows)
        for name, value in stats.ess().items():
            self.course.ess.setdefault(name, []).append(value)

    def _is_due(self, step: int) -> bool:
        if self.arm.every_step or step < self.spec.synced_steps or step in self._syncs_at:
            return True
        return self.arm.horizon > 0 and self.course.ess[rung_name(self.arm.horizon)][-1] < 0.5

    def _sync(self, step: int) -> None:
        weights = weights_of(self.policy)
        self._engine.load(weights)
        load_weights(self._pushed, weights)
        if step >= self.spec.synced_steps:
            self.course.syncs.append(step)

    def _evaluate(self) -> None:
        """A fresh probe of the trainer, in its own numerics."""
        prompts = self._task.prompts(self._eval_rng, EVAL_ROWS, 1)
        self._fresh.load(weights_of(self.policy))
        tokens_ST, _ = self._fresh.generate(torch.from_numpy(prompts), self.spec.response_tokens, self._eval_noise)
        self.own = Probe(torch.from_numpy(prompts), tokens_ST)
        self.course.true_reward.append(float(self._task.rewards(prompts, tokens_ST.numpy()).mean()))
