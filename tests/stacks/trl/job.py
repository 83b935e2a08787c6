"""A real TRL job on one CPU thread: tiny Qwen3 from a config, tokenizer in memory, an engine with weights of its own.

`Watched` is a real sentinel in a thread. Axes: B rows, T tokens of one completion.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dlc_sentinel.config import Act, Config, Ess, Window
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.records import Ack, Train
from dlc_sentinel.runtime import LiveSource, Runtime
from dlc_sentinel.sinks.prometheus import PrometheusSink
from dlc_sentinel.wire.codec import decode
from dlc_sentinel.wire.receiver import Receiver

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

DEADLINE_S = 60.0
NUM_WORDS = 48
PROMPT_TOKENS, LENGTH = 4, 24
HORIZON = 8
CONFIG = Config(
    ess=Ess(horizon=HORIZON),
    window=Window(min_groups=2, min_blocks=16, min_tokens=64),
    act=Act(mode="observe", warmup_steps=1, min_interval_steps=1, pending_tokens=64, pending_groups=2),
)


def acting(mode):
    """The sentinel's settings with another mode."""
    act = Act(mode=mode, warmup_steps=1, min_interval_steps=1, pending_tokens=64, pending_groups=2)
    return Config(ess=CONFIG.ess, window=CONFIG.window, act=act)


# -- the sentinel ----------------------------------------------------------------------------------------------------


class Ears:
    """A sink that other threads can wait on."""

    def __init__(self):
        self.events = []
        self._news = threading.Condition()

    def handle(self, event):
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def publish(self, snapshot):
        return None

    def close(self):
        return None

    def wait_for(self, wanted):
        with self._news:
            assert self._news.wait_for(lambda: any(wanted(e) for e in self.events), DEADLINE_S), self.events

    def of(self, kind):
        return [event for event in self.events if event.kind == kind]

    @property
    def steps(self):
        return {event.step: event.data for event in self.of("step")}


class Tee(LiveSource):
    """A live source that keeps what came, decoded, and sends the commands put into `orders`."""

    def __init__(self, receiver):
        super().__init__(receiver)
        self.records = []
        self.orders = []

    def poll(self, timeout_ms):
        while self.orders:
            command, sent = self.orders.pop(0)
            self.send_command(command)
            sent.set()
        frames = super().poll(timeout_ms)
        self.records += [decode(bytes(frame.frame))[0] for frame in frames if frame.channel != "tick"]
        return frames


class Watched:
    """A sentinel in this process: `address`, what it heard (`ears`), and the records that came in.

    `metrics`: the base address of its metrics port, "0" where it has none.
    """

    def __init__(self, config, *, metrics=False):
        self._receiver = Receiver("tcp://127.0.0.1:0")
        self.address = str(self._receiver.address)
        self.ears = Ears()
        self._source = Tee(self._receiver)
        http = PrometheusSink() if metrics else None
        self.metrics = "0" if http is None else http.url
        self.runtime = Runtime(config, self._source, Monitor(config), None, [self.ears, *([http] if http else [])])
        self._thread = threading.Thread(target=self.runtime.run)
        self._thread.start()

    @property
    def records(self):
        return list(self._source.records)

    def of(self, kind):
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def acks(self):
        return self.of(Ack)

    @property
    def rows(self):
        """One `Row` per trainer sequence, in the order they came."""
        return [row for record in self.of(Train) for row in rows_of(record)]

    def order(self, command):
        """Has the thread that owns the sockets send a command to the trainer; returns once it has."""
        sent = threading.Event()
        self._source.orders.append((command, sent))
        assert sent.wait(DEADLINE_S)

    def close(self):
        self.runtime.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@contextmanager
def sentinel(monkeypatch, config=CONFIG, *, metrics=False):
    watched = Watched(config, metrics=metrics)
    monkeypatch.setenv("DLC_SENTINEL", watched.address)
    monkeypatch.setenv("DLC_SENTINEL_METRICS", watched.metrics)
    monkeypatch.setenv("DLC_SENTINEL_RUN", "trl")
    try:
        yield watched
    finally:
        watched.close()


