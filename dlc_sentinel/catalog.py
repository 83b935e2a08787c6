"""Every published metric, declared once: name, kind, unit, help, labels, and how its samples are read off a snapshot.

Prometheus names are PREFIX + name; a stack's own log uses `log_name`. All metrics of a run carry RUN_LABELS first.
A value that is NaN, null or missing has no sample: absence means "not known", never 0.
Names, labels and label values here are a contract with dashboards and alert rules.
Over 300 lines because the table of all metrics is one place on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dlc_sentinel.plaintext import label
from dlc_sentinel.records import FRAME_CAUSES, TOKEN_CAUSES, Json, RunSnapshot, Snapshot

PREFIX = "dlc_sentinel_"
LOG_PREFIX = "dlc/"
RUN_LABELS = ("run", "model_name", "engine")
HORIZONS = ("1", "8", "32", "128", "512", "inf")
STATS = ("mean", "rms", "p50_abs", "p99_abs")
STREAMS = ("engine", "old", "cur")
VERDICTS = (
    "STALE_ENGINE", "DATA", "TRANSFORM", "LABEL", "ENGINE", "LAG", "LEARNING", "UNWIRED", "BLIND", "HEALTHY",
)  # fmt: skip
COMMANDS = ("RESYNC", "ABORT")
OUTCOMES = ("sent", "applied", "refused", "expired", "hypothetical")
OPEN_STATES = ("suspected", "confirmed")

Kind = Literal["gauge", "counter", "info"]


class Sample(NamedTuple):
    """One value. `labels` are those of the metric's own label names; `engine` overrides the run's engine label."""

    labels: tuple[str, ...]
    value: float
    engine: str = ""


Samples = Callable[[RunSnapshot], Iterable[Sample]]


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


def number(tree: Json, *keys: str) -> float:
    """The number at tree[key][key]...; NaN where a key is missing or the value is no number. Text "inf" is infinity."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    if tree == "inf":
        return math.inf
    if tree is None or isinstance(tree, (bool, str)) or not hasattr(tree, "__float__"):
        return math.nan
    return float(tree)


def part(tree: Json, *keys: str) -> Mapping[str, Json]:
    """The object at tree[key][key]...; empty where a key is missing or the value is no object (null, NaN)."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, Mapping) else {}


def engine_label(run: RunSnapshot) -> str:
    """The single replica's name, or "all"."""
    return run.engines[0] if len(run.engines) == 1 else "all"


def _under(*path: str, keys: tuple[str, ...]) -> Samples:
    """Samples step[path][key] labelled by key."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        for key in keys:
            yield Sample((key,), number(run.step, *path, key))

    return samples


def _field(read: Callable[[RunSnapshot], float]) -> Samples:
    def samples(run: RunSnapshot) -> Iterator[Sample]:
        yield Sample((), read(run))

    return samples


def _counts(read: Callable[[RunSnapshot], Mapping[str, int]], known: tuple[str, ...]) -> Samples:
    """Counters by cause. Known causes start at 0, so that the first increase is seen as one."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        return _from_zero(read(run), known)

    return samples


def _from_zero(counts: Mapping[str, int], known: tuple[str, ...]) -> Iterator[Sample]:
    for cause in (*known, *sorted(set(counts) - set(known))):
        yield Sample((cause,), number(counts.get(cause, 0)))


def _kl(run: RunSnapshot) -> Iterator[Sample]:
    for direction in ("gen_now", "now_gen"):
        for scope in ("prefix", "full"):
            yield Sample((direction, scope), number(run.step, "kl", f"{direction}_{scope}"))


def _kl_reliable(run: RunSnapshot) -> Iterator[Sample]:
    kl = part(run.step, "kl")
    yield Sample((), {"ok": 1.0, "low": 0.5, "none": 0.0}.get(str(kl.get("reliability")), math.nan))


def _basis(run: RunSnapshot) -> Iterator[Sample]:
    basis = part(run.step).get("basis")
    if isinstance(basis, str) and basis:
        yield Sample((basis,), 1.0)


def open_verdicts(run: RunSnapshot) -> frozenset[str]:
    """Verdicts with a finding that is open now, and the verdict of the run itself."""
    return frozenset({str(f.get("verdict")) for f in run.findings if f.get("state") in OPEN_STATES} | {run.verdict})


def _findings(run: RunSnapshot) -> Iterator[Sample]:
    active = open_verdicts(run)
    for verdict in VERDICTS:
        yield Sample((verdict,), float(verdict in active))


def _commands(run: RunSnapshot) -> Iterator[Sample]:
    known = {f"{kind}/{outcome}" for kind in COMMANDS for outcome in OUTCOMES}
    for key in sorted(known | set(run.num_commands)):
        kind, _, outcome = key.partition("/")
        yield Sample((kind, outcome), number(run.num_commands.get(key, 0)))


def _last_seen(run: RunSnapshot) -> Iterator[Sample]:
    """A restarted producer replaces the one before it; engine replicas are told apart by the engine label."""
    newest: dict[tuple[str, str, str], float] = {}
    for producer in run.producers:
        role = str(producer.get("role", ""))
        key = (role, str(producer.get("rank", "")), str(producer.get("replica", "")) if role == "engine" else "")
        seen_s = number(producer, "last_seen_s")
        if not math.isnan(seen_s):
            newest[key] = max(seen_s, newest.get(key, -math.inf))
    for (role, rank, replica), seen_s in newest.items():
        yield Sample((role, rank), seen_s, engine=replica)


def _build(snapshot: Snapshot) -> Iterator[Sample]:
    yield Sample((snapshot.version,), 1.0)


def _no_run(run: RunSnapshot) -> Iterable[Sample]:
    return ()


