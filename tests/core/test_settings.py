"""What the producers' settings say before any data."""

from dataclasses import replace

import pytest
from factories import Job, make_rollout, make_source, make_train, of_kind

from dlc_sentinel.core.settings import unreported, warnings
from dlc_sentinel.records import Hello

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs_mode": "raw_logprobs"}
PLAIN |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize(
    ("engine", "trainer", "word"),
    [
        ({"temperature": 0.6}, {"temperature": 1.0}, "0.6"),
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, {}, "processed_logprobs"),
        ({"temperature": 0.001}, {}, "0.001"),
        ({"top_p": 0.9}, {}, "top_p 0.9"),
        ({"top_k": 20}, {}, "top_k 20"),
        ({"min_p": 0.05}, {}, "min_p 0.05"),
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty 1.1"),
        ({}, {"clip_ratio_high": 1e-5}, "clip_ratio_high"),
        ({}, {"clip_ratio_low": 1e-5}, "clip_ratio_low"),
        ({"frequency_penalty": 0.2}, {}, "frequency_penalty 0.2"),
        ({"presence_penalty": 0.2}, {}, "presence_penalty 0.2"),
        ({}, {"rollout_is_threshold": 2.0}, "0.5"),
    ],
)
def test_a_setting_that_will_hurt_is_named(engine, trainer, word):
    (text,) = warnings(engine, trainer)

    assert word in text


@pytest.mark.parametrize("engine", [PLAIN, {}, {"temperature": None, "top_p": "x"}, {"temperature": True}])
def test_plain_and_unknown_settings_are_not_judged(engine):
    assert warnings(engine, {"temperature": 1.0, "clip_ratio_low": 0.2, "rollout_is_threshold": 5.0}) == []


def test_a_warning_is_said_once_and_before_any_data():
    job = Job()
    for _ in range(3):
        job.feed(Hello(make_source(role="engine", producer="e0"), "tiny", sampling={"top_p": 0.8}))

    notes = of_kind(job.events, "note")
    assert [e.level for e in notes] == ["WARN"] and "top_p 0.8" in notes[0].text


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 50}])
def test_what_raw_logprobs_do_not_show_is_named_with_its_settings(change):
    assert unreported(PLAIN | change) == PLAIN | change
    assert unreported(PLAIN | change | {"logprobs_mode": "processed_logprobs"}) == {}


@pytest.mark.parametrize("engine", [PLAIN, {}, {"temperature": 0.7}, {"logprobs_mode": "raw_logprobs"}])
def test_nothing_is_hidden_where_nothing_is_changed_or_the_mode_is_not_known(engine):
    assert unreported(engine) == {}


def sampled(job, step, trained_on, disc=1e-3, **sampling):
    """A step whose rows an engine reports, all of them sampled so."""
    record = make_train(step, rows=8, length=128, disc=disc)
    rows = [record.engine_N[i * 128 : (i + 1) * 128] for i in range(8)]
    ids = record.ids if trained_on else tuple(f"eval-{name}" for name in record.ids)
    rollout = replace(make_rollout(ids, rows, step), sampling=(PLAIN | sampling,) * 8)
    job.feed(rollout)
    job.step(step, replace(record, engine_N=None, span_start_K=None, span_version_K=None) if trained_on else record)


def test_rows_sampled_at_a_temperature_that_raw_logprobs_hide_are_TRANSFORM_however_well_the_streams_agree():
    job = Job()
    for step in range(6):
        sampled(job, step, True, temperature=0.7)

    report = job.report()
    assert report["verdict"] == "TRANSFORM"
    (finding,) = report["findings"]
    assert finding["kind"] == "unreported" and finding["evidence"]["temperature"] == 0.7
    assert any("0.7" in e.text for e in of_kind(job.events, "note"))


def test_how_evaluation_samples_is_nobodys_business():
    job = Job()
    for step in range(6):
        sampled(job, step, False, temperature=0.0)

    assert job.report()["findings"] == [] and of_kind(job.events, "note") == []


@pytest.mark.parametrize("clean", [4, 20])
def test_what_only_the_settings_show_lifts_no_floor_and_hides_no_other_fault(clean):
    jobs = [Job(dtypes={"engine": "bfloat16", "trainer": "bfloat16"}) for _ in range(2)]
    for job, temperature in zip(jobs, (0.7, 1.0), strict=True):
        for step in range(24):
            sampled(job, step, True, disc=0.01 if step < clean else 0.3, temperature=temperature)

    hidden, plain = (job.report() for job in jobs)
    assert [step["floor"] for step in hidden["steps"]] == [step["floor"] for step in plain["steps"]]
    own = {(f["verdict"], f["kind"]) for f in hidden["findings"]} - {("TRANSFORM", "unreported")}
    assert own == {(f["verdict"], f["kind"]) for f in plain["findings"]} != set()
