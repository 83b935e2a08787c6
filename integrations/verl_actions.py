"""What RESYNC and ABORT are in each of verl's trainers, and when they may be carried out.

V1 asynchronous: for one step only prompts issued at that step may be trained on; the stale backlog is dropped.
fully_async: the queue is cleared and weights are synced after the update at hand. Synchronous: nothing to resync; where
the engine is doubted (cache reset asked for) the next regular delivery answers the command; with
DLC_SENTINEL_SKIP_MINIBATCHES=1 the actor ranks skip the rest of one step's mini-batches (verl_skip).
ABORT: a checkpoint between two steps, then the trainer's own end of training.
"""

from __future__ import annotations

import logging
from typing import Any

from dlc_sentinel.integrations.verl_skip import OPTION
from dlc_sentinel.integrations.verl_wraps import Aborted

from dlc_sentinel import hook as hooks
from dlc_sentinel.records import Command

CLEAR_S = 10.0
_log = logging.getLogger("dlc_sentinel.verl")


class Actions:
    """Carries out one command at a time, at the places the driver says are safe."""

    def __init__(self, trainer: Any, hook: hooks.Hook | hooks.NoHook, *, may_skip: bool = False) -> None:
        self.skips = may_skip and not hasattr(trainer, "message_queue_client") and _delivers_each_step(trainer)
        """A RESYNC leaves mini-batches of the next step untrained; the actor ranks do it and answer."""
        self._trainer = trainer
        self._hook = hook
        self._abort: Command | None = None
        self._sync: Command | None = None
        self._delivery: tuple[int, Command] | None = None
        """(step whose end delivers weights, the command that asked for it)."""
        self._skip = ""
        self._restore: tuple[int, str, Any] | None = None
        """(step after whose end, attribute, value): what a RESYNC changed for one step."""

    def abilities(self) -> tuple[str, str]:
        """What RESYNC and ABORT do here, in words."""
        refusal = self._refusal()
        resync = "sync now, clear the queue" if self._is_fully_async else "drop stale rows"
        resync = "skip the rest of a step" if self.skips else f"refused ({refusal})" if refusal else resync
        return resync, "checkpoint, then the job fails" if self._is_fully_async else "checkpoint, then a clean end"

    @property
    def _is_fully_async(self) -> bool:
        return hasattr(self._trainer, "message_queue_client")

    def _refusal(self) -> str:
        """Why this trainer cannot resync, or "" if it can."""
        if self._is_fully_async:
            return ""
        if _delivers_each_step(self._trainer):
            return (
                "this trainer delivers its weights at every step: lag comes from the updates inside a step; "
                f"{OPTION}=1 would skip the rest of a step"
            )
        if getattr(self._trainer.replay_buffer, "max_off_policy_strategy", "") != "drop":
            return "max_off_policy_strategy is not `drop`: waiting for stale rows is what was asked for"
        return ""

    # -- called by the driver ----------------------------------------------------------------------------------------

    def take(self, command: Command, step: int) -> None:
        """A command has come; `step` is the last one that is over."""
        if command.kind == "ABORT":
            self._abort = command
            return
        refusal = self._refusal()
        if self._is_fully_async:
            self._sync = command
        elif command.reset_cache:
            # What the engine holds is doubted: it gets new weights and a new cache at the end of the next step.
            self._delivery = (step + 1, command)
        elif self.skips:
            self._skip = command.id
        elif refusal:
            self._hook.ack(command, "refused", reason=refusal)
        else:
            self._drop_stale(command, step)

    def take_skip(self) -> str:
        """Id of the command for which the step that now begins to train is cut short, "" = none."""
        taken, self._skip = self._skip, ""
        return taken

    def between_updates(self) -> None:
        """Fully_async: the update at hand becomes the last of its cycle, so that weights are synced right after it."""
        if self._sync is None or self._restore is not None or not self._is_fully_async:
            return
        trainer = self._trainer
        self._restore = (-1, "trigger_parameter_sync_step", trainer.trigger_parameter_sync_step)
        trainer.trigger_parameter_sync_step = trainer.local_trigger_step
        self._clear_queue()

    def step_over(self, step: int) -> None:
        """Step `step` has been trained and its weights delivered: what was changed for it is put back."""
        if self._delivery is not None and step >= self._delivery[0]:
            self._hook.ack(
                self._delivery[1], "applied", version=step, reason="weights delivered at the end of the step"
            )
            self._delivery = None
        if self._restore is None or step < self._restore[0]:
            return
        _, name, value = self._restore
        self._restore = None
        setattr(self._trainer if self._is_fully_async else self._trainer.replay_buffer, name, value)
        if self._sync is not None:
            self._hook.ack(self._sync, "applied", version=step, reason="queue cleared, weights synced")
            self._sync = None

    def between_steps(self, step: int) -> None:
        """After a step was logged, before the next begins: the place to stop."""
        if self._abort is None:
            return
        command, self._abort = self._abort, None
        trainer = self._trainer
        trainer._save_checkpoint()
        _log.warning("dlc-sentinel ABORT: %s; checkpoint of step %d saved, the job ends", command.reason, step)
        self._hook.ack(command, "applied", version=step, reason=f"checkpoint of step {step} saved")
        if self._is_fully_async:
            # Its other way out ends the trainer only, and the job then waits for a rollouter that never stops.
            raise Aborted(f"dlc-sentinel ABORT: {command.reason}; checkpoint of step {step} saved")
        # V1 looks at it before each step; the older loops have looked already and do one more.
        is_v1 = hasattr(trainer, "replay_buffer")
        trainer.total_training_steps = int(trainer.global_steps) + (0 if is_v1 else 1)
        trainer.is_last_step = True

    # -- how ---------------------------------------------------------------------------------------------------------

    def _drop_stale(self, command: Command, step: int) -> None:
        buffer = self._trainer.replay_buffer
        if self._restore is None:
            self._restore = (step + 1, "max_off_policy_threshold", buffer.max_off_policy_threshold)
        buffer.max_off_policy_threshold = 1
        reason = f"rows issued before step {step + 1} are dropped"
        self._hook.ack(command, "applied", version=step, reason=reason)
        _log.warning("dlc-sentinel RESYNC: %s; %s", command.reason, reason)

    def _clear_queue(self) -> None:
        # A future, since the trainer may be inside an event loop of its own here, where Ray's get is frowned upon.
        cleared = self._trainer.message_queue_client.queue_actor.clear_queue.remote()
        cleared.future().result(timeout=CLEAR_S)


def _delivers_each_step(trainer: Any) -> bool:
    return getattr(trainer, "replay_buffer", None) is None or getattr(trainer, "trainer_mode", "sync") == "sync"
