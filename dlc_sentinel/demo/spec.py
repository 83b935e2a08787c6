"""What one arm of the demo is told, and what it tells back: plain frozen values, JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Self

from dlc_sentinel.demo.engine import Fault
from dlc_sentinel.records import Json

EngineKind = Literal["tiny", "vllm"]


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """One arm: the job's settings (equal for the arms of a demo) and how its generator gets new weights."""

    name: str = "control"
    seed: int = 1
    syncs_every_step: bool = True
    """False: the generator keeps the weights it has after `synced_steps` steps, unless a command says otherwise."""
    obeys: bool = True
    """False: RESYNC and ABORT are refused, with the reason."""
    synced_steps: int = 4
    """Steps at the start after each of which every arm pushes its weights."""

    num_steps: int = 160
    num_groups: int = 8
    rows_per_group: int = 6
    vocab_size: int = 12
    response_tokens: int = 96
    learning_rate: float = 0.0015
    last_rate_ratio: float = 0.2
    """The learning rate falls linearly to this share of itself at the last step."""
    entropy_bonus: float = 0.03
    clip_norm: float = 1.0
    true_reward_every: int = 4
    """Steps between measurements of the true reward."""
    true_reward_rows: int = 48

    engine: EngineKind = "tiny"
    engine_python: str = ""
    """Interpreter of the environment that holds vLLM; used by `vllm` only."""
    engine_dtype: str = "bfloat16"

    fault: Fault = "none"
    """queue: rows wait `queue_batches` batches before they are trained on. The others: see EngineSettings."""
    fault_from_step: int = 10
    drift_per_step: float = 0.01
    queue_batches: int = 0
    sends_checksum: bool = True

    snapshot_steps: tuple[int, ...] = ()
    """Steps whose weights and batch are saved, to be scored again by other means."""
    hook_every: int = 1
    """The trainer's hook is used at steps divisible by this, to measure what it costs."""

    @property
    def rows(self) -> int:
        return self.num_groups * self.rows_per_group

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        given = json.loads(text)
        return cls(**{**given, "snapshot_steps": tuple(given.get("snapshot_steps", ()))})


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of one arm, as it ends. Ratios 0..1; NaN = not measured at this step."""

    arm: str
    step: int
    num_steps: int
    true_reward: float
    """Reward of fresh samples from the trainer's own weights at the start of the step."""
    reward: float
    """Reward of the generator's samples: what a dashboard shows."""
    entropy: float
    grad_norm: float
    lag_ess: Mapping[str, float]
    """Horizon in tokens ("1" ... "inf") -> ESS of the lag ratio, computed in the trainer."""
    lag_rms: float
    discrepancy_rms: float
    age: int
    """Trainer version minus version of the generator's weights, by label."""
    synced: bool
    """Weights were pushed at the end of the step."""
    command: str
    """"" | "RESYNC" | "ABORT": what was received, obeyed or not."""
    cpu_s: float
    """CPU time of the trainer process over the step, without its generator."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """A finished arm."""

    spec: ArmSpec
    steps: tuple[StepReport, ...]
    ended: str
    """"" = all steps done, else why it ended early."""
    wall_s: float
    checksums: tuple[tuple[int, str], ...] = ()
    """(version, checksum of the weights that the engine held after that push)."""
    snapshots: tuple[str, ...] = field(default=())
    """Files of snapshots.py."""

    def true_reward(self) -> float:
        """Mean of the true reward over the last quarter of the steps, 0..1; NaN if it was not measured there."""
        late = [s.true_reward for s in self.steps if s.step >= self.spec.num_steps * 3 // 4]
        known = [value for value in late if value == value]
        return sum(known) / len(known) if known else float("nan")

    @property
    def num_resyncs(self) -> int:
        """RESYNC commands obeyed."""
        return sum(s.command == "RESYNC" and s.synced for s in self.steps) if self.spec.obeys else 0

    def lag_ess_min(self) -> dict[str, float]:
        """Horizon -> smallest lag ESS of any step."""
        names = self.steps[0].lag_ess if self.steps else ()
        return {name: min(s.lag_ess[name] for s in self.steps) for name in names}


def report_to_dict(report: StepReport) -> dict[str, Json]:
    """JSON-ready: NaN becomes null."""
    return {key: None if value != value else value for key, value in asdict(report).items()}


def report_from_dict(given: Mapping[str, Json]) -> StepReport:
    """The inverse of report_to_dict."""
    values = {f.name: given[f.name] for f in fields(StepReport)}
    complete: Json = {name: float("nan") if value is None else value for name, value in values.items()}
    return StepReport(**complete)
