"""Each public case gets the verdict it should have, through the monitor, as a user would see it."""

from __future__ import annotations

import json
from functools import cache

import pytest
from cases.table import CASES, EXCLUDED, NOT_BUILT, NUMBERS
from factories import Job, of_kind

BY_NUMBER = {case.number: case for case in CASES}


@cache
def outcome(number):
    """(report, events) of the case's run; one run serves all questions about it."""
    case = BY_NUMBER[number]
    job = Job(mode=case.mode, dtypes=case.dtypes)
    case.run(job)
    return job.report(), tuple(job.events)


def asked(question, has=lambda case: True):
    """One parameter per case of which this is asked; those whose rule is missing are expected to fail."""
    missing = NOT_BUILT[question]
    return [
        pytest.param(
            case,
            id=case.number,
            marks=pytest.mark.xfail(reason=f"rule not built: {missing[case.number]}") if case.number in missing else (),
        )
        for case in CASES
        if has(case)
    ]


@pytest.mark.parametrize("case", asked("verdict"))
def test_every_public_case_gets_its_verdict(case):
    report, _ = outcome(case.number)

    assert report["verdict"] in case.verdicts, seen(report)


@pytest.mark.parametrize("case", asked("kind", lambda case: case.kinds))
def test_the_finding_names_what_kind_it_is(case):
    report, _ = outcome(case.number)

    kinds = {f["kind"] for f in report["findings"] if f["verdict"] in case.verdicts}
    assert kinds & set(case.kinds), seen(report)


def has_conduct(case):
    return bool(case.also or case.never or case.warns or case.sends is not None or case.by_step is not None)


@pytest.mark.parametrize("case", asked("conduct", has_conduct))
def test_nothing_else_is_said_or_sent(case):
    report, events = outcome(case.number)

    found = {f["verdict"] for f in report["findings"]}
    assert found.isdisjoint(case.never), seen(report)
    assert found.issuperset(case.also), seen(report)
    if case.sends is not None:
        assert {c["kind"] for c in report["commands"]} == set(case.sends), seen(report)
    if case.by_step is not None:
        assert min((e.step for e in of_kind(events, "finding")), default=10**9) <= case.by_step, seen(report)
    if case.warns:
        before = [e for e in events if e.kind == "note" and e.level != "INFO"]
        assert before, [e.text for e in events]


@pytest.mark.parametrize("case", asked("quiet", lambda case: case.verdicts == ("HEALTHY",)))
def test_a_healthy_case_never_has_a_finding_not_even_one_that_closes(case):
    report, _ = outcome(case.number)

    assert report["findings"] == [], seen(report)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.number)
def test_no_report_holds_a_number_that_json_cannot_say(case):
    json.dumps(outcome(case.number)[0], allow_nan=False)


def test_all_59_cases_are_in_the_table_or_excluded_with_a_reason():
    bases = {case.number.rstrip("abc") for case in CASES}

    assert len(NUMBERS) == 59
    assert bases | set(EXCLUDED) == set(NUMBERS) and bases.isdisjoint(EXCLUDED)


def test_every_line_of_what_is_not_built_belongs_to_a_case_that_asks_for_it():
    assert set(NOT_BUILT["verdict"]) <= set(BY_NUMBER)
    assert set(NOT_BUILT["kind"]) <= {case.number for case in CASES if case.kinds}
    assert set(NOT_BUILT["conduct"]) <= {case.number for case in CASES if has_conduct(case)}


def seen(report):
    """What the report says, short enough for a failure message."""
    findings = [(f["verdict"], f["kind"], f["state"], f["since_step"], f["catastrophic"]) for f in report["findings"]]
    return report["verdict"], findings, [(c["step"], c["kind"]) for c in report["commands"]]
