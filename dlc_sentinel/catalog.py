"""Every published metric, declared once: name, kind, unit, help, labels, and how its samples are read off a snapshot.

Prometheus names are PREFIX + name; a stack's own log uses `log_name`. All metrics of a run carry RUN_LABELS first.
A value that is NaN, null or missing has no sample: absence means "not known", never 0.
Names, labels and label values here are a contract with dashboards and alert rules.
Over 300 lines because the table of all metrics is one place on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dlc_sentinel import readings as read
from dlc_sentinel.plaintext import label
from dlc_sentinel.readings import COMMANDS as COMMANDS
from dlc_sentinel.readings import HORIZONS as HORIZONS
from dlc_sentinel.readings import OPEN_STATES as OPEN_STATES
from dlc_sentinel.readings import OUTCOMES as OUTCOMES
from dlc_sentinel.readings import STATS as STATS
from dlc_sentinel.readings import STREAMS as STREAMS
from dlc_sentinel.readings import VERDICTS as VERDICTS
from dlc_sentinel.readings import Sample as Sample
from dlc_sentinel.readings import Samples, engine_label
from dlc_sentinel.readings import number as number
from dlc_sentinel.readings import part as part
from dlc_sentinel.records import FRAME_CAUSES, TOKEN_CAUSES, RunSnapshot, Snapshot

PREFIX = "dlc_sentinel_"
LOG_PREFIX = "dlc/"
RUN_LABELS = ("run", "model_name", "engine")
Kind = Literal["gauge", "counter", "info"]


def _nothing(snapshot: Snapshot) -> Iterable[Sample]:
    return ()


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """Without prefix; counters end in _total."""
    kind: Kind
    unit: str
    """"" where the value is a plain count, version or flag."""
    help: str
    labels: tuple[str, ...]
    """Beyond RUN_LABELS."""
    samples: Samples
    process_samples: Callable[[Snapshot], Iterable[Sample]] = _nothing
    """Samples that belong to no run: their run labels are empty."""
    of_run: bool = True
    """False for facts of the sentinel process: no run labels at all."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        return (*RUN_LABELS, *self.labels) if self.of_run else self.labels


_TERM = (
    "Statistics over the policy tokens of the last closed step: mean, root mean square, median and 99th percentile of "
    "the size."
)

