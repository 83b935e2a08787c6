"""Where each rule draws its line: just beyond it there is a finding, just short of it there is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factories import Job, commands, make_train
from factories_streams import log_softmax, make_noise, make_policy, make_sampled, make_streams, shifted

from dlc_sentinel.config import Config
from dlc_sentinel.core.decide import Decider
from dlc_sentinel.core.facts import StepFacts, Values
from dlc_sentinel.core.profile import Profile
from dlc_sentinel.core.rules.base import View, resumed, rising, skipping, tail_alone
from dlc_sentinel.core.rules.engine import stale_engine

BF16 = {"engine": "bfloat16", "trainer": "bfloat16"}
MOVES = {"lr": 1e-6, "grad_norm": 0.7}


def kinds(job):
    return {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"]}


def found(streams_at, *, steps=4, clean=0, dtypes=BF16, **train):
    """Kinds of findings over `clean` healthy steps and `steps` of `streams_at(step)`."""
    job = Job(dtypes=dtypes)
    for step in range(clean + steps):
        s = make_streams(step, disc=0.03) if step < clean else streams_at(step)
        job.step(step, s.train(**train), scalars=MOVES)
    return kinds(job)


# -- data ------------------------------------------------------------------------------------------------------------


def of_other_tokens(s, hit):
    s.engine = np.where(hit, make_policy(s.shape, s.rng, certain=0.2), s.engine)
    return s


def at_places(which, share=1.0, length=512, rows=32):
    """Engine values of other tokens at the places where `which` is True."""

    def streams(step):
        s = make_streams(step, rows=rows, length=length, disc=0.03)
        return of_other_tokens(s, which(np.arange(length)) & (s.rng.random(s.shape) < share))

    return streams


def test_tokens_off_at_multiples_of_one_number_are_a_chunk_edge():
    assert found(at_places(lambda t: (t % 128 == 0) & (t > 0))) == {"DATA/chunk_edge"}


def test_tokens_off_at_one_place_are_named_by_it():
    assert found(at_places(lambda t: t == 77)) == {"DATA/one_place"}


@pytest.mark.parametrize(("rows", "length", "share"), [(512, 80, 0.4), (512, 80, 1.0), (64, 600, 1.0)])
@pytest.mark.parametrize("strays", [0.0, 0.001, 0.02])
def test_one_place_is_named_beside_tokens_that_are_off_anywhere(rows, length, share, strays):
    damaged = at_places(lambda t: t == 40, share, length, rows)

    def strewn(s):
        wild = s.rng.random(s.shape) < strays
        s.engine = np.where(wild, s.engine - s.rng.exponential(0.4, s.shape), s.engine)
        return s

    def clean(step):
        return strewn(make_streams(step, rows=rows, length=length, disc=0.03))

    assert found(lambda step: strewn(damaged(step)) if step >= 6 else clean(step), steps=12) == {"DATA/one_place"}
    assert found(clean, steps=12) == set()


@pytest.mark.parametrize(
    ("chunk", "rows", "length", "share", "strays"),
    [
        (16, 32, 300, 0.5, 0.002), (32, 32, 300, 0.5, 0.002), (64, 32, 300, 0.5, 0.002),
        (64, 32, 300, 0.9, 0.02),  # more strays than edges
        (64, 8, 2000, 0.3, 0.0004), (64, 16, 1500, 0.2, 0.0004),  # hardly a place has enough far tokens for itself
        (32, 2, 4000, 0.35, 0.006), (32, 2, 8000, 0.3, 0.005),  # of two rows none has, and strays fall on odd 16s
    ],
)  # fmt: skip
def test_the_chunk_is_its_largest_number_although_strays_fall_on_its_parts(chunk, rows, length, share, strays):
    job = Job(dtypes=BF16)
    for step in range(6):
        s = at_places(lambda t: (t % chunk == 0) & (t > 0), share, length, rows)(step)
        job.step(step, of_other_tokens(s, s.rng.random(s.shape) < strays).train(), scalars=MOVES)

    evidence = next(f for f in job.report()["findings"] if f["kind"] == "chunk_edge")["evidence"]
    assert evidence["modulus"] == chunk


@pytest.mark.parametrize(("rows", "length", "place", "strays"), [(200, 80, 40, 0.0005), (400, 300, 130, 0.00005)])
def test_one_place_beside_a_few_tokens_that_are_off_anywhere_is_no_chunk(rows, length, place, strays):
    """Too few of the place's tokens are off to name it, and among the strays one or two lie on a multiple with it."""

    def streams(step):
        s = at_places(lambda t: t == place, 0.25, length, rows)(step)
        return of_other_tokens(s, s.rng.random(s.shape) < strays)

    assert "DATA/chunk_edge" not in found(streams, steps=8)


