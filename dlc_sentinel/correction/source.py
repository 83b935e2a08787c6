"""Where logits come from: hidden states and an output matrix, or logits; read a chunk of kept tokens at a time.

Axes: X source positions (flattened), M kept tokens, C tokens of a chunk, D width of the source, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dlc_sentinel.correction.batch import Batch, EngineFull, EngineList
from dlc_sentinel.errors import ConfigError, ShapeError

__all__ = ["CHUNK_BYTES", "Hidden", "Logits", "Reader", "Source", "check_vocabulary", "grad_rows", "inner_dtype"]

CHUNK_BYTES: Final = 2**28
"""Size of one chunk of logits unless chunk_tokens says otherwise: 441 tokens at a vocabulary of 151,936."""
CAST_ROWS: Final = 16384
"""Rows of a half-precision output matrix that are widened at a time."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Last hidden states and the output matrix: logits = (hidden @ output.T + bias) / temperature.

    hidden: [N, H] or [B, T, H], the batch's layout, position t predicting the batch's token t. output_VH: [V, H].
    """

    hidden: Tensor
    output_VH: Tensor
    bias_V: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits themselves, [N, V] or [B, T, V], before the temperature; their gradient has their size."""

    logits: Tensor


Source = Hidden | Logits


def inner_dtype(source: Source) -> torch.dtype:
    """float64 for a float64 source, float32 for every other."""
    main = source.hidden if isinstance(source, Hidden) else source.logits
    return torch.float64 if main.dtype == torch.float64 else torch.float32


class Reader:
    """Chunks of z of a source, in the inner dtype. One per call: holds no result."""

    def __init__(self, source: Source, batch: Batch, temperature: float, chunk_tokens: int | None) -> None:
        _check(source, batch, temperature, chunk_tokens)
        self.batch, self.temperature = batch, temperature
        main = source.hidden if isinstance(source, Hidden) else source.logits
        self.main_XD = main.reshape(-1, main.shape[-1])
        self.output_VH = source.output_VH if isinstance(source, Hidden) else None
        self.bias_V = source.bias_V if isinstance(source, Hidden) else None
        self.num_vocab = main.shape[-1] if self.output_VH is None else len(self.output_VH)
        self.dtype = inner_dtype(source)
        width = torch.finfo(self.dtype).bits // 8 * self.num_vocab
        self.chunk = chunk_tokens or max(1, CHUNK_BYTES // width)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(start, end) of kept tokens."""
        for start in range(0, self.batch.num_tokens, self.chunk):
            yield start, min(start + self.chunk, self.batch.num_tokens)

    def main_rows(self, main_XD: Tensor, start: int, end: int) -> Tensor:
        """Kept rows start:end, [C, D], in the inner dtype."""
        return main_XD[self.batch.rows(start, end)].to(self.dtype)

    def z(self, main_CD: Tensor, output_VH: Tensor | None, bias_V: Tensor | None) -> Tensor:
        """Logits over the temperature, [C, V]; never a view of the input."""
        if output_VH is None:
            return main_CD / self.temperature
        z_CV = main_CD.new_empty(len(main_CD), len(output_VH))
        for rows, part_VH in _wide(output_VH, self.dtype):
            torch.mm(main_CD, part_VH.T, out=z_CV[:, rows])
        if bias_V is not None:
            z_CV += bias_V.to(self.dtype)
        return z_CV if self.temperature == 1.0 else z_CV.div_(self.temperature)


def check_vocabulary(batch: Batch, num_vocab: int) -> None:
    """Raises ShapeError where a token or the engine's distribution does not fit a vocabulary of this size."""
    ids = {"token": batch.token_M}
    if isinstance(batch.engine, EngineFull) and batch.engine.logp.shape[-1] != num_vocab:
        raise ShapeError(
            f"EngineFull.logp is {batch.engine.logp.shape[-1]} wide, the source's vocabulary is {num_vocab}; "
            f"pad the engine's with -inf, or cut the output matrix's padding rows"
        )
    if isinstance(batch.engine, EngineList):
        ids["EngineList.index"] = batch.engine.index
    for name, id_M in ids.items():
        lowest = 0 if name == "token" else -1
        if id_M.numel() and not lowest <= int(id_M.min()) <= int(id_M.max()) < num_vocab:
            raise ShapeError(
                f"{name} holds ids from {int(id_M.min())} to {int(id_M.max())} in a vocabulary of {num_vocab}; "
                f"mask padding tokens, and check that both sides use one tokenizer"
            )


def grad_rows(grad_CV: Tensor, output_VH: Tensor | None) -> Tensor:
    """Gradient of the chunk's hidden states (or of its logits), [C, D], in the inner dtype."""
    if output_VH is None:
        return grad_CV
    out_CH = grad_CV.new_zeros(len(grad_CV), output_VH.shape[1])
    for rows, part_VH in _wide(output_VH, grad_CV.dtype):
        out_CH.addmm_(grad_CV[:, rows], part_VH)
    return out_CH


def _wide(output_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The output matrix in the inner dtype: whole where it has it already, else in slices of its rows."""
    if output_VH.dtype == dtype:
        yield slice(None), output_VH
        return
    for start in range(0, len(output_VH), CAST_ROWS):
        rows = slice(start, start + CAST_ROWS)
        yield rows, output_VH[rows].to(dtype)


def _check(source: Source, batch: Batch, temperature: float, chunk_tokens: int | None) -> None:
    main = source.hidden if isinstance(source, Hidden) else source.logits
    if main.shape[:-1].numel() != batch.num_positions:
        raise ShapeError(
            f"{type(source).__name__}: shape {tuple(main.shape)} holds {main.shape[:-1].numel()} positions, the batch "
            f"{batch.num_positions}; drop the last position of each row and shift, so that position t predicts token t"
        )
    if isinstance(source, Hidden) and source.output_VH.shape[-1] != main.shape[-1]:
        raise ShapeError(
            f"Hidden: hidden is {main.shape[-1]} wide, output_VH is {tuple(source.output_VH.shape)}; "
            f"wanted [V, {main.shape[-1]}], the layout of torch.nn.Linear.weight"
        )
    if not temperature > 0.0 or (chunk_tokens is not None and chunk_tokens < 1):
        raise ConfigError(
            f"score: temperature={temperature}, chunk_tokens={chunk_tokens}; both must be positive. "
            f"A greedy sampler (temperature 0) has no score"
        )
