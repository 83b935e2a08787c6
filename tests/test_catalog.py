"""The metric catalogue: names and values are a contract with dashboards, so they are written out here by hand."""

from __future__ import annotations

import math

import pytest
from factories_snapshots import NOW_S, make_finding, make_producer, make_run, make_snapshot, make_step

from dlc_sentinel import catalog, verdicts
from dlc_sentinel.catalog import BY_NAME, LOGGED, METRICS, log_values, series

SPECIFIED = {
    "lag_ess_ratio": ("horizon",), "action_lag_ess_ratio": (), "action_horizon_tokens": (),
    "lag_ess_interval_ratio": ("bound",), "lag_ess_by_age_ratio": ("age",), "blocks": ("horizon",),
    "coverage_ratio": ("horizon",), "half_horizon_tokens": (), "discrepancy_nats": ("stat",), "lag_nats": ("stat",),
    "total_nats": ("stat",), "stale_kv_nats": ("stat",), "floor_nats": ("stat",),
    "discrepancy_by_probability_nats": ("probability",), "discrepancy_by_position_nats": ("position",),
    "discrepancy_by_replica_nats": (), "kl_nats": ("direction", "scope"), "kl_reliable": (), "kl_k1_nats": (),
    "kl_blind_spot_ratio": (), "version_age": ("stat",), "age_tokens": ("age",), "trainer_version": (),
    "engine_version": (), "forecast_steps": ("bound",), "loop_gain_ratio": (), "basis_info": ("basis",),
    "finding_active": ("verdict",), "verdict_info": ("verdict",),
    "finding_confidence_ratio": ("verdict", "kind", "state"), "finding_since_step": ("verdict",),
    "finding_catastrophic": ("verdict",), "commands_total": ("kind", "outcome"), "breaker_open": (),
    "mode_info": ("mode",), "scalar": ("name",), "tokens_total": ("stream",), "step_tokens": (), "step_groups": (),
    "usable_tokens_ratio": (), "dropped_tokens_total": ("cause",), "refused_frames_total": ("cause",),
    "frames_total": (), "sequence_gaps_total": (), "join_bytes": (),
    "producer_last_seen_timestamp_seconds": ("role", "rank"), "producer_last_step": ("role", "rank"),
    "producers": ("role", "state"), "last_step": (), "verdict_latency_seconds": (), "build_info": ("version",),
    "start_timestamp_seconds": (), "published_timestamp_seconds": (), "runs": (),
}  # fmt: skip


def values(name, run=None):
    """{own labels of the metric: value} for one run."""
    return {labels[3:]: value for labels, value in series(BY_NAME[name], make_snapshot(run or make_run())).items()}


def test_the_catalogue_declares_each_specified_metric_once_and_no_other():
    assert [m.name for m in METRICS] == list(BY_NAME)
    assert {m.name: m.labels for m in METRICS} == SPECIFIED


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_a_metric_says_in_a_sentence_what_it_is_and_its_name_ends_in_its_unit_and_kind(metric):
    stem = metric.name.removesuffix("_total")
    assert len(metric.help) > 30
    assert metric.help.rstrip().endswith(".")
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "info") == metric.name.endswith("_info")
    assert metric.unit == "" or stem.endswith(metric.unit)


def test_the_names_of_all_verdicts_have_a_text_in_the_order_of_severity():
    assert [verdict.name for verdict in verdicts.VERDICTS] == list(catalog.VERDICTS)


def test_values_are_those_of_the_last_closed_step():
    run = make_run(
        step=make_step(
            lag_ess={"32": 0.43},
            half_horizon=8,
            discrepancy={"rms": 0.5},
            lag={"p99_abs": 0.7},
            total={"mean": -0.1},
            version_age={"mean": 2.5, "max": 4},
            loop_gain=1.25,
            forecast_steps={"low": 3.0, "mid": 5.0, "high": 9.0},
            kl={
                "gen_now_prefix": 0.1,
                "gen_now_full": 0.2,
                "now_gen_prefix": 0.3,
                "now_gen_full": 0.4,
                "reliability": "low",
            },
        )
    )

    assert values("lag_ess_ratio", run)[("32",)] == 0.43
    assert values("half_horizon_tokens", run) == {(): 8.0}
    assert values("discrepancy_nats", run)[("rms",)] == 0.5
    assert values("lag_nats", run)[("p99_abs",)] == 0.7
    assert values("total_nats", run)[("mean",)] == -0.1
    assert values("version_age", run) == {("mean",): 2.5, ("max",): 4.0}
    assert values("loop_gain_ratio", run) == {(): 1.25}
    assert values("forecast_steps", run) == {("low",): 3.0, ("mid",): 5.0, ("high",): 9.0}
    assert values("kl_nats", run) == {
        ("gen_now", "prefix"): 0.1,
        ("gen_now", "full"): 0.2,
        ("now_gen", "prefix"): 0.3,
        ("now_gen", "full"): 0.4,
    }
    assert values("kl_reliable", run) == {(): 0.5}


