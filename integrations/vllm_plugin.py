"""The vLLM plug-in: `vllm.general_plugins` calls `register` in every process of vLLM.

With DLC_SENTINEL set it streams the logprob of every sampled token, with request id, finish reason, sampling facts,
cached tokens, replica and weight version; without it nothing is wrapped. Ids: the external request id, with ":index"
where n > 1. Settings, beside those of hook.connect:

    DLC_SENTINEL_FORCE_LOGPROBS=1   ask the engine for logprobs where the client did not; the client sees none
    DLC_SENTINEL_VERSIONS=0:1       unlabelled weights count from 0, each update adds 1; "off" = they stay unknown
    DLC_SENTINEL_IDS=hash           name responses by hash_id(prompt, response), for trainers that see no request ids
    DLC_SENTINEL_REPLICA=name       this server among several; default: vLLM's own engine index
    DLC_SENTINEL_CHECKSUM=0|1       checksum the weights after an update never, or always; default: while it takes < 1 s
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from typing import Any

__all__ = ["register"]

_REGISTRY = "vllm.model_executor.models.registry"
"""vLLM inspects model classes in a process of this name: it has no engine."""


def register() -> None:
    """Wraps what fits in the vLLM of this process, and says on stderr what was wrapped and what could not."""
    if os.environ.get("DLC_SENTINEL", "").strip() in ("", "0"):
        return
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if getattr(spec, "name", "") == _REGISTRY:
        return
    from dlc_sentinel.integrations.vllm_wraps import install

    wrapped, missing = install()
    process = multiprocessing.current_process().name
    text = f"dlc-sentinel: vLLM {_version()} ({process}, pid {os.getpid()}): "
    text += "wrapped " + ", ".join(wrapped) if wrapped else "nothing wrapped"
    if missing:
        text += "; not wrapped: " + "; ".join(missing)
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@functools.cache
def _version() -> str:
    vllm: Any = sys.modules.get("vllm")
    return str(getattr(vllm, "__version__", "?"))
