"""How the samples of each metric are read off a snapshot; what the metrics are stands in `catalog`.

A value that is NaN, null or missing gives NaN here and has no sample there: absence means "not known", never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from dlc_sentinel.records import Json, RunSnapshot, Snapshot

HORIZONS = ("1", "8", "32", "128", "512", "inf")
STATS = ("mean", "rms", "p50_abs", "p99_abs")
STREAMS = ("engine", "old", "cur")
VERDICTS = (
    "STALE_ENGINE", "DATA", "TRANSFORM", "LABEL", "ENGINE", "LAG", "LEARNING", "UNWIRED", "BLIND", "HEALTHY",
)  # fmt: skip
COMMANDS = ("RESYNC", "ABORT")
OUTCOMES = ("sent", "applied", "refused", "expired", "hypothetical")
OPEN_STATES = ("suspected", "confirmed")
PRODUCER_STATES = ("alive", "silent", "gone")
OLDEST = "oldest"
MAX_AGES = 16
"""Youngest ages with a series of their own; the oldest age present is published as "oldest", too."""
MAX_SCALARS = 32
MAX_BINS = 16


class Sample(NamedTuple):
    """One value. `labels` are those of the metric's own label names; `engine` overrides the run's engine label."""

    labels: tuple[str, ...]
    value: float
    engine: str = ""


Samples = Callable[[RunSnapshot], Iterable[Sample]]


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


def under(*path: str, keys: tuple[str, ...]) -> Samples:
    """Samples step[path][key] labelled by key."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        for key in keys:
            yield Sample((key,), number(run.step, *path, key))

    return samples


def field(read: Callable[[RunSnapshot], float]) -> Samples:
    def samples(run: RunSnapshot) -> Iterator[Sample]:
        yield Sample((), read(run))

    return samples


def counts(read: Callable[[RunSnapshot], Mapping[str, int]], known: tuple[str, ...]) -> Samples:
    """Counters by cause. Known causes start at 0, so that the first increase is seen as one."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        return from_zero(read(run), known)

    return samples


def from_zero(counts: Mapping[str, int], known: tuple[str, ...]) -> Iterator[Sample]:
    for cause in (*known, *sorted(set(counts) - set(known))):
        yield Sample((cause,), number(counts.get(cause, 0)))


def kl(run: RunSnapshot) -> Iterator[Sample]:
    for direction in ("gen_now", "now_gen"):
        for scope in ("prefix", "full"):
            yield Sample((direction, scope), number(run.step, "kl", f"{direction}_{scope}"))


def kl_reliable(run: RunSnapshot) -> Iterator[Sample]:
    kl = part(run.step, "kl")
    yield Sample((), {"ok": 1.0, "low": 0.5, "none": 0.0}.get(str(kl.get("reliability")), math.nan))


def basis(run: RunSnapshot) -> Iterator[Sample]:
    basis = part(run.step).get("basis")
    if isinstance(basis, str) and basis:
        yield Sample((basis,), 1.0)


def open_verdicts(run: RunSnapshot) -> frozenset[str]:
    """Verdicts with a finding that is open now, and the verdict of the run itself."""
    return frozenset({str(f.get("verdict")) for f in run.findings if f.get("state") in OPEN_STATES} | {run.verdict})


def findings(run: RunSnapshot) -> Iterator[Sample]:
    active = open_verdicts(run)
    for verdict in VERDICTS:
        yield Sample((verdict,), float(verdict in active))


def commands(run: RunSnapshot) -> Iterator[Sample]:
    known = {f"{kind}/{outcome}" for kind in COMMANDS for outcome in OUTCOMES}
    for key in sorted(known | set(run.num_commands)):
        kind, _, outcome = key.partition("/")
        yield Sample((kind, outcome), number(run.num_commands.get(key, 0)))


def last_seen(run: RunSnapshot) -> Iterator[Sample]:
    """A restarted producer replaces the one before it; engine replicas are told apart by the engine label."""
    newest: dict[tuple[str, str, str], float] = {}
    for producer in run.producers:
        key = _who(producer)
        seen_s = number(producer, "last_seen_s")
        if not math.isnan(seen_s):
            newest[key] = max(seen_s, newest.get(key, -math.inf))
    for (role, rank, replica), seen_s in newest.items():
        yield Sample((role, rank), seen_s, engine=replica)


def build(snapshot: Snapshot) -> Iterator[Sample]:
    yield Sample((snapshot.version,), 1.0)


def no_run(run: RunSnapshot) -> Iterable[Sample]:
    return ()


def ages(*path: str) -> Samples:
    """Samples step[path][age] of the youngest ages, and of the oldest age that is there."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        by_age = part(run.step, *path)
        known = sorted(int(age) for age in by_age if str(age).isdecimal())
        for age in known[:MAX_AGES]:
            yield Sample((str(age),), number(by_age, str(age)))
        if known:
            yield Sample((OLDEST,), number(by_age, str(known[-1])))

    return samples


