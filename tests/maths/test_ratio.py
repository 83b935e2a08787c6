import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlc_sentinel.errors import ShapeError
from dlc_sentinel.maths import compress, log_ratio, remap, split

LOGPROBS = st.floats(-90, 0, width=32)


@given(arrays(np.float32, (3, 50), elements=LOGPROBS))
@settings(deadline=None, max_examples=60)
def test_lag_plus_discrepancy_is_total(streams):
    parts = split(*streams)

    bound = 4 * np.finfo(np.float32).eps * np.abs(streams.astype(np.float64)).sum(axis=0)
    assert np.all(np.abs(parts.lag_N + parts.disc_N - parts.total_N) <= bound * 1e-7)


def test_every_ratio_is_later_minus_earlier_and_trainer_minus_engine():
    parts = split(np.float32([-1.0]), np.float32([-1.5]), np.float32([-3.0]))

    assert (parts.lag_N[0], parts.disc_N[0], parts.total_N[0]) == (0.5, 1.5, 2.0)
    assert log_ratio(np.float32([-1.0]), np.float32([-3.0]))[0] == 2.0


def test_the_difference_of_float32_logprobs_is_taken_in_float64():
    cur, old = np.float32([-16.000002]), np.float32([-1e-7])

    assert split(cur, old, old).lag_N[0] == float(cur[0]) - float(old[0])
    assert split(cur, old, old).lag_N.dtype == np.float64


def test_equal_streams_give_a_lag_of_exactly_zero():
    x = np.float32([-0.1, -7.3, -88.0])

    assert np.array_equal(split(x, x, x - 1).lag_N, np.zeros(3))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
@settings(deadline=None, max_examples=80)
def test_compress_is_boolean_indexing_row_by_row(lengths, seed, share):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    mask = rng.random(offsets[-1]) < share
    x = rng.normal(size=offsets[-1]).astype(np.float32)

    kept_offsets, (kept, index) = compress(mask, offsets, x, np.arange(offsets[-1]))

    for row in range(len(lengths)):
        mine = slice(offsets[row], offsets[row + 1])
        assert np.array_equal(kept[kept_offsets[row] : kept_offsets[row + 1]], x[mine][mask[mine]])
    assert np.array_equal(x[index], kept)
    assert kept.dtype == np.float32
    assert kept_offsets[-1] == mask.sum()


def test_long_runs_and_scattered_positions_are_compressed_alike():
    mask = np.ones(20_000, dtype=bool)
    mask[5_000:6_000] = False
    x = np.arange(20_000.0)

    _, (kept,) = compress(mask, np.array([0, 20_000]), x)

    assert np.array_equal(kept, x[mask])


def test_a_span_start_moves_to_the_number_of_kept_tokens_before_it():
    mask = np.array([True, False, False, True, True, False])

    assert remap(mask, np.array([0, 1, 2, 3, 4, 6])).tolist() == [0, 1, 1, 1, 2, 3]
    assert remap(np.zeros(3, dtype=bool), np.array([0, 2])).tolist() == [0, 0]


def test_streams_of_unlike_length_are_refused_with_the_numbers():
    with pytest.raises(ShapeError, match=r"\[2, 3, 2\]"):
        split(np.zeros(2), np.zeros(3), np.zeros(2))
    with pytest.raises(ShapeError, match=r"\[2, 3\]"):
        compress(np.ones(2, dtype=bool), np.array([0, 2]), np.zeros(3))
