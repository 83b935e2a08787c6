"""One arm of the demo: `python -m dlc_sentinel.demo.trainer FOLDER`, with FOLDER/spec.json; reports on standard output.

A step: generate, score under the weights last pushed, score and update the current ones, report to the hook, poll it,
push weights if it is time or a command says so. The version of a step is its number: the weights it starts from.
Uncorrected policy gradient on purpose: what an engine with old weights does to it is what the demo shows.

Axes: S responses, T response tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlc_sentinel.demo import snapshots
from dlc_sentinel.demo.client import Batch, EngineDied, EngineProcess, launch
from dlc_sentinel.demo.engine import EngineSettings
from dlc_sentinel.demo.policy import (
    load_weights,
    make_policy,
    response_log_softmax,
    sampled,
    score,
    weights_of,
)
from dlc_sentinel.demo.sampler import Sampler
from dlc_sentinel.demo.shape import PolicyShape
from dlc_sentinel.demo.spec import ArmSpec, StepReport, report_to_dict
from dlc_sentinel.demo.task import CountingTask, group_advantages
from dlc_sentinel.hook import Hook, NoHook, connect
from dlc_sentinel.maths.lag import LagStats
from dlc_sentinel.records import F32, Command

NO_STEP = -1


class Arm:
    """The training loop of one arm, a step at a time."""

    def __init__(self, spec: ArmSpec, folder: Path, engine: EngineProcess, hook: Hook | NoHook) -> None:
        self.spec, self._folder, self._engine, self._hook = spec, folder, engine, hook
        self._task = CountingTask(vocab_size=spec.vocab_size, response_tokens=spec.response_tokens)
        self._shape = PolicyShape(vocab_size=self._task.vocab_size)
        self._policy = make_policy(self._shape, spec.seed)
        self._pushed = make_policy(self._shape, spec.seed)
        """The weights the generator was last given, in the trainer's own numerics: they score the middle stream."""
        self._pushed_version = 0
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=spec.learning_rate)
        self._prompt_rng = np.random.default_rng([spec.seed, 1])
        self._truth_rng = np.random.default_rng([spec.seed, 2])
        self._truth_noise = torch.Generator().manual_seed(spec.seed + 5_000)
        longest = self._task.prompt_tokens + spec.response_tokens
        self._truth = Sampler(self._shape, spec.true_reward_rows, longest)
        self._queue: deque[tuple[Batch, F32, int]] = deque()
        """(batch, its middle stream, version of the weights that scored it), oldest first."""
        self._num_batches = 0
        self.checksums: list[tuple[int, str]] = []
        self.snapshot_files: list[str] = []
        self.ended = ""

    def push(self, version: int, step: int) -> None:
        """Gives the generator the current weights as `version`, and keeps a copy of them."""
        weights = weights_of(self._policy)
        self.checksums.append((version, self._engine.sync(weights, version=version, step=step)))
        load_weights(self._pushed, weights)
        self._pushed_version = version

    def step(self, step: int) -> StepReport:
        """Trains on one batch, talks to the sentinel, and pushes weights where due."""
        started_s = time.process_time()
        hook = self._hook if step % self.spec.hook_every == 0 else NoHook()
        true_reward = self._true_reward() if step % self.spec.true_reward_every == 0 else float("nan")
        batch, old_ST, old_version = self._next_batch(step)
        rewards = self._task.rewards(batch.prompts_SP, batch.tokens_ST)
        advantages_S = group_advantages(rewards, self.spec.rows_per_group)
        logprobs_STV, cur_ST = self._forward(batch)
        cur = cur_ST.detach().numpy()
        self._tell_rows(hook, step, batch, cur, old_ST, old_version, advantages_S)
        if step in self.spec.snapshot_steps:
            self._save_snapshot(step, batch, old_ST, cur)
        entropy, grad_norm = self._update(step, logprobs_STV, cur_ST, torch.from_numpy(advantages_S))
        self._tell_scalars(hook, step, float(rewards.mean()), entropy, grad_norm)
        command = hook.poll(step)
        synced = self._act(step, command)
        ess, lag_rms = _lag_numbers(cur, old_ST, self.spec.rows_per_group)
        return StepReport(
            arm=self.spec.name,
            step=step,
            num_steps=self.spec.num_steps,
            true_reward=true_reward,
            reward=float(rewards.mean()),
            entropy=entropy,
            grad_norm=grad_norm,
            lag_ess=ess,
            lag_rms=lag_rms,
            discrepancy_rms=_rms(old_ST, batch.engine_ST),
            age=step - batch.version,
            synced=synced,
            command=command.kind if command is not None else "",
            cpu_s=time.process_time() - started_s,
        )

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """([S, T, V], [S, T]) logprobs of all and of the sampled tokens under the current weights, with gradient."""
        prompts, tokens = torch.from_numpy(batch.prompts_SP), torch.from_numpy(batch.tokens_ST)
        logprobs_STV = response_log_softmax(self._policy, prompts, tokens)
        return logprobs_STV, sampled(logprobs_STV, tokens)

    def _tell_rows(
        self, hook: Hook | NoHook, step: int, batch: Batch, cur: F32, old: F32, old_version: int, advantages_S: F32
    ) -> None:
        """The trainer's streams; the generator's own come from the generator, and the sentinel joins them by id."""
        rows = range(len(batch.ids))
        hook.train(
            step,
            step,
            seq_id=list(batch.ids),
            group=[batch.ids[row - row % self.spec.rows_per_group] for row in rows],
            cur=cur,
            old=old,
            old_is="generator",
            old_version=old_version,
            versions=batch.version,
            lengths=[self.spec.response_tokens for _ in rows],
            advantage=advantages_S,
        )

    def _tell_scalars(self, hook: Hook | NoHook, step: int, reward: float, entropy: float, grad_norm: float) -> None:
        values = {
            "reward": reward,
            "entropy": entropy,
            "grad_norm": grad_norm,
            "lr": self._optimizer.param_groups[0]["lr"],
            "response_length": float(self.spec.response_tokens),
            "truncated_ratio": 0.0,
        }
        hook.scalars(step, values)

    def _next_batch(self, step: int) -> tuple[Batch, F32, int]:
        """The oldest waiting batch, after the queue was filled; without a queue, a fresh one."""
        waits = self.spec.queue_batches if self.spec.fault == "queue" and step >= self.spec.fault_from_step else 0
        while len(self._queue) <= waits:
            prompts = self._task.prompts(self._prompt_rng, self.spec.num_groups, self.spec.rows_per_group)
            batch = self._engine.generate(f"b{self._num_batches}", prompts, self.spec.response_tokens)
            self._num_batches += 1
            old = score(self._pushed, torch.from_numpy(prompts), torch.from_numpy(batch.tokens_ST)).numpy()
            self._queue.append((batch, old, self._pushed_version))
        return self._queue.popleft()

    def _update(self, step: int, logprobs_STV: Tensor, cur_ST: Tensor, advantages_S: Tensor) -> tuple[float, float]:
        """(entropy, nats per token; gradient norm before clipping), after one optimizer step."""
        spec = self.spec
        fall = (1.0 - spec.last_rate_ratio) * step / spec.num_steps
        self._optimizer.param_groups[0]["lr"] = spec.learning_rate * (1.0 - fall)
        entropy = -(logprobs_STV.exp() * logprobs_STV).sum(-1).mean()
        loss = -(advantages_S[:, None] * cur_ST).mean() - spec.entropy_bonus * entropy
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        grad_norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), spec.clip_norm)
        self._optimizer.step()
        return float(entropy.detach()), float(grad_norm)

    def _act(self, step: int, command: Command | None) -> bool:
        """Obeys or refuses a command and pushes weights where the arm's own plan says so; whether it pushed."""
        planned = self.spec.syncs_every_step or step < self.spec.synced_steps
        obeyed = command is not None and self.spec.obeys
        aborted = obeyed and command is not None and command.kind == "ABORT"
        pushes = not aborted and (planned or obeyed)
        if pushes:
            self.push(step + 1, step)
        if command is None:
            return pushes
        if not self.spec.obeys:
            self._hook.ack(command, "refused", reason="this arm was told to ignore commands")
        elif aborted:
            self.ended = f"ABORT at step {step}: {command.reason}"
            self._hook.ack(command, "applied", version=self._pushed_version, reason="the arm ends")
        else:
            if command.action == "drop_stale":
                self._queue.clear()
            self._hook.ack(command, "applied", version=self._pushed_version)
        return pushes

    def _true_reward(self) -> float:
        """Mean reward of fresh samples from the current weights in the trainer's numerics, 0..1."""
        prompts = self._task.prompts(self._truth_rng, self.spec.true_reward_rows, 1)
        self._truth.load(weights_of(self._policy))
        tokens, _ = self._truth.generate(torch.from_numpy(prompts), self.spec.response_tokens, self._truth_noise)
        return float(self._task.rewards(prompts, tokens.numpy()).mean())

    def _save_snapshot(self, step: int, batch: Batch, old_ST: F32, cur_ST: F32) -> None:
        path = self._folder / f"snapshot-{step}.npz"
        snapshots.save(path, batch, old_ST, cur_ST, weights_of(self._pushed), weights_of(self._policy))
        self.snapshot_files.append(str(path))


