"""Token-by-token sampling from Qwen3 weights with a KV cache, in float32 or in bfloat16 numerics.

bfloat16 here means: weights, activations and cached keys and values hold bfloat16 values, products are summed in
float32, every result is rounded to bfloat16: what matrix hardware does. The rounding is written out because CPUs
without bfloat16 instructions run torch's own kernels five times slower, and because it gives the same numbers anywhere.

Axes: S responses, P prompt tokens, T response tokens, V vocabulary, H heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dlc_sentinel.demo.shape import PolicyShape
from dlc_sentinel.records import F32

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    head_norms: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Sampler:
    """Holds one set of weights and a cache for `num_rows` responses of at most `num_tokens` tokens, prompt included."""

    def __init__(self, shape: PolicyShape, num_rows: int, num_tokens: int, dtype: Dtype = "float32") -> None:
        self._shape = shape
        self._rounds = dtype == "bfloat16"
        self._heads, self._key_heads = shape.num_heads, shape.num_kv_heads
        self._size = shape.head_dim
        self._layers: list[_Layer] = []
        self._embed = self._head = self._last_norm = torch.empty(0)
        rows = (shape.num_layers, num_rows, self._key_heads)
        self._keys = torch.zeros(*rows, self._size, num_tokens)
        self._values = torch.zeros(*rows, num_tokens, self._size)
        self._cos, self._sin = self._rotary(num_tokens)
        self.logit_grid = 0.0
        """Width to which logits are rounded, nats; 0 = not. A fault to inject, no part of the policy."""

    def load(self, weights: Mapping[str, F32]) -> None:
        """Takes over the weights, rounded to the sampler's dtype; the caller's arrays are not kept."""

        def take(*names: str) -> Tensor:
            return self._round(torch.cat([torch.from_numpy(np.array(weights[name])) for name in names]))

        self._embed, self._last_norm = take("model.embed_tokens.weight"), take("model.norm.weight")
        self._head = take("lm_head.weight").t().contiguous()
        self._layers = []
        for number in range(self._shape.num_layers):
            base = f"model.layers.{number}."
            attention, mlp = base + "self_attn.", base + "mlp."
            qk_norms = [(f"{attention}q_norm.weight", self._heads), (f"{attention}k_norm.weight", self._key_heads)]
            layer = _Layer(
                norm=take(base + "input_layernorm.weight"),
                qkv=take(*(f"{attention}{part}_proj.weight" for part in "qkv")).t().contiguous(),
                head_norms=torch.cat([take(name).expand(count, self._size) for name, count in qk_norms]),
                out=take(attention + "o_proj.weight").t().contiguous(),
                mlp_norm=take(base + "post_attention_layernorm.weight"),
                gate_up=take(mlp + "gate_proj.weight", mlp + "up_proj.weight").t().contiguous(),
                down=take(mlp + "down_proj.weight").t().contiguous(),
            )
            self._layers.append(layer)

    @torch.no_grad()
    def generate(self, prompts_SP: Tensor, num_tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """([S, T] sampled tokens, [S, T] their logprobs in nats), T = num_tokens, temperature 1, nothing cut off."""
        num_rows, num_prompt = prompts_SP.shape
        shape = (num_tokens, num_rows, self._shape.vocab_size)
        gumbel_TSV = -torch.empty(shape).exponential_(generator=generator).log()
        for place in range(num_prompt - 1):
            self._step(prompts_SP[:, place], place)
        token, tokens, logits = prompts_SP[:, -1], list[Tensor](), list[Tensor]()
        for noise_SV in gumbel_TSV:
            logits.append(self._step(token, num_prompt - 1 + len(tokens)))
            token = (logits[-1] + noise_SV).argmax(-1)
            tokens.append(token)
        tokens_ST = torch.stack(tokens, dim=1)
        logprobs_STV = torch.log_softmax(torch.stack(logits, dim=1), dim=-1)
        return tokens_ST, logprobs_STV.gather(-1, tokens_ST[..., None])[..., 0]

    def _step(self, token_S: Tensor, place: int) -> Tensor:
        """[S, V] logits after the token at `place`; writes its keys and values."""
        x = self._embed[token_S]
        for number, layer in enumerate(self._layers):
            mixed = self._attend(self._norm(x, layer.norm), number, layer, place)
            x = self._round(x + self._round(mixed @ layer.out))
            gate, up = self._round(self._norm(x, layer.mlp_norm) @ layer.gate_up).chunk(2, -1)
            x = self._round(x + self._round(self._round(functional.silu(gate) * up) @ layer.down))
        logits = self._round(self._norm(x, self._last_norm) @ self._head)
        return torch.round(logits / self.logit_grid) * self.logit_grid if self.logit_grid > 0 else logits

    def _attend(self, x: Tensor, number: int, layer: _Layer, place: int) -> Tensor:
        num_rows, heads, key_heads = x.shape[0], self._heads, self._key_heads
        qkv = self._round(x @ layer.qkv).view(num_rows, heads + 2 * key_heads, self._size)
        qk = self._norm(qkv[:, : heads + key_heads], layer.head_norms)
        qk = self._round(qk * self._cos[place] + qk.roll(self._size // 2, -1) * self._sin[place])
        keys, values = self._keys[number, :num_rows], self._values[number, :num_rows]
        keys[..., place], values[:, :, place] = qk[:, heads:], qkv[:, heads + key_heads :]
        query = qk[:, :heads].reshape(num_rows, key_heads, heads // key_heads, self._size)
        scores = torch.softmax(query @ keys[..., : place + 1] * self._size**-0.5, dim=-1)
        mixed = self._round(self._round(scores) @ values[:, :, : place + 1])
        return mixed.reshape(num_rows, heads * self._size)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._shape.norm_eps)
        return self._round(x * scale * weight)

    def _round(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if self._rounds else x

    def _rotary(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [num_tokens, D]: rotating is x * cos + roll(x, D / 2) * sin."""
        theta = self._shape.rope_theta
        rate = theta ** -(torch.arange(0, self._size, 2, dtype=torch.float32) / self._size)
        angle = torch.outer(torch.arange(num_tokens, dtype=torch.float32), rate)
        cos, sin = self._round(angle.cos()), self._round(angle.sin())
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
