"""The generator's own process: `python -m dlc_sentinel.demo.engine`, spoken to over its standard input and output.

It keeps the weights it was given until it is given others, tags what it generates with their version, and reports to
the sentinel through a hook of its own. `serve` is shared with the vLLM engine; only the backend differs.

    start {run facts, EngineSettings} -> ready     sync {version, step} + weights -> synced {version, checksum}
    generate {request, num_tokens} + prompts -> batch {version} + tokens, logprobs     stop, or a closed pipe -> ends
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Literal, Protocol

import numpy as np

from dlc_sentinel.demo.protocol import Array, Link, Message, checksum
from dlc_sentinel.hook import connect
from dlc_sentinel.records import F32, I64, UNKNOWN_VERSION

Fault = Literal["none", "undelivered", "drift", "queue"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is told at its start; plain values only, since it crosses the pipe as JSON."""

    seed: int = 1
    dtype: str = "bfloat16"
    num_rows: int = 48
    num_tokens: int = 100
    """Longest prompt plus response, tokens."""
    shape: Mapping[str, float] = field(default_factory=dict)
    """Fields of PolicyShape."""
    fault: Fault = "none"
    fault_from_version: int = 0
    """undelivered: weights of later versions are not taken over, though every answer says so. drift: starts here."""
    drift_per_step: float = 0.01
    """Growth of the logits' rounding width a generated batch, nats."""
    sends_checksum: bool = True
    """Whether the hook's `synced` carries the checksum of the weights that the engine really holds."""
    model_dir: str = ""
    """vLLM only: folder with config.json and weights."""


class Backend(Protocol):
    """What generates."""

    dtype: str
    stack: str

    def load(self, weights: Mapping[str, F32]) -> None:
        """Takes over the weights and forgets whatever was computed with the old ones."""

    def generate(self, prompts_SP: I64, num_tokens: int) -> tuple[I64, F32]:
        """([S, T] sampled tokens, [S, T] their logprobs in nats) at temperature 1."""

    def coarsen(self, grid_nats: float) -> None:
        """Rounds logits to multiples of `grid_nats` from now on."""


class TinyBackend:
    """The hand-written sampler over a Qwen3 made from a config."""

    stack = "dlc-sentinel demo"

    def __init__(self, settings: EngineSettings) -> None:
        import torch

        from dlc_sentinel.demo.sampler import Sampler
        from dlc_sentinel.demo.shape import PolicyShape

        torch.set_num_threads(1)
        shape = PolicyShape(**settings.shape)  # type: ignore[arg-type]  # JSON keeps ints as ints, floats as floats
        self.dtype = settings.dtype
        self._sampler = Sampler(
            shape,
            settings.num_rows,
            settings.num_tokens,
            "bfloat16" if settings.dtype == "bfloat16" else "float32",
        )
        self._generator = torch.Generator().manual_seed(settings.seed)

    def load(self, weights: Mapping[str, F32]) -> None:
        self._sampler.load(weights)

    def generate(self, prompts_SP: I64, num_tokens: int) -> tuple[I64, F32]:
        import torch

        prompts = torch.from_numpy(np.array(prompts_SP))
        tokens, logprobs = self._sampler.generate(prompts, num_tokens, self._generator)
        return tokens.numpy(), logprobs.numpy()

    def coarsen(self, grid_nats: float) -> None:
        self._sampler.logit_grid = grid_nats


class Engine:
    """One generator: a backend, the version of its weights, and its hook."""

    def __init__(self, settings: EngineSettings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        self._version = UNKNOWN_VERSION
        self._held_checksum = ""
        self._num_drifted = 0
        self._hook = connect(
            role="engine",
            model_name="demo-qwen3",
            stack=backend.stack,
            sampling={
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "logprobs_mode": "processed_logprobs",
            },
            dtypes={"engine": backend.dtype},
        )

    def sync(self, version: int, step: int, weights: Mapping[str, F32]) -> str:
        """The checksum of the weights held after taking over those of `version` (under the fault: only its label)."""
        lost = self._settings.fault == "undelivered" and version > self._settings.fault_from_version
        if not lost:
            self._backend.load(weights)
            self._held_checksum = checksum(weights)
        self._version = version
        shown = self._held_checksum if self._settings.sends_checksum else None
        self._hook.synced(version, step, checksum=shown, tensors=len(weights))
        return self._held_checksum

    def generate(self, request: str, prompts_SP: I64, num_tokens: int) -> tuple[I64, F32, int]:
        """(tokens [S, T], logprobs [S, T], version of the weights by label); rows are named `request`:0, :1, ..."""
        if self._settings.fault == "drift" and self._version >= self._settings.fault_from_version:
            self._num_drifted += 1
            self._backend.coarsen(self._settings.drift_per_step * self._num_drifted)
        tokens, logprobs = self._backend.generate(prompts_SP, num_tokens)
        ids = [f"{request}:{row}" for row in range(len(tokens))]
        # "stop": a response of this task is whole at its fixed length, for every policy; none is cut short.
        self._hook.rollout(ids, logprobs, version=self._version, finish="stop")
        return tokens, logprobs, self._version

    def close(self) -> None:
        self._hook.close()


def serve(link: Link, make_backend: Callable[[EngineSettings], Backend]) -> None:
    """Answers messages until `stop` or a closed pipe. An error ends the process; its text goes to the peer first."""
    first = link.receive()
    if first is None:
        return
    try:
        settings = EngineSettings(**first.fields["settings"])
        engine = Engine(settings, make_backend(settings))
        link.send("ready", {"pid": os.getpid()})
        while (message := link.receive()) is not None and message.kind != "stop":
            link.send(*_answer(engine, message))
        engine.close()
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, ImportError) as error:
        traceback.print_exc()
        link.send("error", {"text": f"{type(error).__name__}: {error}"})


def _answer(engine: Engine, message: Message) -> tuple[str, dict[str, str | int], dict[str, Array]]:
    fields = message.fields
    if message.kind == "sync":
        weights = {name: value.astype(np.float32) for name, value in message.arrays.items()}
        held = engine.sync(int(fields["version"]), int(fields["step"]), weights)
        return "synced", {"version": int(fields["version"]), "checksum": held}, {}
    if message.kind == "generate":
        prompts = message.arrays["prompts"].astype(np.int64)
        tokens, logprobs, version = engine.generate(str(fields["request"]), prompts, int(fields["num_tokens"]))
        return "batch", {"version": version}, {"tokens": tokens, "logprobs": logprobs}
    raise ValueError(f"message {message.kind!r}, wanted sync, generate or stop")


def own_pipe() -> Link:
    """This process's standard streams as a link; what anything prints from now on goes to standard error instead."""
    incoming: IO[bytes] = os.fdopen(os.dup(0), "rb")
    outgoing: IO[bytes] = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)
    return Link(incoming, outgoing)


if __name__ == "__main__":
    serve(own_pipe(), TinyBackend)
