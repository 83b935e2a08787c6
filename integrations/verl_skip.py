"""DLC_SENTINEL_SKIP_MINIBATCHES=1: where nothing can be resynced, a RESYNC leaves the rest of one step untrained.

A synchronous trainer delivers its weights at every step, so its lag comes from the updates inside a step. The driver
names the command in the batch of the next step (verl_driver); the first mini-batch, which is on-policy, is trained, and
before each of the others the actor ranks agree on one integer, so that all leave out the same ones. What the
learning-rate schedule expects of the last mini-batch still happens. The answer goes out with the next weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dlc_sentinel.integrations import verl_ranks, verl_wraps
from dlc_sentinel.integrations.verl_wraps import quietly

from dlc_sentinel import hook as hooks
from dlc_sentinel.records import Outcome

SKIP = "dlc_skip"
"""Added by the driver to a batch's own facts, where skipping is on: id of the command to obey, "" = none."""
OPTION = "DLC_SENTINEL_SKIP_MINIBATCHES"
_log = logging.getLogger("dlc_sentinel.verl")


class Plan:
    """Which mini-batches of a batch are left out, and what is answered. Plain Python: no verl, no torch."""

    def __init__(self) -> None:
        self.command_id = ""
        self.num_seen = 0
        self.num_skipped = 0

    def begin(self, command_id: str) -> None:
        """A mini-batch is next; `command_id` stands in its facts."""
        self.command_id = command_id or self.command_id

    @property
    def wish(self) -> int:
        """1 = leave the next mini-batch out. Never the first of a batch: it is at the generator's weights."""
        return int(bool(self.command_id) and self.num_seen > 0)

    def done(self, *, skipped: bool, last: bool, step: int) -> tuple[str, Outcome, str] | None:
        """A mini-batch is over; after the `last` one of a batch with a command: (command id, outcome, reason)."""
        self.num_seen += 1
        self.num_skipped += skipped
        if not last:
            return None
        command_id, seen, left_out = self.command_id, self.num_seen, self.num_skipped
        self.command_id, self.num_seen, self.num_skipped = "", 0, 0
        if not command_id:
            return None
        if left_out:
            return command_id, "applied", f"skipped {left_out} of {seen} mini-batches of step {step}"
        if seen > 1:
            return command_id, "refused", f"step {step} was trained whole: not every actor rank has the plug-in"
        reason = f"step {step} has one mini-batch in one epoch, trained on-policy: there is nothing to skip"
        return command_id, "refused", reason


class Skipping:
    """Puts the plan between an actor's loop over mini-batches and their training."""

    def __init__(self, worker: Any, hook: hooks.Hook, *, step_key: str) -> None:
        self._worker = worker
        self._hook = hook
        self._step_key = step_key
        self._plan = Plan()
        self._answer: tuple[str, Outcome, str] | None = None

    def install(self) -> None:
        """Replaces `train_batch` on the training worker itself; `remove` leaves no trace."""
        train_batch: Callable[..., Any] = self._worker.actor.train_batch
        misfit = verl_wraps.TRAIN_ONE.misfit(["self", *verl_wraps.argument_names(train_batch)])
        if misfit:
            _log.warning("dlc-sentinel: mini-batches cannot be skipped: %s; the job runs on", misfit)
            return

        def train_or_skip(data: Any, *args: Any, **kwargs: Any) -> Any:
            skipped = bool(self._agree(data))
            result = self._nothing(data) if skipped else train_batch(data, *args, **kwargs)
            self._count(data, skipped)
            return result

        self._worker.actor.train_batch = train_or_skip
        verl_ranks.sign_in("skip")

    def remove(self) -> None:
        """Puts the original method back."""
        vars(self._worker.actor).pop("train_batch", None)

    def delivered(self, version: int) -> None:
        """Weights of `version` went to the generator: what was skipped before is answered now, by rank 0."""
        answer, self._answer = self._answer, None
        if answer is not None and int(getattr(self._worker, "rank", 0)) == 0:
            command_id, outcome, reason = answer
            self._hook.ack(command_id, outcome, version=version, reason=reason)
            _log.warning("dlc-sentinel RESYNC: %s: %s", outcome, reason)

    @quietly
    def _agree(self, data: Any) -> int:
        """1 where any rank wishes to skip; every rank asks, or (option off) none does."""
        from verl.utils import tensordict_utils as tu

        command_id = tu.get(data, SKIP)
        if command_id is None:
            return 0
        self._plan.begin(command_id)
        return verl_ranks.highest([self._plan.wish])[0] if verl_ranks.all_have("skip") else 0

    @quietly
    def _count(self, data: Any, skipped: bool) -> None:
        from verl.utils import tensordict_utils as tu

        last = bool(tu.get(data, "update_lr_scheduler", False))
        step = int(tu.get(data, self._step_key, -1))
        self._answer = self._plan.done(skipped=skipped, last=last, step=step) or self._answer

    def _nothing(self, data: Any) -> Any:
        """What `train_batch` returns, without a number of its own: verl's averages are over what was trained."""
        from verl.utils import tensordict_utils as tu

        engine = self._worker.actor.engine
        metrics = {"lr": engine.lr_scheduler_step()} if tu.get(data, "update_lr_scheduler", False) else {}
        if not engine.is_mp_src_rank_with_outputs():
            return None
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})