def test_first_tokens_that_are_off_are_named():
    assert found(at_places(lambda t: t == 0)) == {"DATA/first_token"}


def test_runs_of_tokens_that_are_off_are_a_span_inside_the_mask():
    def streams(step):
        s = make_streams(step, disc=0.03)
        for row in range(len(s.old)):
            at = int(s.rng.integers(5, 40))
            s.engine[row, at : at + 12] = s.old[row, at : at + 12] - s.rng.uniform(1.0, 2.0, 12)
        return s

    assert found(streams, clean=6) == {"DATA/masked_span"}


def test_first_tokens_after_masked_spans_that_are_off_are_a_turn_edge():
    def streams(step):
        s = make_streams(step, length=160, disc=0.03)
        start = s.rng.integers(40, 80, len(s.old))
        places = np.arange(160)
        s.mask = (places < start[:, None]) | (places >= start[:, None] + 30)
        s.engine[np.arange(len(s.old)), start + 30] = -s.rng.uniform(3.0, 5.0, len(s.old))
        return s

    assert found(streams) == {"DATA/turn_edge"}


def test_a_shift_explains_that_the_engine_seems_off_as_well():
    def streams(step):
        s = make_streams(step, disc=0.03)
        s.old = s.cur = shifted(s.old, 1, s.rng)
        return s

    assert found(streams, clean=6) == {"DATA/offset"}


@pytest.mark.parametrize(("quiet", "state"), [(2, "confirmed"), (3, "closed")])
def test_a_finding_closes_after_three_steps_without_it(quiet, state):
    job = Job(dtypes=BF16)
    for step in range(4 + quiet):
        s = make_streams(step, disc=0.03)
        if step < 4:
            s.engine.reshape(-1)[:100] = np.nan
        job.step(step, s.train(), scalars=MOVES)

    assert [f["state"] for f in job.report()["findings"]] == [state]


@pytest.mark.parametrize(("share", "wanted"), [(0.016, {"DATA/non_finite"}), (0.006, set())])
def test_a_cause_of_one_percent_of_the_tokens_is_a_finding(share, wanted):
    def streams(step):
        s = make_streams(step, disc=0.03)
        s.engine.reshape(-1)[: int(share * s.engine.size)] = np.nan
        return s

    assert found(streams) == wanted


@pytest.mark.parametrize(("value", "name"), [(np.nan, "non_finite"), (-9999.0, "placeholder")])
@pytest.mark.parametrize(("rows", "wanted"), [(63, False), (64, True)])
def test_last_tokens_without_a_value_are_a_finding_however_long_the_rows(value, name, rows, wanted):
    def streams(step):
        s = make_streams(step, disc=0.03, rows=72, length=300)
        s.engine[:rows, -1] = value
        return s

    assert found(streams) == ({f"DATA/{name}"} if wanted else set())


@pytest.mark.parametrize(("value", "catastrophic"), [(np.nan, True), (-9999.0, False)])
def test_one_percent_that_is_not_finite_is_a_catastrophe(value, catastrophic):
    job = Job(dtypes=BF16)
    for step in range(3):
        s = make_streams(step, disc=0.03)
        s.engine.reshape(-1)[: int(0.05 * s.engine.size)] = value
        job.step(step, s.train(), scalars=MOVES)

    assert [f["catastrophic"] for f in job.report()["findings"]] == [catastrophic]


@pytest.mark.parametrize(("share", "wanted"), [(0.016, {"TRANSFORM/logits"}), (0.006, set())])
def test_one_percent_of_values_above_0_are_logits(share, wanted):
    def streams(step):
        s = make_streams(step, disc=0.03)
        s.engine.reshape(-1)[: int(share * s.engine.size)] = 2.0
        return s

    assert found(streams) == wanted


