"""In an actor rank: the DLC loss where verl's policy loss is computed, for loss_mode=dlc. Installed by verl_dlc.

verl's engines hand the logits of each micro-batch to the loss function when a batch is flagged `distillation_use_topk`,
and add what it returns to the model's output; then they call it for the loss. `ActorLoss` answers both: scores first,
whose gradient reaches every logit, then verl's own loss, in which the registered policy loss finds them. In verl's
old_log_probs pass it notes the trainer's log-probabilities of the listed tokens instead.

Axes: B rows, T response tokens (padded), N positions of the packed micro-batch, R response tokens (packed), K listed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dlc_sentinel.integrations import verl_dlc_batch, verl_wraps
from dlc_sentinel.integrations.verl_dlc_batch import GEN, Rows
from dlc_sentinel.integrations.verl_dlc_topk import IDS, LOSS_MODE
from dlc_sentinel.integrations.verl_wraps import Wraps

from dlc_sentinel.errors import ConfigError
from dlc_sentinel.records import UNKNOWN_VERSION

SCORE, WEIGHT = "dlc_score", "dlc_weight"
"""In the model's output, [N]."""
NOTING = "dlc_noting"
"""Flag of a batch in the old_log_probs pass."""
ALGOS, WORKERS = "verl.trainer.ppo.core_algos", "verl.workers.engine_workers"
RANK_VARIABLE = "WG_PREFIX"
"""Environment variable that verl gives each of its worker ranks."""
delivered = [UNKNOWN_VERSION]
"""Version of the weights that were last delivered, which old_log_probs is computed at."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the registered policy loss reads of the micro-batch at hand."""

    score_BT: Any
    weight_BT: Any
    metrics: Mapping[str, float]


_scores: ContextVar[Scores | None] = ContextVar("dlc_scores", default=None)


def install(wraps: Wraps) -> None:
    """Registers the policy loss; wraps the training worker's calls, which pass on those of other loss modes."""
    wraps.when_loaded(ALGOS, _register)
    # Ray has taken these classes apart by the time a driver loads an external_lib, and cannot send them once changed.
    if WORKERS in sys.modules and RANK_VARIABLE not in os.environ:
        return
    wraps.add(verl_wraps.SET_LOSS, _set_loss)
    wraps.add(verl_wraps.TRAIN_ONE, lambda original: _flagged(original, noting=False))
    wraps.add(verl_wraps.INFER, lambda original: _flagged(original, noting=True))
    wraps.add(verl_wraps.UPDATE_WEIGHTS, _update_weights)


def _register(algos: ModuleType) -> None:
    algos.register_policy_loss(LOSS_MODE)(policy_loss)


