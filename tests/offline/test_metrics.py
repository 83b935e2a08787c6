"""Logs of numbers: what is exact in them, what is suspected, and what is said to be unknown."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from factories_streams import make_noise, make_policy

from dlc_sentinel.core.facts import StepFacts
from dlc_sentinel.errors import TapeError
from dlc_sentinel.offline.analyze import exit_code, judge
from dlc_sentinel.offline.metrics import MetricStep


def rollout_corr(total_N):
    """What verl logs of a total log-ratio (trainer minus engine), in its own sign."""
    rho = np.exp(total_N)
    return {
        "rollout_corr/kl": float(-total_N.mean()),
        "rollout_corr/k3_kl": float((rho - total_N - 1).mean()),
        "rollout_corr/chi2_token": float((rho**2).mean() - 1),
    }


def noise(rms, seed=0, num=20_000):
    rng = np.random.default_rng(seed)
    return make_noise(make_policy(num, rng), rms, rng)


def metrics(folder, steps):
    """A file of verl's logger; `steps` = one dict of numbers each, from step 1."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "data": data}) + "\n" for n, data in enumerate(steps, 1)))
    return path


def aged(age, total_N, **more):
    staleness = {f"training/off_policy/trajectory_staleness/{k}": float(age) for k in ("mean", "max")}
    worst = {"training/off_policy/trajectory_staleness_worst/max": float(age)}
    return rollout_corr(total_N) | staleness | worst | more


@pytest.mark.parametrize("rms", [1e-3, 0.05, 0.3, 1.0, 3.0])
def test_the_token_level_ess_of_the_total_is_exact_from_three_logged_numbers(rms):
    total_N = noise(rms)
    rho = np.exp(total_N)
    logged = rollout_corr(total_N)

    step = MetricStep(1, *(logged[f"rollout_corr/{name}"] for name in ("kl", "k3_kl", "chi2_token")))

    assert step.total_ess == pytest.approx(rho.sum() ** 2 / (len(rho) * (rho**2).sum()), rel=1e-9)


def test_numbers_that_contradict_each_other_give_no_ess():
    assert math.isnan(MetricStep(1, kl=3.0, k3_kl=0.1, chi2_token=0.0).total_ess)
    assert math.isnan(MetricStep(1, kl=0.1, k3_kl=0.1, chi2_token=-1.5).total_ess)
    assert math.isnan(MetricStep(1, kl=0.1, k3_kl=0.1).total_ess)


def test_a_log_of_fresh_rows_at_the_floor_is_healthy_and_its_steps_have_every_key(tmp_path):
    judged = judge(metrics(tmp_path, [aged(0, noise(0.03, n)) for n in range(12)]))

    report = judged.report
    assert (report["verdict"], exit_code(report), report["commands"], report["unparsed_lines"]) == (
        "HEALTHY",
        0,
        [],
        [],
    )
    step = report["steps"][-1]
    assert set(StepFacts(0, 0).to_public()) <= set(step)
    assert step["basis"] == "exact" and step["discrepancy"]["mean"] == pytest.approx(noise(0.03, 11).mean(), abs=1e-9)
    assert step["total_ess"]["1"] > 0.99
    unknown = ("num_tokens", "num_groups", "version", "loop_gain", "half_horizon")
    assert [step[name] for name in unknown] == [None] * len(unknown)
    assert set(step["dropped"].values()) == set(step["lag_ess"].values()) == {None}
    json.dumps(report, allow_nan=False)


def test_rows_of_older_weights_make_the_basis_mixed_and_it_is_said(tmp_path):
    judged = judge(metrics(tmp_path, [aged(2, noise(0.06, n)) for n in range(6)]))

    assert judged.report["verdict"] == "BLIND"
    assert judged.report["findings"][0]["kind"] == "mixed_basis"
    assert judged.report["steps"][-1]["discrepancy"]["mean"] is None
    assert any("up to 2 versions old" in note for note in judged.notes)


def test_a_total_so_small_that_lag_is_excluded_needs_no_split(tmp_path):
    assert judge(metrics(tmp_path, [aged(2, noise(1e-3, n)) for n in range(6)])).report["verdict"] == "HEALTHY"


def test_a_log_without_ages_is_mixed_unless_it_is_said_to_be_on_policy(tmp_path):
    path = metrics(tmp_path, [rollout_corr(noise(0.03, n)) for n in range(6)])

    assert judge(path).report["verdict"] == "BLIND"
    assert any("ages are not logged" in note for note in judge(path).notes)
    assert judge(path, on_policy=True).report["verdict"] == "HEALTHY"


def test_an_engine_off_on_fresh_rows_is_ENGINE(tmp_path):
    report = judge(metrics(tmp_path, [aged(0, noise(0.4, n)) for n in range(6)])).report

    assert (report["verdict"], report["findings"][0]["kind"], exit_code(report)) == ("ENGINE", "level", 10)


def test_fresh_rows_that_drift_away_are_drift_or_undelivered_weights(tmp_path):
    report = judge(metrics(tmp_path, [aged(0, noise(0.02 + 0.01 * n, n)) for n in range(30)])).report

    assert (report["verdict"], report["findings"][0]["kind"]) == ("ENGINE", "drift_or_undelivered")


