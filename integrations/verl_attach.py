"""Into a verl job that already runs, unmodified: through Ray, whose named actors run a function they are handed.

Reached: actor ranks (all three streams) and agent-loop workers (versions per token). Not reached: the driver, which is
no named actor; so this watches only. This package must be importable where the job runs.

Nothing of the job is closed or killed, and its TransferQueue is not touched.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dlc_sentinel.integrations import verl_actor, verl_rollout
from dlc_sentinel.integrations.verl_wraps import Wraps

from dlc_sentinel.errors import SentinelError

OURS = "_dlc_sentinel"
"""Attribute of a Ray actor under which what was put into it is kept, for `detach`."""
TRAINER, AGENT = "WorkerDict", "agent_loop_worker_"
WATCHES_ONLY = "watching only: RESYNC and ABORT need the plug-in at launch"
PROBE_S = 5.0
_HOST_PORT = re.compile(r"(?:ray://)?\[?(.+?)\]?:(\d{1,5})")


@dataclass(frozen=True, slots=True)
class Reached:
    """One Ray actor of the job and what was done there."""

    name: str
    outcome: str
    """"attached", "detached", "nothing to do: ..." or "failed: ..."."""

    @property
    def is_done(self) -> bool:
        return self.outcome in ("attached", "detached")


def attach(address: str, env: Mapping[str, str], *, timeout_s: float = 600.0) -> list[Reached]:
    """What was reached. `env`: DLC_SENTINEL and its companions, as the job would have had them at launch.

    A training rank takes the call when the one it is working on is over, and sends from the next weight sync on, since
    only then its place in the run is known. Raises: SentinelError without a verl job.
    """
    with _cluster(address, timeout_s) as actors:
        done = _ask(actors(AGENT), _attach_agent, (), timeout_s=timeout_s)
        done |= _ask(actors(TRAINER), _attach_trainer, (dict(env),), timeout_s=timeout_s)
        return _reached(done, address)


def detach(address: str, *, timeout_s: float = 600.0) -> list[Reached]:
    """What was restored: every replaced function is the job's own again. Raises: SentinelError without a verl job."""
    with _cluster(address, timeout_s) as actors:
        done = _ask(actors(AGENT), _detach, (), timeout_s=timeout_s)
        done |= _ask(actors(TRAINER), _detach, (), timeout_s=timeout_s)
        return _reached(done, address)


def _reached(done: Mapping[str, Any], address: str) -> list[Reached]:
    if not done:
        raise SentinelError(f"no verl job at Ray address {address!r}: no actor named *{TRAINER}* or {AGENT}* there")
    return [Reached(name, str(outcome)) for name, outcome in done.items()]


# -- this side of Ray ------------------------------------------------------------------------------------------------


@contextmanager
def _cluster(address: str, timeout_s: float) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Gives a function: part of a name -> {name: handle} of the live actors with it."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise SentinelError(f"{error}; run this command with the Python of the job, which has Ray") from error
    _knock(address, timeout_s)
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SentinelError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        named = ray.util.list_named_actors(all_namespaces=True)

        def actors(part: str) -> dict[str, Any]:
            found = [actor for actor in named if part in actor["name"]]
            return {actor["name"]: ray.get_actor(actor["name"], namespace=actor["namespace"]) for actor in found}

        with warnings.catch_warnings():
            # Reading an actor's handle imports verl here, which warns of every engine that is not installed.
            warnings.simplefilter("ignore")
            yield actors
    finally:
        ray.shutdown()


def _knock(address: str, timeout_s: float) -> None:
    """Nothing where `address` names no host and port. Raises: SentinelError where nobody listens: Ray waits minutes."""
    named = _HOST_PORT.fullmatch(address)
    if named is None:
        return
    wait_s = min(PROBE_S, timeout_s)
    try:
        socket.create_connection((named[1], int(named[2])), wait_s).close()
    except (OSError, OverflowError, ValueError) as error:
        why = f"no answer in {wait_s:g} s" if isinstance(error, TimeoutError) else error
        raise SentinelError(
            f"no Ray cluster at {address!r}: {why}; wanted the address of the job's cluster (HOST:6379 where Ray chose "
            "the port), or auto on a machine of the job"
        ) from error


def _ask(
    actors: Mapping[str, Any], function: Callable[..., Any], args: Sequence[Any], *, timeout_s: float
) -> dict[str, Any]:
    """Each actor's answer; all are asked at once. One that fails answers with "failed: why"."""
    ray: Any = importlib.import_module("ray")
    waiting = {name: actor.__ray_call__.remote(function, *args) for name, actor in actors.items()}
    answers: dict[str, Any] = {}
    for name, ref in waiting.items():
        try:
            answers[name] = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.RayError as error:
            answers[name] = f"failed: {_last_line(error)}"
    return answers


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


# -- in the job's actors ---------------------------------------------------------------------------------------------


def _attach_trainer(actor: Any, env: Mapping[str, str]) -> str:
    if hasattr(actor, OURS):
        return "nothing to do: attached before"
    workers = [w for w in getattr(actor, "worker_dict", {}).values() if getattr(w, "actor", None) is not None]
    if any("train_batch" in vars(worker.actor.engine) for worker in workers):
        return "nothing to do: watched since launch"
    with _environment(env):
        taps = [verl_actor.tap_worker(worker, live=True) for worker in workers]
    setattr(actor, OURS, [tap.remove for tap in taps if tap is not None])
    return "attached" if getattr(actor, OURS) else "nothing to do: no actor model here"


def _attach_agent(actor: Any) -> str:
    if hasattr(actor, OURS):
        return "nothing to do: attached before"
    wraps = Wraps()
    verl_rollout.install(wraps)
    setattr(actor, OURS, [wraps.undo])
    return "attached"


def _detach(actor: Any) -> str:
    for undo in vars(actor).pop(OURS, None) or ():
        undo()
        return "detached"
    return "nothing to do: not attached"


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
