"""Records the streams of a real async RL loop: a Hugging Face trainer, a real vLLM engine on CPU, every split known.

    .venv-vllm/bin/python -m benchmarks.record_split OUT --engines bf16 fp8 e5m2 fp32

writes OUT/<engine>-<lr>.npz (plain arrays) for each engine and learning rate. The engine gets version v's weights at
step v and makes batch v; the trainer then trains on batch v - 3 (--train-lag). Each batch is scored, in float32, by the
trainer's weights at its own version (the truth the split needs) and 1, 3 and 6 versions later. After each sync the
engine also re-scores one row of the batch trained on (`prompt_logprobs`). `A+B` is one run whose engine is replaced
halfway by another.

Policy: Qwen3 with 0.5 M parameters, taught a random order-2 Markov language; reward: the share of even tokens.
Axes: S rows, P prompt tokens, T response tokens, N packed tokens of all batches, V versions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

# first: it sets the environment that torch reads when it is imported
from benchmarks.split_engine import ENGINES, Engine, Engines, must_round  # isort: skip

import numpy as np
import torch
from torch import Tensor

from dlc_sentinel.demo.policy import load_weights, make_policy, response_log_softmax, sampled, score, weights_of
from dlc_sentinel.demo.shape import PolicyShape

SHAPE = PolicyShape(512, 128, 256, 2, 4, 2, 32, 256)
PROMPT_TOKENS, NUM_GROUPS, GROUP_ROWS = 16, 16, 4
MIN_TOKENS, MAX_TOKENS = 64, 160
LAGS = (0, 1, 3, 6)
TABLE_SCALES = (2.1, 0.7)
"""Spread of the language's two tables, nats: an entropy of about ln 512 - (2.1^2 + 0.7^2) / 2 = 3.8 nats a token."""
TRUNCATION = 2.0
Arrays = dict[str, np.ndarray]


class Language:
    """Text in which a token's logits are the sum of two random tables, one of the last token, one of that before."""

    def __init__(self, seed: int) -> None:
        shape = (2, SHAPE.vocab_size, SHAPE.vocab_size)
        scales = torch.tensor(TABLE_SCALES)[:, None, None]
        self._tables = scales * torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self._random = torch.Generator().manual_seed(seed)

    def sample(self, num_rows: int, num_tokens: int) -> Tensor:
        """[rows, tokens] token ids."""
        ids = torch.randint(0, SHAPE.vocab_size, (num_rows, num_tokens), generator=self._random)
        for at in range(2, num_tokens):
            logits = self._tables[0, ids[:, at - 1]] + self._tables[1, ids[:, at - 2]]
            noise = torch.empty_like(logits).exponential_(generator=self._random).log_()
            ids[:, at] = (logits - noise).argmax(1)
        return ids


def pretrained(folder: Path, num_steps: int) -> dict[str, np.ndarray]:
    """Weights after supervised steps on the language, each rounded to bfloat16; made once for a folder."""
    path = folder / f"pretrained-{num_steps}.npz"
    if not path.exists():
        started_s, language, model = time.monotonic(), Language(1), make_policy(SHAPE, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps + 1)
        pool = language.sample(2048, 64)
        for step in range(num_steps):
            ids = pool[(32 * step) % 2048 : (32 * step) % 2048 + 32]
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 100 == 0 or step == num_steps - 1:
                say(f"pretraining step {step}: {loss.item():.3f} nats, {time.monotonic() - started_s:.0f} s")
        rounded = {name: value.to(torch.bfloat16).float() for name, value in model.state_dict().items()}
        np.savez(path, **{name: value.numpy() for name, value in rounded.items()})
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


class Batch:
    """One generated batch and the streams known of it so far."""

    def __init__(self, prompts_SP: Tensor, length_S: np.ndarray, tokens_ST: Tensor, engine_N: np.ndarray) -> None:
        self.prompts_SP, self.length_S, self.tokens_ST, self.engine_N = prompts_SP, length_S, tokens_ST, engine_N
        self.mask_ST = np.arange(tokens_ST.shape[1]) < length_S[:, None]
        self.trainer = {lag: np.full(len(engine_N), np.nan, np.float32) for lag in LAGS}
        even = ((tokens_ST % 2 == 0).numpy() & self.mask_ST).sum(1) / length_S
        even = even.reshape(NUM_GROUPS, GROUP_ROWS)
        spread = even.std(1, keepdims=True) + 1e-4
        self.advantage_S = torch.from_numpy(((even - even.mean(1, keepdims=True)) / spread).ravel()).float()

    def row(self, row: int) -> tuple[list[int], list[int]]:
        """(prompt, response) of a row."""
        return self.prompts_SP[row].tolist(), self.tokens_ST[row, : self.length_S[row]].tolist()


