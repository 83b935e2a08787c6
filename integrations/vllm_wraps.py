"""The wrapped methods of vLLM. Each calls the original with what it was given; a fault of ours disables the wrap."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dlc_sentinel.integrations import vllm_symbols as symbols
from dlc_sentinel.integrations.vllm_engine import Plugin
from dlc_sentinel.integrations.vllm_symbols import Symbol
from dlc_sentinel.integrations.vllm_weights import begins_update, changes_weights

_log = logging.getLogger("dlc_sentinel.vllm")

R = TypeVar("R")
Method = Callable[..., Any]
Wrap = Callable[["Guard", Plugin, Method], Method]


class Guard:
    """Runs our part of one wrap; after the first error only the original runs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.broken = False

    def run(self, part: Callable[..., R], *args: Any, **kwargs: Any) -> R | None:
        """What `part` returns; None when it failed, now or before."""
        if self.broken:
            return None
        try:
            return part(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # nothing may raise into the engine
            self.broken = True
            kind = type(error).__name__
            _log.warning(
                "dlc-sentinel: %s: %s: %s; disabled, the engine runs on", self.path, kind, error, exc_info=True
            )
            return None


def install() -> tuple[list[str], list[str]]:
    """(symbols wrapped, why others were not). A second call in one process wraps nothing again."""
    plugin = Plugin()
    wrapped: list[str] = []
    missing: list[str] = []
    for group in (symbols.STREAM, *((symbol,) for symbol in symbols.FACTS + symbols.WEIGHTS)):
        _install_group(group, plugin, wrapped, missing)
    return wrapped, missing


def _install_group(group: Sequence[Symbol], plugin: Plugin, wrapped: list[str], missing: list[str]) -> None:
    found = [(symbol, *symbols.find(symbol)) for symbol in group]
    wrong = [reason for _, owner, reason in found if owner is None]
    if wrong:
        missing += wrong
        return
    # One guard for the group: half of the stream's wraps would lose or double tokens.
    guard = Guard(" and ".join(symbol.path for symbol in group) if len(group) > 1 else group[0].path)
    for symbol, owner, _ in found:
        original = getattr(owner, symbol.name)
        if not hasattr(original, "_dlc_sentinel"):
            method = _WRAPS[symbol](guard, plugin, original)
            method._dlc_sentinel = True  # type: ignore[attr-defined]  # a mark on a function
            setattr(owner, symbol.name, method)
        wrapped.append(symbol.path)


def _add_request(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request, *args, **kwargs)
        guard.run(plugin.opened, self, request)
        return result

    return add_request


def _process_outputs(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        front = plugin.fronts.get(self)
        if front is None:
            return original(self, engine_core_outputs, *args, **kwargs)
        # Not guarded: logprobs that the client did not ask for must never reach vLLM's own processor, which asserts.
        hidden = front.collector.hide(engine_core_outputs)
        result = original(self, engine_core_outputs, *args, **kwargs)
        label = kwargs.get("weight_version", args[2] if len(args) > 2 else None)
        guard.run(front.step, engine_core_outputs, label, hidden, result)
        return result

    return process_outputs


def _abort_requests(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def abort_requests(self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, request_ids, *args, **kwargs)
        front = plugin.fronts.get(self)
        if front is not None:
            guard.run(front.aborted, result)
        return result

    return abort_requests


def _engine_init(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        guard.run(plugin.made, self, vllm_config)

    return init


def _get_output_async(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    async def get_output_async(self: Any) -> Any:
        outputs = await original(self)
        guard.run(plugin.came_from, self, outputs)
        return outputs

    return get_output_async


def _collective_rpc(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **rest: Any
    ) -> Any:
        core = plugin.core(self)
        core.versions.inside += 1
        try:
            result = original(self, method, timeout, args, kwargs, **rest)
        finally:
            core.versions.inside -= 1
        if begins_update(method):
            core.versions.begin()
        elif core.versions.inside == 0 and changes_weights(method):
            guard.run(core.changed, method, args, kwargs)
        return result

    return collective_rpc


def _step(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        versions = plugin.core(self).versions
        if versions.dirty:
            guard.run(versions.before_step)
        result = original(self, *args, **kwargs)
        if versions.batches_before and result[0] is not None:
            versions.after_step(1)
        return result

    return step


def _set_version(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def set_weight_version(self: Any, weight_version: str, *args: Any, **kwargs: Any) -> Any:
        result = original(self, weight_version, *args, **kwargs)
        core = plugin.core(self)
        if not core.setting:
            guard.run(core.versions.explicit, str(weight_version))
        return result

    return set_weight_version


def _add_lora(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, lora_request, *args, **kwargs)
        guard.run(plugin.core(self).lora_loaded, lora_request)
        return result

    return add_lora


def _sleep(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def sleep(self: Any, level: Any = 1, *args: Any, **kwargs: Any) -> Any:
        result = original(self, level, *args, **kwargs)
        if isinstance(level, int) and level >= 2:
            guard.run(plugin.core(self).versions.asleep)
        return result

    return sleep


def _load_model(guard: Guard, plugin: Plugin, original: Method) -> Method:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        guard.run(watch_model, plugin, self)
        return result

    return load_model


def watch_model(plugin: Plugin, worker: Any) -> None:
    """Notices direct calls of the model's load_weights, which no RPC announces (TRL's colocated mode)."""
    model = worker.model_runner.get_model()
    original = getattr(model, "load_weights", None)
    if original is None:
        return
    guard = Guard(f"{type(model).__name__}.load_weights")

    @functools.wraps(original)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for core in list(plugin.cores.values()):
            if core.versions.inside == 0:
                guard.run(core.changed, "load_weights", args, kwargs)
        return result

    model.load_weights = load_weights


_WRAPS: dict[Symbol, Wrap] = {
    symbols.ADD_REQUEST: _add_request,
    symbols.PROCESS_OUTPUTS: _process_outputs,
    symbols.ABORT_REQUESTS: _abort_requests,
    symbols.LLM_ENGINE: _engine_init,
    symbols.ASYNC_LLM: _engine_init,
    symbols.GET_OUTPUT_ASYNC: _get_output_async,
    symbols.COLLECTIVE_RPC: _collective_rpc,
    symbols.STEP: _step,
    symbols.STEP_WITH_QUEUE: _step,
    symbols.SET_VERSION: _set_version,
    symbols.ADD_LORA: _add_lora,
    symbols.SLEEP: _sleep,
    symbols.LOAD_MODEL: _load_model,
}