_TERM = (
    "Statistics over the policy tokens of the last closed step: mean, root mean square, median and 99th percentile of "
    "the size."
)

METRICS: tuple[Metric, ...] = (
    Metric(
        "lag_ess_ratio", "gauge", "ratio",
        "Effective sample size of the lag importance ratio over blocks of `horizon` tokens, as a share of the blocks "
        "(1 = on-policy). Below 0.5 at the action horizon, resync the generator.",
        ("horizon",), _under("lag_ess", keys=HORIZONS),
    ),
    Metric(
        "half_horizon_tokens", "gauge", "tokens",
        "Longest block length up to which the lag ESS stays at or above one half; 0 = not even single tokens, "
        "+Inf = whole sequences.",
        (), _field(lambda run: number(run.step, "half_horizon")),
    ),
    Metric(
        "discrepancy_nats", "gauge", "nats",
        "Trainer minus engine logprob at the generator's own weights: numeric disagreement, not staleness. " + _TERM,
        ("stat",), _under("discrepancy", keys=STATS),
    ),
    Metric(
        "lag_nats", "gauge", "nats",
        "Trainer logprob now minus trainer logprob at the generator's weights: how far the policy moved on. " + _TERM,
        ("stat",), _under("lag", keys=STATS),
    ),
    Metric(
        "total_nats", "gauge", "nats",
        "Trainer logprob now minus engine logprob = discrepancy plus lag. " + _TERM,
        ("stat",), _under("total", keys=STATS),
    ),
    Metric(
        "kl_nats", "gauge", "nats",
        "KL divergence between the generator's policy (gen) and the trained one (now). scope prefix: mean per token on "
        "the generator's prefixes; full: per trajectory.",
        ("direction", "scope"), _kl,
    ),
    Metric(
        "kl_reliable", "gauge", "",
        "How far the full-trajectory KL can be trusted: 1 ok, 0.5 low (probably too small), 0 not at all.",
        (), _kl_reliable,
    ),
    Metric(
        "version_age", "gauge", "",
        "Age of the trained tokens in weight versions: the trainer's version minus the version that generated them.",
        ("stat",), _under("version_age", keys=("mean", "max")),
    ),
    Metric(
        "forecast_steps", "gauge", "steps",
        "Forecast number of steps until the lag ESS at the action horizon falls below one half.",
        ("bound",), _under("forecast_steps", keys=("low", "mid", "high")),
    ),
    Metric(
        "loop_gain_ratio", "gauge", "ratio",
        "Lag per unit of age against the window before; above 1 for several windows means that lag feeds itself.",
        (), _field(lambda run: number(run.step, "loop_gain")),
    ),
    Metric(
        "basis_info", "info", "",
        "What the split into discrepancy and lag rests on in the last closed step, weakest part first to count: exact, "
        "rescored, calibrated, mixed or none.",
        ("basis",), _basis,
    ),
    Metric(
        "finding_active", "gauge", "",
        "1 while this verdict is open for the run or is its overall verdict, else 0. UNWIRED and BLIND mean that "
        "health is not known.",
        ("verdict",), _findings,
    ),
    Metric(
        "commands_total", "counter", "",
        "Commands decided by the sentinel, by kind and by what came of them (hypothetical: due, but not sent).",
        ("kind", "outcome"), _commands,
    ),
    Metric(
        "tokens_total", "counter", "tokens",
        "Token logprobs received, by stream: engine, old (trainer at the generator's weights), cur (trainer now).",
        ("stream",), _counts(lambda run: run.num_tokens, STREAMS),
    ),
    Metric(
        "dropped_tokens_total", "counter", "tokens",
        "Tokens that were sent but not used, each under exactly one cause.",
        ("cause",), _counts(lambda run: run.dropped_tokens, TOKEN_CAUSES),
    ),
    Metric(
        "refused_frames_total", "counter", "frames",
        "Whole frames that could not be used, by cause; without run labels where no run could be named.",
        ("cause",), _counts(lambda run: run.refused_frames, FRAME_CAUSES),
        lambda snapshot: _from_zero(snapshot.num_refused, FRAME_CAUSES),
    ),
    Metric(
        "frames_total", "counter", "frames",
        "Frames received from the hooks of this run.",
        (), _field(lambda run: number(run.num_frames)),
    ),
    Metric(
        "sequence_gaps_total", "counter", "",
        "Frames that a hook numbered and that never arrived: loss proven by the receiver.",
        (), _field(lambda run: number(run.sequence_gaps)),
    ),
    Metric(
        "join_bytes", "gauge", "bytes",
        "Memory held by rows that wait for their other half.",
        (), _field(lambda run: number(run.join_bytes)),
    ),
    Metric(
        "producer_last_seen_timestamp_seconds", "gauge", "seconds",
        "Unix time of the newest sign of life of a hook, by role and rank; for an engine the engine label names its "
        "replica.",
        ("role", "rank"), _last_seen,
    ),
    Metric(
        "last_step", "gauge", "",
        "Number of the last training step that was closed and judged.",
        (), _field(lambda run: number(run.last_step) if run.last_step >= 0 else math.nan),
    ),
    Metric(
        "verdict_latency_seconds", "gauge", "seconds",
        "Time from the last frame of a step to its verdict.",
        (), _field(lambda run: number(run.verdict_latency_s)),
    ),
    Metric(
        "build_info", "info", "",
        "Version of the sentinel that publishes these numbers.",
        ("version",), _no_run, _build, of_run=False,
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


def log_values(run: RunSnapshot) -> dict[str, float]:
    """All metrics of a run as {log name: value}, for a stack's own logger; NaN left out."""
    return {
        log_name(metric, sample): sample.value
        for metric in METRICS
        for sample in metric.samples(run)
        if not math.isnan(sample.value)
    }
