"""In an actor rank: reads all three logprob streams of every micro-batch, where verl computes its loss.

Two methods of live objects are replaced, the training engine's `train_batch` and the worker's `update_weights`, so the
same code serves a job that was launched with the plug-in and one that is attached to while it runs.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from typing import Any

from dlc_sentinel.integrations import verl_batch, verl_rescore, verl_rows, verl_wraps
from dlc_sentinel.integrations.verl_skip import Skipping
from dlc_sentinel.integrations.verl_wraps import Wraps, quietly

from dlc_sentinel import hook as hooks
from dlc_sentinel.records import UNKNOWN_VERSION

STEP, BYPASS = "dlc_step", "dlc_bypass"
"""What the driver adds to a batch's own facts (see verl_driver)."""
TAP = "_dlc_sentinel_tap"
"""Attribute of a worker under which its tap is kept."""
LIVE_REFUSAL = "attached to a running job: RESYNC and ABORT need the plug-in at launch (pip install, DLC_SENTINEL=...)"
_log = logging.getLogger("dlc_sentinel.verl")


def install(wraps: Wraps) -> None:
    """Taps each actor worker once its model is built."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            tap_worker(self)
            return result

        return init_model

    wraps.add(verl_wraps.INIT_MODEL, wrap)


@quietly
def tap_worker(worker: Any, *, live: bool = False) -> ActorTap | None:
    """The tap now on this worker; None where it does not train, or nobody listens."""
    if getattr(worker, "actor", None) is None:
        return None
    # Rank 0 of the trainer is who can act: the driver, or in a job attached to while it runs the first actor rank.
    hook = connect(worker.config, rank=int(getattr(worker, "rank", 0)) + (0 if live else 1))
    if isinstance(hook, hooks.NoHook):
        return None
    tap = ActorTap(worker, hook, live=live)
    tap.install()
    return tap


def say_goodbye(actor: Any) -> None:
    """Run in a Ray actor when training is over: its taps have nothing more to send."""
    for worker in (actor, *getattr(actor, "worker_dict", {}).values()):
        tap = vars(worker).get(TAP)
        if tap is not None:
            tap.hook.close()


def connect(config: Any, *, rank: int) -> hooks.Hook | hooks.NoHook:
    """A hook that says what verl's actor_rollout_ref config tells about model, sampling and number formats."""
    rollout, actor = config.rollout, config.actor
    sampling = {name: rollout.get(name) for name in ("temperature", "top_p", "top_k", "logprobs_mode")}
    mixed = (actor.get("fsdp_config") or {}).get("mixed_precision") or {}
    return hooks.connect(
        role="trainer",
        rank=rank,
        model_name=str(config.model.path).rstrip("/").rsplit("/", 1)[-1],
        stack="verl",
        versions={name: _version(name) for name in ("verl", "torch")},
        sampling={name: value for name, value in sampling.items() if value is not None},
        dtypes={"engine": engine_dtype(rollout), "trainer": str(mixed.get("param_dtype") or "bfloat16")},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def engine_dtype(rollout: Any) -> str:
    """The coarser of the engine's dtype and its quantization, as configured."""
    return str(rollout.get("quantization") or rollout.get("dtype") or "bfloat16")


class ActorTap:
    """What was put on one worker, and the place in the run: step, update, micro-batch, weight version."""

    def __init__(self, worker: Any, hook: hooks.Hook, *, live: bool) -> None:
        self.hook = hook
        self.version = UNKNOWN_VERSION
        """Of the weights that were last delivered: the step's own, until the next delivery."""
        self._worker = worker
        self._live = live
        self._rank = int(getattr(worker, "rank", 0))
        self._engine_dtype = engine_dtype(worker.config.rollout)
        self._step = -1
        self._ended = -1
        self._update = -1
        self._micro = 0
        self._bypass = False
        self._moved: list[Any] | None = None
        """Sums over the update's tokens, on the device; see `_move`."""
        self._names = verl_rows.RowNames(self._rank)
        self._skipping = None if live else Skipping(worker, hook, step_key=STEP)
        self._rescoring = None if live else verl_rescore.build(worker)

    def install(self) -> None:
        """Replaces the two methods on the objects themselves, so that `remove` leaves no trace."""
        engine = self._worker.actor.engine
        train_batch, update_weights = engine.train_batch, self._worker.update_weights
        for symbol, function in ((verl_wraps.TRAIN_BATCH, train_batch), (verl_wraps.UPDATE_WEIGHTS, update_weights)):
            misfit = symbol.misfit(["self", *verl_wraps.argument_names(function)])
            if misfit:
                _log.warning("dlc-sentinel: rank %d sends nothing: %s; the job runs on", self._rank, misfit)
                return

        def tapped_train_batch(data: Any, loss_function: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_update(data)
            return train_batch(data, self._tapped(loss_function), *args, **kwargs)

        async def tapped_update_weights(global_steps: Any = None, *args: Any, **kwargs: Any) -> Any:
            result = await update_weights(global_steps, *args, **kwargs)
            self._synced(global_steps)
            return result

        engine.train_batch = tapped_train_batch
        self._worker.update_weights = tapped_update_weights
        setattr(self._worker, TAP, self)
        for part in (self._skipping, self._rescoring):
            if part is not None:
                part.install()

    def remove(self) -> None:
        """Puts the original methods back and says goodbye to the sentinel."""
        vars(self._worker.actor.engine).pop("train_batch", None)
        vars(self._worker).pop("update_weights", None)
        vars(self._worker).pop(TAP, None)
        for part in (self._skipping, self._rescoring):
            if part is not None:
                part.remove()
        self.hook.close()

    # -- where we are ------------------------------------------------------------------------------------------------

    @quietly
    def _begin_update(self, data: Any) -> None:
        from verl.utils import tensordict_utils as tu

        if self.version == UNKNOWN_VERSION:
            # Until a first delivery is seen nobody knows which weights these are, nor how many updates have been.
            return
        step = tu.get(data, STEP)
        # Without a driver that counts: a step lasts from one weight sync to the next.
        step = int(step) if step is not None else self.version + 1
        if step != self._step:
            self._end_step()
            self._step, self._update = step, -1
        self._bypass = bool(tu.get(data, BYPASS, False))
        self._update += 1
        self._micro = 0
        self._moved = None
        self._names.restart()

    @quietly
    def _synced(self, global_steps: Any) -> None:
        self._end_step()
        if global_steps is None or int(global_steps) == self.version:
            return
        self.version = int(global_steps)
        if self._skipping is not None:
            self._skipping.delivered(self.version)
        if self._rescoring is not None:
            self._rescoring.keep(self.version)
        if self._rank == 0:
            self.hook.synced(self.version, self._step if self._step >= 0 else self.version)

    def _end_step(self) -> None:
        if self._step < 0 or self._step == self._ended:
            return
        self._ended = self._step
        if self._rank == 0 and self._moved is not None and self._update > 0:
            self.hook.scalars(self._step, {"displacement_nats": self._displacement(*map(float, self._moved))})
        command = self.hook.poll(self._step)
        if command is not None and self._live and self._rank == 0:
            self.hook.ack(command, "refused", reason=LIVE_REFUSAL)

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _tapped(self, loss_function: Any) -> Any:
        def loss(*args: Any, **kwargs: Any) -> Any:
            result = loss_function(*args, **kwargs)
            if "student_logits" in kwargs:  # asked for what goes into the model's output, not for the loss
                return result
            self._record(**dict(zip(("model_output", "data"), args, strict=False)), **kwargs)
            return result

        return loss

    @quietly
    def _record(self, model_output: Any, data: Any, **_: Any) -> None:
        engine = self._worker.actor.engine
        # Before the first delivery that is seen nobody knows which weights these are, nor how many updates have been.
        if (
            self.version == UNKNOWN_VERSION
            or not engine.is_mp_src_rank_with_outputs()
            or "log_probs" not in model_output
        ):
            return
        from verl.workers.utils.padding import no_padding_2_padding

        streams = ("rollout_log_probs",) if self._bypass else ("rollout_log_probs", "old_log_probs")
        rows = data.select("response_mask", *(name for name in streams if name in data)).to_padded_tensor()
        mask = rows["response_mask"].bool()
        facts = verl_batch.row_facts(data, len(mask))
        on_host = mask.cpu().numpy() if verl_rows.needs_mask(facts) else None
        cur = no_padding_2_padding(model_output["log_probs"].detach(), data)
        per_row = {
            "cur": cur,
            "engine": rows.get("rollout_log_probs", None),
            "old": rows.get("old_log_probs", None),
            "mask": mask,
            "versions": verl_rows.token_versions(facts, mask.shape[1], on_host),
            "segments": verl_rows.wire_segments(facts),
            **self._identity(data, len(mask)),
        }
        again = self._rescored(data, len(mask))
        if again:
            part = verl_batch.select(per_row, list(again))
            part["old"], versions = verl_rescore.rescored_columns(again, cur)
            self._send(part, {"old_is": "generator", "old_version": versions})
            rest = [row for row in range(len(mask)) if row not in again]
            per_row, facts = verl_batch.select(per_row, rest), [facts[row] for row in rest]
        if facts:
            self._send(per_row, self._middle(facts))
        self._micro += 1
        if "old_log_probs" in rows and "rollout_log_probs" in rows:
            self._move(cur, rows["old_log_probs"], rows["rollout_log_probs"], mask)

    def _send(self, per_row: Mapping[str, Any], middle: Mapping[str, Any]) -> None:
        self.hook.train(
            self._step,
            self.version,
            update=self._update,
            micro=self._micro,
            dtypes={"engine": self._engine_dtype},
            **per_row,
            **middle,
        )

    def _rescored(self, data: Any, num_rows: int) -> Mapping[int, verl_rescore.Rescored]:
        names = verl_batch.row_names(data, num_rows) if self._rescoring is not None else None
        return {} if self._rescoring is None or names is None else self._rescoring.found(names)

    def _move(self, cur: Any, old: Any, engine: Any, mask: Any) -> None:
        moved, off = (cur - old).float() * mask, (old - engine).float() * mask
        sums = (mask.sum(), off.square().sum(), (off * moved).sum(), moved.square().sum())
        self._moved = [a + b for a, b in zip(self._moved or (0.0,) * len(sums), sums, strict=True)]

    def _displacement(self, num: float, off: float, cross: float, moved: float) -> float:
        """How much further this step's updates took the policy from what the engine holds, rms in nats.

        The step before began at rms(old - engine) and this one ends at rms(current - engine), so over steps it adds
        up to the distance from weights that never arrived: whichever way the updates went, and unlike an engine of
        other numerics. `old` is of before update 0: the last update has seen all but its own movement.
        """
        whole = (self._update + 1) / self._update
        end = max(off + 2 * whole * cross + whole * whole * moved, 0.0)
        return float((end / max(num, 1.0)) ** 0.5 - (off / max(num, 1.0)) ** 0.5)

    def _identity(self, data: Any, num_rows: int) -> Mapping[str, Any]:
        uids = verl_batch.column(data, "uid", num_rows)
        if uids is None:
            return {}
        return {"seq_id": self._names.take(uids, verl_batch.column(data, "session_id", num_rows)), "group": uids}

    def _middle(self, facts: list[verl_rows.Facts]) -> Mapping[str, Any]:
        """What old_log_probs is: verl recomputes it at the weights of the last sync.

        In bypass mode it is a copy of the engine's values, which says nothing and is not sent.
        """
        if self._bypass:
            return {}
        fresh = all(row.is_uniform and row.newest == self.version for row in facts)
        return {"old_is": "generator" if fresh else "proximal", "old_version": self.version}
