"""A tiny random Qwen3 with a byte-level tokenizer, written to a folder as Hugging Face lays models out.

Runs in .venv-vllm. No pad id: Hugging Face zeroes that row of the embedding, and RMSNorm makes an outlier of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 2048
EOS, BOS = 1, 2


def write(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """The folder, now with a 1 M parameter model of random weights."""
    torch.manual_seed(seed)
    words = ["<|unused|>", "<|eos|>", "<|bos|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<t{i}>" for i in range(VOCAB - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[EOS], bos_token=words[BOS]).save_pretrained(
        folder
    )
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=EOS, bos_token_id=BOS, pad_token_id=None, initializer_range=0.08,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path, seed: int) -> Path:
    """The folder, now with a LoRA adapter of rank 4 on the base model's attention outputs, of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Qwen3ForCausalLM.from_pretrained(base)
    chance = torch.Generator().manual_seed(seed)
    arrays = {}
    for name, layer in model.named_modules():
        if name.endswith("o_proj"):
            shapes = {"lora_A": (4, layer.in_features), "lora_B": (layer.out_features, 4)}
            for part, shape in shapes.items():
                arrays[f"base_model.model.{name}.{part}.weight"] = torch.randn(shape, generator=chance)
    save_file(arrays, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
