"""The trainer's side of control, at on_step_end: rank 0 decides, one integer goes to every rank, all act alike.

Also here, since it needs the same moment: the step's scalars, and the sentinel's numbers for the trainer's own log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from dlc_sentinel.integrations.trl_wraps import Quiet

if TYPE_CHECKING:
    from dlc_sentinel.integrations.job_numbers import Numbers

    from dlc_sentinel.hook import Hook
    from dlc_sentinel.records import Command, Outcome

SYNC, DROP, ABORT = 1, 2, 3
SCALARS = {
    "completions/mean_length": "response_length",
    "completions/clipped_ratio": "truncated_ratio",
    "sample/trained_tokens_mean": "response_length",
    "sample/staleness_mean": "staleness",
}
"""TRL's name -> the name it has with every stack. Others go under TRL's own name."""
LEFT_OUT = ("perf/", "dlc/", "num_tokens", "step_time")
AGREE_S = 60.0
"""How long attach waits for the other ranks' attach."""


class Streams(Protocol):
    """What differs between the trainers."""

    def observe(self, step: int) -> None: ...
    def refuses(self, command: Command) -> str: ...
    def resync(self, code: int, told: Callable[[int, str], None] | None) -> None: ...


class Control:
    """Polls, decides on rank 0, acts on all ranks, acknowledges what was done."""

    def __init__(
        self, trainer: Any, hook: Hook, quiet: Quiet, streams: Streams, *, together: bool, numbers: Numbers | None
    ) -> None:
        """`numbers`: what the sentinel has of this run, for rank 0's log; None on the others."""
        self._numbers = numbers
        self._trainer = trainer
        self._hook = hook
        self._quiet = quiet
        self._streams = streams
        self._world = int(trainer.accelerator.num_processes)
        self._leads = int(trainer.accelerator.process_index) == 0
        self._together = together
        self._resync: Command | None = None
        self._abort: Command | None = None
        self._taken: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._evidence: dict[str, float] = {}
        self._lr = self._grad_norm = math.nan

    # -- events of the trainer ---------------------------------------------------------------------------------------

    def train_begins(self) -> None:
        self._quiet.do("reading the version", self._streams.observe, int(self._trainer.state.global_step))

    def optimizer_steps(self, optimizer: Any) -> None:
        """Keeps the learning rate this update is made with; the scheduler has moved on when the step ends."""
        if optimizer is not None and optimizer.param_groups:
            self._lr = float(optimizer.param_groups[0]["lr"])

    def watch_grad_norm(self, original: Any) -> Any:
        """A replacement for Trainer._get_grad_norm that keeps what it returns."""

        def call(*args: Any, **named: Any) -> Any:
            self._grad_norm = original(*args, **named)
            return self._grad_norm

        return call

    def step_ends(self, control: Any) -> None:
        """Everything of the step was sent; take the command that waits, and act on it."""
        step = int(self._trainer.state.global_step) - 1
        self._quiet.do("reading the version", self._streams.observe, step)
        if self._leads:
            self._quiet.do("sending scalars", self._send_scalars, step)
        command = self._hook.poll(step)
        code = self._agreed(self._quiet.do("deciding", self._decide, command) or 0 if self._leads else 0)
        if code == ABORT:
            control.should_training_stop = control.should_save = True
        elif code:
            self._quiet.do("RESYNC", self._streams.resync, code, self._resynced if self._leads else None)
            if self._resync is not None and self._quiet.num_errors.get("RESYNC"):
                self._answer(self._resync, "refused", reason="the trainer failed to do it; see its log")
                self._resync = None
        if self._leads:
            self._quiet.do("writing to the trainer's log", self._write_log)
            if self._numbers is not None:
                self._numbers.refresh(step)

    def logged(self, logs: Any) -> None:
        """TRL empties its metrics once they are logged."""
        if not any(str(name).startswith("eval_") for name in logs or ()):
            self._taken.clear()

    def saved(self) -> None:
        self._finish_abort("checkpoint saved, training ends")

    def train_ends(self) -> None:
        self._finish_abort("training ends without a checkpoint")
        if self._resync is not None:
            self._answer(self._resync, "refused", reason="training ended before the next generation")
            self._resync = None

    # -- commands ----------------------------------------------------------------------------------------------------

    def _decide(self, command: Command | None) -> int:
        """What all ranks shall do; a command that cannot be done is answered here."""
        if command is None:
            return 0
        self._evidence = numbers(command)
        together = self._world == 1 or self._together
        reason = "" if together else "not every rank is attached; see the first lines of the job"
        if command.kind == "ABORT" and not reason:
            self._abort = command
            return ABORT
        reason = reason or self._streams.refuses(command)
        if reason:
            self._answer(command, "refused", reason=reason)
            return 0
        if self._resync is not None:
            self._answer(self._resync, "refused", reason=f"replaced by {command.id} before the next generation")
        self._resync = command
        needs_sync = getattr(self._streams, "needs_sync", None)
        return SYNC if needs_sync is None or needs_sync(command) else DROP

    def _agreed(self, code: int) -> int:
        """Rank 0's code, on every rank."""
        if self._world == 1 or not self._together:
            return code
        import torch

        accelerator = self._trainer.accelerator
        return int(accelerator.reduce(torch.tensor(code, device=accelerator.device), reduction="sum").item())

    def _resynced(self, version: int, what: str) -> None:
        command, self._resync = self._resync, None
        if command is not None:
            self._answer(command, "applied", version=version, reason=what)

    def _finish_abort(self, what: str) -> None:
        if self._abort is not None:
            version = int(self._trainer.state.global_step)
            self._answer(self._abort, "applied", version=version, reason=f"step {version}: {what}")
            self._abort = None

    def _answer(self, command: Command, outcome: Outcome, *, version: int | None = None, reason: str) -> None:
        self._hook.ack(command, outcome, version=version, reason=reason)
        key = f"{command.kind}/{outcome}"
        self._counts[key] = self._counts.get(key, 0) + 1

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _send_scalars(self, step: int) -> None:
        values = {"lr": self._lr, "grad_norm": float(self._grad_norm)}
        for name, window in getattr(self._trainer, "_metrics", {}).get("train", {}).items():
            if name.startswith(LEFT_OUT):
                continue
            fresh = window[self._taken.get(name, 0) :]
            self._taken[name] = len(window)
            numeric = [float(value) for value in fresh if isinstance(value, (int, float)) and math.isfinite(value)]
            if numeric:
                values[SCALARS.get(name, name)] = sum(numeric) / len(numeric)
        self._hook.scalars(step, {name: value for name, value in values.items() if math.isfinite(value)})

    def _write_log(self) -> None:
        """The numbers at hand, where TRL averages and logs its own; the newest value stands for the logging window.

        They are the hook's own, and the sentinel's of the last step it closed; where it was never read, the evidence of
        its last command. Nothing here waits: what is not there yet is left out.
        """
        fetched = self._numbers.values() if self._numbers is not None else {}
        if fetched:
            self._evidence = {}
        tokens, dropped, _ = self._hook.account()
        values: dict[str, float] = {"dlc/tokens_total": tokens, **self._evidence}
        values |= {f"dlc/dropped_tokens_total/{cause}": num for cause, num in dropped.items() if num}
        values |= {name: value for name, value in fetched.items() if math.isfinite(value)}
        values |= {f"dlc/commands_total/{key}": num for key, num in self._counts.items()}
        metrics = getattr(self._trainer, "_metrics", {}).get("train")
        if metrics is not None:
            metrics.update({name: [float(value)] for name, value in values.items()})


