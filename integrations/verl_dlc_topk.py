"""From the rollout server to the actor: the engine's most probable tokens at each position, for loss_mode=dlc.

    agent loop: asks, in vLLM's own extra_args   ->  server: logprobs=K, the list comes back in extra_fields
    agent loop: keeps the lists of a sample      ->  columns dlc_topk_ids, dlc_topk_logp of the batch, [T, K]

Axes: T tokens of a response, tool text included; K = TOP_K. A slot without a token has id -1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from dlc_sentinel.integrations import verl_wraps
from dlc_sentinel.integrations.verl_wraps import Symbol, Wraps, quietly

from dlc_sentinel.records import F32, I64

TOP_K = 20
"""Listed tokens a position: as many as a vLLM server gives unless its max_logprobs says otherwise."""
LOSS_MODE = "dlc"
TOPK = "dlc_topk"
"""Key of the wish in a request's extra_args, and of the answer in its extra_fields: (ids [n, K], logp [n, K])."""
IDS, LOGP = "dlc_topk_ids", "dlc_topk_logp"
"""Columns of the batch."""
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
VLLM_GENERATE = Symbol(
    "vllm.v1.engine.async_llm", "AsyncLLM.generate", ("self", "prompt", "sampling_params", "request_id")
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine request generated."""

    token_ids: Sequence[int]
    listed: tuple[I64, F32] | None
    """(ids [n, K], logp [n, K]); None where the server sent no lists."""


_sample: ContextVar[list[Piece] | None] = ContextVar("dlc_topk_sample", default=None)
"""The pieces of the sample at hand: verl runs each in a task of its own."""


def install(wraps: Wraps) -> None:
    """Wraps the agent loops' client and output, and in a vLLM server the answer and the engine's entrance."""
    wraps.add(verl_wraps.GENERATE, _generate)
    wraps.add(verl_wraps.AGENT_OUTPUT, _as_dict)
    wraps.add(verl_wraps.VLLM_ANSWER, _answer)
    wraps.when_loaded(SERVER, _rebind)
    wraps.add(VLLM_GENERATE, _raise_logprobs)


def is_asked(config: Any) -> bool:
    """Whether this job's config says loss_mode=dlc; a config that has no such place does not."""
    for name in ("actor_rollout_ref", "actor", "policy_loss", "loss_mode"):
        config = getattr(config, name, None)
    return bool(config == LOSS_MODE)


# -- in the agent loop -----------------------------------------------------------------------------------------------


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("sampling_params")
        if params is None or not is_asked(self.config):
            return await original(self, *args, **kwargs)
        sample = _sample.get()
        if sample is None:
            _sample.set(sample := [])
        if self.config.actor_rollout_ref.rollout.name != "sglang":  # it refuses what it does not know
            extra = {**(params.get("extra_args") or {}), TOPK: TOP_K}
            kwargs["sampling_params"] = {**params, "extra_args": extra}
        output = await original(self, *args, **kwargs)
        sample.append(Piece(list(output.token_ids), output.extra_fields.pop(TOPK, None)))
        return output

    return generate


def _as_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_dict(self: Any) -> Any:
        output = original(self)
        sample = _sample.get()
        if sample is not None:
            _add_columns(output, sample)
        return output

    return as_dict


@quietly
def _add_columns(output: dict[str, Any], sample: Sequence[Piece]) -> None:
    import torch

    ids, logp = columns(sample, output["responses"].tolist(), output["response_mask"].tolist())
    output[IDS], output[LOGP] = torch.from_numpy(ids), torch.from_numpy(logp)


def columns(sample: Sequence[Piece], response: Sequence[int], mask: Sequence[int]) -> tuple[I64, F32]:
    """(ids [T, K], logp [T, K]) of a response from the pieces that it was generated in; mask is 1 on generated tokens.

    Where the pieces are not what the response holds, nothing is listed: a list of another position would mislead.
    """
    ids_TK = np.full((len(response), TOP_K), -1, np.int64)
    logp_TK = np.zeros((len(response), TOP_K), np.float32)
    at = np.flatnonzero(mask)
    made = [token for piece in sample for token in piece.token_ids]
    if made[: len(at)] != [response[place] for place in at]:
        return ids_TK, logp_TK
    first = 0
    for piece in sample:
        here = at[first : first + len(piece.token_ids)]
        first += len(piece.token_ids)
        if piece.listed is not None:
            ids_TK[here], logp_TK[here] = piece.listed[0][: len(here)], piece.listed[1][: len(here)]
    return ids_TK, logp_TK


# -- in a vLLM server ------------------------------------------------------------------------------------------------


def _raise_logprobs(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl asks its engine for the sampled token's logprob only; here, for a request that wishes it, for K more."""

    def generate(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        wish = (getattr(sampling_params, "extra_args", None) or {}).get(TOPK)
        if wish and sampling_params.logprobs is not None:
            most = int(self.model_config.max_logprobs)
            sampling_params.logprobs = max(sampling_params.logprobs, wish if most < 0 else min(wish, most))
        return original(self, prompt, sampling_params, *args, **kwargs)

    return generate


def _answer(original: Callable[..., Any]) -> Callable[..., Any]:
    """verl calls this with the engine's result and the extra_fields of the answer, whatever was asked of it."""

    def extract(output: Any, num_prompt_logprobs: Any, result_dict: Any) -> Any:
        result = original(output, num_prompt_logprobs, result_dict)
        logprobs = output.outputs[0].logprobs
        if logprobs and max(len(listed) for listed in logprobs) > 1:
            result_dict[TOPK] = lists(logprobs)
        return result

    return extract


def _rebind(server: ModuleType) -> None:
    """The server has the function by name; whichever module came first, it shall have the wrapped one."""
    utils = sys.modules[verl_wraps.VLLM_ANSWER.module]
    setattr(server, verl_wraps.VLLM_ANSWER.path, getattr(utils, verl_wraps.VLLM_ANSWER.path))


def lists(logprobs: Sequence[Mapping[int, Any]]) -> tuple[I64, F32]:
    """(ids [n, K], logp [n, K]) from vLLM's {token: Logprob} of each position, most probable first; -1 = empty slot."""
    ids_nK = np.full((len(logprobs), TOP_K), -1, np.int64)
    logp_nK = np.zeros((len(logprobs), TOP_K), np.float32)
    for row, listed in enumerate(logprobs):
        best = sorted(((entry.logprob, token) for token, entry in listed.items()), reverse=True)[:TOP_K]
        kept = [(logprob, token) for logprob, token in best if logprob > -np.inf]
        if kept:
            logp_nK[row, : len(kept)], ids_nK[row, : len(kept)] = zip(*kept, strict=True)
    return ids_nK, logp_nK
