"""What a loss reads of a batch: sampled tokens, advantages, log-probabilities, and what is known of the engine.

Axes: N packed tokens, or B rows by T columns when padded; X stands for either. M tokens that the mask keeps, S rows,
V vocabulary, K listed tokens. All log-probabilities are natural logs (nats) at one temperature and one sampling
transform, the engine's. Position t holds the token that hidden state t predicts: the caller has shifted already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dlc_sentinel.errors import RecordError, ShapeError

__all__ = ["Batch", "EngineFull", "EngineList"]

MAX_MASS_ERROR = 2e-3
"""A probability, or the sum of the listed ones, may exceed 1 by this much: bf16 logits and float32 logprobs round."""


@dataclass(frozen=True, slots=True)
class EngineFull:
    """The engine's distribution over the whole vocabulary at each position; exact centring.

    logp: [X, V], -inf where the engine gives no mass. gen_logp: [X, V], the trainer at the generator's weights; without
    it the centring uses mu as it is (nu = mu). Any float dtype. Both are read in chunks, never copied whole.
    """

    logp: Tensor
    gen_logp: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EngineList:
    """Some tokens' engine log-probabilities at each position: top-k, or the whole support of a truncated sampler.

    index: [X, K] int64, -1 in an empty slot, no token twice at a position. logp: [X, K]. gen_logp: [X, K], the trainer
    at the generator's weights on the same tokens (a snapshot forward); without it nu = mu.
    whole_support: False = a tail is left over and is modelled; True = the list is everything that could be sampled
    (top-p, top-k, sampling mask): the trainer is renormalised on it, then and now, and the lag is that of the
    renormalised policies. Without gen_logp here the batch's own must be renormalised already: log pi(a) - log pi(S).
    """

    index: Tensor
    logp: Tensor
    gen_logp: Tensor | None = None
    whole_support: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Kept tokens of a batch, packed. Made by `Batch.packed` or `Batch.padded`, which check; then plain data."""

    token_M: Tensor
    """[M] int64, the sampled tokens."""
    advantage_M: Tensor
    """[M] float."""
    offsets_S1: Tensor
    """[S+1] int64: row s holds kept tokens offsets[s]:offsets[s+1]."""
    keep_M: Tensor | None
    """[M] int64, place of each kept token in the flattened positions; None = all are kept."""
    num_positions: int
    """Number of flattened positions of the source: N, or B times T."""
    gen_logp_M: Tensor | None = None
    """[M] trainer at the weights that generated the token; what lag is measured from."""
    engine_logp_M: Tensor | None = None
    """[M] engine when it generated."""
    prox_logp_M: Tensor | None = None
    """[M] trainer at the start of this step's updates (often called old_log_probs)."""
    engine: EngineFull | EngineList | None = None
    """A list holds kept tokens only, [M, K]; a full one stays in the layout it came in, flattened."""

    @classmethod
    def packed(
        cls,
        token_N: Tensor,
        advantage: Tensor,
        *,
        offsets_S1: Tensor,
        mask_N: Tensor | None = None,
        gen_logp_N: Tensor | None = None,
        engine_logp_N: Tensor | None = None,
        prox_logp_N: Tensor | None = None,
        engine: EngineFull | EngineList | None = None,
    ) -> Batch:
        """A batch of packed rows. advantage: [N], or [S] for one value a row; offsets_S1: cu_seqlens, 0..N.

        mask_N: [N] bool, True on tokens the policy chose; None keeps all. Masked positions may hold anything, nan too.
        Raises: ShapeError for lengths that differ; RecordError for ids that are no integers, and for nan, repeated or
        impossible values (a logprob above 0) at kept tokens.
        """
        offsets_S1 = offsets_S1.to(device=token_N.device, dtype=torch.int64)
        _check_packed(token_N, offsets_S1)
        length_S = offsets_S1.diff()
        if tuple(advantage.shape) == tuple(length_S.shape) and advantage.shape != token_N.shape:
            advantage = torch.repeat_interleave(advantage, length_S)
        streams = {"gen_logp": gen_logp_N, "engine_logp": engine_logp_N, "prox_logp": prox_logp_N}
        return _build(token_N, advantage, mask_N, offsets_S1, streams, engine)

    @classmethod
    def padded(
        cls,
        token_BT: Tensor,
        advantage: Tensor,
        *,
        mask_BT: Tensor,
        gen_logp_BT: Tensor | None = None,
        engine_logp_BT: Tensor | None = None,
        prox_logp_BT: Tensor | None = None,
        engine: EngineFull | EngineList | None = None,
    ) -> Batch:
        """A batch of padded rows. mask_BT: [B, T], true on policy tokens; gaps inside a row are closed.

        advantage: [B, T], or [B] for one value a row. Errors as for `packed`.
        """
        if token_BT.ndim != 2 or mask_BT.shape != token_BT.shape:
            raise ShapeError(
                f"Batch.padded: token is {tuple(token_BT.shape)}, mask is {tuple(mask_BT.shape)}; "
                f"both must be [B, T]. For packed rows use Batch.packed with cu_seqlens"
            )
        num_rows, width = token_BT.shape
        if tuple(advantage.shape) == (num_rows,):
            advantage = advantage[:, None].expand(num_rows, width)
        offsets_S1 = torch.arange(num_rows + 1, device=token_BT.device) * width
        streams = {"gen_logp": gen_logp_BT, "engine_logp": engine_logp_BT, "prox_logp": prox_logp_BT}
        return _build(token_BT, advantage, mask_BT, offsets_S1, streams, engine)

    def rows(self, start: int, end: int) -> Tensor | slice:
        """What picks kept tokens start:end out of flattened positions."""
        return slice(start, end) if self.keep_M is None else self.keep_M[start:end]

    @property
    def num_tokens(self) -> int:
        """Number of kept tokens, M."""
        return len(self.token_M)