@pytest.mark.parametrize(("cut", "wanted"), [(0.65, {"DATA/finish_reason"}), (0.2, set())])
def test_rows_counted_as_cut_though_the_engine_finished_them_are_DATA(cut, wanted):
    job = Job(dtypes=BF16)
    for step in range(4):
        s = make_streams(step, disc=0.03)
        job.feed(s.rollout(finish="stop"), numbered=False)
        job.step(
            step, s.train(with_engine=False, span_start_K=None, span_version_K=None),
            scalars=MOVES | {"truncated_ratio": cut},
        )  # fmt: skip

    assert kinds(job) == wanted


# -- transforms ------------------------------------------------------------------------------------------------------


def shaped(x_of):
    """Streams whose trainer - engine is `x_of(engine, rng)`, nats."""

    def streams(step):
        s = make_streams(step, disc=0.0)
        s.engine = np.minimum(s.engine, -1e-4)
        s.old = s.cur = np.minimum(s.engine + x_of(s.engine, s.rng), -1e-6)
        return s

    return streams


def test_a_bias_with_noise_on_both_sides_is_no_cut_distribution():
    assert found(shaped(lambda e, rng: rng.normal(-0.02, 0.03, e.shape))) == set()


@pytest.mark.parametrize(("lost", "wanted"), [(0.02, {"TRANSFORM/kept_mass"}), (0.002, set())])
def test_a_cut_of_half_a_percent_of_the_mass_is_named(lost, wanted):
    assert found(shaped(lambda e, rng: np.where(rng.random(e.shape) < lost / 0.05, -0.0513, 0.0))) == wanted


@pytest.mark.parametrize(("noise", "wanted"), [(0.02, {"TRANSFORM/temperature"}), (0.25, set())])
def test_a_slope_must_explain_half_of_the_difference(noise, wanted):
    names = found(shaped(lambda e, rng: -0.12 * e + rng.normal(0.0, noise, e.shape) * (e < -0.05)))

    assert {name for name in names if name.startswith("TRANSFORM")} == wanted


@pytest.mark.parametrize(("engine", "trainer", "side"), [(0.6, 1.0, "engine"), (1.0, 0.6, "trainer")])
def test_the_side_that_is_tempered_is_told(engine, trainer, side):
    job = Job(dtypes=BF16)
    for step in range(3):
        s = make_sampled(step, lambda x: log_softmax(x / engine), lambda x: log_softmax(x / trainer))
        job.step(step, s.train(), scalars=MOVES)

    (finding,) = job.report()["findings"]
    assert (finding["kind"], finding["evidence"]["tempered_side"]) == ("temperature", side)


# -- label -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "wanted"), [(2, {"LABEL/future_version"}), (0, set())])
def test_two_rows_in_a_hundred_from_the_future_are_LABEL(rows, wanted):
    def streams(step):
        s = make_streams(step, rows=100, disc=0.03)
        s.fields = {"span_version_K": np.where(np.arange(100) < rows, step + 3, step)}
        return s

    assert found(streams) == wanted


def test_one_row_of_other_weights_now_and_again_is_chance():
    def streams(step):
        s = make_streams(step, rows=16, disc=0.03)
        if step in (8, 10):
            s.engine[0] = np.minimum(s.old[0] - make_noise(s.old[0], 0.4, s.rng), -1e-6)
        return s

    assert found(streams, steps=14) == set()


@pytest.mark.parametrize(("share", "wanted"), [(0.08, {"LABEL/other_version"}), (0.02, set())])
def test_rows_that_fit_the_present_weights_and_not_their_label_are_found_from_one_in_twenty_five_on(share, wanted):
    def streams(step):
        s = make_streams(step + 1, rows=50, disc=0.02)
        wrong = s.rows(share)
        s.old[wrong] = np.minimum(s.cur[wrong] - make_noise(s.cur[wrong], 0.3, s.rng), -1e-6)
        s.fields = {"span_version_K": np.where(np.isin(np.arange(50), wrong), step, step + 1)}
        return s

    assert {name for name in found(streams, steps=8) if name.startswith("LABEL")} == wanted


# -- engine ----------------------------------------------------------------------------------------------------------


def off(s, rms):
    s.engine = np.minimum(s.old - make_noise(s.old, rms, s.rng), -1e-6)
    return s


@pytest.mark.parametrize(("rms", "named"), [(0.12, True), (0.075, False)])
def test_an_engine_is_off_beyond_three_floors(rms, named):
    names = found(lambda step: off(make_streams(step), rms), clean=6)

    assert ("ENGINE/level" in names) == named


MOE = {"engine": "moe", "trainer": "moe"}


