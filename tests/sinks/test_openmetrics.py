"""A run that is over as OpenMetrics text: one sample a step, repeated as a scrape would have seen it."""

from __future__ import annotations

import math

import pytest
from factories_snapshots import make_event, make_run, make_snapshot, make_step
from prometheus_client.openmetrics.parser import text_fd_to_metric_families

from dlc_sentinel import catalog
from dlc_sentinel.plaintext import label
from dlc_sentinel.sinks import openmetrics
from dlc_sentinel.sinks.openmetrics import LIVE_ONLY, OpenMetricsSink


def written(sink, tmp_path):
    """{metric: [(labels, value, time)]}, read by Prometheus' own parser."""
    path = tmp_path / "run.om"
    sink.write(path)
    with path.open() as file:
        families = list(text_fd_to_metric_families(file))
    return {
        sample.name: [(s.labels, s.value, float(s.timestamp)) for s in family.samples if s.name == sample.name]
        for family in families for sample in family.samples
    }  # fmt: skip


def told(sink, *, steps, every_s=10.0):
    for step in range(steps):
        sink.handle(make_event("step", step=step, t_s=1000.0 + every_s * step))
        run = make_run(last_step=step, num_frames=10 * step, step=make_step(step, lag_ess={"32": 1 - step / 10}))
        sink.publish(make_snapshot(run, t_s=5000.0))


def test_each_step_is_a_sample_at_the_time_the_step_was_closed(tmp_path):
    sink = OpenMetricsSink()
    told(sink, steps=3)

    found = written(sink, tmp_path)["dlc_sentinel_action_lag_ess_ratio"]

    assert [(value, at) for _, value, at in found] == [(1.0, 1000.0), (0.9, 1010.0), (0.8, 1020.0)]
    assert found[0][0] == {"run": "r1", "model_name": "Qwen3-0.6B", "engine": "0"}


def test_between_steps_the_values_are_repeated(tmp_path):
    sink = OpenMetricsSink(fill_s=30.0)
    told(sink, steps=2, every_s=100.0)
    found = written(sink, tmp_path)["dlc_sentinel_last_step"]

    assert [(value, at) for _, value, at in found] == [(0, 1000), (0, 1030), (0, 1060), (0, 1090), (1, 1100)]


def test_a_long_pause_stays_a_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(openmetrics, "MAX_FILLS", 5)
    sink = OpenMetricsSink(fill_s=30.0)
    told(sink, steps=2, every_s=1e7)

    assert len(written(sink, tmp_path)["dlc_sentinel_last_step"]) == 2 + 5


def test_it_may_be_moved_to_end_now_with_the_times_among_the_values(tmp_path):
    sink = OpenMetricsSink()
    told(sink, steps=2)
    before = written(sink, tmp_path)["dlc_sentinel_producer_last_seen_timestamp_seconds"][0]
    sink.end_at(9000.0)
    after = written(sink, tmp_path)["dlc_sentinel_producer_last_seen_timestamp_seconds"][0]

    assert after[2] - before[2] == after[1] - before[1] == 9000.0 - 1010.0


def test_every_metric_is_there_but_what_only_a_living_process_has(tmp_path):
    sink = OpenMetricsSink()
    told(sink, steps=1)

    names = {name.removeprefix(catalog.PREFIX) for name in written(sink, tmp_path)}

    assert names.isdisjoint(LIVE_ONLY)
    assert {"lag_ess_ratio", "commands_total", "basis_info", "verdict_info", "half_horizon_tokens"} <= names


def test_two_pictures_of_one_moment_are_one_sample(tmp_path):
    sink = OpenMetricsSink()
    told(sink, steps=1)
    sink.publish(make_snapshot(make_run(last_step=7), t_s=1000.0))

    assert [value for _, value, _ in written(sink, tmp_path)["dlc_sentinel_last_step"]] == [0]


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "ünï"])
def test_a_hostile_run_name_is_one_label_value(tmp_path, name):
    sink = OpenMetricsSink()
    sink.publish(make_snapshot(make_run(run=name), t_s=1000.0))

    (labels, _, _), *_ = written(sink, tmp_path)["dlc_sentinel_last_step"]
    assert labels["run"] == label(name)


def test_infinity_is_written_as_such(tmp_path):
    sink = OpenMetricsSink()
    sink.publish(make_snapshot(make_run(step=make_step(half_horizon="inf")), t_s=1000.0))

    assert written(sink, tmp_path)["dlc_sentinel_half_horizon_tokens"][0][1] == math.inf
