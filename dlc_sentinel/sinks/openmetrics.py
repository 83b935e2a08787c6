"""A run that is over as OpenMetrics text with times, for `promtool tsdb create-blocks-from openmetrics`.

Each published snapshot gives one sample per series; between steps the values are repeated every `fill_s`, as a scrape
would have seen them. What is measured while living (latency, signs of life of the process) is left out.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path

from dlc_sentinel import catalog
from dlc_sentinel.records import Event, Snapshot

FILL_S = 30.0
MAX_FILLS = 2880
"""Repetitions in one gap: a day. A longer pause is a pause."""
LIVE_ONLY = frozenset({
    "verdict_latency_seconds", "start_timestamp_seconds", "published_timestamp_seconds", "build_info", "runs",
})  # fmt: skip


class OpenMetricsSink:
    """Keeps every sample; `write` puts them into a file."""

    def __init__(self, *, fill_s: float = FILL_S) -> None:
        self._shift_s = 0.0
        self._fill_s = fill_s
        self._series: dict[str, dict[tuple[str, ...], tuple[array[float], array[float]]]] = {
            metric.name: {} for metric in catalog.METRICS if metric.name not in LIVE_ONLY
        }
        self._step_s: float | None = None
        self._last_s = -math.inf
        self._last: Snapshot | None = None
        self.num_samples = 0

    def handle(self, event: Event) -> None:
        if event.kind == "step":
            self._step_s = event.t_s

    def publish(self, snapshot: Snapshot) -> None:
        # A replay reads ahead: the time of the step that was just closed is the event's.
        t_s, self._step_s = (snapshot.t_s if self._step_s is None else self._step_s), None
        if t_s <= self._last_s:
            return
        if self._last is not None:
            gap = min(int((t_s - self._last_s) / self._fill_s), MAX_FILLS)
            for number in range(1, gap + 1):
                filled_s = self._last_s + number * self._fill_s
                if filled_s < t_s:
                    self._add(self._last, filled_s)
        self._add(snapshot, t_s)
        self._last, self._last_s = snapshot, t_s

    def close(self) -> None:
        """Nothing to release."""

    def end_at(self, t_s: float) -> None:
        """Moves all times, those that are values too, so that the last sample is at `t_s`."""
        if self._last is not None:
            self._shift_s = t_s - self._last_s

    def _add(self, snapshot: Snapshot, t_s: float) -> None:
        for name, found in self._series.items():
            for labels, value in catalog.series(catalog.BY_NAME[name], snapshot).items():
                times, values = found.setdefault(labels, (array("d"), array("d")))
                times.append(t_s)
                values.append(value)
                self.num_samples += 1

    def write(self, path: Path) -> None:
        """One family after the other, each series in order of time, and the end mark."""
        with path.open("w", encoding="utf-8") as file:
            for name, found in self._series.items():
                if found:
                    file.writelines(self._family(catalog.BY_NAME[name], found))
            file.write("# EOF\n")

    def _family(
        self, metric: catalog.Metric, found: dict[tuple[str, ...], tuple[array[float], array[float]]]
    ) -> Iterator[str]:
        family = metric.full_name.removesuffix("_total" if metric.kind == "counter" else "_info")
        is_time = metric.name.endswith("_timestamp_seconds")
        yield f"# HELP {family} {_escape(metric.help)}\n# TYPE {family} {metric.kind}\n"
        for labels, (times, values) in found.items():
            inside = ",".join(
                f'{name}="{_escape(value)}"' for name, value in zip(metric.label_names, labels, strict=True)
            )
            head = f"{metric.full_name}{{{inside}}}"
            for t_s, value in zip(times, values, strict=True):
                shown = value + self._shift_s if is_time else value
                yield f"{head} {_number(shown)} {t_s + self._shift_s:.3f}\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
