"""What the plug-in knows in one process of vLLM: its hooks, front ends (streams) and engine cores (versions)."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Any

from dlc_sentinel.integrations.vllm_core import Core
from dlc_sentinel.integrations.vllm_front import Front, logprobs_mode, setting
from dlc_sentinel.integrations.vllm_stream import Pump
from dlc_sentinel.integrations.vllm_weights import Counting

from dlc_sentinel.hook import Hook, NoHook, connect


class Plugin:
    """Everything of one process, made when vLLM loads the plug-in. After a fork, hooks and threads start afresh."""

    def __init__(self) -> None:
        self.counting = Counting.parse(setting("VERSIONS"))
        self.force = setting("FORCE_LOGPROBS") not in ("", "0")
        self.fronts: weakref.WeakKeyDictionary[Any, Front] = weakref.WeakKeyDictionary()
        self.cores: weakref.WeakKeyDictionary[Any, Core] = weakref.WeakKeyDictionary()
        self._configs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._engine_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._hooks: dict[tuple[int, int], tuple[Any, Hook | NoHook]] = {}
        self._pumps: dict[int, Pump] = {}
        self._clients: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def made(self, engine: Any, config: Any) -> None:
        """A front end was built: what its config says about the streams to come."""
        self._configs[engine.output_processor] = config
        self._clients[engine.output_processor] = weakref.ref(engine.engine_core)

    def came_from(self, client: Any, outputs: Any) -> None:
        """The engine that the step now to be processed came from; only data-parallel front ends see more than one."""
        self._engine_of[client] = int(getattr(outputs, "engine_index", 0) or 0)

    def engine_index(self, processor: Any) -> int:
        """Index of the engine whose step this front end is processing."""
        ref = self._clients.get(processor)
        return self._engine_of.get(ref(), 0) if ref is not None else 0

    def opened(self, processor: Any, request: Any) -> None:
        """A front end took a request; it is on its way to the engine."""
        front = self.fronts.get(processor)
        if front is None:
            front = self.fronts[processor] = Front(self, processor, self._configs.get(processor))
        front.opened(request)

    def core(self, engine_core: Any) -> Core:
        """The versions of an engine core."""
        core = self.cores.get(engine_core)
        if core is None:
            core = self.cores[engine_core] = Core(self, engine_core)
        return core

    def label_here(self) -> str | None:
        """The label of the engine core in this process, for vLLM before 0.32; None where there is no such one."""
        cores = list(self.cores.values())
        return cores[0].versions.label if len(cores) == 1 else None

    def hook(self, config: Any) -> Hook | NoHook:
        """The connection for one engine config, made at first use in each process."""
        key = (os.getpid(), id(config))
        held = self._hooks.get(key)
        if held is None:
            held = self._hooks[key] = (config, _connect(config))
        return held[1]

    def pump(self) -> Pump:
        """The thread that flushes, one in each process."""
        pid = os.getpid()
        pump = self._pumps.get(pid)
        if pump is None:
            pump = self._pumps[pid] = Pump(self.flush)
            _at_exit(self.flush)
        return pump

    def flush(self) -> None:
        """Sends all finished responses of this process."""
        for front in list(self.fronts.values()):
            front.collector.flush()


def _at_exit(flush: Any) -> None:
    atexit.register(flush)
    forked = sys.modules.get("multiprocessing.util")
    if forked is not None:
        # Before the hook's own farewell, which has priority 10.
        forked.Finalize(None, flush, exitpriority=20)


def _connect(config: Any) -> Hook | NoHook:
    model, cache = getattr(config, "model_config", None), getattr(config, "cache_config", None)
    parallel = getattr(config, "parallel_config", None)
    dtypes = {"engine": str(getattr(model, "dtype", "")).removeprefix("torch.")}
    dtypes["kv_cache"] = str(getattr(cache, "cache_dtype", ""))
    dtypes["quantization"] = str(getattr(model, "quantization", None) or "")
    versions = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("vllm", "torch")}
    rank = int(getattr(parallel, "data_parallel_rank", 0) or 0)
    return connect(
        role="engine",
        rank=rank,
        replica=setting("REPLICA") or str(rank),
        model_name=str(getattr(model, "served_model_name", None) or getattr(model, "model", "")),
        stack="vllm",
        versions={name: text for name, text in versions.items() if text},
        sampling={"logprobs_mode": logprobs_mode(config)},
        dtypes={name: text for name, text in dtypes.items() if text},
    )
