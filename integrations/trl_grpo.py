"""Three streams of a GRPOTrainer: engine = sampling_per_token_logps, old = old_per_token_logps, cur = the loss's own.

A step is TRL's optimizer step (`state.global_step`), so its update index is always 0 and versions count optimizer
steps: weights of version v have seen v of them. A batch generated at version v and trained for four steps has ages
0, 1, 2, 3. Axes: B rows of one micro-batch, T columns of the padded completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dlc_sentinel.integrations.trl_wraps import Quiet, Wraps

if TYPE_CHECKING:
    from dlc_sentinel.hook import Hook
    from dlc_sentinel.records import Command

ROW = "dlc_row"
"""Column [B] added to TRL's batch: generation << 32 | row in the global batch. TRL shuffles it with the rest."""
KEPT_GENERATIONS = 256

WRAPPED = {
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    "_compute_loss": ("model", "inputs"),
}
"""Method of GRPOTrainer -> the arguments it must begin with."""
ENGINE_WRAPPED: dict[str, tuple[str, ...]] = {"sync_weights": ()}


@dataclass(frozen=True, slots=True)
class Generation:
    """Where a batch comes from."""

    version: int
    """Optimizer steps in the weights that generated it; -1 = not known."""
    old_version: int
    """Optimizer steps in the weights that scored `old`."""


