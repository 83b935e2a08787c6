"""demo: a real tiny RL job three times at once, one sentinel beside it, and what came of each."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dlc_sentinel.cli import codes, screen, settings
from dlc_sentinel.cli.sentinel import EVENTS_FILE, Latest, Sentinel, own_address, until_signal
from dlc_sentinel.cli.serve import announce
from dlc_sentinel.errors import TapeError
from dlc_sentinel.records import Event, Json, Snapshot
from dlc_sentinel.tape.schema import STATE_FILE, part_paths
from dlc_sentinel.ui import live

if TYPE_CHECKING:
    from dlc_sentinel.demo.arms import Progress
    from dlc_sentinel.demo.spec import ArmResult, ArmSpec

INTERRUPTED = 130
LINE_EVERY_STEPS = 10
VLLM_PYTHON = Path(".venv-vllm/bin/python")
_WATCHED_BY_US = ("unwatched", "watched")


class Witness:
    """The sink that remembers what the sentinel made of each arm."""

    def __init__(self) -> None:
        self.verdicts: dict[str, list[str]] = {}
        """Arm -> its verdicts in order of first appearance."""
        self.lag_ess_min: dict[str, dict[str, float]] = {}
        """Arm -> horizon -> smallest lag ESS of any step."""

    def handle(self, event: Event) -> None:
        if event.kind == "step":
            least = self.lag_ess_min.setdefault(event.run, {})
            for horizon, value in event.data["lag_ess"].items():
                if value is not None and not math.isnan(value):
                    least[horizon] = min(value, least.get(horizon, math.inf))

    def publish(self, snapshot: Snapshot) -> None:
        for run in snapshot.runs:
            seen = self.verdicts.setdefault(run.run, [])
            if run.last_step >= 0 and run.verdict not in seen:
                seen.append(run.verdict)

    def close(self) -> None:
        """Nothing to release."""


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same job.")] = 1,
    engine: Annotated[Literal["builtin", "vllm"], typer.Option(help="Who generates: our own sampler, or vLLM.")] = (
        "builtin"
    ),
    out: Annotated[Path, typer.Option(metavar="DIR", help="Tape, picture, table.")] = Path("dlc-sentinel-demo"),
    steps: Annotated[int | None, typer.Option(min=8, help="Fewer or more steps than usual.")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="The engine's numbers.")] = "bfloat16",
    engine_python: Annotated[
        Path | None, typer.Option(metavar="PATH", help=f"Python that has vLLM; else {VLLM_PYTHON}, else this one.")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Arms at a time.")] = 2,
    plain: Annotated[bool, typer.Option("--plain", help="Progress lines instead of the live view.")] = False,
    config: settings.ConfigFile = None,
    sets: settings.Sets = None,
    as_json: settings.AsJson = False,
) -> None:
    """Watch a real RL job fail and be saved, on CPU.

    One job, three arms, same seed: control (new weights every step), unwatched (old weights, nobody acts) and watched
    (old weights, the sentinel sends RESYNC). At the end a table and a picture; --json: one object as the last line.
    """
    from dlc_sentinel.demo.arms import three_arms
    from dlc_sentinel.demo.spec import ArmSpec

    base = ArmSpec(engine="vllm" if engine == "vllm" else "tiny", engine_dtype=dtype)
    if engine == "vllm":
        base = _changed(base, engine_python=str(_vllm_python(engine_python)))
    if steps is not None:
        base = _changed(base, num_steps=steps)
    arms = three_arms(seed, base)
    _clear_tape(out / "tape")
    own: dict[str, Json] = {
        "serve.address": own_address("demo"),
        "serve.metrics_port": 0,
        "tape.dir": str(out / "tape"),
    }
    chosen = settings.load(config, sets, act="resync", unless_set=own).config
    shows = not plain and sys.stdout.isatty()
    latest, witness = Latest(), Witness()
    with Sentinel(chosen, latest, witness, alerts=not (shows and sys.stderr.isatty())) as sentinel:
        announce(sentinel, chosen)
        sentinel.start()
        job = _Job(arms, out, str(sentinel.address), parallel, None if shows else _progress)
        with until_signal(job.stop.set):
            if shows:
                live.watch(latest, screen.console(), stop=job.stop)
            job.over.wait()
    if sentinel.error is not None:
        screen.say(f"the sentinel broke: {type(sentinel.error).__name__}: {sentinel.error}")
        raise typer.Exit(codes.INTERNAL)
    _conclude(job, witness, out, as_json)


class _Job:
    """The arms, run by a thread. `stop` ends them early (and is set when they are through); `over` = none runs now."""

    def __init__(
        self,
        arms: tuple[ArmSpec, ...],
        out: Path,
        address: str,
        parallel: int,
        tell: Callable[[Progress], None] | None,
    ) -> None:
        self.results: list[ArmResult] = []
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.over = threading.Event()
        self.is_complete = False
        self._arms, self._out, self._address, self._parallel, self._tell = arms, out, address, parallel, tell
        threading.Thread(target=self._run, name="dlc-sentinel-demo", daemon=True).start()

    def _run(self) -> None:
        from dlc_sentinel.demo.arms import ArmFailed, run_demo
        from dlc_sentinel.demo.spec import ArmResult

        environment = {arm.name: {"DLC_SENTINEL": self._address} for arm in self._arms}
        news = run_demo(self._arms, self._out, env=environment, parallel=self._parallel)
        try:
            for item in news:
                if isinstance(item, ArmResult):
                    self.results.append(item)
                if self._tell is not None:
                    self._tell(item)
                if self.stop.is_set():
                    break
            self.is_complete = len(self.results) == len(self._arms)
        except (ArmFailed, OSError) as error:
            self.error = error
        finally:
            # The generator has a `finally` that ends the arms that still run.
            getattr(news, "close", lambda: None)()
            self.stop.set()
            self.over.set()


def _progress(item: Progress) -> None:
    from dlc_sentinel.demo.spec import ArmResult

    if isinstance(item, ArmResult):
        screen.say(f"{item.spec.name}: done in {item.wall_s:.0f} s, true reward {item.true_reward():.3f}")
    elif item.step % LINE_EVERY_STEPS == 0 or item.command:
        true = "" if math.isnan(item.true_reward) else f"true reward {item.true_reward:.3f}, "
        sent = f", {item.command}{' obeyed' if item.synced else ' ignored'}" if item.command else ""
        screen.say(
            f"{item.arm} step {item.step}/{item.num_steps}: {true}shown {item.reward:.3f}, "
            f"lag ESS_32 {item.lag_ess['32']:.2f}, age {item.age}{sent}"
        )


def _conclude(job: _Job, witness: Witness, out: Path, as_json: bool) -> None:
    """Table, picture, JSON; raises typer.Exit where the demo did not come to its end."""
    from dlc_sentinel.demo import result

    if job.error is not None:
        screen.say(f"the demo broke: {job.error}")
        raise typer.Exit(codes.INTERNAL)
    if not job.is_complete:
        screen.say("the demo was stopped")
        raise typer.Exit(INTERRUPTED)
    text = result.table(job.results)
    (out / "table.txt").write_text(text + "\n", encoding="utf-8")
    picture = result.picture(job.results, out / "demo.png")
    least = {arm: witness.lag_ess_min.get(arm, {}) for arm in _WATCHED_BY_US}
    summary = result.summary(
        job.results,
        verdicts=witness.verdicts.get("unwatched", []),
        lag_ess_min=least,
        identity_error=result.identity_max_error(job.results),
    )
    (out / "result.json").write_text(json.dumps(summary, allow_nan=False) + "\n", encoding="utf-8")
    tell: Callable[[str], None] = screen.say if as_json else screen.data
    tell(f"\n{text}\n\npicture {picture}\ntape    {out / 'tape'} (`dlc-sentinel replay` reads it)")
    if not result.saved(job.results):
        screen.say("not saved this time: watched is below 0.9x control or 1.3x unwatched; another --seed may differ")
    if as_json:
        screen.data_json(summary)


def _changed(spec: ArmSpec, **changes: Json) -> ArmSpec:
    from dataclasses import replace

    return replace(spec, **changes)


def _vllm_python(given: Path | None) -> Path:
    """The interpreter that has vLLM. Raises: typer.BadParameter."""
    if given is not None:
        return given
    if VLLM_PYTHON.exists():
        return VLLM_PYTHON.absolute()
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise typer.BadParameter("--engine vllm: no vLLM here; name a Python that has it with --engine-python")


def _clear_tape(folder: Path) -> None:
    """Takes away the tape of the demo before: its runs have the same names, and one would go on where it ended."""
    try:
        for path in [*(path for _, path in part_paths(folder)), folder / STATE_FILE, folder / EVENTS_FILE]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise TapeError(f"{folder}: the tape of an earlier demo cannot be removed: {error.strerror}") from error