@pytest.mark.parametrize(("rms", "commands"), [(0.4, ["ABORT"]), (0.24, [])])
def test_an_abort_is_due_beyond_five_floors(rms, commands):
    job = Job(mode="abort", dtypes=MOE)
    for step in range(10):
        s = make_streams(step, rows=64, disc=0.06) if step < 6 else off(make_streams(step, rows=64, certain=0.2), rms)
        job.step(step, s.train(), scalars=MOVES)

    assert [c["kind"] for c in job.report()["commands"]] == commands


@pytest.mark.parametrize(("rms", "suspected"), [(0.06, True), (0.036, False)])
def test_a_repeated_checksum_tells_from_one_and_a_half_floors_on(rms, suspected):
    job = Job(mode="observe", dtypes=BF16)
    for step in range(12):
        job.step(step, make_streams(step, disc=0.03 if step < 8 else rms).train(), scalars=MOVES)
        job.synced(step + 1, step, checksum=f"c{min(step, 6)}")

    assert ("STALE_ENGINE/never_delivered" in kinds(job)) == suspected


def test_what_has_grown_step_by_step_is_no_catastrophe():
    job = Job(mode="observe", dtypes=BF16)
    for step in range(36):
        s = make_streams(step, rows=64, certain=0.3, disc=0.03 + 0.013 * min(max(step - 6, 0), 20))
        job.step(step, s.train(), scalars=MOVES)

    assert kinds(job) == {"STALE_ENGINE/stale_or_drift"}  # nobody tested it, so the suspicion stands
    assert [c["kind"] for c in job.report()["commands"]] == ["RESYNC"]


@pytest.mark.parametrize(("rms", "wanted"), [(0.008, {"ENGINE/changed"}), (0.003, set())])
def test_a_change_below_five_thousandths_of_a_nat_is_numerics(rms, wanted):
    job = Job()
    for step in range(16):
        job.step(step, make_streams(step, rows=64, disc=0.001 if step < 12 else rms).train(), scalars=MOVES)

    assert kinds(job) == wanted


def facts(rms, step):
    values = Values(rms=rms, p50_abs=rms / 10, p99_abs=4 * rms, num=3000)
    return StepFacts(step, step, current=values, discrepancy=values, num_tokens=3000, floor_rms=0.03)


LEFT = [0.03, 0.045, 0.06, 0.075, 0.088]


@pytest.mark.parametrize(
    ("newest", "rises"),
    [
        ([0.100, 0.104, 0.108, 0.112, 0.116, 0.120], True),
        ([0.100, 0.112, 0.102, 0.098, 0.109, 0.121], False),  # two of three pairs in order
        ([0.100, 0.101, 0.102, 0.103, 0.104, 0.105], False),  # five percent
        ([0.100, 0.101, 0.102, 0.130, 0.131, 0.132], False),  # one step makes nearly all of it
    ],
)
def test_a_rise_is_in_order_by_a_tenth_and_by_no_single_step(newest, rises):
    history = [facts(rms, step) for step, rms in enumerate(LEFT + newest)]

    assert (rising(history)[0] >= 0) == rises


def test_a_slow_rise_after_a_jump_is_none_of_stale_weights():
    jumped = [0.03] * 5 + [0.40, 0.42, 0.44, 0.46, 0.48, 0.50]
    walked = [0.03, 0.06, 0.12, 0.18, 0.24, 0.30, 0.36]

    assert rising([facts(rms, step) for step, rms in enumerate(jumped)])[0] < 0
    assert rising([facts(rms, step) for step, rms in enumerate(walked)])[0] >= 0


def test_a_rise_that_single_steps_hide_is_seen_in_medians_of_five():
    history = [facts((0.04 + 0.0045 * i) * (1.0 + 0.15 * (-1) ** i), i) for i in range(20)]

    assert rising(history)[0] >= 0
    assert rising(history[:19])[0] < 0  # three windows and a bit


@pytest.mark.parametrize(("steps", "named"), [(6, False), (20, True)])
def test_a_small_change_at_once_that_stays_for_three_windows_is_a_level_and_no_drift(steps, named):
    names = found(lambda step: make_streams(step, rows=48, disc=0.05), clean=20, steps=steps)

    assert ("ENGINE/level" in names) == named and "ENGINE/drift" not in names


