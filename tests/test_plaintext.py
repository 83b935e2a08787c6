"""Text from outside, made inert."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc_sentinel.plaintext import label, plain


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31;1mred\x1b[0m", "red"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "31mred"),
        ("a\nb\r\n\tc", "a b c"),
        ("bell\x07\x00\x08", "bell"),
        ("r\u202eesrever\u200b\ufeff", "resrever"),
        ("line\u2028sep", "line sep"),
        ("\ud800lone", "lone"),
        (None, "None"),
    ],
)
def test_escapes_and_invisible_characters_are_dropped(hostile, shown):
    assert plain(hostile) == shown


@given(st.text(), st.integers(1, 50))
def test_plain_text_is_one_printable_line_within_its_limit(text, limit):
    shown = plain(text, limit)

    assert len(shown) <= limit
    assert shown.isprintable()


def test_a_text_of_megabytes_is_cut_and_says_so():
    assert plain("y" * 5_000_000, 10) == "yyyyyyyyy…"


@given(st.text(max_size=300), st.text(max_size=300))
def test_labels_are_equal_only_for_equal_texts(one, other):
    assert (label(one) == label(other)) == (one == other)
