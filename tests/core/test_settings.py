"""What the producers' settings say before any data."""

import pytest
from factories import Job, make_source, of_kind

from dlc_sentinel.core.settings import warnings
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