def run_arm(spec: ArmSpec, folder: Path, report: Callable[[StepReport], None]) -> Arm:
    """Runs the arm to its end, calling `report` after each step; its files go to `folder`. Raises: EngineDied."""
    torch.set_num_threads(1)
    with _start_engine(spec, folder) as engine:
        hook = connect(
            role="trainer",
            model_name="demo-qwen3",
            stack="dlc-sentinel demo",
            sampling={"temperature": 1.0},
            dtypes={"trainer": "float32"},
        )
        arm = Arm(spec, folder, engine, hook)
        arm.push(0, NO_STEP)
        for step in range(spec.num_steps):
            report(arm.step(step))
            if arm.ended:
                break
        hook.close()
    return arm


def _start_engine(spec: ArmSpec, folder: Path) -> EngineProcess:
    task = CountingTask(vocab_size=spec.vocab_size, response_tokens=spec.response_tokens)
    shape = PolicyShape(vocab_size=task.vocab_size)
    model_dir = folder / "model"
    if spec.engine == "vllm":
        make_policy(shape, spec.seed).save_pretrained(model_dir)
    settings = EngineSettings(
        seed=spec.seed + 1_000,
        dtype=spec.engine_dtype,
        num_rows=spec.rows,
        num_tokens=task.prompt_tokens + spec.response_tokens,
        shape={"vocab_size": task.vocab_size},
        fault=spec.fault,
        fault_from_version=spec.fault_from_step,
        drift_per_step=spec.drift_per_step,
        sends_checksum=spec.sends_checksum,
        model_dir=str(model_dir),
    )
    return launch(spec.engine, settings, folder, spec.engine_python)