@pytest.mark.parametrize("missing", [None, math.nan], ids=["null", "nan"])
def test_a_value_that_is_not_known_is_absent_and_never_zero(missing):
    run = make_run(step=make_step(lag_ess={"32": missing}, loop_gain=missing, kl={"reliability": None}, stale_kv=None))

    assert ("32",) not in values("lag_ess_ratio", run)
    assert ("8",) in values("lag_ess_ratio", run)
    assert values("loop_gain_ratio", run) == {}
    assert values("kl_reliable", run) == {}


def test_a_run_without_a_closed_step_has_counters_and_no_step_values():
    run = make_run(step=None, history=(), last_step=-1)

    published = {m.name for m in METRICS if m.of_run and values(m.name, run)}

    assert "lag_ess_ratio" not in published
    assert "basis_info" not in published
    assert "last_step" not in published
    assert {"frames_total", "tokens_total", "finding_active"} <= published


def test_a_half_horizon_of_whole_sequences_is_infinity():
    assert values("half_horizon_tokens", make_run(step=make_step(half_horizon="inf"))) == {(): math.inf}


def test_counters_of_known_causes_start_at_zero_and_unknown_causes_are_not_lost():
    run = make_run(dropped_tokens={"late": 7, "brand_new": 2}, num_commands={"RESYNC/applied": 3})

    assert values("dropped_tokens_total", run)[("late",)] == 7
    assert values("dropped_tokens_total", run)[("unmatched",)] == 0
    assert values("dropped_tokens_total", run)[("brand_new",)] == 2
    assert values("commands_total", run)[("RESYNC", "applied")] == 3
    assert values("commands_total", run)[("ABORT", "sent")] == 0


def test_a_finding_is_active_while_suspected_or_confirmed_and_the_verdict_of_the_run_is_too():
    run = make_run(
        verdict="BLIND",
        findings=(
            make_finding("LAG", state="suspected"),
            make_finding("ENGINE", state="closed"),
            make_finding("DATA", state="superseded"),
        ),
    )

    active = {labels[0] for labels, value in values("finding_active", run).items() if value == 1.0}

    assert active == {"LAG", "BLIND"}
    assert values("finding_active", run)[("HEALTHY",)] == 0.0


def test_the_engine_label_names_a_single_replica_and_is_all_for_several():
    def labels(engines):
        (found,) = series(BY_NAME["frames_total"], make_snapshot(make_run(engines=engines)))
        return found

    assert labels(("7",)) == ("r1", "Qwen3-0.6B", "7")
    assert labels(("0", "1")) == ("r1", "Qwen3-0.6B", "all")


def test_last_seen_is_that_of_the_newest_of_restarted_producers_and_apart_for_each_engine_replica():
    run = make_run(
        producers=(
            make_producer("trainer", producer="old", last_seen_s=NOW_S - 500, state="gone"),
            make_producer("trainer", producer="new", last_seen_s=NOW_S - 1),
            make_producer("engine", producer="a", replica="0", last_seen_s=NOW_S - 2),
            make_producer("engine", producer="b", replica="1", last_seen_s=NOW_S - 90, state="silent"),
        )
    )

    found = series(BY_NAME["producer_last_seen_timestamp_seconds"], make_snapshot(run))

    assert {labels[2:]: value for labels, value in found.items()} == {
        ("0", "trainer", "0"): NOW_S - 1,
        ("0", "engine", "0"): NOW_S - 2,
        ("1", "engine", "0"): NOW_S - 90,
    }


def test_frames_refused_before_a_run_was_named_carry_empty_run_labels():
    found = series(BY_NAME["refused_frames_total"], make_snapshot(num_refused={"unparsable": 4}))

    assert found[("", "", "", "unparsable")] == 4
    assert found[("r1", "Qwen3-0.6B", "0", "unparsable")] == 0


def test_the_build_has_no_run_labels():
    assert series(BY_NAME["build_info"], make_snapshot(version="1.2.3")) == {("1.2.3",): 1.0}


def test_hostile_run_names_are_inert_short_and_stay_distinct():
    names = ["a\x1b[31mred", "a\x1b[32mred", "x" * 10_000, "x" * 10_001, "two\nlines", "<script>", "r\u202e1"]
    snapshot = make_snapshot(*(make_run(run=name) for name in names))

    labels = [found[0] for found in series(BY_NAME["frames_total"], snapshot)]

    assert len(set(labels)) == len(names)
    assert all(label.isprintable() and len(label) < 150 for label in labels)
    assert "<script>" in labels


def test_log_names_are_the_metric_name_with_label_values_appended():
    logged = log_values(make_run(step=make_step(lag_ess={"32": 0.43, "8": None}, kl={"now_gen_full": 0.9})))

    assert logged["dlc/lag_ess_ratio/32"] == 0.43
    assert logged["dlc/kl_nats/now_gen/full"] == 0.9
    assert logged["dlc/half_horizon_tokens"] == 512.0
    assert "dlc/lag_ess_ratio/8" not in logged


