"""A real, tiny RL job on CPU: a trainer process, a generator process of its own, and one arm of the demo per trainer.

task -> policy (a Qwen3 from a config), sampler (KV-cache decoding) -> protocol, engine, vllm_engine (the generator's
process), client (its handle) -> trainer (one arm) -> arms (runs them) -> result (numbers, table, picture).
Nothing here is imported by the sentinel; importing this package alone loads nothing heavy.
"""
