"""What is known about one closed step: the only thing diagnosis and decision see of the tokens.

Plain numbers, so that a state file can hold them: `to_json` and `from_json` are inverse (nan is written as null).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from dlc_sentinel.core.profile import Profile
from dlc_sentinel.core.shape import FunctionOfLogp
from dlc_sentinel.core.unsplit import UnsplitRows
from dlc_sentinel.maths.bootstrap import GroupSums
from dlc_sentinel.records import TOKEN_CAUSES, Json

NAN = math.nan
Basis = Literal["exact", "rescored", "calibrated", "mixed", "none"]
MAX_PUBLISHED_AGES = 64
"""The youngest ages of what is published by age."""
RUNGS = ("1", "8", "32", "128", "512", "inf")


@dataclass(frozen=True, slots=True)
class Values:
    """Statistics of one log-ratio over a step's tokens, in nats; nan without tokens."""

    mean: float = NAN
    rms: float = NAN
    p50_abs: float = NAN
    p99_abs: float = NAN
    mean_abs: float = NAN
    num: int = 0

    def to_public(self) -> dict[str, float]:
        return {"mean": self.mean, "rms": self.rms, "p50_abs": self.p50_abs, "p99_abs": self.p99_abs}


@dataclass(frozen=True, slots=True)
class Kl:
    """KL between generator and current policy in nats; full = per trajectory, prefix = per token."""

    gen_now_prefix: float = NAN
    gen_now_full: float = NAN
    gen_now_k1: float = NAN
    now_gen_prefix: float = NAN
    now_gen_full: float = NAN
    blind_spot: float = NAN
    reliability: str = "none"


