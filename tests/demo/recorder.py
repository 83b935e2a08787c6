"""Stand-ins for the two things an arm talks to: a hook that writes down its calls, an engine within the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlc_sentinel.demo.client import Batch
from dlc_sentinel.demo.engine import Engine, EngineSettings
from dlc_sentinel.records import Command


@dataclass
class RecordingHook:
    """Has a hook's face; `commands` maps the step of a poll to the command it brings."""

    commands: Mapping[int, Command] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Command | None:
            # Arrays are copied: the caller may go on writing to its own.
            kept = {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in kwargs.items()}
            self.calls.append((name, args, kept))
            return self.commands.get(args[0]) if name == "poll" else None

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Positional and named arguments of each call of that name."""
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@dataclass
class CountingBackend:
    """Generates the count of its loads as every token; logprobs are minus the grid it was told to round to."""

    dtype: str = "float32"
    stack: str = "fake"
    loads: list[Mapping[str, Any]] = field(default_factory=list)
    grid: float = 0.0

    def load(self, weights: Mapping[str, Any]) -> None:
        self.loads.append(weights)

    def generate(self, prompts_SP: Any, num_tokens: int) -> tuple[Any, Any]:
        shape = (len(prompts_SP), num_tokens)
        return np.full(shape, len(self.loads), dtype=np.int64), np.full(shape, -self.grid, dtype=np.float32)

    def coarsen(self, grid_nats: float) -> None:
        self.grid = grid_nats


class InProcessEngine:
    """An EngineProcess without the process."""

    def __init__(self, settings: EngineSettings, backend: Any) -> None:
        self._engine = Engine(settings, backend)
        self.pushed: list[int] = []

    def sync(self, weights: Mapping[str, Any], *, version: int, step: int) -> str:
        self.pushed.append(version)
        return self._engine.sync(version, step, weights)

    def generate(self, request: str, prompts_SP: Any, num_tokens: int) -> Batch:
        tokens, logprobs, version = self._engine.generate(request, prompts_SP, num_tokens)
        ids: Sequence[str] = [f"{request}:{row}" for row in range(len(tokens))]
        return Batch(tuple(ids), version, prompts_SP, tokens, logprobs)
