"""Engine and current logprobs of an AsyncGRPOTrainer, with the version of each sample that TRL drops before the batch.

TRL counts weight syncs (`model_version`); here every version is the optimizer step whose weights were synced, so that
age 0 means the same weights also with weight_sync_steps > 1. TRL stamps a sample when its group starts: tokens made
after a sync in mid-generation are newer than their label, so an age above 0 is an upper bound. Age 0 is exact.
There is no middle stream: `old_log_probs` is the engine's. M = loss terms of one rank's row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from dlc_sentinel.integrations.trl_wraps import Quiet, Wraps

if TYPE_CHECKING:
    from dlc_sentinel.hook import Hook
    from dlc_sentinel.records import Command

ROWS = "dlc_rows"
"""Added to TRL's batch: [ranks, samples, 4] = (version, serial number, group, loss terms) of each sample; -1 = none."""
KEPT_SAMPLES = 65536
KEPT_VERSIONS = 4096

WRAPPED = {"get_train_dataloader": (), "compute_loss": ("model", "inputs")}
"""Method of AsyncGRPOTrainer -> the arguments it must begin with."""
USED = {"_sync_weight": ()}
"""Methods called, not replaced."""
COLLATOR_WRAPPED = {"torch_call": ("examples",)}

_SYNC = 1