def record(
    engines: list[str],
    lr: float,
    seed: int,
    num_versions: int,
    train_lag: int,
    start: dict[str, np.ndarray],
    dirs: Path,
) -> Arrays:
    """The streams of one run of `num_versions` versions, the engines taking equal parts of it."""
    language, rng = Language(1000 + seed), np.random.default_rng([seed, 7])
    model = make_policy(SHAPE, 0)
    load_weights(model, start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    batches: list[Batch] = []
    rescored: list[tuple[int, np.ndarray, np.ndarray]] = []
    in_turn = Engines(engines, dirs, seed, max_rows=NUM_GROUPS * GROUP_ROWS, max_tokens=SHAPE.max_tokens)
    for version in range(num_versions):
        engine = in_turn.at(version * len(engines) // num_versions)
        engine.load(weights_of(model))
        prompts = language.sample(NUM_GROUPS, PROMPT_TOKENS).repeat_interleave(GROUP_ROWS, 0)
        length_S = rng.integers(MIN_TOKENS, MAX_TOKENS + 1, len(prompts))
        batches.append(Batch(prompts, length_S, *engine.generate(prompts, length_S)))
        for lag in LAGS:
            if lag not in (train_lag, *range(version + 1, max(LAGS) + 1)):
                scores(batches[version - lag], model, lag)
        step(
            batches[max(version - train_lag, 0)], model, optimizer, keep_as=train_lag if version >= train_lag else None
        )
        if version >= train_lag:
            row = int(rng.integers(len(length_S)))
            rescored.append(rescored_row(batches[version - train_lag], engine, row, train_lag))
    return packed(batches, rescored, engines) | {"train_lag": np.array(train_lag)}


@torch.no_grad()
def scores(batch: Batch, model: torch.nn.Module, lag: int) -> None:
    """Writes the trainer's logprobs at its present weights into the batch."""
    batch.trainer[lag][:] = score(model, batch.prompts_SP, batch.tokens_ST).numpy()[batch.mask_ST]


def step(batch: Batch, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, keep_as: int | None) -> None:
    """One update with the ratio to the engine truncated at 2; the forward pass is the batch's score at a lag."""
    now_ST = sampled(response_log_softmax(model, batch.prompts_SP, batch.tokens_ST), batch.tokens_ST)
    mask_ST = torch.from_numpy(batch.mask_ST)
    now_N = now_ST[mask_ST]
    if keep_as is not None:
        batch.trainer[keep_as][:] = now_N.detach().numpy()
    ratio_N = (now_N.detach() - torch.from_numpy(batch.engine_N)).exp().clamp(max=TRUNCATION)
    advantage_N = batch.advantage_S[:, None].expand_as(now_ST)[mask_ST]
    loss = -(ratio_N * advantage_N * now_N).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def rescored_row(batch: Batch, engine: Engine, row: int, lag: int) -> tuple[int, np.ndarray, np.ndarray]:
    """(row, the engine's logprobs now, the trainer's logprobs now) of one row of a batch `lag` versions old."""
    ends = np.cumsum(batch.length_S)
    part = slice(int(ends[row] - batch.length_S[row]), int(ends[row]))
    return row, engine.rescore(*batch.row(row)), batch.trainer[lag][part].copy()


def packed(batches: list[Batch], rescored: list[tuple[int, np.ndarray, np.ndarray]], engines: list[str]) -> Arrays:
    """Plain arrays: streams over all batches, lengths [V, S]; the re-scored rows begin with version train_lag."""
    out = {f"trainer_{lag}": np.concatenate([batch.trainer[lag] for batch in batches]) for lag in LAGS}
    out["engine"] = np.concatenate([batch.engine_N for batch in batches])
    out["lengths"] = np.stack([batch.length_S for batch in batches])
    out["rescored_row"] = np.array([row for row, _, _ in rescored], dtype=np.int64)
    out["rescored_engine"] = np.concatenate([engine for _, engine, _ in rescored])
    out["rescored_trainer"] = np.concatenate([trainer for _, _, trainer in rescored])
    out["rounded_cache"] = np.array([name for name in engines if must_round(name)], dtype=np.str_)
    out["engine_of_version"] = np.array([engines[v * len(engines) // len(batches)] for v in range(len(batches))])
    return out


def say(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Records what the command line asks for; files that are there already stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engines", nargs="+", required=True, help="of " + ", ".join(ENGINES) + ", or A+B")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 2e-4, 1e-4])
    parser.add_argument("--versions", type=int, default=18)
    parser.add_argument("--train-lag", type=int, choices=LAGS[1:], default=3)
    parser.add_argument("--pretraining-steps", type=int, default=500)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    start = pretrained(asked.out, asked.pretraining_steps)
    model_dir = asked.out / "model"
    if not model_dir.exists():
        model = make_policy(SHAPE, 0)
        load_weights(model, start)
        model.save_pretrained(model_dir)
    for seed, lr in enumerate(asked.rates):
        for engines in asked.engines:
            path = asked.out / f"{engines}-{lr:g}{'' if asked.train_lag == 3 else f'-late{asked.train_lag}'}.npz"
            if path.exists():
                continue
            started_s = time.monotonic()
            arrays = record(engines.split("+"), lr, seed, asked.versions, asked.train_lag, start, model_dir)
            np.savez(path, allow_pickle=False, **arrays)
            facts = {
                "file": path.name,
                "tokens": len(arrays["engine"]),
                "wall_s": round(time.monotonic() - started_s, 1),
            }
            say(json.dumps(facts))


if __name__ == "__main__":
    main()
