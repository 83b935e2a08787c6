"""What a stack logged of a run as numbers per step: verl's file logger, and the state a Hugging Face trainer keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.lines import numbered, opened, tree_of
from dlc_sentinel.records import Json

STATE_NAME = "trainer_state.json"
NAN = math.nan
Numbers = Mapping[str, float]

_SHARED: Mapping[str, tuple[str, ...]] = {
    "kl": ("rollout_corr/kl", "rollout_correction/kl"),
    "k3_kl": ("rollout_corr/k3_kl", "rollout_correction/k3_kl"),
    "chi2_token": ("rollout_corr/chi2_token", "rollout_correction/chi2_token"),
    "mean_abs": ("sampling/sampling_logp_difference/mean",),
    "age_mean": ("training/off_policy/trajectory_staleness/mean", "sample/staleness_mean"),
    "age_max": ("training/off_policy/trajectory_staleness_worst/max", "sample/staleness_max"),
    "num_stale": ("fully_async/count/stale_trajectory_processed",),
}
"""What is read -> the names stacks log it under, the first that is there counts."""
_SCALARS: Mapping[str, tuple[str, ...]] = {
    "reward": ("critic/rewards/mean", "reward"),
    "entropy": ("actor/entropy", "entropy"),
    "grad_norm": ("actor/grad_norm", "grad_norm"),
    "lr": ("actor/lr", "learning_rate"),
    "response_length": ("response_length/mean", "completions/mean_length"),
    "truncated_ratio": ("response_length/clip_ratio", "completions/clipped_ratio"),
}
"""Names of the `scalars` record -> names in the log."""


@dataclass(frozen=True, slots=True)
class MetricStep:
    """One step of a log; nan = not logged. Mean over tokens, total = trainer minus engine, nats."""

    step: int
    kl: float = NAN
    """-mean(total): verl's sign."""
    k3_kl: float = NAN
    """mean(exp(total) - 1 - total)."""
    chi2_token: float = NAN
    """mean(exp(2 total)) - 1."""
    mean_abs: float = NAN
    age_mean: float = NAN
    age_max: float = NAN
    scalars: Numbers = field(default_factory=dict)

    @property
    def total_ess(self) -> float:
        """Token-level effective sample size of the total ratio, 0..1, exact: mean(rho)^2 / mean(rho^2).

        mean(rho) = 1 + k3_kl - kl and mean(rho^2) = 1 + chi2_token; nan where one is missing or they contradict.
        """
        mean, square = 1.0 + self.k3_kl - self.kl, 1.0 + self.chi2_token
        if not (mean > 0.0 and square > 0.0):
            return NAN
        return min(mean * mean / square, 1.0)

    @property
    def total_rms(self) -> float:
        """Rms of the total in nats, nearly: sqrt(2 k3) is its leading term, good to a tenth below 0.3 nats."""
        return math.sqrt(2.0 * self.k3_kl) if self.k3_kl >= 0.0 else NAN

    @property
    def has_mismatch(self) -> bool:
        """True when anything at all is known about trainer against engine."""
        return not (math.isnan(self.kl) and math.isnan(self.k3_kl) and math.isnan(self.mean_abs))


class MetricLog:
    """One log. `steps` in order; `problems` holds (line number, why); `stack` is verl or trl.

    Raises: TapeError if the file cannot be read or is none of the two.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[tuple[int, str]] = []
        if self.path.suffix == ".json":
            self.stack, entries = "trl", self._history()
        else:
            self.stack, entries = "verl", self._lines()
        self.steps = _merged(entries)
        if not self.steps:
            raise TapeError(f"{self.path}: no step with numbers in it; wanted metrics.jsonl of verl, or {STATE_NAME}")

    @property
    def run(self) -> str:
        return self.path.parent.name or self.path.stem

    def _lines(self) -> list[tuple[int, Numbers]]:
        entries = []
        try:
            with opened(self.path) as file:
                for number, text in numbered(file, self.problems):
                    try:
                        entries.append(_verl_line(text))
                    except (ValueError, KeyError, TypeError) as error:
                        if text.strip():
                            self.problems.append((number, f"not {{step, data}} ({error})"))
        except (OSError, EOFError) as error:
            raise TapeError(f"{self.path}: cannot be read ({error})") from error
        return entries

    def _history(self) -> list[tuple[int, Numbers]]:
        try:
            tree = tree_of(self.path.read_bytes())
            history = tree.get("log_history") if isinstance(tree, Mapping) else None
            if not isinstance(history, list):
                raise ValueError("no log_history in it")
        except (OSError, ValueError) as error:
            raise TapeError(f"{self.path}: not {STATE_NAME} of TRL ({error}); wanted its list log_history") from error
        entries = [entry for entry in history if isinstance(entry, Mapping) and isinstance(entry.get("step"), int)]
        return [(entry["step"], _numbers(entry)) for entry in entries]


def _verl_line(text: bytes) -> tuple[int, Numbers]:
    tree = tree_of(text)
    return int(tree["step"]), _numbers(tree["data"])


def _numbers(tree: Mapping[str, Json]) -> Numbers:
    return {
        name: float(value)
        for name, value in tree.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _merged(entries: Sequence[tuple[int, Numbers]]) -> list[MetricStep]:
    """One step per number: a stack may log a step in several entries, of which the newest value counts."""
    by_step: dict[int, dict[str, float]] = {}
    for step, numbers in entries:
        by_step.setdefault(step, {}).update(numbers)
    return [_step(step, by_step[step]) for step in sorted(by_step)]


def _step(step: int, numbers: Numbers) -> MetricStep:
    found = {key: _first(numbers, names) for key, names in _SHARED.items()}
    if found.pop("num_stale") == 0.0 and math.isnan(found["age_max"]):
        found["age_mean"] = found["age_max"] = 0.0
    scalars = {key: value for key, names in _SCALARS.items() if not math.isnan(value := _first(numbers, names))}
    return MetricStep(step, scalars=scalars, **found)


def _first(numbers: Numbers, names: Sequence[str]) -> float:
    return next((numbers[name] for name in names if name in numbers), NAN)