@dataclass
class Row:
    """One sequence of a train record."""

    step: int
    version: int
    update: int
    rank: int
    id: str
    group: str
    generated_at: int
    old_is: str
    old_version: int
    engine: np.ndarray
    cur: np.ndarray
    old: np.ndarray | None
    mask: np.ndarray

    @property
    def age(self):
        return self.version - self.generated_at


def rows_of(record):
    rows = []
    for i, name in enumerate(record.ids):
        start, end = record.offsets_S1[i], record.offsets_S1[i + 1]
        span = np.searchsorted(record.span_start_K, start, side="right") - 1
        cut = [None if x is None else np.array(x[start:end]) for x in (record.engine_N, record.cur_N, record.old_N)]
        mask = np.ones(end - start, bool) if record.mask_N is None else np.array(record.mask_N[start:end])
        old_version = -1 if record.old_version_S is None else int(record.old_version_S[i])
        rows.append(
            Row(
                record.step, record.version, record.update, record.source.rank, name, record.groups[i],
                int(record.span_version_K[span]), record.old_is, old_version, *cut, mask,
            )
        )  # fmt: skip
    return rows


# -- the model and its engine ----------------------------------------------------------------------------------------


def tiny_config():
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip


def tiny_model():
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(tiny_config())


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {f"w{i}": 3 + i for i in range(NUM_WORDS)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def prompts(num):
    from datasets import Dataset

    rng = np.random.default_rng(3)
    words = rng.integers(0, NUM_WORDS, (num, PROMPT_TOKENS))
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in words]})


def reward(completion_ids, **_):
    """Share of a completion's tokens below 24: something that can be learnt, so that the policy moves."""
    return [float(np.mean(np.array(ids) < 24)) for ids in completion_ids]


def plain_logps(state_dict, ids_BT, num_kept):
    """Second implementation: log-softmax of a plain forward, [B, num_kept] float64, for whole token rows [B, T]."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(tiny_config()).eval()
    model.load_state_dict(state_dict)
    ids = torch.as_tensor(ids_BT)
    with torch.no_grad():
        logits = model(ids).logits[:, -num_kept - 1 : -1].double()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, -num_kept:, None])[..., 0].numpy()


@dataclass
class Batch:
    """What an engine generated in one call, per row, and at which of its syncs."""

    prompts: list
    completions: list
    logprobs: list


class Engine:
    """In place of TRL's VLLMGeneration: weights and numerics (bf16) of its own, which change at sync_weights only."""

    last: Engine | None = None

    def __init__(self, model, accelerator, dtype="bfloat16", **settings):
        import torch
        from transformers import Qwen3ForCausalLM

        self._trainer_model, self._accelerator = model, accelerator
        self._model = Qwen3ForCausalLM(tiny_config()).to(getattr(torch, dtype)).eval()
        self.length = settings.get("max_completion_length", LENGTH)
        self.batches: list[Batch] = []
        self.num_syncs = 0
        self.spoil = None
        Engine.last = self

    def sync_weights(self):
        import torch

        source = self._accelerator.unwrap_model(self._trainer_model).state_dict()
        with torch.no_grad():
            for name, value in self._model.state_dict().items():
                value.copy_(source[name])
        self.num_syncs += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        completions, logprobs = self.sample(prompts)
        self.batches.append(Batch(prompts, completions, logprobs))
        sent = [self.spoil(row) for row in logprobs] if self.spoil else logprobs
        return prompts, completions, [[[value] for value in row] for row in sent], None

    def sample(self, prompts):
        """(ids, logprobs) of one completion per prompt; all prompts have one length."""
        import torch

        ids, past, chosen, logps = torch.as_tensor(prompts), None, [], []
        with torch.no_grad():
            for _ in range(self.length):
                out = self._model(ids, past_key_values=past, use_cache=True)
                past, logp = out.past_key_values, torch.log_softmax(out.logits[:, -1].float(), -1)
                ids = torch.multinomial(logp.exp(), 1)
                chosen.append(ids)
                logps.append(logp.gather(1, ids))
        chosen_BT, logps_BT = torch.cat(chosen, 1).tolist(), torch.cat(logps, 1).tolist()
        ends = [row.index(1) + 1 if 1 in row else self.length for row in chosen_BT]
        return [row[:end] for row, end in zip(chosen_BT, ends, strict=True)], [
            row[:end] for row, end in zip(logps_BT, ends, strict=True)
        ]


