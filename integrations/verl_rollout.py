"""In the agent-loop workers: notes the engine requests that each sample is made of, with their weight versions.

verl keeps only the oldest and newest version of a sample. Every resumed piece and every turn passes through
LLMServerClient.generate, so the version of each token can be kept: as one small dict in the sample's extra_fields.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from dlc_sentinel.integrations import verl_wraps
from dlc_sentinel.integrations.verl_rows import SEGMENTS
from dlc_sentinel.integrations.verl_wraps import Wraps, quietly

_sample: ContextVar[dict[str, Any] | None] = ContextVar("dlc_sample", default=None)
_resuming: ContextVar[bool] = ContextVar("dlc_resuming", default=False)
_request: ContextVar[str] = ContextVar("dlc_request", default="")


def install(wraps: Wraps) -> None:
    """Wraps the agent loop and both clients of the rollout engines."""
    wraps.add(verl_wraps.RUN_AGENT, _run_agent)
    wraps.add(verl_wraps.GENERATE, _generate)
    wraps.add(verl_wraps.GENERATE_RESUMED, _generate_resumed)
    wraps.add(verl_wraps.REQUEST_ID, _request_id)


def _run_agent(original: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        _sample.set({"tokens": [], "versions": [], "ids": [], "turns": 0})
        return await original(*args, **kwargs)

    return run


def _request_id(original: Callable[..., Any]) -> Callable[..., Any]:
    def name(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        _request.set(str(made))
        return made

    return name


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(*args: Any, **kwargs: Any) -> Any:
        output = await original(*args, **kwargs)
        _note_piece(output)
        if not _resuming.get():
            _note_turn(output)
        return output

    return generate


def _generate_resumed(original: Callable[..., Any]) -> Callable[..., Any]:
    async def generate(*args: Any, **kwargs: Any) -> Any:
        token = _resuming.set(True)
        try:
            output = await original(*args, **kwargs)
        finally:
            _resuming.reset(token)
        _note_turn(output)
        return output

    return generate


@quietly
def _note_piece(output: Any) -> None:
    sample = _sample.get()
    if sample is not None and len(output.token_ids):
        sample["tokens"].append(len(output.token_ids))
        sample["versions"].append(output.extra_fields.get("global_steps"))
        sample["ids"].append(_request.get())


@quietly
def _note_turn(output: Any) -> None:
    # One dict per sample: an agent loop keeps the extra_fields of its first turn, and later turns add to the same dict.
    sample = _sample.get()
    if sample is not None:
        sample["turns"] += 1
        output.extra_fields[SEGMENTS] = sample