def _build(
    token_X: Tensor,
    advantage_X: Tensor,
    mask_X: Tensor | None,
    offsets_S1: Tensor,
    streams: dict[str, Tensor | None],
    engine: EngineFull | EngineList | None,
) -> Batch:
    for name, stream_X in {"advantage": advantage_X, "mask": mask_X, **streams}.items():
        if stream_X is not None and stream_X.shape != token_X.shape:
            rows = f", or one per row, shape ({len(offsets_S1) - 1},)" if name == "advantage" else ""
            raise ShapeError(
                f"Batch: {name} has shape {tuple(stream_X.shape)} but the tokens {tuple(token_X.shape)}; "
                f"pass one value per position, masked positions included{rows}"
            )
    _check_ids("token", token_X)
    keep_M = None
    if mask_X is not None and not bool(mask_X.bool().all()):
        keep_M = mask_X.bool().reshape(-1).nonzero().squeeze(1)
        offsets_S1 = torch.searchsorted(keep_M, offsets_S1)
    kept = {name: _kept(stream_X, keep_M) for name, stream_X in streams.items()}
    token_M, advantage_M = _kept_always(token_X, keep_M).long(), _kept_always(advantage_X, keep_M)
    _check_advantage(advantage_M)
    _check_streams(kept)
    return Batch(
        token_M=token_M,
        advantage_M=advantage_M.detach(),
        offsets_S1=offsets_S1,
        keep_M=keep_M,
        num_positions=token_X.numel(),
        gen_logp_M=kept["gen_logp"],
        engine_logp_M=kept["engine_logp"],
        prox_logp_M=kept["prox_logp"],
        engine=_kept_engine(engine, tuple(token_X.shape), keep_M),
    )


def _kept_engine(
    engine: EngineFull | EngineList | None, shape: tuple[int, ...], keep_M: Tensor | None
) -> EngineFull | EngineList | None:
    if engine is None:
        return None
    parts = {"logp": engine.logp, "gen_logp": engine.gen_logp}
    if isinstance(engine, EngineList):
        parts["index"] = engine.index
    for name, part in parts.items():
        if part is not None and tuple(part.shape) != (*shape, engine.logp.shape[-1]):
            raise ShapeError(
                f"{type(engine).__name__}.{name} has shape {tuple(part.shape)}; wanted {(*shape, 'K')}: "
                f"the layout of the tokens and one last axis, the same for logp, gen_logp and index"
            )
    width = engine.logp.shape[-1]
    if not width:
        raise ShapeError(f"{type(engine).__name__}: no token is listed (last axis 0); pass engine=None to go uncentred")
    logp = engine.logp.detach().reshape(-1, width)
    gen_logp = None if engine.gen_logp is None else engine.gen_logp.detach().reshape(-1, width)
    if isinstance(engine, EngineFull):
        return EngineFull(logp, gen_logp)
    _check_ids("EngineList.index", engine.index)
    listed = EngineList(
        _pick(engine.index.reshape(-1, width), keep_M).long(),
        _pick(logp, keep_M),
        None if gen_logp is None else _pick(gen_logp, keep_M),
        engine.whole_support,
    )
    _check_list(listed)
    return listed