class ExactEngine(Engine):
    """An engine with the trainer's own numerics: what is left is lag."""

    def __init__(self, model, accelerator, **settings):
        super().__init__(model, accelerator, "float32", **settings)


# -- the trainer -----------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A GRPOTrainer, and what the test itself saw of it."""

    trainer: object
    weights: dict = field(default_factory=dict)
    """Optimizer step -> the policy's weights before it."""
    logs: list = field(default_factory=list)

    @property
    def engine(self):
        return self.trainer.vllm_generation


def grpo(monkeypatch, folder, *, max_steps, engine=Engine, rollout=None, prompts_per_step=4, **changes):
    """A GRPOTrainer on CPU. Each optimizer step trains `prompts_per_step` prompts with 4 completions each."""
    import trl.trainer.grpo_trainer as module
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setattr(module, "VLLMGeneration", engine)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    settings = {
        "per_device_train_batch_size": 4 * prompts_per_step, "num_generations": 4, "gradient_accumulation_steps": 1,
        "steps_per_generation": 4, "max_completion_length": LENGTH, "learning_rate": 1e-2, "max_steps": max_steps,
        "lr_scheduler_type": "constant", "beta": 0.0, "use_vllm": rollout is None, "vllm_mode": "colocate",
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "output_dir": str(folder), "seed": 1, "scale_rewards": "none",
        "vllm_importance_sampling_mode": "token_truncate", "loss_type": "grpo", "remove_unused_columns": False,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=tiny_model(), reward_funcs=reward, args=GRPOConfig(**settings | changes), train_dataset=prompts(1024),
        processing_class=tokenizer(), rollout_func=rollout,
    )  # fmt: skip
    return Job(trainer)


def watch_along(job, ears, at_step=None):
    """Keeps weights and logs, lets each step wait until the sentinel has judged it, then calls `at_step(step)`."""
    from transformers import TrainerCallback

    class Along(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            job.weights[state.global_step] = {k: v.clone() for k, v in plain(model).state_dict().items()}

        def on_step_end(self, args, state, control, **_):
            step = state.global_step - 1
            ears.wait_for(lambda event: event.kind == "step" and event.step == step)
            if at_step is not None:
                at_step(step)

        def on_log(self, args, state, control, logs=None, **_):
            job.logs.append(dict(logs))

    job.trainer.add_callback(Along())
    return job


def until(what, timeout_s=DEADLINE_S):
    """Returns once `what()` is true; AssertionError at the deadline."""
    end_s, tick = time.monotonic() + timeout_s, threading.Event()
    while not what():
        assert time.monotonic() < end_s
        tick.wait(0.02)


def plain(model):
    return getattr(model, "module", model)


def ess(block_sums):
    """Share (0..1): (sum w)^2 / (n sum w^2)."""
    weights = np.exp(np.asarray(block_sums))
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def blocks(x_T, horizon):
    """Sums over blocks of `horizon` tokens from the start; what is left over is covered by one more, the last ones."""
    if len(x_T) <= horizon:
        return [x_T.sum()]
    whole = [x_T[i : i + horizon].sum() for i in range(0, len(x_T) - horizon + 1, horizon)]
    return whole if len(x_T) % horizon == 0 else [*whole, x_T[-horizon:].sum()]
