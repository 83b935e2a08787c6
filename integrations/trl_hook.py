"""TRL: `attach(trainer)` before `trainer.train()` streams its logprobs to the sentinel and lets it act.

    from dlc_sentinel.integrations.trl_hook import attach
    trainer = GRPOTrainer(...)        # or AsyncGRPOTrainer
    attach(trainer)                   # on every rank; does nothing where DLC_SENTINEL is unset

A GRPOTrainer gives all three streams with versions, groups and masks; an AsyncGRPOTrainer engine and current with
versions. Methods are replaced on this one trainer, each checked first; what does not fit is left alone and said.
The sentinel's numbers of the last closed step stand as `dlc/...` in the trainer's own log, read from its metrics port.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from dlc_sentinel.integrations.job_numbers import Numbers, metrics_url
from dlc_sentinel.integrations.trl_async import AsyncStreams
from dlc_sentinel.integrations.trl_control import Control, all_attached, callback_for
from dlc_sentinel.integrations.trl_grpo import GrpoStreams, replica_of
from dlc_sentinel.integrations.trl_wraps import Quiet, Wraps

from dlc_sentinel.hook import Hook, NoHook, connect

__all__ = ["Attachment", "attach"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MARK = "_dlc_sentinel"


class Attachment:
    """What `attach` put into a trainer."""

    def __init__(self, trainer: Any, hook: Hook | NoHook, quiet: Quiet) -> None:
        self.hook = hook
        self.wraps: tuple[str, ...] = ()
        """What is replaced, as "Class.method"; empty = nothing."""
        self._trainer = trainer
        self._quiet = quiet
        self._wraps: Wraps | None = None
        self._callback: Any = None
        self._numbers: Numbers | None = None

    @property
    def active(self) -> bool:
        """True while the trainer is watched."""
        return self._callback is not None

    @property
    def num_errors(self) -> dict[str, int]:
        """Failures of ours that training did not see, by place."""
        return {place: num for place, num in self._quiet.num_errors.items() if not place.startswith("said ")}

    @property
    def numbers(self) -> Mapping[str, float]:
        """{"dlc/...": number} of the run's last closed step, as far as rank 0 has read them; empty elsewhere."""
        return {} if self._numbers is None else self._numbers.values()

    def detach(self) -> None:
        """Puts everything back and says goodbye to the sentinel. On every rank, like attach; twice does nothing."""
        if self._callback is None or self._wraps is None:
            return
        self._wraps.undo()
        self._trainer.remove_callback(self._callback)
        self._callback = None
        if self._numbers is not None:
            self._numbers.close()
        self.wraps = ()
        if getattr(self._trainer, _MARK, None) is self:
            delattr(self._trainer, _MARK)
        self.hook.close()

    def _enter(self, hook: Hook, streams: GrpoStreams | AsyncStreams, wraps: Wraps) -> None:
        trainer = self._trainer
        streams.install(wraps)
        if not wraps.names:
            hook.close()
            return
        together = all_attached(trainer, self._quiet, ",".join(wraps.names))
        if not together:
            self._quiet.say("ranks", "not every rank attached alike: numbers are sent, RESYNC and ABORT are refused")
        if trainer.accelerator.is_main_process:
            self._numbers = Numbers(hook.source.run, metrics_url())
        control = Control(trainer, hook, self._quiet, streams, together=together, numbers=self._numbers)
        args = ("model", "grad_norm")
        wraps.method(trainer, "_get_grad_norm", args, control.watch_grad_norm, "the grad_norm scalar")
        self._wraps = wraps
        self._callback = callback_for(control)
        trainer.add_callback(self._callback)
        setattr(trainer, _MARK, self)
        self.wraps = tuple(wraps.names)


def attach(
    trainer: Any,
    *,
    run: str | None = None,
    engine_version: Callable[[], int] | None = None,
    engine_dtype: str | None = None,
) -> Attachment:
    """The attachment of this trainer; one that installed nothing where DLC_SENTINEL is unset or the trainer is unknown.

    Args: run: name of the run (default DLC_SENTINEL_RUN); engine_version: for a `rollout_func` that loads weights on
    its own, the optimizer step of the weights it generates with (default: TRL's own record, else the current step);
    engine_dtype: dtype the engine computes in, where TRL cannot tell (a vLLM server). Never raises into training.
    """
    before = getattr(trainer, _MARK, None)
    if isinstance(before, Attachment):
        return before
    quiet = Quiet()
    attached: Attachment | None = quiet.do("attach", _attach, trainer, quiet, run, engine_version, engine_dtype)
    return attached or Attachment(trainer, NoHook(), quiet)


def _attach(
    trainer: Any, quiet: Quiet, run: str | None, engine_version: Callable[[], int] | None, engine_dtype: str | None
) -> Attachment:
    kinds = [kind.__name__ for kind in type(trainer).__mro__]
    kind = next((name for name in ("AsyncGRPOTrainer", "GRPOTrainer") if name in kinds), "")
    if not kind:
        quiet.say("kind", f"{type(trainer).__name__} is neither a GRPOTrainer nor an AsyncGRPOTrainer: not watched")
        return Attachment(trainer, NoHook(), quiet)
    dtypes = _dtypes(trainer, engine_dtype)
    hook = connect(
        run=run,
        role="trainer",
        rank=int(trainer.accelerator.process_index),
        replica=replica_of(trainer),
        model_name=str(getattr(trainer.model.config, "_name_or_path", "") or ""),
        stack="trl",
        versions={name: _version(name) for name in ("trl", "transformers", "torch") if _version(name)},
        sampling=_sampling(trainer),
        dtypes={"engine": dtypes["engine"], "trainer": dtypes["cur"]},
    )
    attached = Attachment(trainer, hook, quiet)
    if isinstance(hook, NoHook):
        return attached
    stack = f"TRL {_version('trl') or 'of unknown version'}"
    wraps = Wraps(quiet, stack)
    streams: GrpoStreams | AsyncStreams
    if kind == "AsyncGRPOTrainer":
        streams = AsyncStreams(trainer, hook, quiet, dtypes)
    else:
        streams = GrpoStreams(trainer, hook, quiet, dtypes, engine_version)
    attached._enter(hook, streams, wraps)
    if trainer.accelerator.is_main_process:
        what = f"wrapped {', '.join(attached.wraps)}" if attached.wraps else "nothing could be wrapped: not watched"
        sys.stderr.write(f"dlc-sentinel: {stack} {kind}, run {hook.source.run}: {what}\n")
    return attached


def _dtypes(trainer: Any, engine_dtype: str | None) -> dict[str, str]:
    """Compute dtype of each side as a name; all "" where the engine's is not known, since one side alone misleads."""
    engine = engine_dtype or ""
    if not engine:
        llm = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
        model_config = getattr(getattr(llm, "llm_engine", None), "model_config", None)
        engine = str(getattr(model_config, "dtype", "") or "").removeprefix("torch.")
    if not engine:
        return dict.fromkeys(("engine", "old", "cur"), "")
    mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(str(getattr(trainer.accelerator, "mixed_precision", "no")))
    own = mixed or str(getattr(trainer.model, "dtype", "")).removeprefix("torch.")
    return {"engine": engine, "old": own, "cur": own}


def _sampling(trainer: Any) -> dict[str, Any]:
    """What is known of the sampling transform, from the trainer's own settings."""
    args = trainer.args
    facts = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name, None) is not None}
    if getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_mode", "") == "colocate":
        facts["logprobs_mode"] = "processed_logprobs"  # TRL starts its own engine so
    return facts


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