def numbers(command: Command) -> dict[str, float]:
    """The evidence of a command under the names its numbers have in a stack's own log."""
    found: dict[str, float] = {}
    for name, value in command.evidence.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        rung = name.removeprefix("lag_ess_")
        known = {"lag_rms_nats": "lag_nats/rms", "discrepancy_rms_nats": "discrepancy_nats/rms"}
        known |= {"age_mean": "version_age/mean", "age_max": "version_age/max"}
        label = f"lag_ess_ratio/{rung}" if rung != name else known.get(name)
        if label is not None:
            found[f"dlc/{label}"] = float(value)
    return found


def callback_for(control: Control) -> Any:
    """A TrainerCallback that passes the trainer's events to `control`."""
    from transformers import TrainerCallback

    class SentinelCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy here
        def on_train_begin(self, args: Any, state: Any, flow: Any, **named: Any) -> None:
            control.train_begins()

        def on_pre_optimizer_step(self, args: Any, state: Any, flow: Any, **named: Any) -> None:
            control.optimizer_steps(named.get("optimizer"))

        def on_step_end(self, args: Any, state: Any, flow: Any, **named: Any) -> Any:
            control.step_ends(flow)
            return flow

        def on_log(self, args: Any, state: Any, flow: Any, logs: Any = None, **named: Any) -> None:
            control.logged(logs)

        def on_save(self, args: Any, state: Any, flow: Any, **named: Any) -> None:
            control.saved()

        def on_train_end(self, args: Any, state: Any, flow: Any, **named: Any) -> None:
            control.train_ends()

    return SentinelCallback()


def all_attached(trainer: Any, quiet: Quiet, wrapped: str, timeout_s: float = AGREE_S) -> bool:
    """True when every rank attached alike, so that a collective per step is safe. No collective itself: it cannot hang.

    Each rank says so in the process group's store and waits for the others; whoever is first to answer, yes or no,
    answers for all.
    """
    rank, world = int(trainer.accelerator.process_index), int(trainer.accelerator.num_processes)
    if world == 1:
        return True
    return bool(quiet.do("meeting the other ranks", _meet, rank, world, wrapped, timeout_s))


def _meet(rank: int, world: int, wrapped: str, timeout_s: float) -> bool:
    from torch.distributed import distributed_c10d

    return settle(distributed_c10d._get_default_store(), rank, world, wrapped, timeout_s)


def settle(store: Any, rank: int, world: int, wrapped: str, timeout_s: float) -> bool:
    """The one answer that all ranks get from the store: True when each has come within the time with this `wrapped`."""
    meeting = store.add(f"dlc_sentinel/attached/{rank}", 1)
    prefix = f"dlc_sentinel/attach/{meeting}"
    store.set(f"{prefix}/{rank}", wrapped)
    names = [f"{prefix}/{other}" for other in range(world)]
    try:
        store.wait(names, timedelta(seconds=timeout_s))
        mine = "yes" if all(store.get(name).decode() == wrapped for name in names) else "no"
    except RuntimeError:  # a timeout: some rank did not attach
        mine = "no"
    answer: bytes = store.compare_set(f"{prefix}/answer", "", mine)
    return answer.decode() == "yes"
