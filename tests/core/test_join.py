"""Two streams become one: by id, by segments, in any order, in any chunking; and every lost token is counted."""

from __future__ import annotations

import numpy as np
import pytest
from factories import make_rollout, make_source, make_train

from dlc_sentinel.core.join import Join


class Counted(dict):
    def __call__(self, step, cause, tokens):
        self[cause] = self.get(cause, 0) + tokens


@pytest.fixture
def lost():
    return Counted()


@pytest.fixture
def join(lost):
    return Join(lost, max_bytes=2**20, max_age_steps=5)


def halves(rows=4, length=10, version=3, **changes):
    """(train record without engine stream, its ids, the engine's arrays)."""
    record = make_train(0, rows=rows, length=length, gen_version=version)
    arrays = list(record.engine_N.reshape(rows, length))
    fields = {"engine_N": None, "span_start_K": None, "span_version_K": None} | changes
    return make_train(0, rows=rows, length=length, gen_version=version, **fields), record.ids, arrays


def engine_of(batches):
    return np.concatenate([rows.engine_N for rows in batches])


def test_a_record_that_carries_everything_passes_straight_through(join, lost):
    record = make_train(0)

    (rows,) = join.feed_train(record)

    assert rows.engine_N is record.engine_N and lost == {}


@pytest.mark.parametrize("engine_first", [True, False])
def test_halves_meet_by_id_in_either_order(join, lost, engine_first):
    train, ids, arrays = halves()
    rollout = make_rollout(ids, arrays, version=3)
    feeds = [lambda: join.feed_rollout(rollout, 0), lambda: join.feed_train(train)]

    batches = [rows for feed in (feeds if engine_first else feeds[::-1]) for rows in feed()]

    assert np.array_equal(engine_of(batches), np.concatenate(arrays))
    assert {int(v) for rows in batches for v in rows.span_version_K} == {3}
    assert lost == {} and join.num_waiting(0) == 0


def test_a_rollout_in_many_chunks_is_the_same_as_in_one(join):
    train, ids, arrays = halves()
    for at in range(0, 10, 3):
        parts = [a[at : at + 3] for a in arrays]
        join.feed_rollout(make_rollout(ids, parts, version=3, final=at == 9, at=at), 0)

    (rows,) = join.feed_train(train)

    assert np.array_equal(rows.engine_N, np.concatenate(arrays))


def test_a_long_sequence_over_several_train_frames_is_put_together(join, lost):
    whole = make_train(0, rows=1, length=30)
    parts = [
        make_train(
            0, rows=1, length=10, ids=whole.ids, groups=whole.groups,
            cur_N=whole.cur_N[at : at + 10], old_N=whole.old_N[at : at + 10], engine_N=whole.engine_N[at : at + 10],
            token_offset_S=np.array([at]), final_S=np.array([at == 20]),
        )
        for at in (0, 10, 20)
    ]  # fmt: skip

    batches = [rows for part in parts for rows in join.feed_train(part)]

    assert len(batches) == 1 and np.array_equal(batches[0].cur_N, whole.cur_N)
    assert lost == {} and join.num_bytes == 0


def test_a_chunk_that_is_missing_costs_the_rest_of_its_sequence_and_is_counted(join, lost):
    for at in (0, 20):
        join.feed_train(
            make_train(0, rows=1, length=10, ids=["a"], token_offset_S=np.array([at]), final_S=np.array([at == 20]))
        )

    assert lost == {"out_of_order": 10}
    join.close_step(0)
    assert lost == {"out_of_order": 10, "unmatched": 10}


def test_segments_put_several_engine_requests_into_one_row(join):
    first, second = np.arange(6, dtype=np.float32) * -0.1, np.arange(4, dtype=np.float32) * -0.2
    join.feed_rollout(make_rollout(["e1"], [first], version=1), 0)
    join.feed_rollout(make_rollout(["e2"], [second], version=2), 0)
    train, *_ = halves(rows=1, length=9, segments=((("e1", 0, 6), ("e2", 1, 3)),))

    (rows,) = join.feed_train(train)

    assert np.array_equal(rows.engine_N, np.concatenate([first, second[1:4]]))
    assert rows.span_start_K.tolist() == [0, 6] and rows.span_version_K.tolist() == [1, 2]


