"""TRL with the DLC loss: `DlcGRPOTrainer`, a GRPOTrainer in every other respect.

    from dlc_sentinel.integrations.trl_dlc import DlcGRPOTrainer
    trainer = DlcGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(use_vllm=True, ...), train_dataset=...)

TRL computes the loss -min(lag ratio, C) A log pi itself (loss_type "cispo", set here with its C); this class hands it
a log pi whose value is the log-probability and whose gradient is the centred score. The engine's distribution is
vLLM's top-k: TRL's client asks for logprobs=k, and the lists become columns of its batch, split and shuffled with the
rest. Without vLLM there is none: the run trains uncentred, and `dlc/centring` in its log is 0 instead of 1.
Where a batch is trained for several steps, one more forward pass a generation gives the generator's log-probabilities
of the listed tokens. Logits of one micro-batch are held whole.

Axes: B rows, T completion tokens (padded on the right), K listed tokens, V vocabulary. TRL is imported by who asks.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlc_sentinel.errors import ConfigError

if TYPE_CHECKING:
    from dlc_sentinel.correction import Batch, Scored

TOP_K = 20
"""Listed tokens a position: as many as a vLLM server gives unless its max_logprobs says otherwise."""
IDS, LOGP, GEN = "dlc_topk_ids", "dlc_topk_logp", "dlc_gen_logp"
"""Columns [B, T, K] added to TRL's batch: ids (-1 = empty slot), the engine's logprobs, the generator's in TRL."""


class DlcMixin:
    """What DlcGRPOTrainer adds to GRPOTrainer. top_k: listed tokens a position; clip: largest weight C."""

    def __init__(
        self, model: Any, reward_funcs: Any = None, args: Any = None, *rest: Any, top_k: int = TOP_K, clip: float = 2.0,
        **named: Any,
    ) -> None:  # fmt: skip
        self._dlc_inputs: Any = None
        self._dlc_lists: list[tuple[Sequence[Any], Sequence[Any]]] = []
        self._dlc_clip = clip
        super().__init__(model, reward_funcs, settings(args, clip), *rest, **named)  # type: ignore[call-arg]  # TRL's
        own: Any = self
        if own.aux_loss_enabled or own._entropy_bonus_enabled:
            raise ConfigError("DlcGRPOTrainer: set router_aux_loss_coef=0 and entropy_coef=0; they need TRL's own pass")
        engine = getattr(self, "vllm_generation", None)
        if engine is not None:
            engine.logprobs = top_k
            engine.generate = self._dlc_listing(engine.generate)

    # -- generation --------------------------------------------------------------------------------------------------

    def _dlc_listing(self, generate: Any) -> Any:
        """The engine's generate; keeps the lists and gives TRL what it reads: the sampled token's logprob."""

        @functools.wraps(generate)
        def call(*args: Any, **named: Any) -> Any:
            prompt_ids, completion_ids, logprobs, token_ids = generate(*args, **named)
            if logprobs is None or token_ids is None:
                return prompt_ids, completion_ids, logprobs, token_ids
            self._dlc_lists.extend(zip(token_ids, logprobs, strict=True))
            sampled = [
                [[values[ids.index(token)]] for token, ids, values in zip(*row, strict=True)]
                for row in zip(completion_ids, token_ids, logprobs, strict=True)
            ]
            return prompt_ids, completion_ids, sampled, None

        return call

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._dlc_lists = []
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]  # TRL's
        # A tool loop generates a row in pieces: their places are not known here, so such a batch stays uncentred.
        if len(self._dlc_lists) == len(output["completion_ids"]) and "tool_mask" not in output:
            output[IDS], output[LOGP] = columns(self._dlc_lists, output["completion_ids"])
            if output.get("old_per_token_logps") is not None:
                output[GEN] = self._dlc_generator(output)
        return output

    def _dlc_generator(self, output: Any) -> Any:
        """[B, T, K] the trainer's log-probabilities of the listed tokens now, which is before the first step."""
        import torch

        own, parts = self, []
        trainer: Any = own
        size = trainer.args.per_device_train_batch_size
        with torch.no_grad():
            for first in range(0, len(output[IDS]), size):
                rows = {name: output[name][first : first + size] for name in ("prompt_ids", "completion_ids")}
                masks = {name: output[name][first : first + size] for name in ("prompt_mask", "completion_mask")}
                z_BTV = self._dlc_logits(
                    trainer.model, torch.cat(tuple(rows.values()), 1), torch.cat(tuple(masks.values()), 1),
                    rows["completion_ids"].shape[1],
                ).float() / trainer.temperature  # fmt: skip
                listed_BTK = z_BTV.gather(2, output[IDS][first : first + size].clamp(min=0))
                parts.append(listed_BTK - z_BTV.logsumexp(2, keepdim=True))
        return torch.cat(parts)

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._dlc_inputs = inputs
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]  # TRL's
        finally:
            self._dlc_inputs = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **named: Any
    ) -> Any:
        inputs = self._dlc_inputs
        if inputs is None:
            return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]  # TRL's
                model, input_ids, attention_mask, logits_to_keep, *args, **named
            )
        if named.get("pixel_values") is not None:
            raise ConfigError("DlcGRPOTrainer: images are not supported; use GRPOTrainer for this model")
        own: Any = self
        logits_BTV = self._dlc_logits(model, input_ids, attention_mask, logits_to_keep)
        batch = batch_of(inputs)
        scored = self._dlc_scored(logits_BTV, batch)
        mode = "train" if own.model.training else "eval"
        for name, value in scored.metrics.as_dict().items():
            if value == value:  # nan: nothing to tell
                own._metrics[mode][name].append(value)
        return score_as_logp(scored, batch, inputs), entropies(logits_BTV, own.temperature), None

    def _dlc_scored(self, logits_BTV: Any, batch: Batch) -> Scored:
        from dlc_sentinel.correction import Logits, Weight, centred_scores

        weight = Weight("one") if batch.gen_logp_M is None else Weight("truncate", high=self._dlc_clip)
        own: Any = self
        return centred_scores(Logits(logits_BTV), batch, weight=weight, temperature=own.temperature)

    def _dlc_logits(self, model: Any, input_ids: Any, attention_mask: Any, num: int) -> Any:
        """[B, T, V] logits that predict the last `num` tokens, before the temperature."""
        own: Any = self
        with own.accelerator.autocast():
            out = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=num + 1, use_cache=False)
        return out.logits[:, :-1][:, -num:]


