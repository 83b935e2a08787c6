"""Rows are held against rows like them: numerics move the tokens that the engine is unsure of."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from dlc_sentinel.core.probe import RowTable
from dlc_sentinel.core.rowfloor import row_floor

PER_UNSURE = 0.0025
"""Mean square of an unsure token, nats^2; of the others it is 0."""


def table(unsure_S, times_S=1.0):
    """Rows of 100 tokens, of which so many are unsure and off by so many times what is usual."""
    unsure_S = np.asarray(unsure_S, np.int64)
    columns = {entry.name: np.zeros(len(unsure_S), np.int64) for entry in fields(RowTable)}
    mean_sq_S = np.square(times_S) * PER_UNSURE * unsure_S / 100
    return RowTable(**(columns | {"mean_sq_S": mean_sq_S, "num_S": np.full(len(unsure_S), 100), "unsure_S": unsure_S}))


def floor_of(rows):
    """The rms of a step of healthy rows."""
    return float(np.sqrt(rows.mean_sq_S.mean()))


@pytest.mark.parametrize("unsure", [[1] * 60 + [40] * 40, [10] * 50 + [60] * 50, [1] * 95 + [60] * 5, [30] * 100])
def test_healthy_rows_have_the_runs_floor_however_their_unsure_tokens_are_spread(unsure):
    rows = table(unsure)

    floor = row_floor(rows, floor_of(rows))

    assert floor.rms == pytest.approx(floor_of(rows), rel=1e-9)
    assert not floor.far(rows).any() and floor.near(rows).all()


def test_rows_that_are_off_are_far_among_rows_that_have_as_many_unsure_tokens():
    times = np.array([1.0] * 90 + [6.0] * 10)
    rows = table([30] * 100, times)

    far = row_floor(rows, floor_of(table([30] * 100))).far(rows)

    assert far.tolist() == (times > 1.0).tolist()


def test_quiet_rows_tell_the_floor_that_the_others_have_lifted_down_to_a_third_of_it():
    rows = table([30] * 100, np.array([1.0] * 50 + [6.0] * 50))
    lifted = 2.0 * floor_of(table([30] * 100))

    floor = row_floor(rows, lifted)

    assert floor.rms == pytest.approx(floor_of(table([30] * 100)), rel=1e-9)
    assert row_floor(table([30] * 100, 0.1), lifted).rms == pytest.approx(lifted / 3.0)
    assert floor.far(rows).sum() == 50


def test_where_hardly_a_row_has_unsure_tokens_the_runs_floor_holds():
    assert row_floor(table([2] * 95 + [20] * 5), 0.03).rms == 0.03
