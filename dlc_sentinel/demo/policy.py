"""The policy: a Qwen3 made from a config, nothing downloaded; scoring by one forward pass; weights as numpy arrays.

Axes: S responses, P prompt tokens, T response tokens, V vocabulary. Logprobs in nats, float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlc_sentinel.demo.shape import PolicyShape
from dlc_sentinel.records import F32


def policy_config(shape: PolicyShape) -> Qwen3Config:
    """The transformers config. No special tokens, so every token can be sampled and none ends a response."""
    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_tokens,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        initializer_range=shape.init_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )


def make_policy(shape: PolicyShape, seed: int) -> Qwen3ForCausalLM:
    """A float32 policy with weights drawn from `seed`; leaves torch's global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(policy_config(shape)).float()


def response_log_softmax(model: Qwen3ForCausalLM, prompts_SP: Tensor, responses_ST: Tensor) -> Tensor:
    """[S, T, V] logprobs, nats, of every token at every response position; differentiable."""
    ids = torch.cat([prompts_SP, responses_ST[:, :-1]], dim=1)
    logits = model(ids, use_cache=False).logits[:, prompts_SP.shape[1] - 1 :]
    return torch.log_softmax(logits.float(), dim=-1)


def sampled(log_softmax_STV: Tensor, responses_ST: Tensor) -> Tensor:
    """[S, T] logprobs, nats, of the sampled tokens."""
    return log_softmax_STV.gather(-1, responses_ST[..., None])[..., 0]


@torch.no_grad()
def score(model: Qwen3ForCausalLM, prompts_SP: Tensor, responses_ST: Tensor) -> Tensor:
    """[S, T] logprobs, nats, of the sampled tokens under `model`; no gradient."""
    return sampled(response_log_softmax(model, prompts_SP, responses_ST), responses_ST)


def weights_of(model: Qwen3ForCausalLM) -> dict[str, F32]:
    """{parameter name: float32 copy}, named as transformers and vLLM name them."""
    return {name: value.detach().float().numpy().copy() for name, value in model.state_dict().items()}


def load_weights(model: Qwen3ForCausalLM, weights: Mapping[str, F32]) -> None:
    """Copies `weights` into `model`, all of them or an error."""
    model.load_state_dict({name: torch.from_numpy(np.asarray(value)) for name, value in weights.items()})