def test_old_rows_that_are_far_off_where_fresh_ones_agree_are_suspected_LAG(tmp_path):
    steps = [aged(n % 4, noise(0.01 + 0.08 * (n % 4), n)) for n in range(16)]

    report = judge(metrics(tmp_path, steps)).report

    assert (report["verdict"], report["findings"][0]["state"]) == ("LAG", "suspected")
    assert "lag_ess_32_about" in report["findings"][0]["evidence"]


def test_one_wild_token_in_old_rows_is_no_lag(tmp_path):
    steps = [aged(n % 2, noise(0.01, n)) for n in range(12)]
    for step in steps[1::2]:
        step["rollout_corr/k3_kl"] = 971.0
        step["rollout_corr/chi2_token"] = 1e6

    assert "LAG" not in [f["verdict"] for f in judge(metrics(tmp_path, steps)).report["findings"]]


def test_bypass_mode_logs_nothing_of_the_mismatch_and_is_BLIND(tmp_path):
    judged = judge(metrics(tmp_path, [{"actor/entropy": 0.5, "critic/rewards/mean": 0.1}] * 4))

    assert judged.report["findings"][0]["kind"] == "no_mismatch_metrics"
    assert "nothing is logged of engine against trainer" in judged.notes


def test_an_entropy_that_collapses_is_LEARNING_though_the_mismatch_is_fine(tmp_path):
    steps = [aged(0, noise(0.02, n), **{"actor/entropy": 0.9 * 0.9**n}) for n in range(40)]

    report = judge(metrics(tmp_path, steps)).report

    assert (report["verdict"], report["findings"][0]["kind"]) == ("LEARNING", "entropy")


def test_lines_that_do_not_parse_are_reported_by_number_and_nan_is_no_number(tmp_path):
    path = metrics(tmp_path, [aged(0, noise(0.03, n)) for n in range(3)])
    path.write_text(
        "nonsense\n\n" + path.read_text() + '{"step": 9, "data": {"rollout_corr/kl": NaN, "x": Infinity}}\n'
    )

    report = judge(path).report

    assert report["unparsed_lines"] == [1]
    assert (report["steps"][-1]["step"], report["steps"][-1]["basis"]) == (9, "none")


def test_a_step_logged_in_several_lines_is_one_step_in_any_order(tmp_path):
    whole = [aged(0, noise(0.03, n)) for n in range(4)]
    path = metrics(tmp_path, whole)
    expected = judge(path).report
    halves = [
        json.dumps({"step": n, "data": dict(part)})
        for n, data in enumerate(whole, 1)
        for part in (list(data.items())[:2], list(data.items())[2:])
    ]
    path.write_text("\n".join(reversed(halves)) + "\n")

    assert judge(path).report == expected


def trainer_state(path, steps):
    history = [{"step": n, "loss": 0.1, **data} for n, data in enumerate(steps, 1)]
    path.write_text(json.dumps({"global_step": len(steps), "log_history": [*history, {"train_runtime": 3.0}]}))


def test_a_trl_run_is_found_by_its_newest_checkpoint_and_judged_by_the_mean_difference(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    state = {"sampling/sampling_logp_difference/mean": 0.012, "entropy": 0.4, "learning_rate": 1e-6}
    trainer_state(tmp_path / "checkpoint-5" / "trainer_state.json", [state] * 6)

    unsaid, on_policy = judge(tmp_path), judge(tmp_path, on_policy=True)

    assert (unsaid.report["verdict"], on_policy.report["verdict"]) == ("BLIND", "HEALTHY")
    assert "known: mean |difference| of the logprobs only, no ESS" in unsaid.notes


def test_a_trl_run_off_by_0_3_nats_on_average_is_ENGINE(tmp_path):
    trainer_state(tmp_path / "trainer_state.json", [{"sampling/sampling_logp_difference/mean": 0.3}] * 4)

    assert judge(tmp_path, on_policy=True).report["verdict"] == "ENGINE"


def test_a_trl_log_without_the_mismatch_says_what_TRL_needs_to_log_it(tmp_path):
    trainer_state(tmp_path / "trainer_state.json", [{"reward": 0.5}] * 4)

    (finding,) = judge(tmp_path).report["findings"]

    assert finding["kind"] == "no_mismatch_metrics"
    assert "use_vllm" in finding["advice"] and "verl" not in finding["advice"]


@pytest.mark.parametrize("text", ["{}", '{"log_history": 3}', "[1]"])
def test_a_file_that_is_no_trainer_state_is_told_what_is_missing(text, tmp_path):
    (tmp_path / "trainer_state.json").write_text(text)

    with pytest.raises(TapeError, match=r"not trainer_state\.json of TRL \(no log_history in it\); wanted its list"):
        judge(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"log_history": 3}', "[1]", '{"log_history": []}', '{"log_history": [3]}'])
def test_a_trainer_state_without_a_history_is_refused(text, tmp_path):
    (tmp_path / "trainer_state.json").write_text(text)

    with pytest.raises(TapeError, match=r"trainer_state\.json"):
        judge(tmp_path)
