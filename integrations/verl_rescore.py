"""DLC_SENTINEL_RESCORE=N: a sample of old rows is scored once more, at the weights that generated them.

verl's asynchronous trainers compute old_log_probs at the weights of the last sync, so rows of older weights lack the
middle stream. With this option each actor rank keeps its own shards of the last N delivered versions in host memory
(N times the size of its parameters). When verl computes old_log_probs, 2 % of the rows, at least four over all ranks,
among those that are wholly of one kept version, are scored at that version: its weights go in, a forward pass, and
verl's own weights go back, bit for bit. These rows are then exact.

Every rank takes part in each forward pass, with a row of its own or not. verl's own functions save and restore
(DetachActorWorker: separate_async, fully_async, one_step_off); what was not tried is refused. Longer steps: one copy of
the parameters to the host and back per version in the sample, and the sample's forward passes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dlc_sentinel.integrations import verl_batch, verl_ranks, verl_wraps
from dlc_sentinel.integrations.verl_rows import Facts
from dlc_sentinel.integrations.verl_wraps import quietly

from dlc_sentinel.records import I64

OPTION = "DLC_SENTINEL_RESCORE"
SHARE, LEAST = 0.02, 4
"""Of the rows that are scored again, over all ranks of a batch."""
_log = logging.getLogger("dlc_sentinel.verl")


@dataclass(frozen=True, slots=True)
class Rescored:
    """One row at its generator's weights; logprobs_T: [T] torch tensor, nats, one per response token, then padding."""

    version: int
    logprobs_T: Any


def choose(
    facts: Sequence[Facts], names: Sequence[str], kept: Collection[int], current: int, quota: int
) -> dict[int, list[int]]:
    """version -> rows to score again: at most `quota`, each wholly of one kept version before `current`.

    Drawn by the hash of the row's name, so by nothing the policy did. A name that stands on two rows is not drawn.
    """
    num = Counter(names)
    rows = [
        i
        for i, row in enumerate(facts)
        if row.is_uniform and row.newest < current and row.newest in kept and num[names[i]] == 1
    ]
    rows.sort(key=lambda i: hashlib.blake2b(names[i].encode(), digest_size=8).digest())
    chosen: dict[int, list[int]] = {}
    for i in rows[:quota]:
        chosen.setdefault(facts[i].newest, []).append(i)
    return chosen


def limit() -> int:
    """How many versions to keep, 0 = the option is off."""
    text = os.environ.get(OPTION, "").strip()
    return int(text) if text.isdigit() else 0


def refusal(worker: Any) -> str:
    """Why this actor's rows cannot be scored again, or ""."""
    # Asked of the class: the properties themselves fail on a strategy verl does not know.
    if not all(hasattr(type(worker), name) for name in ("copy_handler", "restore_handler")):
        return "this trainer's actor keeps no snapshots (verl's DetachActorWorker does)"
    strategy = worker.config.actor.strategy
    if strategy != "fsdp2":
        return f"actor.strategy is {strategy}; it was tried with fsdp2 only"
    if worker.actor.engine.is_param_offload_enabled:
        return "param_offload: verl's snapshots need the parameters on the device"
    return ""