@dataclass(frozen=True, slots=True)
class StepFacts:
    step: int
    version: int
    first_update: int = 0
    last_update: int = 0
    basis: Basis = "none"
    num_tokens: int = 0
    """Usable tokens: current and engine logprob present, unmasked, finite."""
    num_groups: int = 0
    num_rows: int = 0
    num_blocks: Mapping[str, int] = field(default_factory=dict)
    age_mean: float = NAN
    age_max: float = NAN
    num_unknown_age: int = 0
    num_negative_age: int = 0
    lag_ess: Mapping[str, float] = field(default_factory=dict)
    lag_ess_interval: tuple[float, float] = (NAN, NAN)
    lag_ess_by_age: Mapping[str, float] = field(default_factory=dict)
    half_horizon: float = NAN
    """inf = every rung that is covered holds one half."""
    coverage: Mapping[str, float] = field(default_factory=dict)
    action_ess: float = NAN
    """ESS_h* that the rules use: this step's, or pooled with steps before it where it is small."""
    action_interval: tuple[float, float] = (NAN, NAN)
    """Its bootstrap interval; where steps are pooled only below `ess.threshold`, as evidence: it is not cheap."""
    action_blocks: int = 0
    action_enough: bool = False
    """False: fewer than `window.min_blocks` blocks even when pooled; only the severe rule may use the value."""
    unsplit: str = ""
    """Why tokens of the last updates could not be calibrated; empty where all were, or none had to be."""
    engine_change: float = NAN
    """Second moment of the lag-0 rows over that of those before them, in the step where their law changed."""
    bound_ess: float = NAN
    """ESS_h* with the total ratio on rows whose lag is unknown: a nearly safe lower bound."""
    action_ess_youngest: float = NAN
    """ESS_h* of the youngest age present."""
    discrepancy: Values = Values()
    lag: Values = Values()
    total: Values = Values()
    pooled: Values = Values()
    """rms and number of the discrepancy of this step and of those before it, where its own tokens are too few."""
    stale_kv: Values = Values()
    current: Values = Values()
    """Discrepancy of rows labelled current (age 0)."""
    rescored: Values = Values()
    """Discrepancy at present weights of rows that the engine scored once more ..."""
    rescored_interaction: float = NAN
    """... and twice its mean product with what moved in the engine, nats^2: what the other order of terms adds."""
    unmoved: Values = Values()
    """Lag of rows of age 0 in the first update, before any weight moved: the trainer against itself."""
    noise_rms: float = NAN
    """rms of `unmoved`, of the newest step that has such rows, nats."""
    passes_apart: bool = False
    """The trainer's own two passes over the same rows are not of one text."""
    total_first: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """age -> (tokens, rms of total) in the step's first update ..."""
    engine_first: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """... and the same of the discrepancy, of exact rows."""
    by_version: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Generator version -> (tokens, groups) trained on."""
    aged_tokens: int = 0
    """Tokens of the first update with age > 0 and an exact basis ..."""
    aged_moved: int = 0
    """... and those of them whose lag is not exactly 0."""
    aged_any: int = 0
    """Tokens of the first update with age > 0, on any basis ..."""
    aged_apart: int = 0
    """... and those of them on which trainer and engine differ."""
    kl: Kl = Kl()
    dropped: Mapping[str, int] = field(default_factory=dict)
    missing_tokens: int = 0
    """Those of `unmatched` whose rollouts were lost: no rollouts come any more."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    learning: Mapping[str, float] = field(default_factory=dict)
    """Where scalars began, and the reward's running mean and its peak."""
    finished_share: float = NAN
    """Share of the sequences of which the engine said that they were not cut at a limit."""
    copied_from: str = ""
    """"engine" or "current": what `old` turned out to be a bit copy of."""
    repeated_checksum: bool = False
    """The payload delivered for the newest version was the one of an older version."""
    engine_version: int = -1
    """Newest version known to be in the engine."""
    profile: Profile = field(default_factory=Profile)
    """What the rows look like where they are off."""
    discrepancy_by: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """rms of the discrepancy by "probability", "position" and "replica", nats."""
    numerics: tuple[tuple[float, float], ...] = ()
    """(tokens, sum of squares of the discrepancy, nats^2) by bin of the engine's logprob, of a sample of exact rows."""
    floor_rms: float = NAN
    floor_mean_abs: float = NAN
    loop_gain: float = NAN
    loop_gain_low: float = NAN
    forecast: tuple[float, float, float] = (NAN, NAN, NAN)

    @property
    def judged_ess(self) -> float:
        """ESS_h* as the rules take it: the estimate, or where that is calibrated the upper end of its interval."""
        return self.action_interval[1] if self.basis == "calibrated" else self.action_ess

    @property
    def offered_tokens(self) -> int:
        """Tokens the producers sent for this step, usable or not."""
        return self.num_tokens + sum(self.dropped.values())

    def tokens_since(self, version: int) -> tuple[int, int]:
        """(tokens, groups) of this step that were generated at or after `version`."""
        newer = [pair for key, pair in self.by_version.items() if int(key) >= version]
        return sum(n for n, _ in newer), sum(g for _, g in newer)

    def older_share(self, version: int) -> float:
        """Share of the tokens with a known version that are older than `version`; 0 when no version is known."""
        known = {int(key): n for key, (n, _) in self.by_version.items() if int(key) >= 0}
        return sum(n for v, n in known.items() if v < version) / max(sum(known.values()), 1)

    def _tokens_by_age(self) -> dict[str, Json]:
        """Tokens trained on by age of their version, the youngest MAX_PUBLISHED_AGES; unknown versions are left out."""
        ages = {self.version - int(key): num for key, (num, _) in self.by_version.items() if int(key) >= 0}
        return {str(age): ages[age] for age in sorted(ages)[:MAX_PUBLISHED_AGES]}

    def to_public(self) -> dict[str, Json]:
        """The step object of the file format; nan as None."""
        half = "inf" if math.isinf(self.half_horizon) else self.half_horizon
        low, mid, high = self.forecast
        rescored = {"rms": self.rescored.rms, "interaction": self.rescored_interaction}
        tree = {
            "step": self.step,
            "version": self.version,
            "updates": [self.first_update, self.last_update],
            "basis": self.basis,
            "num_tokens": self.num_tokens,
            "num_groups": self.num_groups,
            "num_blocks": {rung: self.num_blocks.get(rung, 0) for rung in RUNGS},
            "version_age": {"mean": self.age_mean, "max": self.age_max},
            "lag_ess": {**dict.fromkeys(RUNGS, NAN), **self.lag_ess},
            "lag_ess_interval": list(self.lag_ess_interval),
            "lag_ess_by_age": dict(self.lag_ess_by_age),
            "half_horizon": half,
            "coverage": {rung: self.coverage.get(rung, NAN) for rung in RUNGS},
            "discrepancy": self.discrepancy.to_public(),
            "lag": self.lag.to_public(),
            "total": self.total.to_public(),
            "discrepancy_by": {name: dict(bins) for name, bins in self.discrepancy_by.items()},
            "tokens_by_age": self._tokens_by_age(),
            "stale_kv": self.stale_kv.to_public() if self.stale_kv.num else None,
            "rescored": rescored if self.rescored.num else None,
            "floor": {"rms": self.floor_rms, "mean_abs": self.floor_mean_abs},
            "loop_gain": self.loop_gain,
            "forecast_steps": {"low": low, "mid": mid, "high": high},
            "kl": asdict(self.kl),
            "dropped": {cause: self.dropped.get(cause, 0) for cause in TOKEN_CAUSES},
        }
        public = no_nan(tree)
        assert isinstance(public, dict)
        return public

    def to_json(self) -> dict[str, Json]:
        half = "inf" if math.isinf(self.half_horizon) else self.half_horizon
        tree = no_nan({**asdict(self), "half_horizon": half})
        assert isinstance(tree, dict)
        return tree


def from_json(tree: Mapping[str, Json]) -> StepFacts:
    """The facts that `to_json` wrote."""
    kept: dict[str, Json] = {}
    for entry in fields(StepFacts):
        if entry.name not in tree:
            continue
        value = _to_nan(tree[entry.name])
        if entry.name == "half_horizon":
            value = float(value)
        elif entry.name in ("discrepancy", "lag", "total", "pooled", "stale_kv", "current", "unmoved", "rescored"):
            value = Values(**value)
        elif entry.name == "kl":
            value = Kl(**value)
        elif entry.name == "profile":
            value = Profile(**{**value, "function": FunctionOfLogp(**value["function"])})
        elif isinstance(value, list):
            value = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        elif isinstance(value, dict):
            value = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
        kept[entry.name] = value
    return StepFacts(**kept)


def no_nan(value: Json) -> Json:
    """The same tree with every non-finite number as None ("inf" where infinity means something is the caller's)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): no_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [no_nan(item) for item in value]
    return value


def _to_nan(value: Json) -> Json:
    if value is None:
        return NAN
    if isinstance(value, dict):
        return {key: _to_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_nan(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """A step's facts with the sums that a later small step may be pooled with."""

    facts: StepFacts
    sums: GroupSums
    unsplit: UnsplitRows | None = None
    state: Mapping[str, Json] = field(default_factory=dict)
    """`facts.to_json()`, made once: the state file is written at every step."""
