"""How verl's functions are wrapped: found when their module loads, checked by name and arguments, wrapped, undone.

A symbol that does not fit is left alone and told in one line; the job runs on. Nothing here imports verl.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

_log = logging.getLogger("dlc_sentinel.verl")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A function of verl that is relied on: where it lives, and the arguments it must begin with."""

    module: str
    path: str
    """"Class.method" or "function"."""
    args: tuple[str, ...]
    since: str = "0.8.0"
    """First verl that has it; an older one does without."""

    def misfit(self, names: Sequence[str] | None) -> str:
        """Why a function with these argument names cannot be wrapped ("" = it can); None = there is no such one."""
        where = f"{self.module}.{self.path}"
        if names is None:
            return f"{where} does not exist in this verl"
        if tuple(names[: len(self.args)]) != self.args:
            return f"{where} takes ({', '.join(names)}), wanted ({', '.join(self.args)}, ...)"
        return ""


INIT_MODEL = Symbol("verl.workers.engine_workers", "ActorRolloutRefWorker.init_model", ("self",))
UPDATE_WEIGHTS = Symbol(
    "verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights", ("self", "global_steps", "mode")
)
TRAIN_BATCH = Symbol("verl.workers.engine.base", "BaseEngine.train_batch", ("self", "data", "loss_function"))
TRAIN_ONE = Symbol("verl.workers.engine_workers", "TrainingWorker.train_batch", ("self", "data"))
INFER = Symbol("verl.workers.engine_workers", "TrainingWorker.infer_batch", ("self", "data"))
SNAPSHOT = Symbol("verl.experimental.separation.engine_workers", "DetachActorWorker.copy_handler", ("self",))
RESTORE = Symbol("verl.experimental.separation.engine_workers", "DetachActorWorker.restore_handler", ("self",))
SET_LOSS = Symbol("verl.workers.engine_workers", "TrainingWorker.set_loss_fn", ("self", "loss_fn"))
AGENT_OUTPUT = Symbol("verl.experimental.agent_loop.agent_loop", "AgentLoopOutput.as_dict", ("self",))
VLLM_ANSWER = Symbol(
    "verl.workers.rollout.vllm_rollout.utils",
    "extract_prompt_logprobs",
    ("output", "num_prompt_logprobs", "result_dict"),
)
UNPAD = Symbol("verl.workers.utils.padding", "no_padding_2_padding", ("tensor", "data"))
LOG = Symbol("verl.utils.tracking", "Tracking.log", ("self", "data", "step", "backend"))
UPDATE_ACTOR_V0 = Symbol("verl.trainer.ppo.ray_trainer", "RayPPOTrainer._update_actor", ("self", "batch"))
UPDATE_ACTOR_V1 = Symbol(
    "verl.trainer.ppo.v1.trainer_base", "PPOTrainer._update_actor", ("self", "batch", "metrics"), since="0.9.0"
)
STEP_V1 = Symbol(
    "verl.trainer.ppo.v1.trainer_base",
    "PPOTrainer._step_once",
    ("self", "metrics", "timing_raw", "sample_batch_size"),
    since="0.9.0",
)
FIT_UPDATE_ACTOR = Symbol(
    "verl.experimental.separation.ray_trainer", "SeparateRayPPOTrainer._fit_update_actor", ("self", "batch")
)
FIT_V0 = Symbol("verl.trainer.ppo.ray_trainer", "RayPPOTrainer.fit", ("self",))
FIT_V1 = Symbol("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.fit", ("self",), since="0.9.0")
RUN_AGENT = Symbol(
    "verl.experimental.agent_loop.agent_loop",
    "AgentLoopWorker._run_agent_loop",
    ("self", "sampling_params", "trajectory"),
)
GENERATE = Symbol("verl.workers.rollout.llm_server", "LLMServerClient.generate", ("self", "request_id", "prompt_ids"))
GENERATE_RESUMED = Symbol(
    "verl.workers.rollout.llm_server",
    "FullyAsyncLLMServerClient.generate",
    ("self", "request_id", "prompt_ids"),
    since="0.9.0",
)
REQUEST_ID = Symbol(
    "verl.workers.rollout.llm_server", "LLMServerClient._vllm_request_id", ("self", "request_id"), since="0.9.0"
)
CONTRACT: tuple[Symbol, ...] = (
    INIT_MODEL, UPDATE_WEIGHTS, TRAIN_BATCH, TRAIN_ONE, INFER, SNAPSHOT, RESTORE, UNPAD, LOG, UPDATE_ACTOR_V0,
    UPDATE_ACTOR_V1, STEP_V1, FIT_UPDATE_ACTOR, FIT_V0, FIT_V1, RUN_AGENT, GENERATE, GENERATE_RESUMED, REQUEST_ID,
    SET_LOSS, AGENT_OUTPUT, VLLM_ANSWER,
)  # fmt: skip
"""Every function of verl whose name or arguments this package relies on."""


class Aborted(RuntimeError):
    """Ends a trainer on purpose, where nothing gentler would: the one error of ours that may leave this package."""


def quietly(method: Callable[P, R]) -> Callable[P, R | None]:
    """The function, unable to raise into the job: an error is told once per function and kind."""
    said: set[str] = set()

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except Aborted:
            raise
        except Exception as error:  # noqa: BLE001  # nothing of ours may end a training run
            kind = type(error).__name__
            if kind not in said:
                said.add(kind)
                text = "dlc-sentinel: %s failed (said once), the job goes on: %s: %s"
                _log.warning(text, method.__qualname__, kind, error)
            return None

    return call


class Wraps:
    """The wraps of this process. `when_loaded` may be called before or after the module is imported."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._waiting: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._undo: list[Callable[[], None]] = []
        self._finder: _Finder | None = None

    def add(self, symbol: Symbol, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Puts `wrap(original)` in the symbol's place, as soon as its module is there."""
        self.when_loaded(symbol.module, lambda module: self._install(module, symbol, wrap))

    def when_loaded(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Calls `act(module)` now if the module is loaded, else right after its import."""
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            act(module)
            return
        self._waiting.setdefault(name, []).append(act)
        if self._finder is None:
            self._finder = _Finder(self._waiting)
            sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Takes all wraps out again; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            self._finder = None

    def _install(
        self, module: ModuleType, symbol: Symbol, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        owner, name, original = find(module, symbol.path)
        misfit = symbol.misfit(None if original is None else argument_names(original))
        if misfit or original is None:
            self.refused.append(misfit)
            _log.warning("dlc-sentinel: not wrapped: %s; what it shows is missing, the job runs on", misfit)
            return
        own = name in vars(owner)
        setattr(owner, name, functools.wraps(original)(wrap(original)))
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))


def find(module: ModuleType, path: str) -> tuple[Any, str, Callable[..., Any] | None]:
    """(holder, name, function or None) of a dotted path in a module."""
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    return owner, name, getattr(owner, name, None)


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments, behind any functools.wraps."""
    return list(inspect.signature(function).parameters)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the usual finders find, and adds what waits for the module to the end of its execution."""

    def __init__(self, waiting: dict[str, list[Callable[[ModuleType], None]]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        # Those before this one have been asked already, perhaps by one like it: two that ask each other never end.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for act in self._waiting.pop(fullname, []):
                quietly(act)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # on this module's own loader only
        return spec