def _lag_numbers(cur_ST: F32, old_ST: F32, rows_per_group: int) -> tuple[dict[str, float], float]:
    """(ESS of the lag ratio by horizon, rms of lag in nats)."""
    lag = cur_ST.astype(np.float64) - old_ST
    num_rows, num_tokens = lag.shape
    stats = LagStats()
    offsets = np.arange(num_rows + 1, dtype=np.int64) * num_tokens
    stats.add(lag.ravel(), offsets, group_S=np.arange(num_rows, dtype=np.int64) // rows_per_group)
    return stats.ess(), _rms(cur_ST, old_ST)


def _rms(left: F32, right: F32) -> float:
    return float(np.sqrt(np.mean((left.astype(np.float64) - right) ** 2)))


def main(folder: Path) -> int:
    """Runs folder/spec.json; one JSON line per step and one at the end on standard output; 0, or 70 if it broke."""
    out = sys.stdout
    started_s = time.monotonic()
    spec = ArmSpec.from_json((folder / "spec.json").read_text())

    def say(kind: str, body: dict[str, object]) -> None:
        # Whoever read the reports is gone: the arm goes on, like any job.
        with contextlib.suppress(BrokenPipeError):
            out.write(json.dumps({"type": kind, **body}) + "\n")
            out.flush()

    try:
        arm = run_arm(spec, folder, lambda report: say("step", report_to_dict(report)))
    except EngineDied as error:
        say("error", {"text": str(error)})
        return 70
    body = {"ended": arm.ended, "checksums": arm.checksums, "snapshots": arm.snapshot_files}
    say("end", {**body, "wall_s": time.monotonic() - started_s})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