def _set_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_loss_fn(self: Any, loss_fn: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(loss_fn, "keywords", {}).get("config")
        if getattr(getattr(config, "policy_loss", None), "loss_mode", "") == LOSS_MODE:
            _refuse(self, config, getattr(loss_fn, "keywords", {}))
            loss_fn = ActorLoss(loss_fn, config)
        return original(self, loss_fn, *args, **kwargs)

    return set_loss_fn


def _refuse(worker: Any, config: Any, keywords: Mapping[str, Any]) -> None:
    """Raises ConfigError where the logits of a whole micro-batch never meet the loss."""
    engine = worker.engine_config
    wrong = {
        "actor.strategy other than fsdp, fsdp2": config.strategy not in ("fsdp", "fsdp2"),
        "model.use_fused_kernels=True": bool(engine.use_fused_kernels),
        "actor.ulysses_sequence_parallel_size > 1": engine.ulysses_sequence_parallel_size > 1,
        "pad_to_length=True": bool(getattr(engine, "pad_to_length", False)),
        "distillation": keywords.get("distillation_config") is not None,
    }
    found = [name for name, is_so in wrong.items() if is_so]
    if found:
        raise ConfigError(
            f"loss_mode=dlc does not work with {', '.join(found)}; change that, or take another loss_mode"
        )


def _flagged(original: Callable[..., Any], *, noting: bool) -> Callable[..., Any]:
    def call(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.loss_fn, ActorLoss):
            self.loss_fn.flag(data, noting=noting)
        return original(self, data, *args, **kwargs)

    return call


def _update_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    async def update_weights(self: Any, global_steps: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, global_steps, *args, **kwargs)
        if global_steps is not None:
            delivered[0] = int(global_steps)
        return result

    return update_weights


class ActorLoss:
    """verl's loss of an actor, asked first for scores and then for the loss; one per actor rank."""

    def __init__(self, inner: Callable[..., Any], config: Any) -> None:
        self._inner = inner
        self._config = config
        self._metrics: Mapping[str, float] = {}
        self._noted_NL: Any = None
        """Between the two calls of the old_log_probs pass."""

    def flag(self, data: Any, *, noting: bool) -> None:
        """Sets the flags that make verl's engine hand over the logits of this batch, to train it or to note."""
        from verl.utils import tensordict_utils as tu

        if not noting:
            # With a second gradient through the logits verl's log-prob kernel must not write its own in their place.
            rest = {"calculate_entropy": True} if self._config.use_kl_loss else {}
            tu.assign_non_tensor(data, distillation_use_topk=True, **rest)
        # Without its adapter the model is the reference, not the policy.
        elif IDS in data.keys() and not tu.get(data, "no_lora_adapter", False):  # noqa: SIM118  # a TensorDict's `in`
            tu.assign_non_tensor(data, distillation_use_topk=True, compute_loss=True, **{NOTING: True})

    def __call__(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Any = None, **_: Any
    ) -> Any:
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        is_noting = bool(tu.get_non_tensor_data(data=data, key=NOTING, default=False))
        if student_logits is not None:
            return self._note(student_logits[0], data) if is_noting else self._score(student_logits[0], data)
        if is_noting:
            return self._hand_over(model_output, data)
        score_BT, weight_BT = (no_padding_2_padding(model_output[name], data) for name in (SCORE, WEIGHT))
        with _at_hand(Scores(score_BT, weight_BT, self._metrics)):
            return self._inner(model_output=model_output, data=data, dp_group=dp_group)

    def _score(self, logits_NV: Any, data: Any) -> dict[str, Any]:
        import torch

        from dlc_sentinel.correction import DLC_WEIGHT, Logits, centred_scores

        batch, exact_share = verl_dlc_batch.batch_of(data, len(logits_NV), delivered[0])
        scored = centred_scores(Logits(logits_NV), batch, weight=DLC_WEIGHT)
        place_M = torch.arange(len(logits_NV), device=logits_NV.device) if batch.keep_M is None else batch.keep_M
        none_N = torch.zeros(len(logits_NV), dtype=scored.score_M.dtype, device=logits_NV.device)
        metrics = scored.metrics.as_dict() | {"dlc/lag_exact_share": exact_share}
        self._metrics = {f"actor/{name}": value for name, value in metrics.items()}
        out = {SCORE: none_N.index_put((place_M,), scored.score_M)}
        out[WEIGHT] = none_N.index_put((place_M,), scored.weight_M)
        return {name: value_N[None] for name, value_N in out.items()}

    def _note(self, logits_NV: Any, data: Any) -> dict[str, Any]:
        """The trainer's log-probabilities at the listed tokens, and at the sampled one: no extra forward pass."""
        import torch

        from dlc_sentinel.correction.source import CHUNK_BYTES

        rows = Rows(data)
        token_RL: Any = torch.cat((rows.take(IDS).clamp(min=0), rows.take("responses")[:, None]), 1)
        self._noted_NL = torch.zeros(len(logits_NV), token_RL.shape[1], device=logits_NV.device)
        chunk = max(1, CHUNK_BYTES // (4 * logits_NV.shape[1]))
        for place_C, token_CL in zip(rows.place_R.split(chunk), token_RL.split(chunk), strict=True):
            z_CV = logits_NV[place_C].float()
            self._noted_NL[place_C] = z_CV.gather(1, token_CL) - z_CV.logsumexp(1, keepdim=True)
        return {}

    def _hand_over(self, model_output: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        import torch

        model_output[GEN] = torch.nested.nested_tensor_from_jagged(self._noted_NL, data["input_ids"].offsets())
        self._noted_NL = None
        return torch.zeros(()), {}


@contextmanager
def _at_hand(scores: Scores) -> Iterator[None]:
    token = _scores.set(scores)
    try:
        yield
    finally:
        _scores.reset(token)


def policy_loss(
    old_log_prob: Any,
    log_prob: Any,
    advantages: Any,
    response_mask: Any,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """verl's policy loss "dlc": (loss, metrics), reduced by verl's own rule. Raises: ConfigError outside an actor."""
    scores = _scores.get()
    if scores is None:
        raise ConfigError(
            "loss_mode=dlc: no scores came with this micro-batch; set actor_rollout_ref.model.external_lib="
            "dlc_sentinel.integrations.verl_dlc, and look in the log for what could not be wrapped"
        )
    if rollout_is_weights is not None:
        raise ConfigError("loss_mode=dlc has a lag weight of its own; set algorithm.rollout_correction.rollout_is=null")
    from verl.trainer.ppo.core_algos import agg_loss

    loss_BT = -scores.weight_BT * advantages * scores.score_BT
    loss = agg_loss(loss_mat=loss_BT, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, dict(scores.metrics)
