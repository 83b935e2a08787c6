"""What the plug-in touches in vLLM: each symbol with the arguments it must have, checked before anything is wrapped.

The same table is checked against the source text of other vLLM releases by the contract test.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Symbol:
    """One method of vLLM."""

    module: str
    owner: str
    name: str
    args: tuple[str, ...]
    """Its first arguments, in order, by name; further ones may follow."""
    since: str = "0.12"
    """First vLLM release that has it."""

    @property
    def path(self) -> str:
        """Class and method, as it stands in messages."""
        return f"{self.owner}.{self.name}"


_OUTPUT, _CORE = "vllm.v1.engine.output_processor", "vllm.v1.engine.core"

ADD_REQUEST = Symbol(
    _OUTPUT, "OutputProcessor", "add_request", ("self", "request", "prompt", "parent_req", "request_index")
)
PROCESS_OUTPUTS = Symbol(_OUTPUT, "OutputProcessor", "process_outputs", ("self", "engine_core_outputs"))
ABORT_REQUESTS = Symbol(_OUTPUT, "OutputProcessor", "abort_requests", ("self", "request_ids"))
STREAM = (ADD_REQUEST, PROCESS_OUTPUTS, ABORT_REQUESTS)
"""Wrapped together or not at all: two of three would lose or double tokens."""

LLM_ENGINE = Symbol("vllm.v1.engine.llm_engine", "LLMEngine", "__init__", ("self", "vllm_config"))
ASYNC_LLM = Symbol("vllm.v1.engine.async_llm", "AsyncLLM", "__init__", ("self", "vllm_config"))
GET_OUTPUT_ASYNC = Symbol("vllm.v1.engine.core_client", "AsyncMPClient", "get_output_async", ("self",))
FACTS = (LLM_ENGINE, ASYNC_LLM, GET_OUTPUT_ASYNC)
"""Model name, dtypes and logprobs_mode of an engine, and which data-parallel engine a step came from."""

COLLECTIVE_RPC = Symbol(_CORE, "EngineCore", "collective_rpc", ("self", "method", "timeout", "args", "kwargs"))
STEP = Symbol(_CORE, "EngineCore", "step", ("self",))
STEP_WITH_QUEUE = Symbol(_CORE, "EngineCore", "step_with_batch_queue", ("self",))
SET_VERSION = Symbol(_CORE, "EngineCore", "set_weight_version", ("self", "weight_version"), since="0.28")
ADD_LORA = Symbol(_CORE, "EngineCore", "add_lora", ("self", "lora_request"))
SLEEP = Symbol(_CORE, "EngineCore", "sleep", ("self", "level"))
LOAD_MODEL = Symbol("vllm.v1.worker.gpu_worker", "Worker", "load_model", ("self",))
WEIGHTS = (COLLECTIVE_RPC, STEP, STEP_WITH_QUEUE, SET_VERSION, ADD_LORA, SLEEP, LOAD_MODEL)
"""Weight updates and when they take effect."""

ALL = STREAM + FACTS + WEIGHTS


def complaint(symbol: Symbol, args: Sequence[str]) -> str:
    """Why a method with these argument names does not fit; "" when it does."""
    if tuple(args[: len(symbol.args)]) == symbol.args:
        return ""
    return f"{symbol.path} takes ({', '.join(args)}), wanted ({', '.join(symbol.args)}, ...)"


def find(symbol: Symbol) -> tuple[Any, str]:
    """(class that owns the symbol, "") in the vLLM of this process, or (None, why it cannot be wrapped)."""
    try:
        owner = getattr(importlib.import_module(symbol.module), symbol.owner)
    except (ImportError, AttributeError) as error:
        return None, f"{symbol.owner} is not in this vLLM ({error})"
    method = inspect.getattr_static(owner, symbol.name, None)
    if method is None:
        return None, f"{symbol.path} is not in this vLLM; it came with {symbol.since}"
    if not inspect.isfunction(method):
        return None, f"{symbol.path} is a {type(method).__name__}, wanted a plain method"
    wrong = complaint(symbol, list(inspect.signature(method).parameters))
    return (None, wrong) if wrong else (owner, "")