def test_every_published_sample_has_a_log_name_of_its_own():
    run = make_run(producers=(make_producer("engine", replica="0"), make_producer("engine", replica="1")))

    logged = [metric for metric in METRICS if metric.name in LOGGED]
    known = [sample for metric in logged for sample in metric.samples(run) if not math.isnan(sample.value)]

    assert len(logged) == len(LOGGED)
    assert len(log_values(run)) == len(known)


def test_the_action_horizon_picks_the_rung_that_sends_a_resync():
    run = make_run(step=make_step(lag_ess={"8": 0.7, "32": 0.43}), action_horizon=8)

    assert values("action_lag_ess_ratio", run) == {(): 0.7}
    assert values("action_horizon_tokens", run) == {(): 8.0}


def test_the_interval_is_published_by_its_ends():
    assert values("lag_ess_interval_ratio", make_run(step=make_step(lag_ess_interval=[0.4, 0.5]))) == {
        ("low",): 0.4,
        ("high",): 0.5,
    }
    assert values("lag_ess_interval_ratio", make_run(step=make_step(lag_ess_interval=[None, None]))) == {}


def test_of_many_ages_the_youngest_have_series_of_their_own_and_the_oldest_is_named():
    by_age = {str(age): 1 - age / 100 for age in range(2, 60)}

    found = values("lag_ess_by_age_ratio", make_run(step=make_step(lag_ess_by_age=by_age)))

    assert len(found) == 17
    assert found[("2",)] == 0.98 and found[("17",)] == 0.83 and found[("oldest",)] == 1 - 59 / 100


def test_the_numbers_behind_the_ladder_are_published_by_horizon():
    assert values("blocks")[("32",)] == 2048
    assert values("coverage_ratio")[("512",)] == 0.7


def test_the_floor_and_the_stale_cache_stand_beside_the_discrepancy():
    run = make_run(step=make_step(stale_kv={"rms": 0.2}))

    assert values("floor_nats", run) == {("rms",): 0.0118, ("mean_abs",): 0.0085}
    assert values("stale_kv_nats", run) == {("rms",): 0.2}
    assert values("stale_kv_nats") == {}


def test_scalars_are_those_of_the_newest_step_by_name_and_bounded_in_number():
    many = {f"n{number:03}": 1.0 for number in range(100)}

    found = values("scalar", make_run(scalars=({"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.4, "lr": None})))

    assert found == {("reward",): 0.4}
    assert len(values("scalar", make_run(scalars=({"step": 1, **many},)))) == 32
    assert values("scalar", make_run(scalars=())) == {}


def test_the_engines_version_is_the_newest_that_was_delivered():
    syncs = tuple({"step": step, "version": version} for step, version in ((1, 2), (2, 5), (3, -1)))

    assert values("engine_version", make_run(synced=syncs)) == {(): 5.0}
    assert values("engine_version", make_run(synced=())) == {}
    assert values("trainer_version", make_run(step=make_step(version=-1))) == {}


def test_an_open_finding_is_published_with_confidence_and_first_step_and_a_closed_one_is_not():
    run = make_run(
        findings=(
            make_finding("LAG", kind="queue", confidence=0.9, since_step=31),
            make_finding("DATA", kind="shift", catastrophic=True, since_step=7, state="suspected"),
            make_finding("ENGINE", state="closed", catastrophic=True),
        )
    )

    assert values("finding_confidence_ratio", run) == {
        ("LAG", "queue", "confirmed"): 0.9,
        ("DATA", "shift", "suspected"): 0.97,
    }
    assert values("finding_since_step", run) == {("LAG",): 31.0, ("DATA",): 7.0}
    assert values("finding_catastrophic", run) == {("DATA",): 1.0, ("ENGINE",): 0.0}


def test_the_verdict_and_the_mode_are_named():
    run = make_run(verdict="BLIND", mode="observe", breaker_open=True)

    assert values("verdict_info", run) == {("BLIND",): 1.0}
    assert values("mode_info", run) == {("observe",): 1.0}
    assert values("breaker_open", run) == {(): 1.0}


def test_the_usable_share_is_of_all_that_was_offered():
    run = make_run(step=make_step(num_tokens=900, dropped={"late": 60, "unmatched": 40}))

    assert values("usable_tokens_ratio", run) == {(): 0.9}
    assert values("usable_tokens_ratio", make_run(step=make_step(num_tokens=0))) == {}


def test_producers_are_counted_by_role_and_state():
    run = make_run(
        producers=(make_producer("trainer"), make_producer("trainer", rank=1, state="gone"), make_producer("engine"))
    )

    found = values("producers", run)

    assert found[("trainer", "alive")] == found[("trainer", "gone")] == found[("engine", "alive")] == 1
    assert found[("trainer", "silent")] == found[("engine", "gone")] == 0


def test_the_process_tells_since_when_it_listens_how_fresh_its_picture_is_and_of_how_many_runs():
    snapshot = make_snapshot(make_run(), make_run(run="r2"), t_s=70.0, started_s=10.0)

    assert series(BY_NAME["start_timestamp_seconds"], snapshot) == {(): 10.0}
    assert series(BY_NAME["published_timestamp_seconds"], snapshot) == {(): 70.0}
    assert series(BY_NAME["runs"], snapshot) == {(): 2.0}
