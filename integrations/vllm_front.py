"""One front end of vLLM: responses named and described as requests come in, and sent as rows when they end."""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dlc_sentinel.integrations.vllm_stream import Collector, Row, Trail, grouped
from dlc_sentinel.integrations.vllm_weights import lora_version

from dlc_sentinel.hook import hash_id
from dlc_sentinel.records import Json

if TYPE_CHECKING:
    from dlc_sentinel.integrations.vllm_engine import Plugin

_log = logging.getLogger("dlc_sentinel.vllm")

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_OCCURRENCES = 2**17


def setting(name: str) -> str:
    """The text of one DLC_SENTINEL_ variable of the plug-in; "" when unset."""
    return os.environ.get(f"DLC_SENTINEL_{name}", "").strip()


def logprobs_mode(config: Any) -> str:
    """ "raw_logprobs", "processed_logprobs" ... as vLLM names them; "" when not known."""
    mode = getattr(getattr(config, "model_config", None), "logprobs_mode", "")
    return str(getattr(mode, "value", mode) or "")


class Front:
    """One OutputProcessor: its open responses, named and described, and their way to the hook."""

    def __init__(self, plugin: Plugin, processor: Any, config: Any) -> None:
        by_hash = setting("IDS") == "hash"
        self._plugin = plugin
        self._processor = weakref.ref(processor)
        self._config = config
        self._mode = logprobs_mode(config)
        self._facts: dict[tuple[Any, ...], Mapping[str, Json]] = {}
        self._occurrence: OrderedDict[str, int] = OrderedDict()
        self._said = False
        parallel = getattr(config, "parallel_config", None)
        self._many = int(getattr(parallel, "data_parallel_size", 1) or 1) > 1
        self._base = setting("REPLICA")
        self.collector = Collector(self._send, plugin.counting.version_of, self._hash if by_hash else None)
        self._replica = self._replica_of(int(getattr(parallel, "data_parallel_rank", 0) or 0))

    def opened(self, request: Any) -> None:
        """Starts a response, and makes the engine send logprobs where the client asked for none and we are to."""
        params = getattr(request, "sampling_params", None)
        processor = self._processor()
        state = None if processor is None else processor.request_states.get(request.request_id)
        if params is None or state is None or request.request_id in self.collector:
            return
        forced = params.logprobs is None and self._plugin.force
        if params.logprobs is None and not forced:
            self._say_unasked()
            return
        trail = Trail(sequence_id(request, state), state, self._sampling(params), forced, lora_version(_lora(state)))
        self.collector.open(request.request_id, trail)
        if forced:
            # A copy: the client's own object, perhaps shared between requests, stays as it is.
            request.sampling_params = copy.copy(params)
            request.sampling_params.logprobs = 0

    def step(self, outputs: Sequence[Any], label: str | None, hidden: Mapping[int, Any], result: Any) -> None:
        """One engine step, after vLLM has processed it."""
        processor, collector = self._processor(), self.collector
        if self._many:
            self._turn_to(self._plugin.engine_index(processor))
        collector.step(outputs, label if label is not None else self._plugin.label_here(), hidden)
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended and processor is not None:
            for output in ended:
                if output.request_id not in processor.request_states:  # else: more input is to come
                    collector.close(output.request_id, str(output.finish_reason))
        for request_id in getattr(result, "reqs_to_abort", ()):
            collector.close(request_id, "stop")
        if collector.needs_flush():
            collector.flush()
        elif collector.has_done:
            self._plugin.pump().arm()

    def aborted(self, request_ids: Sequence[str]) -> None:
        """The client gave these up (internal ids): what was generated is sent, finish "abort"."""
        for request_id in request_ids:
            self.collector.close(request_id, "abort")
        if self.collector.has_done:
            self._plugin.pump().arm()

    def _turn_to(self, index: int) -> None:
        replica = self._replica_of(index)
        if replica != self._replica:
            self.collector.flush()
            self._replica = replica

    def _replica_of(self, index: int) -> str:
        return f"{self._base}-{index}" if self._base and self._many else self._base or str(index)

    def _send(self, rows: Sequence[Row]) -> None:
        hook = self._plugin.hook(self._config)
        for group in grouped(rows):
            hook.rollout(
                [row.id for row in group],
                [row.logprobs for row in group],
                version_spans=[row.spans for row in group],
                finish=[row.finish for row in group],
                cached_tokens=[row.cached_tokens for row in group],
                sampling=[row.sampling for row in group],
                replica=self._replica,
                token_offset=group[0].offset,
                final=bool(group[0].finish),
            )

    def _sampling(self, params: Any) -> Mapping[str, Json]:
        values = tuple(getattr(params, name, None) for name in _SAMPLING)
        facts = self._facts.get(values)
        if facts is None:
            known = {name: value for name, value in zip(_SAMPLING, values, strict=True) if value is not None}
            facts = self._facts[values] = {**known, "logprobs_mode": self._mode}
        return facts

    def _hash(self, trail: Trail) -> str:
        prompt = trail.state.prompt_token_ids or []
        plain = hash_id(prompt, trail.state.detokenizer.output_token_ids[: trail.length])
        occurrence = self._occurrence[plain] = self._occurrence.pop(plain, 0) + 1
        if len(self._occurrence) > _OCCURRENCES:
            self._occurrence.popitem(last=False)
        return plain.rpartition("#")[0] + f"#{occurrence}"

    def _say_unasked(self) -> None:
        if not self._said:
            self._said = True
            text = "the client asks for no logprobs, so these requests cannot be watched"
            _log.warning("dlc-sentinel: %s; DLC_SENTINEL_FORCE_LOGPROBS=1 makes the engine send them", text)


def sequence_id(request: Any, state: Any) -> str:
    """The id of a response on the wire: the client's request id, with ":index" where one request has n > 1.

    vLLM before 0.14 has no external id: there the request's own (the parent's, for n > 1) is what the client gave.
    """
    parent = getattr(state, "parent_req", None)
    external = getattr(state, "external_req_id", None)
    if external is None:
        external = request.request_id if parent is None else parent.request_id
    return str(external) if parent is None else f"{external}:{state.request_index}"


def _lora(state: Any) -> str | None:
    name = getattr(state, "lora_name", None)
    return None if name is None else str(name)
