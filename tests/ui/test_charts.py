"""Charts of text cells."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc_sentinel.ui.charts import ASCII, UNICODE, bar, chart, scale_top

NAN = math.nan


def drawn(values, width, height, floor=NAN, glyphs=UNICODE):
    return [line.plain for line in chart(values, width, height, floor, glyphs, "")]


def test_columns_are_linear_from_zero_to_the_largest_value():
    assert drawn([1 / 8, 2 / 8, 4 / 8, 7 / 8, 1.0], 5, 1) == ["▁▂▄▇█"]


def test_the_newest_value_is_at_the_right_and_the_oldest_fall_out_at_the_left():
    assert drawn([1.0, 0.5, 1.0], 2, 1) == ["▄█"]
    assert drawn([0.5, 1.0], 4, 1) == ["  ▄█"]


def test_a_chart_of_two_rows_has_sixteen_levels():
    assert drawn([1 / 16, 8 / 16, 9 / 16, 1.0], 4, 2) == ["  ▁█", "▁███"]


def test_no_data_is_a_dot_and_a_true_zero_is_empty():
    assert drawn([NAN, 0.0, 1.0], 3, 1) == ["· █"]


def test_the_floor_is_a_line_behind_the_columns_and_stays_visible_through_them():
    assert drawn([1.0, 0.0], 3, 4, floor=0.6) == [" █ ", "┈▓┈", " █ ", " █ "]


def test_values_below_the_floor_leave_the_floor_inside_the_scale():
    assert scale_top([0.1, 0.2], floor=1.0) == 1.25
    assert drawn([0.1, 0.2], 2, 2, floor=1.0) == ["┈┈", "▂▃"]


@pytest.mark.parametrize("values", [[], [NAN], [0.0, 0.0], [math.inf, 1.0]])
def test_a_chart_of_nothing_zeros_or_infinities_has_its_size_all_the_same(values):
    lines = drawn(values, 7, 3, floor=NAN)

    assert [len(line) for line in lines] == [7, 7, 7]


@given(
    st.lists(st.floats(0, 1e9) | st.just(NAN), max_size=40), st.integers(1, 30), st.integers(1, 6), st.floats(0, 1e9)
)
def test_a_chart_has_exactly_its_size_in_cells_and_in_ascii_uses_ascii(values, width, height, floor):
    for glyphs in (UNICODE, ASCII):
        lines = drawn(values, width, height, floor, glyphs)
        assert [len(line) for line in lines] == [width] * height
    assert "".join(lines).isascii()


def test_a_bar_is_read_against_the_tick_at_one_half():
    assert bar(0.25, 8, UNICODE, "", is_trusted=True).plain == "██  │   "
    assert bar(0.75, 8, UNICODE, "", is_trusted=True).plain == "████│█  "
    assert bar(1.0, 8, UNICODE, "", is_trusted=True).plain == "████│███"


def test_a_bar_grows_in_eighths_of_a_cell():
    assert bar(0.25 / 8 * 5, 8, UNICODE, "", is_trusted=True).plain == "█▎  │   "


def test_a_bar_that_is_not_trusted_is_hatched():
    assert bar(1.0, 8, UNICODE, "", is_trusted=False).plain == "▒▒▒▒│▒▒▒"


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_bar_without_a_value_is_only_its_tick(value):
    assert bar(value, 8, UNICODE, "", is_trusted=True).plain == "    │   "