def test_engine_tokens_fall_on_the_unmasked_positions_when_tool_tokens_lie_between(join):
    arrays = [np.array([-0.1, -0.2, -0.3], np.float32)]
    mask = np.array([True, False, True, False, True])
    train, ids, _ = halves(rows=1, length=5, mask_N=mask)
    join.feed_rollout(make_rollout(ids, arrays, version=7), 0)

    (rows,) = join.feed_train(train)

    assert np.array_equal(rows.engine_N[mask], arrays[0]) and np.isnan(rows.engine_N[~mask]).all()


def test_lengths_that_disagree_are_mis_sized_and_the_other_rows_are_used(join, lost):
    train, ids, arrays = halves()
    arrays[1] = arrays[1][:-2]
    join.feed_rollout(make_rollout(ids, arrays), 0)

    (rows,) = join.feed_train(train)

    assert len(rows.group_S) == 3 and lost == {"mis_sized": 10}


def test_the_same_row_twice_in_one_update_counts_once(join, lost):
    record = make_train(0, rows=4, length=10)
    join.feed_train(record)

    assert join.feed_train(record) == []
    assert lost == {"duplicate": 40}


def test_the_same_row_in_another_update_is_another_use(join, lost):
    assert join.feed_train(make_train(0, ids=[f"i{k}" for k in range(32)]))
    assert join.feed_train(make_train(0, update=1, ids=[f"i{k}" for k in range(32)]))
    assert lost == {}


def test_two_engine_streams_that_differ_are_counted_and_neither_is_chosen(join, lost):
    record = make_train(0, rows=2, length=10)
    other = record.engine_N.copy()
    other[3] += 0.5
    join.feed_rollout(make_rollout(record.ids, list(other.reshape(2, 10)), version=0), 0)

    (rows,) = join.feed_train(record)

    assert lost == {"unmatched": 1} and not rows.mask_N[3]


def test_rows_without_a_rollout_are_unmatched_when_their_step_closes(join, lost):
    train, *_ = halves()

    assert join.feed_train(train) == []
    assert join.num_waiting(0) == 4
    join.close_step(0)
    assert lost == {"unmatched": 40} and join.num_bytes == 0


def test_rollouts_that_nobody_trains_on_are_no_fault(join, lost):
    join.feed_rollout(make_rollout(["x"], [np.zeros(50, np.float32)]), 0)

    join.close_step(20)

    assert lost == {} and join.unused_tokens == 50 and join.num_bytes == 0


def test_the_buffer_is_bounded_in_bytes_and_what_falls_out_is_counted(lost):
    join = Join(lost, max_bytes=10_000, max_age_steps=5)

    for k in range(100):
        join.feed_rollout(make_rollout([f"x{k}"], [np.zeros(100, np.float32)]), 0)

    assert join.num_bytes <= 10_000
    assert lost["join_full"] == 100 * 100 - 100 * sum(1 for _ in join._generated)


def test_rows_with_an_engine_stream_of_their_own_go_on_without_versions_when_none_come(join, lost):
    join.feed_rollout(make_rollout(["other"], [np.zeros(3, np.float32)]), 0)
    record = make_train(0, rows=2, length=10, span_start_K=None, span_version_K=None)

    assert join.feed_train(record) == []
    (rows,) = join.close_step(0)

    assert set(rows.span_version_K.tolist()) == {-1} and lost == {}


def test_an_in_flight_weight_change_keeps_its_token(join):
    source = make_source(role="engine", producer="e0")
    rollout = make_rollout(["a"], [np.zeros(10, np.float32)], source=source)
    rollout = type(rollout)(
        **{f: getattr(rollout, f) for f in rollout.__slots__}
        | {"span_start_K": np.array([0, 4]), "span_version_K": np.array([5, 6])}
    )
    join.feed_rollout(rollout, 0)
    train, *_ = halves(rows=1, length=10, ids=("a",), groups=("g",))

    (rows,) = join.feed_train(train)

    assert rows.span_start_K.tolist() == [0, 4] and rows.span_version_K.tolist() == [5, 6]