class Rescoring:
    """Keeps the versions of one actor rank, and scores a sample of each batch at them."""

    def __init__(self, worker: Any, num_kept: int) -> None:
        self._worker = worker
        self._num_kept = num_kept
        self._kept: dict[int, Any] = {}
        self._found: dict[str, Rescored] = {}
        self._infer: Any = worker.actor.infer_batch

    def install(self) -> None:
        """Replaces `infer_batch` on the training worker itself; `remove` leaves no trace."""
        misfit = verl_wraps.INFER.misfit(["self", *verl_wraps.argument_names(self._infer)])
        if misfit:
            _log.warning("dlc-sentinel: no row is scored again: %s; the job runs on", misfit)
            return

        def infer_batch(data: Any, *args: Any, **kwargs: Any) -> Any:
            from verl.utils import tensordict_utils as tu

            # Without its adapter the model is the reference, not the policy.
            is_policy = not tu.get(data, "no_lora_adapter", False)
            result = self._infer(data, *args, **kwargs)
            if is_policy and self._kept:
                self._rescore(data)
            return result

        self._worker.actor.infer_batch = infer_batch
        verl_ranks.sign_in("rescore")

    def remove(self) -> None:
        """Puts the original method back and lets the kept weights go."""
        vars(self._worker.actor).pop("infer_batch", None)
        self._kept.clear()

    @quietly
    def keep(self, version: int) -> None:
        """The weights as they are now were delivered as `version`."""
        self._kept[version] = self._worker.copy_handler(self._worker.actor.engine.module)
        while len(self._kept) > self._num_kept:
            del self._kept[min(self._kept)]

    def found(self, names: Sequence[str]) -> dict[int, Rescored]:
        """Place in `names` -> what was found for that row."""
        return {place: self._found[name] for place, name in enumerate(names) if name in self._found}

    @quietly
    def _rescore(self, data: Any) -> None:
        self._found = {}
        if not verl_ranks.all_have("rescore"):
            return
        names, chosen = self._sample(data) or ([], {})
        versions = sorted(self._kept)
        counts = verl_ranks.highest([len(chosen.get(version, ())) for version in versions])
        if not any(counts):
            return
        before = self._worker.copy_handler(self._worker.actor.engine.module)
        try:
            for version, count in zip(versions, counts, strict=True):
                if count:
                    self._put(self._kept[version])
                    self._score(data, version, names, chosen.get(version, []), count)
        finally:
            self._put(before)

    @quietly
    def _sample(self, data: Any) -> tuple[list[str], dict[int, list[int]]] | None:
        names = verl_batch.row_names(data, len(data))
        if names is None:
            return None
        num_ranks = int(self._worker.actor.engine.get_data_parallel_size())
        quota = math.ceil(max(LEAST, SHARE * len(data) * num_ranks) / num_ranks)
        return names, choose(verl_batch.row_facts(data, len(data)), names, self._kept, max(self._kept), quota)

    def _score(self, data: Any, version: int, names: Sequence[str], rows: Sequence[int], count: int) -> None:
        """A forward pass over `count` rows on every rank: its own first, then its first row to make up the number."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import no_padding_2_padding

        part = tu.index_select_tensor_dict(data, [*rows, *[0] * (count - len(rows))])
        # One row at a time: the same number of passes on every rank, and little memory.
        tu.assign_non_tensor(part, use_dynamic_bsz=False, micro_batch_size_per_gpu=1, calculate_entropy=False)
        output = self._infer(part)
        if output is None:
            return
        logprobs = no_padding_2_padding(tu.get(output, "log_probs"), part)
        for place, row in enumerate(rows):
            self._found[names[row]] = Rescored(version, logprobs[place])

    def _put(self, saved: Any) -> None:
        module = self._worker.actor.engine.module
        self._worker.restore_handler(module, *saved)
        # The outermost module may still hold whole parameters of the pass before.
        module.reshard()


def rescored_columns(found: Mapping[int, Rescored], like_BT: Any) -> tuple[Any, I64]:
    """([R, T] logprobs padded as `like_BT`, of its dtype and device; [R] versions) in the order of `found`."""
    import torch

    old = torch.zeros((len(found), like_BT.shape[1]), dtype=like_BT.dtype, device=like_BT.device)
    for place, row in enumerate(found.values()):
        width = min(old.shape[1], len(row.logprobs_T))
        old[place, :width] = row.logprobs_T[:width].to(old)
    return old, np.array([row.version for row in found.values()], np.int64)


def build(worker: Any) -> Rescoring | None:
    """The option's part of one actor rank; None where it is off, or cannot work, which is told by rank 0."""
    num_kept = limit()
    if not num_kept:
        return None
    reason = refusal(worker)
    if reason:
        if int(getattr(worker, "rank", 0)) == 0:
            _log.warning("dlc-sentinel: %s does nothing here: %s", OPTION, reason)
        return None
    return Rescoring(worker, num_kept)
