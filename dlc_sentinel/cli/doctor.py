"""doctor: is everything there for a sentinel to work here, down to a job of made-up numbers through real sockets."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import typer

from dlc_sentinel.cli import checks, codes, screen, settings
from dlc_sentinel.cli.checks import Check
from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import SentinelError
from dlc_sentinel.hook import Hook
from dlc_sentinel.records import Hello, Source
from dlc_sentinel.runtime import LiveSource, Runtime
from dlc_sentinel.wire.receiver import Receiver

ROUND_TRIP_S = 15.0
_POLL_MS = 20
_ROWS, _TOKENS = 32, 64
_RUN = "doctor"


def doctor(config: settings.ConfigFile = None, sets: settings.Sets = None, as_json: settings.AsJson = False) -> None:
    """Check that a sentinel can work here.

    Packages, addresses, keys, disk, and one synthetic job from hook to verdict.

    Exit code 0 where nothing fails (warnings included), else 1.
    """
    chosen = settings.load(config, sets)
    found = []
    for check in _all(chosen.config):
        found.append(check)
        if not as_json:
            fix = f"  -> {check.fix}" if check.fix else ""
            screen.wrapped(f"{check.state:<4}  {check.name}: {check.text}{fix}", " " * 6)
    failed = any(check.state == "fail" for check in found)
    if as_json:
        rows = [{"name": c.name, "state": c.state, "text": c.text, "fix": c.fix or None} for c in found]
        screen.data_json({"ok": not failed, "checks": rows})
    raise typer.Exit(codes.DEGRADED if failed else codes.OK)


def _all(config: Config) -> Iterator[Check]:
    yield checks.python()
    yield from checks.packages(config)
    yield checks.address(config)
    yield checks.folder(config)
    yield checks.keys(config)
    yield checks.metrics_port(config)
    yield from checks.tape(config)
    yield round_trip(config)


def round_trip(config: Config) -> Check:
    """A healthy job of made-up numbers: hook -> sockets -> verdict, beside any sentinel that runs here."""
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="dlc-") as folder:
            verdict = _verdict_of_made_up_job(config, Path(folder))
    except (SentinelError, OSError) as error:
        return Check("round trip", "fail", f"hook to verdict: {error}", "see the lines above")
    took_s = time.monotonic() - started_s
    if verdict == "HEALTHY":
        return Check("round trip", "ok", f"hook, sockets, verdict: HEALTHY as it must be, in {took_s:.1f} s")
    text = f"a healthy made-up job was judged {verdict or 'not at all'} after {took_s:.1f} s"
    return Check("round trip", "fail", text, "is a window or ess setting changed? without one this is a fault of ours")


def _verdict_of_made_up_job(config: Config, folder: Path) -> str:
    """The verdict, "" if none came in time."""
    keys = checks.sentinel_keys(config)
    receiver = Receiver(f"ipc://{folder}/s.sock", keys=keys or None)
    runtime = Runtime(config, LiveSource(receiver), Monitor(config), None, ())
    with closing(runtime):
        hook = _hook(str(receiver.address), keys)
        try:
            _made_up_steps(hook)
            end_s = time.monotonic() + ROUND_TRIP_S
            while time.monotonic() < end_s:
                runtime.step(_POLL_MS)
                runs = runtime.snapshot().runs
                if runs and runs[0].last_step >= 1:
                    return runs[0].verdict
        finally:
            hook.close()
    return ""


def _hook(address: str, keys: str) -> Hook:
    """A hook with exactly these keys, whatever the environment says."""
    before = os.environ.pop("DLC_SENTINEL_KEYS", None)
    try:
        if keys:
            os.environ["DLC_SENTINEL_KEYS"] = keys
        return Hook(address, Hello(Source(_RUN, "trainer", ""), stack="doctor"))
    finally:
        os.environ.pop("DLC_SENTINEL_KEYS", None)
        if before is not None:
            os.environ["DLC_SENTINEL_KEYS"] = before


def _made_up_steps(hook: Hook) -> None:
    """Two steps of 2,048 tokens: engine noise of 1e-4 nats, no lag."""
    rng = np.random.default_rng(0)
    for step in range(2):
        engine_ST = -0.1 - rng.exponential(1.0, (_ROWS, _TOKENS))
        old_ST = (engine_ST + rng.normal(0.0, 1e-4, engine_ST.shape)).astype(np.float32)
        groups = [f"{step}.{row // 4}" for row in range(_ROWS)]
        hook.train(
            step, step, old_is="generator", versions=step, group=groups,
            cur=old_ST, old=old_ST, engine=engine_ST.astype(np.float32),
        )  # fmt: skip
        hook.poll(step)