class AsyncStreams:
    """What an AsyncGRPOTrainer shows, sent to the hook; and its side of a RESYNC."""

    def __init__(self, trainer: Any, hook: Hook, quiet: Quiet, dtypes: dict[str, str]) -> None:
        self._trainer = trainer
        self._hook = hook
        self._quiet = quiet
        self._dtypes = dtypes
        self._wraps: Wraps | None = None
        self._queue: _SeenQueue | None = None
        self._steps: OrderedDict[int, int] = OrderedDict()
        """TRL's model_version -> optimizer step whose weights it is."""
        self._micro = (-1, 0)

    def install(self, wraps: Wraps) -> None:
        """Wraps what fits; both methods are needed for any stream, so one alone is not wrapped."""
        trainer, self._wraps = self._trainer, wraps
        lost = "the logprob streams"
        fit = [
            wraps.method(trainer, "compute_loss", WRAPPED["compute_loss"], self._watch_loss, lost),
            wraps.method(trainer, "get_train_dataloader", (), self._watch_loader, lost),
        ]
        if not all(fit):
            wraps.undo()

    # -- where samples come from (rank 0) ----------------------------------------------------------------------------

    def _watch_loader(self, original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            loader = original(*args, **named)
            if self._trainer.accelerator.is_main_process:
                self._quiet.do("reading the rollout queue", self._enter_queue, loader)
            return loader

        return call

    def _enter_queue(self, loader: Any) -> None:
        assert self._wraps is not None
        dataset, collator = self._trainer._rollout_dataset, loader.collate_fn
        queue = _SeenQueue(dataset.queue)
        args = COLLATOR_WRAPPED["torch_call"]
        if self._wraps.method(collator, "torch_call", args, self._watch_collator, "versions and ids of samples"):
            self._wraps.attribute(dataset, "queue", queue)
            self._queue = queue

    def _watch_collator(self, original: Any) -> Any:
        def call(examples: Any, *args: Any, **named: Any) -> Any:
            batch = original(examples, *args, **named)
            self._quiet.do("reading a packed batch", self._mark, batch, examples)
            return batch

        return call

    def _mark(self, batch: Any, examples: Any) -> None:
        import torch

        assert self._queue is not None
        (rows,) = examples
        table = np.full((len(rows), max(len(row.samples) for row in rows), 4), -1, np.int64)
        for i, row in enumerate(rows):
            for j, sample in enumerate(row.samples):
                model_version, serial = self._queue.take(sample["input_ids"])
                num_terms = int(sample["completion_mask"][1:].sum())
                table[i, j] = self._steps.get(model_version, -1), serial, int(sample["group_id"]), num_terms
        batch[ROWS] = torch.from_numpy(table)

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _watch_loss(self, original: Any) -> Any:
        def call(model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            tee = _Tee(model)
            loss = original(tee, inputs, *args, **named)
            if self._trainer.model.training:
                self._quiet.do("sending a micro-batch", self._send, inputs, tee.log_probs)
            return loss

        return call

    def _send(self, inputs: Any, log_probs: Any) -> None:
        selected = inputs["token_index"] >= 0
        step = int(self._trainer.state.global_step)
        self._micro = (step, self._micro[1] + 1 if self._micro[0] == step else 0)
        rows = self._origins(inputs, int(selected.sum()))
        self._hook.train(
            step, step, micro=self._micro[1], old_is="absent", dtypes=self._dtypes, replica="0",
            cur=log_probs.flatten()[inputs["token_index"][selected]], engine=inputs["old_log_probs"][selected], **rows,
        )  # fmt: skip

    def _origins(self, inputs: Any, num_terms: int) -> dict[str, Any]:
        """Ids, groups, versions and lengths of the samples in this rank's row."""
        table = inputs.get(ROWS)
        if table is None:
            self._quiet.say("no rows", "samples came without their marks: sent without ids, groups and versions")
            ends = np.cumsum(np.bincount(inputs["segment_id"][inputs["token_index"] >= 0].cpu().numpy()))
            return {"cu_seqlens": np.concatenate([[0], ends])}
        version_S, serial_S, group_S, terms_S = np.array(table[0].tolist(), np.int64).T
        real = serial_S >= 0
        return {
            "seq_id": [f"a{serial}" for serial in serial_S[real].tolist()],
            "group": [f"g{group}" for group in group_S[real].tolist()],
            "versions": version_S[real],
            "cu_seqlens": np.concatenate([[0], np.cumsum(terms_S[real])]),
        }

    # -- versions and RESYNC -----------------------------------------------------------------------------------------

    def observe(self, step: int) -> None:
        """Notes a sync that has happened since the last look. TRL keeps the count on rank 0 only."""
        model_version = int(self._trainer.model_version)
        if not self._trainer.accelerator.is_main_process or model_version in self._steps or model_version == 0:
            return
        version = int(self._trainer.state.global_step)
        self._steps[model_version] = version
        if len(self._steps) > KEPT_VERSIONS:
            self._steps.popitem(last=False)
        self._hook.synced(version, step, label=f"model_version {model_version}")

    def refuses(self, command: Command) -> str:
        """Why a RESYNC cannot be done here; "" where it can."""
        if self._queue is None:
            return "the rollout queue could not be wrapped, so stale samples cannot be dropped"
        return ""

    def needs_sync(self, command: Command) -> bool:
        """Rank 0: True when the newest weights are not in the engine yet and the command asks for them."""
        newest = next(reversed(self._steps.values()), -1)
        return command.action != "drop_stale" and newest != int(self._trainer.state.global_step)

    def resync(self, code: int, told: Callable[[int, str], None] | None) -> None:
        """Syncs the weights where `code` says so (a collective: every rank), then drops all samples older than those.

        `told(version, what)` is called on rank 0 at once: the engine holds `version` when this returns.
        """
        if code == _SYNC:
            self._trainer._sync_weight()
            self.observe(int(self._trainer.state.global_step) - 1)
        if self._queue is None or told is None:
            return
        self._queue.oldest = int(self._trainer.model_version)
        version = self._steps.get(self._queue.oldest, -1)
        synced = "weights synced, " if code == _SYNC else ""
        told(version, f"{synced}queued samples older than step {version} dropped")

    @property
    def num_dropped(self) -> int:
        """Samples that a RESYNC kept out of training."""
        return self._queue.num_dropped if self._queue is not None else 0


class _Tee:
    """The model, with the log-probabilities of its last call kept."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.log_probs: Any = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        outputs = self._model(*args, **named)
        self.log_probs = outputs.log_probs.detach()
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _SeenQueue:
    """TRL's rollout queue; remembers each sample's version by the identity of its array, and drops what is too old."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._seen: OrderedDict[int, tuple[Any, int, int]] = OrderedDict()
        self._num = 0
        self.oldest = -1
        """Samples of an older model_version are not handed out."""
        self.num_dropped = 0

    def get(self, *args: Any, **named: Any) -> Any:
        """As the queue's own; a dropped sample costs its own wait, not more."""
        while True:
            sample = self._queue.get(*args, **named)
            version = int(sample.model_version)
            if version < self.oldest:
                self.num_dropped += 1
                continue
            self._num += 1
            # The array is kept too, so that its identity is not given to another one meanwhile.
            self._seen[id(sample.input_ids)] = (sample.input_ids, version, self._num)
            if len(self._seen) > KEPT_SAMPLES:
                self._seen.popitem(last=False)
            return sample

    def take(self, input_ids: Any) -> tuple[int, int]:
        """(model_version, serial number) of the sample that holds this very array; -1 and a new number if not known."""
        found = self._seen.pop(id(input_ids), None)
        if found is None:
            self._num += 1
            return -1, self._num
        return found[1:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
