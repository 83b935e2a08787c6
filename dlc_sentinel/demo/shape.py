"""Sizes of the demo's policy. Light: the generator's process need not load transformers for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """Sizes of a Qwen3 with untied embeddings. head_dim 32 is the smallest that vLLM's CPU attention takes."""

    vocab_size: int = 16
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 1
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    max_tokens: int = 256
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    init_range: float = 0.08
