"""Runs in .venv-vllm: a random 1 M parameter Qwen3 in a real bf16 vLLM engine, and in Hugging Face in fp32.

python random_model.py FOLDER OUT.jsonl     writes one step of the open file format
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

ROWS, PROMPT, TOKENS, VOCAB = 32, 8, 96, 2048


def main(folder: str, out: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=2, pad_token_id=None, initializer_range=0.08,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    prompts = [{"prompt_token_ids": torch.randint(3, VOCAB, (PROMPT,)).tolist()} for _ in range(ROWS)]
    llm = LLM(
        folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_seqs=ROWS,
        distributed_executor_backend="uni", disable_log_stats=True, seed=1,
    )  # fmt: skip
    sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    engine = [[step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs]
    ids = torch.tensor([p["prompt_token_ids"] + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)])
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = trainer(ids, use_cache=False).logits[:, PROMPT - 1 : -1]
    old = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0].tolist()
    lines = [{"type": "meta", "run": "random", "engine_dtype": "bfloat16", "trainer_dtype": "float32"}]
    for i in range(ROWS):
        row = {"type": "seq", "step": 0, "version": 0, "versions": 0, "id": f"s{i}", "group": f"g{i // 8}"}
        lines.append({**row, "engine": engine[i], "old": old[i], "cur": old[i], "old_is": "generator"})
    Path(out).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