def test_a_drift_that_has_ended_is_still_no_jump():
    names = found(lambda step: make_streams(step, rows=48, disc=0.03 + 0.0025 * min(step - 20, 14)), clean=20, steps=44)

    assert "ENGINE/drift" in names and "ENGINE/level" not in names


@pytest.mark.parametrize(("steps", "named"), [(12, False), (36, True)])
def test_a_drift_has_stayed_above_the_floor_for_three_windows(steps, named):
    names = found(lambda step: make_streams(step, rows=48, disc=0.03 + 0.0012 * (step - 20)), clean=20, steps=steps)

    assert ("ENGINE/drift" in names) == named


def test_prompts_all_of_whose_rows_are_off_are_named():
    def streams(step):
        s = make_streams(step, rows=64, disc=0.03)
        s.engine[:8] = np.minimum(s.old[:8] - make_noise(s.old[:8], 0.5, s.rng), -1e-6)
        return s

    assert "ENGINE/prompt_keyed" in found(streams, clean=6)


@pytest.mark.parametrize(("obeyed", "wanted"), [(False, {"STALE_ENGINE/one_replica"}), (True, {"ENGINE/replica"})])
def test_one_replica_that_is_off_may_hold_old_weights_until_a_RESYNC_has_changed_nothing(obeyed, wanted):
    job = Job(dtypes=BF16)
    for step in range(24):
        records = []
        for replica in ("0", "1"):
            s = make_streams(step, rows=24, disc=0.03, seed=int(replica))
            s = off(s, 0.3) if step >= 5 and replica == "1" else s
            names = tuple(f"{replica}-{step}-{i}" for i in range(24))
            records.append(s.train(ids=names, groups=names, micro=int(replica), replica=replica))
        for command in commands(job.step(step, *records, scalars=MOVES)):
            if obeyed and command["sent"]:
                job.ack(command, version=step + 1, step=step)

    assert not any(name.startswith("LABEL") for name in kinds(job))
    ended = {f"{f['verdict']}/{f['kind']}" for f in job.report()["findings"] if f["state"] == "superseded"}
    assert wanted <= kinds(job) - ended and (not obeyed or ended == {"STALE_ENGINE/one_replica"})


def test_an_engine_whose_logprobs_lie_on_a_coarse_grid_is_named():
    def streams(step):
        s = off(make_streams(step, rows=48, length=128), 0.1)
        s.engine = np.minimum(np.round(s.engine * 3.0) / 3.0, -1e-6)
        return s

    assert "ENGINE/quantised" in found(streams, clean=6)


def test_a_difference_that_grows_along_the_response_is_named():
    def streams(step):
        s = make_streams(step, length=256, disc=0.03)
        grown = np.linspace(0.01, 0.6, 256)
        s.engine = np.minimum(s.old - s.rng.normal(size=s.shape) * grown * -np.expm1(s.old), -1e-6)
        return s

    assert "ENGINE/position" in found(streams, clean=6)


@pytest.mark.parametrize(("rms", "wanted"), [(0.14, {"ENGINE/trainer_noise"}), (0.07, set())])
def test_a_trainer_that_disagrees_with_itself_by_a_tenth_of_a_nat_is_named(rms, wanted):
    def streams(step):
        s = make_streams(step, disc=0.03)
        s.cur = np.minimum(s.old + s.rng.normal(0.0, rms, s.shape), -1e-6)
        return s

    assert found(streams) == wanted


def test_a_catastrophe_needs_the_largest_hundredth_to_be_off():
    job = Job(mode="abort", dtypes={"engine": "float16", "trainer": "float16"})
    for step in range(4):
        s = make_streams(step, disc=0.004)
        s.engine.reshape(-1)[::300] -= 4.0
        job.step(step, s.train(), scalars=MOVES)

    assert job.report()["commands"] == []


# -- lag, and what cannot be seen ------------------------------------------------------------------------------------


def test_lag_made_inside_a_step_is_called_epochs():
    job = Job(mode="observe")
    for step in range(4):
        updates = [
            make_train(step, update=u, lag=0.1 * u, rows=16, ids=[f"u{u}-{step}-{i}" for i in range(16)])
            for u in range(4)
        ]
        job.step(step, *updates)

    assert kinds(job) == {"LAG/epochs"}