class GrpoStreams:
    """What a GRPOTrainer shows, sent to the hook; and its side of a RESYNC."""

    def __init__(
        self,
        trainer: Any,
        hook: Hook,
        quiet: Quiet,
        dtypes: dict[str, str],
        engine_version: Callable[[], int] | None,
    ) -> None:
        self._trainer = trainer
        self._hook = hook
        self._quiet = quiet
        self._dtypes = dtypes
        self._engine_version = engine_version
        self._num_generations = 0
        self._generations: dict[int, Generation] = {}
        self._in_loss = False
        self._cur: Any = None
        self._sent: tuple[int, set[str], int] = (-1, set(), 0)
        self._on_generated: Callable[[int], None] | None = None

    def install(self, wraps: Wraps) -> None:
        """Wraps what fits. Without all three trainer methods there are no streams, so then none is wrapped."""
        trainer = self._trainer
        makers = {
            "_generate_and_score_completions": self._watch_generation,
            "_get_per_token_logps_and_entropies": self._watch_scoring,
            "_compute_loss": self._watch_loss,
        }
        fit = [wraps.method(trainer, name, args, makers[name], "the logprob streams") for name, args in WRAPPED.items()]
        if not all(fit):
            wraps.undo()
            return
        engine = getattr(trainer, "vllm_generation", None)
        if engine is not None:
            wraps.method(engine, "sync_weights", (), self._watch_sync, "notes of weight syncs")

    # -- generation --------------------------------------------------------------------------------------------------

    def _watch_generation(self, original: Any) -> Any:
        def call(inputs: Any, *args: Any, **named: Any) -> Any:
            output = original(inputs, *args, **named)
            if self._trainer.model.training:
                self._quiet.do("reading a generated batch", self._mark, output)
            return output

        return call

    def _mark(self, output: Any) -> None:
        import torch

        trainer = self._trainer
        index = self._num_generations
        self._num_generations += 1
        generation = Generation(self._generator_version(), int(trainer.state.global_step))
        self._generations[index] = generation
        self._generations.pop(index - KEPT_GENERATIONS, None)
        num_rows = int(output["completion_ids"].shape[0])
        first = int(trainer.accelerator.process_index) * num_rows
        output[ROW] = torch.arange(first, first + num_rows, dtype=torch.int64) + (index << 32)
        done, self._on_generated = self._on_generated, None
        if done is not None:
            done(generation.version)

    def _generator_version(self) -> int:
        trainer = self._trainer
        if self._engine_version is not None:
            return int(self._engine_version())
        if getattr(trainer, "use_vllm", False):
            return int(getattr(trainer, "_last_loaded_step", -1))
        return int(trainer.state.global_step)

    def _watch_sync(self, original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            step = int(self._trainer.state.global_step)
            if owns_engine(self._trainer):
                self._hook.synced(step, step)
            return result

        return call

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _watch_scoring(self, original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            scored = original(*args, **named)
            if self._in_loss and self._cur is None:
                self._cur = scored[0].detach()
            return scored

        return call

    def _watch_loss(self, original: Any) -> Any:
        def call(model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            if not self._trainer.model.training:
                return original(model, inputs, *args, **named)
            with self._listening():
                loss = original(model, inputs, *args, **named)
            self._quiet.do("sending a micro-batch", self._send, inputs, self._cur)
            self._cur = None
            return loss

        return call

    @contextmanager
    def _listening(self) -> Iterator[None]:
        self._in_loss, self._cur = True, None
        try:
            yield
        finally:
            self._in_loss = False

    def _send(self, inputs: Any, cur_BT: Any) -> None:
        engine_BT, old_BT = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
        if engine_BT is None:
            self._quiet.say(
                "no engine",
                "this trainer's generation returns no logprobs (transformers generate), so there is nothing to compare "
                "and nothing is sent; use_vllm=True or a rollout_func gives them",
            )
            return
        step = int(self._trainer.state.global_step)
        mask_BT = inputs["completion_mask"].bool()
        if inputs.get("tool_mask") is not None:
            mask_BT = mask_BT & inputs["tool_mask"].bool()
        columns = {"engine": engine_BT, "cur": cur_BT, "mask": mask_BT, "advantage": inputs["advantages"]}
        if old_BT is not None:
            columns["old"] = old_BT
        rows = self._origins(inputs)
        rows, columns, micro = self._fresh(step, rows, columns)
        if rows is not None and not rows["seq_id"]:
            return
        self._hook.train(
            step, step, micro=micro, old_is=_old_is(rows, old_BT), dtypes=self._dtypes,
            replica=replica_of(self._trainer), **columns, **(rows or {}),
        )  # fmt: skip

    def _origins(self, inputs: Any) -> dict[str, Any] | None:
        """Ids, groups and versions of the rows; None (and said) where the marks did not come through."""
        marks = inputs.get(ROW)
        if marks is None:
            self._quiet.say(
                "no marks",
                f"{type(self._trainer).__name__} rebuilt its batch without unknown columns: rows go without ids, "
                "groups and versions",
            )
            return None
        per_prompt = max(int(self._trainer.num_generations), 1)
        split = [(mark >> 32, mark & 0xFFFFFFFF) for mark in marks.tolist()]
        known = [self._generations.get(index, Generation(-1, -1)) for index, _ in split]
        return {
            "seq_id": [f"{index}.{row}" for index, row in split],
            "group": [f"{index}.g{row // per_prompt}" for index, row in split],
            "versions": np.array([one.version for one in known], np.int64),
            "old_version": np.array([one.old_version for one in known], np.int64),
        }

    def _fresh(
        self, step: int, rows: dict[str, Any] | None, columns: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, dict[str, Any], int]:
        """Rows not yet sent in this step: a second pass over a batch inside one optimizer step shows nothing new."""
        if self._sent[0] != step:
            self._sent = (step, set(), 0)
        _, sent, micro = self._sent
        self._sent = (step, sent, micro + 1)
        if rows is None:
            return rows, columns, micro
        keep = [i for i, name in enumerate(rows["seq_id"]) if name not in sent]
        sent.update(rows["seq_id"])
        if len(keep) < len(rows["seq_id"]):
            rows = {k: v[keep] if isinstance(v, np.ndarray) else [v[i] for i in keep] for k, v in rows.items()}
            columns = {name: value[keep] for name, value in columns.items()}
        return rows, columns, micro

    # -- RESYNC ------------------------------------------------------------------------------------------------------

    def refuses(self, command: Command) -> str:
        """Why a RESYNC cannot be done here; "" where it can."""
        return "" if hasattr(self._trainer, "_buffered_inputs") else "this TRL has no _buffered_inputs to drop"

    def resync(self, code: int, told: Callable[[int, str], None] | None) -> None:
        """Drops the rest of the generated batch and has the weights loaded anew; the same on every rank.

        `told(version, what)` is called once the next batch was generated, with the version that generated it.
        """
        trainer = self._trainer
        per = int(trainer.args.steps_per_generation) * int(trainer.num_iterations)
        left = -int(trainer._step) % per
        trainer._buffered_inputs = None
        if hasattr(trainer, "_last_loaded_step"):
            trainer._last_loaded_step = -1
        if told is not None:
            what = f"{left} of {per} micro-batches of the old batch dropped, new batch generated after a weight sync"
            self._on_generated = lambda version: told(version, what)

    def observe(self, step: int) -> None:
        """Nothing: versions are read where a batch is generated."""


def owns_engine(trainer: Any) -> bool:
    """True on one rank of each engine: every tensor-parallel group when colocated, else rank 0."""
    rank, width = int(trainer.accelerator.process_index), _tensor_parallel(trainer)
    return rank % width == 0 if width else rank == 0


def replica_of(trainer: Any) -> str:
    """Name of the engine that this rank's rows come from."""
    width = _tensor_parallel(trainer)
    return str(int(trainer.accelerator.process_index) // width) if width else "0"


def _tensor_parallel(trainer: Any) -> int:
    """Ranks per colocated engine; 0 where the engine is a server, or is not TRL's."""
    if not getattr(trainer, "use_vllm", False) or getattr(trainer, "vllm_mode", "") != "colocate":
        return 0
    return max(int(getattr(trainer, "vllm_tensor_parallel_size", 1) or 1), 1)


def _old_is(rows: dict[str, Any] | None, old_BT: Any) -> str:
    if old_BT is None:
        return "absent"
    same = rows is not None and bool((rows["versions"] == rows["old_version"]).all())
    return "generator" if same else "proximal"
