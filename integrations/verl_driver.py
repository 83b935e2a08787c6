"""In the driver: says which step it is, sends the step's scalars, merges the sentinel's numbers, carries out commands.

All trainers of verl pass through `_update_actor` (the step begins to train) and `Tracking.log` (the step is over);
the driver holds the trainer, hence only it can change the queue or save a checkpoint.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dlc_sentinel.integrations import verl_actor, verl_wraps
from dlc_sentinel.integrations.job_numbers import Numbers, metrics_url
from dlc_sentinel.integrations.verl_actions import Actions
from dlc_sentinel.integrations.verl_skip import OPTION, SKIP
from dlc_sentinel.integrations.verl_wraps import Wraps, quietly

from dlc_sentinel import hook as hooks

RANK = 0
"""Commands go to the trainer's rank 0, and only the driver can act; the actor's ranks count from 1 (verl_actor)."""
SCALARS: Mapping[str, str] = {
    "reward": "critic/rewards/mean",
    "score": "critic/score/mean",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "response_length": "response_length/mean",
    "truncated_ratio": "response_length/clip_ratio",
    "ppo_kl": "actor/ppo_kl",
    "pg_clipfrac": "actor/pg_clipfrac",
    "staleness": "training/off_policy/trajectory_staleness/mean",
    "evicted_samples": "training/off_policy/evicted_samples",
}
"""Our name -> verl's."""
STEP_KEYS = ("training/global_step", "actor/grad_norm")
"""A log call with one of these reports a training step; others (validation, timings) do not."""
GOODBYE_S = 5.0
_log = logging.getLogger("dlc_sentinel.verl")


def install(wraps: Wraps) -> None:
    """Wraps the trainers' own functions; the driver comes to life when one of them first trains."""
    driver = Driver()
    for symbol in (verl_wraps.UPDATE_ACTOR_V0, verl_wraps.UPDATE_ACTOR_V1):
        wraps.add(symbol, driver.wrap_update_actor)
    wraps.add(verl_wraps.STEP_V1, driver.wrap_before)
    wraps.add(verl_wraps.FIT_UPDATE_ACTOR, driver.wrap_after)
    wraps.add(verl_wraps.LOG, driver.wrap_log)
    for symbol in (verl_wraps.FIT_V0, verl_wraps.FIT_V1):
        wraps.add(symbol, driver.wrap_fit)


class Driver:
    """The one trainer of this process, seen from its own calls."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._hook: hooks.Hook | hooks.NoHook | None = None
        self._actions: Actions | None = None
        self._numbers: Numbers | None = None

    def close(self) -> None:
        """Says goodbye to the sentinel."""
        if self._hook is not None:
            self._hook.close()

    # -- wraps -------------------------------------------------------------------------------------------------------

    def wrap_update_actor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hands the step's number and mode to the actor ranks, with the batch."""

        def update_actor(trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._mark(trainer, batch)
            return original(trainer, batch, *args, **kwargs)

        return update_actor

    def wrap_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A command that came since the step before was logged is applied before the next rows are taken."""

        def step_once(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._between(trainer)
            return original(trainer, *args, **kwargs)

        return step_once

    def wrap_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same for trainers that sync only after several updates: applied before they decide whether to sync."""

        def update_actor(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(trainer, *args, **kwargs)
            self._between(trainer)
            return result

        return update_actor

    def wrap_log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Adds our numbers to what is logged; at the end of a step also reports it and looks for commands."""

        def log(tracking: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
            merged = self._at_log(data, step)
            return original(tracking, data if merged is None else merged, step, *args, **kwargs)

        return log

    def wrap_fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A training that came to its end says goodbye; one that failed falls silent, and is missed."""

        def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(trainer, *args, **kwargs)
            self._goodbye(trainer)
            return result

        return fit

    def _await_end(self, trainer: Any) -> None:
        """The same where training is a task of an event loop: `fit` of fully_async cannot be wrapped in its actor."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here: wrap_fit sees the end
            return
        if task is not None:
            task.add_done_callback(partial(self._task_over, trainer))

    def _task_over(self, trainer: Any, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            # a thread: the loop may have others to serve, and Python waits for it at exit
            threading.Thread(target=self._goodbye, args=(trainer,), name="dlc-goodbye").start()

    # -- what they do ------------------------------------------------------------------------------------------------

    @quietly
    def _mark(self, trainer: Any, batch: Any) -> None:
        self._meet(trainer)
        correction = trainer.config.algorithm.get("rollout_correction") or {}
        facts: dict[str, object] = {
            verl_actor.STEP: step_of(trainer),
            verl_actor.BYPASS: bool(correction.get("bypass_mode", False)),
        }
        if self._actions is not None and self._actions.skips:
            # Rows were being generated while the sentinel judged the step before: its command is here by now.
            self._look(step_of(trainer) - 1)
            facts[SKIP] = self._actions.take_skip()
        # TransferQueue batches carry their own facts in extra_info, the older DataProto in meta_info.
        (batch.extra_info if hasattr(batch, "extra_info") else batch.meta_info).update(facts)

    @quietly
    def _between(self, trainer: Any) -> None:
        self._meet(trainer)
        assert self._actions is not None
        self._look(step_of(trainer) - 1)
        self._actions.between_updates()

    def _look(self, last: int) -> None:
        """Takes the command that is there, if any; `last` is the step that is over."""
        assert self._hook is not None and self._actions is not None
        command = self._hook.poll(last) if last >= 0 else None
        if command is not None:
            self._actions.take(command, last)

    @quietly
    def _at_log(self, data: Any, step: Any) -> dict[str, Any] | None:
        if self._trainer is None or not any(key in data for key in STEP_KEYS):
            return None
        assert self._hook is not None and self._actions is not None and self._numbers is not None
        step = int(step)
        self._hook.scalars(step, {ours: data[theirs] for ours, theirs in SCALARS.items() if theirs in data})
        self._actions.step_over(step)
        self._look(step)
        self._actions.between_steps(step)
        self._numbers.refresh(step)
        return {**data, **self._numbers.values()}

    @quietly
    def _goodbye(self, trainer: Any) -> None:
        """For the actor ranks, too: Ray kills them at the end of a job, without their own way out."""
        if trainer is not self._trainer:
            return
        ray: Any = importlib.import_module("ray")
        ranks = trainer.actor_rollout_wg.workers
        asked = [rank.__ray_call__.remote(verl_actor.say_goodbye) for rank in ranks]
        self.close()  # while they say theirs: the job may be over at any moment
        ray.wait(asked, num_returns=len(asked), timeout=GOODBYE_S)

    def _meet(self, trainer: Any) -> None:
        if trainer is self._trainer:
            return
        self._trainer = trainer
        self._hook = verl_actor.connect(trainer.config.actor_rollout_ref, rank=RANK)
        may_skip = os.environ.get(OPTION, "").strip() not in ("", "0")
        self._actions = Actions(trainer, self._hook, may_skip=may_skip)
        run = os.environ.get("DLC_SENTINEL_RUN") or "default"
        self._numbers = Numbers(run, metrics_url())
        _log.warning(
            "dlc-sentinel watches run %s, %s, step %d: RESYNC = %s, ABORT = %s",
            run, type(trainer).__name__, step_of(trainer), *self._actions.abilities(),
        )  # fmt: skip
        self._await_end(trainer)


def step_of(trainer: Any) -> int:
    """The step that is being trained, as verl will log it: fully_async counts weight versions, the others steps."""
    version = getattr(trainer, "current_param_version", None)
    return int(trainer.global_steps) if version is None else int(version) + 1
