"""Three moments of an arm on disk, and their independent second scoring.

A snapshot holds a batch, the streams the hook sent, and both sets of weights. `identity_error` scores the batch again
with freshly built transformers models and compares: disc + lag, as sent, must be total as rescored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from dlc_sentinel.demo.client import Batch
from dlc_sentinel.demo.policy import load_weights, make_policy, score
from dlc_sentinel.demo.shape import PolicyShape
from dlc_sentinel.records import F32, F64


def save(
    path: Path, batch: Batch, old_ST: F32, cur_ST: F32, old_weights: Mapping[str, F32], cur_weights: Mapping[str, F32]
) -> None:
    """Writes one snapshot (.npz)."""
    arrays: dict[str, np.ndarray] = {
        "prompts": batch.prompts_SP,
        "tokens": batch.tokens_ST,
        "engine": batch.engine_ST,
        "old": old_ST,
        "cur": cur_ST,
    }
    arrays |= {f"old_weights/{name}": value for name, value in old_weights.items()}
    arrays |= {f"cur_weights/{name}": value for name, value in cur_weights.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes **kwargs for its own flag


def identity_error(path: Path) -> float:
    """Largest difference, nats, between the split that was sent and an independent one, over a snapshot's tokens.

    Checked per token: disc + lag - total, where disc and lag come from the streams sent and total from the rescoring
    of the current weights; and lag itself, so that an error shared by both parts is seen too.
    """
    with np.load(path) as held:
        arrays = {name: held[name] for name in held.files}
    engine, old, cur = (arrays[name].astype(np.float64) for name in ("engine", "old", "cur"))
    again_cur, again_old = (_rescored(arrays, side) for side in ("cur", "old"))
    split = (old - engine) + (cur - old) - (again_cur - engine)
    lag = (cur - old) - (again_cur - again_old)
    return float(max(np.abs(split).max(), np.abs(lag).max()))


def _rescored(arrays: Mapping[str, np.ndarray], side: str) -> F64:
    """[S, T] logprobs by a fresh model in float64, with the plain attention instead of the fused one."""
    prefix = f"{side}_weights/"
    weights = {name[len(prefix) :]: value for name, value in arrays.items() if name.startswith(prefix)}
    model = make_policy(PolicyShape(vocab_size=len(weights["lm_head.weight"])), seed=0)
    model.set_attn_implementation("eager")
    load_weights(model, weights)
    prompts, tokens = (torch.from_numpy(arrays[name]) for name in ("prompts", "tokens"))
    return score(model.double(), prompts, tokens).double().numpy()