def settings(args: Any, clip: float) -> Any:
    """A copy of a GRPOConfig with the loss that the centred score goes into. Raises: ConfigError for what conflicts."""
    if args is None:
        args = importlib.import_module("trl").GRPOConfig(output_dir="dlc-grpo")
    if args.beta != 0.0 or args.importance_sampling_level != "token":
        raise ConfigError(
            f"DlcGRPOTrainer: beta={args.beta}, importance_sampling_level={args.importance_sampling_level!r}; wanted "
            f"beta=0.0 and 'token': a KL term would get the centred score's gradient, and the weight is each token's"
        )
    args = copy.copy(args)
    args.loss_type, args.epsilon_high = "cispo", clip
    args.vllm_importance_sampling_correction = False  # the discrepancy is centred, not weighted
    return args


def batch_of(inputs: Any) -> Batch:
    """A micro-batch of TRL's as the correction reads it; tokens whose engine logprob is missing are left out."""
    from dlc_sentinel.correction import Batch, EngineList

    mask_BT = inputs["completion_mask"].bool()
    engine_BT, old_BT = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
    listed = None
    if IDS in inputs and engine_BT is not None:
        mask_BT = mask_BT & engine_BT.isfinite()
        listed = EngineList(inputs[IDS], inputs[LOGP], inputs.get(GEN))
    elif "tool_mask" in inputs:
        mask_BT = mask_BT & inputs["tool_mask"].bool()
    return Batch.padded(
        inputs["completion_ids"], inputs["advantages"], mask_BT=mask_BT, gen_logp_BT=old_BT,
        engine_logp_BT=engine_BT if listed is not None else None, engine=listed,
    )  # fmt: skip


def score_as_logp(scored: Scored, batch: Batch, inputs: Any) -> Any:
    """[B, T] log-probabilities by value, centred scores by gradient; 0 where the batch keeps no token."""
    import torch

    logp_M = scored.logp_M + (scored.score_M - scored.score_M.detach())
    place_M = torch.arange(batch.num_positions, device=logp_M.device) if batch.keep_M is None else batch.keep_M
    return logp_M.new_zeros(batch.num_positions).index_put((place_M,), logp_M).view_as(inputs["completion_ids"])


def entropies(logits_BTV: Any, temperature: float) -> Any:
    """[B, T] nats, without gradient: a number for TRL's log; one row at a time."""
    import torch

    with torch.no_grad():
        logp = ((row_TV.float() / temperature).log_softmax(-1) for row_TV in logits_BTV)
        return torch.stack([-(logp_TV.exp() * logp_TV).sum(-1) for logp_TV in logp])


def columns(lists: Sequence[tuple[Sequence[Any], Sequence[Any]]], completion_ids_BT: Any) -> tuple[Any, Any]:
    """(ids, logprobs) [B, T, K] from each row's lists, as TRL's client gives them; -1 and 0 in empty slots."""
    import torch

    width = max((len(ids) for row, _ in lists for ids in row), default=1)
    ids_BTK = torch.full((*completion_ids_BT.shape, width), -1, dtype=torch.int64)
    logp_BTK = torch.zeros(ids_BTK.shape, dtype=torch.float32)
    for b, (row_ids, row_logps) in enumerate(lists):
        for t, (ids, logps) in enumerate(zip(row_ids, row_logps, strict=True)):
            kept = [(i, x) for i, x in zip(ids, logps, strict=True) if x is not None and x > float("-inf")]
            for k, (i, x) in enumerate(kept):
                ids_BTK[b, t, k], logp_BTK[b, t, k] = i, x
    return ids_BTK.to(completion_ids_BT.device), logp_BTK.to(completion_ids_BT.device)


@functools.cache
def trainer_class() -> type:
    """DlcGRPOTrainer itself, made when TRL is asked for."""
    bases = DlcMixin, importlib.import_module("trl").GRPOTrainer
    return type("DlcGRPOTrainer", bases, {"__doc__": __doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "DlcGRPOTrainer":
        return trainer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
