"""What is kept of the records for people: the worst sequences, scalars, syncs, who said hello."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_rollout, make_source, make_train

from dlc_sentinel.evidence import MAX_SCALARS, Evidence
from dlc_sentinel.records import Hello, Scalars, Synced
from dlc_sentinel.strips import WINDOW

HOSTILE = "<b>\x1b[31ms1\u202e"


def fed(*records, **settings):
    evidence = Evidence(**settings)
    for record in records:
        evidence.feed(record)
    return evidence.of("r1")


def one_bad(step=0, row=5, token=40, by=-3.0, **changes):
    """A healthy record with one token of `cur` moved by `by` nats."""
    record = make_train(step, lag=0.01, rows=8, length=200, **changes)
    record.cur_N[int(record.offsets_S1[row]) + token] += by
    return record


def test_the_sequence_with_the_largest_difference_comes_first_and_names_its_token():
    record = one_bad()
    worst = fed(record).worst

    assert (worst[0]["id"], worst[0]["at"]) == ("s0-0-5", 40)
    assert worst[0]["score"] == pytest.approx(abs(float(record.cur_N[1040]) - float(record.engine_N[1040])), abs=1e-4)
    assert [strip["score"] for strip in worst] == sorted((strip["score"] for strip in worst), reverse=True)


def test_a_strip_is_a_window_around_the_worst_token_of_all_three_streams():
    record = one_bad(token=150)
    strip = fed(record).worst[0]
    window = slice(1000 + strip["first"], 1000 + strip["first"] + WINDOW)

    assert strip["first"] <= 150 < strip["first"] + WINDOW
    assert strip["engine"] == pytest.approx(record.engine_N[window].tolist(), abs=1e-4)
    assert strip["gen"] == pytest.approx(record.old_N[window].tolist(), abs=1e-4)
    assert strip["cur"] == pytest.approx(record.cur_N[window].tolist(), abs=1e-4)


@pytest.mark.parametrize("value", [np.nan, -np.inf, -9999.0, -3.4e38])
def test_a_placeholder_is_no_difference(value):
    record = make_train(0, lag=0.01, rows=8, length=64)
    record.engine_N[70] = value
    strips = fed(record).worst

    assert max(strip["score"] for strip in strips) < 1.0


def test_masked_tokens_do_not_count():
    record = one_bad()
    mask = np.ones(1600, np.bool_)
    mask[1040] = False
    hidden = one_bad(mask_N=mask)
    hidden.cur_N[:] = record.cur_N

    assert fed(hidden).worst[0]["score"] < 1.0


def test_an_engine_side_that_came_as_a_rollout_is_joined():
    whole = one_bad(step=1)
    streams = np.split(whole.engine_N, whole.offsets_S1[1:-1])
    rollout = make_rollout(whole.ids, streams, version=1)
    lone = one_bad(step=1, with_engine=False)
    strip = fed(rollout, lone).worst[0]

    assert (strip["id"], strip["at"]) == ("s1-0-5", 40)
    assert strip["engine"] == fed(whole).worst[0]["engine"]


def test_segments_are_put_together_from_several_requests():
    whole = one_bad(step=1)
    streams = np.split(whole.engine_N, whole.offsets_S1[1:-1])
    parts = [half for stream in streams for half in (stream[:90], stream[90:])]
    names = [f"{name}.{half}" for name in whole.ids for half in "ab"]
    segments = tuple(((f"{name}.a", 0, 90), (f"{name}.b", 0, -1)) for name in whole.ids)
    lone = one_bad(step=1, with_engine=False, segments=segments)

    assert fed(make_rollout(names, parts, version=1), lone).worst[0]["engine"] == fed(whole).worst[0]["engine"]


def test_rollouts_that_nobody_asks_for_stay_bounded(monkeypatch):
    monkeypatch.setattr("dlc_sentinel.evidence.ROLLOUT_BYTES", 100_000)
    whole = one_bad(step=1)
    streams = np.split(whole.engine_N, whole.offsets_S1[1:-1])
    others = [make_rollout([f"o{n}"], [np.full(5000, -1.0)]) for n in range(6)]
    lone = one_bad(step=1, with_engine=False, old_N=None, old_is="absent")

    assert fed(make_rollout(whole.ids, streams, version=1), *others, lone).worst == ()
    assert len(fed(*others, make_rollout(whole.ids, streams, version=1), lone).worst) == 8


def test_without_a_stream_at_the_generators_weights_there_is_none():
    assert fed(one_bad(step=3, gen_version=1, old_is="absent", old_N=None)).worst[0]["gen"] is None
    assert fed(one_bad(step=3, gen_version=1, old_is="proximal")).worst[0]["gen"] is None
    assert fed(one_bad(step=3, gen_version=1, old_is="proximal", old_version=1)).worst[0]["gen"] is not None


def test_at_age_zero_in_the_first_update_the_current_policy_is_the_generators():
    strip = fed(one_bad(step=3, old_is="absent", old_N=None)).worst[0]

    assert strip["gen"] == strip["cur"]


def test_only_the_newest_steps_are_kept_where_asked():
    records = [one_bad(step, by=-9.0 + step) for step in range(6)]

    assert {strip["step"] for strip in fed(*records, last_steps=2).worst} == {4, 5}
    assert fed(*records, last_steps=None).worst[0]["step"] == 0
    assert {strip["step"] for strip in fed(*records, last_steps=None, steps=(1, 2)).worst} == {1, 2}


def test_a_run_that_begins_again_is_shown_from_its_beginning():
    records = [one_bad(step, by=-9.0) for step in (500, 501)] + [one_bad(0)]

    assert {strip["step"] for strip in fed(*records, last_steps=16).worst} == {0}


def test_no_more_than_asked_are_kept():
    assert len(fed(*(one_bad(step) for step in range(9)), keep=3).worst) == 3


def test_scalars_syncs_and_hellos_are_kept_by_run():
    source = make_source()
    hello = Hello(source, "tiny", "verl", {"torch": "2"}, 7, "h", {"temperature": 1.0}, {"engine": "bfloat16"})
    kept = fed(
        hello, Scalars(source, 3, {"reward": 0.5}), Scalars(source, 3, {"lr": 1e-6}), Synced(source, 4, 3, checksum="x")
    )

    assert kept.scalars == ({"step": 3, "reward": 0.5, "lr": 1e-6},)
    assert kept.synced[0]["checksum"] == "x"
    assert kept.about[0]["versions"] == {"torch": "2"}
    assert Evidence().of("r1").scalars == ()


def test_a_flood_of_scalars_and_runs_stays_bounded():
    evidence = Evidence()
    for n in range(100):
        evidence.feed(Scalars(make_source(run=f"r{n}"), 1, {f"x{i}": 0.0 for i in range(1000)}))

    assert len(evidence.of("r99").scalars[0]) <= MAX_SCALARS + 1
    assert evidence.of("r0").scalars == ()


def test_texts_from_outside_are_cleaned_where_they_are_taken():
    source = make_source(replica=HOSTILE)
    record = one_bad(ids=[HOSTILE + str(i) for i in range(8)])
    kept = fed(record, Synced(source, 1, 1, HOSTILE, HOSTILE), Hello(source, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}))

    assert "\x1b" not in repr((kept.worst, kept.synced, kept.about))
    assert "\u202e" not in repr((kept.worst, kept.synced, kept.about))