def bins(*path: str) -> Samples:
    """Samples step[path][bin] in the order of the step object, a bounded number of them."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        for name in list(part(run.step, *path))[:MAX_BINS]:
            yield Sample((str(name),), number(run.step, *path, name))

    return samples


def replicas(*path: str) -> Samples:
    """Samples step[path][replica]; the engine label names the replica."""

    def samples(run: RunSnapshot) -> Iterator[Sample]:
        for replica in part(run.step, *path):
            yield Sample((), number(run.step, *path, replica), engine=str(replica))

    return samples


def interval(run: RunSnapshot) -> Iterator[Sample]:
    both = part(run.step).get("lag_ess_interval")
    if isinstance(both, (list, tuple)) and len(both) == 2:
        for bound, value in zip(("low", "high"), both, strict=True):
            yield Sample((bound,), number(value))


def scalars(run: RunSnapshot) -> Iterator[Sample]:
    """What the stack reported last, a bounded number of names."""
    newest = run.scalars[-1] if run.scalars else {}
    for name in sorted(set(newest) - {"step"})[:MAX_SCALARS]:
        yield Sample((str(name),), number(newest, name))


def engine_version(run: RunSnapshot) -> float:
    """Newest version that was delivered to the engine; NaN while none was."""
    versions = [number(sync, "version") for sync in run.synced]
    return max((version for version in versions if version >= 0), default=math.nan)


def trainer_version(run: RunSnapshot) -> float:
    """Version of the step object; NaN where it is not known (-1)."""
    version = number(run.step, "version")
    return version if version >= 0 else math.nan


def usable_ratio(run: RunSnapshot) -> float:
    """Usable tokens of the last step over those that were offered; NaN where none were."""
    usable = number(run.step, "num_tokens")
    offered = usable + sum(number(num) for num in part(run.step, "dropped").values())
    return usable / offered if offered > 0 else math.nan


def verdict(run: RunSnapshot) -> Iterator[Sample]:
    yield Sample((run.verdict,), 1.0)


def mode(run: RunSnapshot) -> Iterator[Sample]:
    yield Sample((run.mode,), 1.0)


def _open(run: RunSnapshot) -> Iterator[Mapping[str, Json]]:
    return (finding for finding in run.findings if finding.get("state") in OPEN_STATES)


def confidences(run: RunSnapshot) -> Iterator[Sample]:
    for finding in _open(run):
        labels = tuple(str(finding.get(name) or "") for name in ("verdict", "kind", "state"))
        yield Sample(labels, number(finding, "confidence"))


def since_steps(run: RunSnapshot) -> Iterator[Sample]:
    """Of each verdict with an open finding, the earliest step of its evidence."""
    first: dict[str, float] = {}
    for finding in _open(run):
        name, since = str(finding.get("verdict")), number(finding, "since_step")
        if not math.isnan(since):
            first[name] = min(since, first.get(name, math.inf))
    for name, since in first.items():
        yield Sample((name,), since)


def catastrophic(run: RunSnapshot) -> Iterator[Sample]:
    names = {str(finding.get("verdict")) for finding in _open(run) if finding.get("catastrophic") is True}
    for name in ("DATA", "ENGINE"):
        yield Sample((name,), float(name in names))


def producers(run: RunSnapshot) -> Iterator[Sample]:
    counted = Counter((str(p.get("role", "")), str(p.get("state", ""))) for p in run.producers)
    for role in sorted({role for role, _ in counted}):
        for state in PRODUCER_STATES:
            yield Sample((role, state), float(counted[role, state]))


def producer_steps(run: RunSnapshot) -> Iterator[Sample]:
    """The newest step of each role and rank; engine replicas are told apart by the engine label."""
    newest: dict[tuple[str, str, str], float] = {}
    for producer in run.producers:
        step = number(producer, "last_step")
        if step >= 0:
            key = _who(producer)
            newest[key] = max(step, newest.get(key, -math.inf))
    for (role, rank, replica), step in newest.items():
        yield Sample((role, rank), step, engine=replica)


def _who(producer: Mapping[str, Json]) -> tuple[str, str, str]:
    role = str(producer.get("role", ""))
    return role, str(producer.get("rank", "")), str(producer.get("replica", "")) if role == "engine" else ""


def of_process(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Iterable[Sample]]:
    def samples(snapshot: Snapshot) -> Iterator[Sample]:
        yield Sample((), read(snapshot))

    return samples