@pytest.mark.parametrize(("young", "kind"), [(0.02, "queue"), (0.4, "old_weights")])
def test_where_the_youngest_rows_are_fine_the_others_are_dropped_else_weights_are_fetched(young, kind):
    job = Job()
    for step in range(4):
        records = [
            make_train(step, step + 9, step + made, lag=lag, ids=[f"{made}-{step}-{i}" for i in range(32)])
            for made, lag in ((8, young), (1, 0.5))
        ]
        job.step(step, *records)

    assert kinds(job) == {f"LAG/{kind}"}
    assert [c["action"] for c in job.report()["commands"]] == ["drop_stale" if kind == "queue" else "sync_weights"]


def test_a_few_aged_tokens_prove_no_wire_missing():
    job = Job()
    for step in range(6):
        job.step(step, gen_version=max(step - 2, 0), lag=0.0, rows=8, length=96)

    assert kinds(job) == set()


def test_one_step_that_cannot_be_split_between_two_that_can_leaves_nobody_blind():
    job = Job()
    for step in range(9):
        unknown = {"old_is": "absent", "old_N": None, "gen_version": -1, "lag": 0.25}
        job.step(step, version=step + 3, **(unknown if step % 2 else {"gen_version": step, "lag": 0.02}))

    assert kinds(job) == set()


UNKNOWN = StepFacts(4, 4, num_tokens=3000, floor_rms=0.03)
"""A step with tokens whose discrepancy nobody knows."""


@pytest.mark.parametrize("unknown", [(0,), (2,), (1, 2), (0, 4), (0, 1, 2, 3, 4)])
def test_steps_without_a_known_discrepancy_do_not_decide_whether_the_tail_alone_has_grown(unknown):
    grown = replace(facts(0.2, 10), discrepancy=Values(rms=0.2, p50_abs=0.003, p99_abs=0.8, num=3000))
    history = [UNKNOWN if step in unknown else facts(0.03, step) for step in range(10)] + [grown]

    assert tail_alone(history)
    assert not tail_alone([UNKNOWN] * 4)


def test_a_process_that_goes_on_is_known_by_its_own_first_step():
    history = [facts(0.03, step) for step in range(20)] + [facts(0.2, 20), replace(UNKNOWN, step=21)]
    view = View(Config(), resumed_step=20)

    (found,) = stale_engine(history[:-1], view)
    assert found.kind == "after_resume" and found.evidence["first_step_after_a_resume"] == 20
    assert resumed(history, view)  # and by no step that says nothing


def test_what_the_trainer_has_moved_since_its_engine_was_at_its_floor_outlives_a_step_that_says_nothing():
    decider = Decider(Config(), "r1")
    for step in range(6):
        said = UNKNOWN if step == 4 else facts(0.2, step)
        decider.before_rules(replace(said, step=step, scalars={"displacement_nats": 0.05}))

    assert decider.state.displacement_nats == pytest.approx(0.3)
    assert decider.state.displacement_quiet_nats == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("course", "skips"),
    [
        ([0.10, 0.15, 0.20, 0.03, 0.10, 0.15, 0.20, 0.03, 0.10], True),
        ([0.10, 0.15, 0.20, 0.26, 0.33, 0.03, 0.10, 0.15], False),  # back but once
        ([0.10, 0.15, 0.20, 0.06, 0.10, 0.15, 0.20, 0.06, 0.10], False),  # never back at its floor
        ([0.10, 0.15, 0.03, 0.10, 0.15, 0.03, 0.10], False),  # two pairs of steps, which is chance
        ([0.10, 0.104, 0.108, 0.03, 0.10, 0.104, 0.108, 0.03, 0.10], False),  # worse by four percent
        ([0.10, 0.15, 0.11, 0.03, 0.10, 0.15, 0.11, 0.03, 0.10], False),  # as often better as worse
    ],
)
def test_missed_syncs_show_as_a_rise_that_ends_at_the_floor_more_than_once(course, skips):
    history = [facts(rms, step) for step, rms in enumerate([0.03, 0.03, *course])]

    assert skipping(history) == (2 if skips else -1)


@pytest.mark.parametrize(("first", "later", "stale"), [(0.05, 0.12, True), (0.089, 0.095, False)])
def test_the_first_update_shows_a_broken_delivery_by_a_jump_and_not_by_a_hair(first, later, stale):
    profile = Profile(correlation=0.9)
    history = [replace(facts(rms, step), profile=profile) for step, rms in enumerate([first, later])]

    assert bool(stale_engine(history, View(Config()))) == stale
