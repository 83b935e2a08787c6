"""The words of the verdicts, as `explain` and alert lines show them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from dlc_sentinel.verdicts import BY_NAME, VERDICTS, asked, text_of


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda v: v.name)
def test_every_verdict_says_all_there_is_to_say(verdict):
    for field in fields(verdict):
        assert getattr(verdict, field.name) != "", field.name
    assert verdict.check_first
    assert verdict.do


@pytest.mark.parametrize("verdict", VERDICTS, ids=lambda v: v.name)
def test_the_one_line_fits_under_the_badge_of_an_80_column_terminal(verdict):
    assert len(verdict.line) <= 74
    assert not verdict.line.endswith(".")


def test_only_blind_and_unwired_say_that_health_is_not_known():
    assert {verdict.name for verdict in VERDICTS if not verdict.is_known} == {"BLIND", "UNWIRED"}


@pytest.mark.parametrize("name", ["", "FROM_THE_FUTURE"])
def test_a_verdict_without_text_is_never_taken_for_health(name):
    assert text_of(name).is_known is False
    assert name not in BY_NAME


@pytest.mark.parametrize(
    ("verdict", "acted", "hypothetical", "words"),
    [
        ("LAG", True, False, "asked for a RESYNC"),
        ("STALE_ENGINE", True, False, "asked for a RESYNC"),
        ("DATA", True, False, "asked for an ABORT"),
        ("LAG", True, True, "would have asked for a RESYNC"),
        ("LAG", False, False, ""),
        ("LAG", "yes", False, ""),
    ],
)
def test_a_finding_says_what_was_asked_for_and_not_that_it_was_done(verdict, acted, hypothetical, words):
    assert asked({"verdict": verdict, "acted": acted}, hypothetical=hypothetical) == words