METRICS: tuple[Metric, ...] = (
    Metric(
        "lag_ess_ratio", "gauge", "ratio",
        "Effective sample size of the lag importance ratio over blocks of `horizon` tokens, as a share of the blocks "
        "(1 = on-policy). Below 0.5 at the action horizon, resync the generator.",
        ("horizon",), read.under("lag_ess", keys=HORIZONS),
    ),
    Metric(
        "action_lag_ess_ratio", "gauge", "ratio",
        "The lag ESS at the action horizon: the number that sends a RESYNC when it falls below 0.5.",
        (), read.field(lambda run: number(run.step, "lag_ess", str(run.action_horizon))),
    ),
    Metric(
        "action_horizon_tokens", "gauge", "tokens",
        "Block length, in tokens, at which the lag ESS sends a RESYNC (setting ess.horizon).",
        (), read.field(lambda run: number(run.action_horizon)),
    ),
    Metric(
        "lag_ess_interval_ratio", "gauge", "ratio",
        "Ends of the 90 % interval of the lag ESS at the action horizon, from a bootstrap over prompt groups.",
        ("bound",), read.interval,
    ),
    Metric(
        "lag_ess_by_age_ratio", "gauge", "ratio",
        "Lag ESS at the action horizon of the rows of one version age alone; oldest = the oldest age of the step.",
        ("age",), read.ages("lag_ess_by_age"),
    ),
    Metric(
        "blocks", "gauge", "",
        "Number of blocks of `horizon` tokens behind the lag ESS of the last closed step.",
        ("horizon",), read.under("num_blocks", keys=HORIZONS),
    ),
    Metric(
        "coverage_ratio", "gauge", "ratio",
        "Share of the blocks of this horizon that hold all its tokens; below one half the rung is not used.",
        ("horizon",), read.under("coverage", keys=HORIZONS),
    ),
    Metric(
        "half_horizon_tokens", "gauge", "tokens",
        "Longest block length up to which the lag ESS stays at or above one half; 0 = not even single tokens, "
        "+Inf = whole sequences.",
        (), read.field(lambda run: number(run.step, "half_horizon")),
    ),
    Metric(
        "discrepancy_nats", "gauge", "nats",
        "Trainer minus engine logprob at the generator's own weights: numeric disagreement, not staleness. " + _TERM,
        ("stat",), read.under("discrepancy", keys=STATS),
    ),
    Metric(
        "lag_nats", "gauge", "nats",
        "Trainer logprob now minus trainer logprob at the generator's weights: how far the policy moved on. " + _TERM,
        ("stat",), read.under("lag", keys=STATS),
    ),
    Metric(
        "total_nats", "gauge", "nats",
        "Trainer logprob now minus engine logprob = discrepancy plus lag. " + _TERM,
        ("stat",), read.under("total", keys=STATS),
    ),
    Metric(
        "stale_kv_nats", "gauge", "nats",
        "Discrepancy of tokens made by new weights on a cache of older weights, after a weight change inside their "
        "response. " + _TERM,
        ("stat",), read.under("stale_kv", keys=STATS),
    ),
    Metric(
        "floor_nats", "gauge", "nats",
        "Discrepancy that counts as healthy for this run: from its own first steps, capped by a table per number "
        "format.",
        ("stat",), read.under("floor", keys=("rms", "mean_abs")),
    ),
    Metric(
        "discrepancy_by_probability_nats", "gauge", "nats",
        "Root mean square of the discrepancy over tokens of one class of engine probability.",
        ("probability",), read.bins("discrepancy_by", "probability"),
    ),
    Metric(
        "discrepancy_by_position_nats", "gauge", "nats",
        "Root mean square of the discrepancy over tokens of one range of positions in the response.",
        ("position",), read.bins("discrepancy_by", "position"),
    ),
    Metric(
        "discrepancy_by_replica_nats", "gauge", "nats",
        "Root mean square of the discrepancy over the tokens of one engine replica, which the engine label names.",
        (), read.replicas("discrepancy_by", "replica"),
    ),
    Metric(
        "kl_nats", "gauge", "nats",
        "KL divergence between the generator's policy (gen) and the trained one (now). scope prefix: mean per token on "
        "the generator's prefixes; full: per trajectory.",
        ("direction", "scope"), read.kl,
    ),
    Metric(
        "kl_reliable", "gauge", "",
        "How far the full-trajectory KL can be trusted: 1 ok, 0.5 low (probably too small), 0 not at all.",
        (), read.kl_reliable,
    ),
    Metric(
        "kl_k1_nats", "gauge", "nats",
        "KL from generator to trained policy per trajectory by its plain estimator (minus the summed lag): noisy, can "
        "be negative; beside kl_nats it shows how far that can be trusted.",
        (), read.field(lambda run: number(run.step, "kl", "gen_now_k1")),
    ),
    Metric(
        "kl_blind_spot_ratio", "gauge", "ratio",
        "Full-trajectory KL over what the generator's own prefixes show of it: 1 = they show everything.",
        (), read.field(lambda run: number(run.step, "kl", "blind_spot")),
    ),
    Metric(
        "version_age", "gauge", "",
        "Age of the trained tokens in weight versions: the trainer's version minus the version that generated them.",
        ("stat",), read.under("version_age", keys=("mean", "max")),
    ),
    Metric(
        "age_tokens", "gauge", "tokens",
        "Tokens of the last closed step by their version age; oldest = the oldest age of the step.",
        ("age",), read.ages("tokens_by_age"),
    ),
    Metric(
        "trainer_version", "gauge", "",
        "Version of the weights that the last closed step started from.",
        (), read.field(read.trainer_version),
    ),
    Metric(
        "engine_version", "gauge", "",
        "Newest version of the weights that was delivered to the engine; a rise is a weight sync.",
        (), read.field(read.engine_version),
    ),
    Metric(
        "forecast_steps", "gauge", "steps",
        "Forecast number of steps until the lag ESS at the action horizon falls below one half.",
        ("bound",), read.under("forecast_steps", keys=("low", "mid", "high")),
    ),
    Metric(
        "loop_gain_ratio", "gauge", "ratio",
        "Lag per unit of age against the window before; above 1 for several windows means that lag feeds itself.",
        (), read.field(lambda run: number(run.step, "loop_gain")),
    ),
    Metric(
        "basis_info", "info", "",
        "What the split into discrepancy and lag rests on in the last closed step, weakest part first to count: exact, "
        "rescored, calibrated, mixed or none.",
        ("basis",), read.basis,
    ),
    Metric(
        "finding_active", "gauge", "",
        "1 while this verdict is open for the run or is its overall verdict, else 0. UNWIRED and BLIND mean that "
        "health is not known.",
        ("verdict",), read.findings,
    ),
    Metric(
        "verdict_info", "info", "",
        "The one verdict of the run: its most severe open finding, else HEALTHY where that is proven, else BLIND.",
        ("verdict",), read.verdict,
    ),
    Metric(
        "finding_confidence_ratio", "gauge", "ratio",
        "How sure the sentinel is of an open finding, by verdict, kind and state (suspected or confirmed).",
        ("verdict", "kind", "state"), read.confidences,
    ),
    Metric(
        "finding_since_step", "gauge", "",
        "First step of the evidence of an open finding.",
        ("verdict",), read.since_steps,
    ),
    Metric(
        "finding_catastrophic", "gauge", "",
        "1 while an open DATA or ENGINE finding is so bad that nothing should be trained on: then ABORT is due.",
        ("verdict",), read.catastrophic,
    ),
    Metric(
        "commands_total", "counter", "",
        "Commands decided by the sentinel, by kind and by what came of them (hypothetical: due, but not sent).",
        ("kind", "outcome"), read.commands,
    ),
    Metric(
        "breaker_open", "gauge", "",
        "1 while RESYNCs without effect have opened the breaker: nothing is sent until `actions reset`.",
        (), read.field(lambda run: float(run.breaker_open)),
    ),
    Metric(
        "mode_info", "info", "",
        "What the sentinel may send to this run: observe (nothing), resync, or abort (both).",
        ("mode",), read.mode,
    ),
    Metric(
        "scalar", "gauge", "",
        "A number that the training stack reported with its newest step, by its name: reward, entropy, grad_norm, "
        "response_length, truncated_ratio, lr and others.",
        ("name",), read.scalars,
    ),
    Metric(
        "tokens_total", "counter", "tokens",
        "Token logprobs received, by stream: engine, old (trainer at the generator's weights), cur (trainer now).",
        ("stream",), read.counts(lambda run: run.num_tokens, STREAMS),
    ),
    Metric(
        "step_tokens", "gauge", "tokens",
        "Usable tokens of the last closed step: both logprobs there, finite and unmasked.",
        (), read.field(lambda run: number(run.step, "num_tokens")),
    ),
    Metric(
        "step_groups", "gauge", "",
        "Prompt groups of the last closed step; the interval of the ESS draws from them.",
        (), read.field(lambda run: number(run.step, "num_groups")),
    ),
    Metric(
        "usable_tokens_ratio", "gauge", "ratio",
        "Usable tokens of the last closed step over all that were offered for it.",
        (), read.field(read.usable_ratio),
    ),
    Metric(
        "dropped_tokens_total", "counter", "tokens",
        "Tokens that were sent but not used, each under exactly one cause.",
        ("cause",), read.counts(lambda run: run.dropped_tokens, TOKEN_CAUSES),
    ),
    Metric(
        "refused_frames_total", "counter", "frames",
        "Whole frames that could not be used, by cause; without run labels where no run could be named.",
        ("cause",), read.counts(lambda run: run.refused_frames, FRAME_CAUSES),
        lambda snapshot: read.from_zero(snapshot.num_refused, FRAME_CAUSES),
    ),
    Metric(
        "frames_total", "counter", "frames",
        "Frames received from the hooks of this run.",
        (), read.field(lambda run: number(run.num_frames)),
    ),
    Metric(
        "sequence_gaps_total", "counter", "",
        "Frames that a hook numbered and that never arrived: loss proven by the receiver.",
        (), read.field(lambda run: number(run.sequence_gaps)),
    ),
    Metric(
        "join_bytes", "gauge", "bytes",
        "Memory held by rows that wait for their other half.",
        (), read.field(lambda run: number(run.join_bytes)),
    ),
    Metric(
        "producer_last_seen_timestamp_seconds", "gauge", "seconds",
        "Unix time of the newest sign of life of a hook, by role and rank; for an engine the engine label names its "
        "replica.",
        ("role", "rank"), read.last_seen,
    ),
    Metric(
        "producer_last_step", "gauge", "",
        "Newest step that a hook has named, by role and rank; for an engine the engine label names its replica.",
        ("role", "rank"), read.producer_steps,
    ),
    Metric(
        "producers", "gauge", "",
        "Number of hooks by role and state: alive, silent (no sign of life for 6 s) or gone.",
        ("role", "state"), read.producers,
    ),
    Metric(
        "last_step", "gauge", "",
        "Number of the last training step that was closed and judged.",
        (), read.field(lambda run: number(run.last_step) if run.last_step >= 0 else math.nan),
    ),
    Metric(
        "verdict_latency_seconds", "gauge", "seconds",
        "Time from the last frame of a step to its verdict.",
        (), read.field(lambda run: number(run.verdict_latency_s)),
    ),
    Metric(
        "build_info", "info", "",
        "Version of the sentinel that publishes these numbers.",
        ("version",), read.no_run, read.build, of_run=False,
    ),
    Metric(
        "start_timestamp_seconds", "gauge", "seconds",
        "Unix time since when the sentinel listens.",
        (), read.no_run, read.of_process(lambda snapshot: snapshot.started_s), of_run=False,
    ),
    Metric(
        "published_timestamp_seconds", "gauge", "seconds",
        "Unix time of the newest picture of all runs; it stands still when the sentinel is stuck.",
        (), read.no_run, read.of_process(lambda snapshot: snapshot.t_s), of_run=False,
    ),
    Metric(
        "runs", "gauge", "",
        "Number of runs that the sentinel has heard of since it started.",
        (), read.no_run, read.of_process(lambda snapshot: float(len(snapshot.runs))), of_run=False,
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def series(metric: Metric, snapshot: Snapshot) -> dict[tuple[str, ...], float]:
    """All samples of one metric: {values of metric.label_names: value}; text from outside is made inert, NaN left out.

    Two runs whose labels coincide keep the newer one's value: a scrape never holds one series twice.
    """
    found: dict[tuple[str, ...], float] = {}
    empty_run = ("",) * len(RUN_LABELS) if metric.of_run else ()
    for sample in metric.process_samples(snapshot):
        _put(found, empty_run, sample)
    for run in snapshot.runs:
        for sample in metric.samples(run):
            _put(found, (run.run, run.model_name, sample.engine or engine_label(run)), sample)
    return found


def _put(found: dict[tuple[str, ...], float], run_labels: tuple[str, ...], sample: Sample) -> None:
    if not math.isnan(sample.value):
        found[tuple(label(text) for text in (*run_labels, *sample.labels))] = sample.value


def log_name(metric: Metric, sample: Sample) -> str:
    """The name in a stack's own log: dlc/lag_ess_ratio/32. Run labels are left out: such a log belongs to one run."""
    return LOG_PREFIX + "/".join((metric.name, *sample.labels, *([sample.engine] if sample.engine else [])))


LOGGED = (
    "lag_ess_ratio", "action_lag_ess_ratio", "half_horizon_tokens", "discrepancy_nats", "lag_nats", "total_nats",
    "floor_nats", "kl_nats", "kl_reliable", "version_age", "forecast_steps", "loop_gain_ratio", "finding_active",
    "commands_total", "dropped_tokens_total", "last_step",
)  # fmt: skip
"""What a training log takes; the rest says how the sentinel itself is, or repeats what the stack logs."""


def log_values(run: RunSnapshot) -> dict[str, float]:
    """The metrics of a run that are LOGGED as {log name: value}, for a stack's own logger; NaN left out."""
    return {
        log_name(metric, sample): sample.value
        for metric in METRICS
        if metric.name in LOGGED
        for sample in metric.samples(run)
        if not math.isnan(sample.value)
    }