def _check_packed(token_N: Tensor, offsets_S1: Tensor) -> None:
    fits = offsets_S1.ndim == 1 and len(offsets_S1) >= 1 and token_N.ndim == 1
    fits = fits and int(offsets_S1[0]) == 0 and int(offsets_S1[-1]) == len(token_N)
    if not fits or bool((offsets_S1.diff() < 0).any()):
        raise ShapeError(
            f"Batch.packed: offsets {offsets_S1.tolist()[:8]} do not cut tokens of shape {tuple(token_N.shape)} into "
            f"rows; wanted cu_seqlens [S+1], ascending from 0 to the number of tokens"
        )


def _check_ids(name: str, id_X: Tensor) -> None:
    if id_X.is_floating_point() or id_X.is_complex() or id_X.dtype == torch.bool:
        raise RecordError(
            f"Batch: {name} is {id_X.dtype}; wanted token ids of an integer dtype: a float loses the last digits of "
            f"large ids. Find where the ids became floats, then convert with .long()"
        )


def _check_advantage(advantage_M: Tensor) -> None:
    if not bool(advantage_M.isfinite().all()):
        num = int((~advantage_M.isfinite()).sum())
        raise RecordError(
            f"Batch: advantage is not finite at {num} of {len(advantage_M)} kept tokens; mask these tokens, or look at "
            f"the rewards and at how they are scaled (is a group's standard deviation 0, or of one sample only?)"
        )


def _check_streams(kept: dict[str, Tensor | None]) -> None:
    for name, stream_M in kept.items():
        if stream_M is None:
            continue
        if not bool(stream_M.isfinite().all()):
            num = int((~stream_M.isfinite()).sum())
            raise RecordError(
                f"Batch: {name} is not finite at {num} of {len(stream_M)} kept tokens; mask these tokens, "
                f"or find out why the stack has no value there (a token outside the engine's kept set?)"
            )
        above_M = stream_M > math.log1p(MAX_MASS_ERROR)
        if bool(above_M.any()):
            raise RecordError(
                f"Batch: {name} is above 0 at {int(above_M.sum())} of {len(stream_M)} kept tokens, up to "
                f"{float(stream_M.max()):.4g}; wanted log-probabilities in nats, at most 0: are these logits, "
                f"probabilities or negated values?"
            )


def _check_list(listed: EngineList) -> None:
    used_MK = listed.index >= 0
    for name, logp_MK in (("logp", listed.logp), ("gen_logp", listed.gen_logp)):
        if logp_MK is None or not logp_MK.numel():
            continue
        if bool(logp_MK[used_MK].isnan().any()):
            raise RecordError(f"EngineList.{name}: nan in a used slot; put index -1 where there is no value")
        mass_M = logp_MK.double().exp().masked_fill(~used_MK, 0.0).sum(1)
        if bool((mass_M > 1.0 + MAX_MASS_ERROR).any()):
            raise RecordError(
                f"EngineList.{name}: listed probabilities sum to {float(mass_M.max()):.4f} at a position, more than 1; "
                f"pass log-probabilities (not logits), of one temperature"
            )
    sorted_MK = listed.index.sort(1).values
    if bool(((sorted_MK[:, 1:] == sorted_MK[:, :-1]) & (sorted_MK[:, 1:] >= 0)).any()):
        raise RecordError("EngineList.index: a token is listed twice at a position; keep one, put -1 in the other slot")


def _kept(stream_X: Tensor | None, keep_M: Tensor | None) -> Tensor | None:
    return None if stream_X is None else _kept_always(stream_X, keep_M).detach()


def _kept_always(stream_X: Tensor, keep_M: Tensor | None) -> Tensor:
    return _pick(stream_X.reshape(-1), keep_M)


def _pick(flat: Tensor, keep_M: Tensor | None) -> Tensor:
    return flat if keep_M is None else flat[keep_M]
