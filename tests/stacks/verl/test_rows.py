"""The generator's version of every token, from what verl and the wrapped clients know of a row."""

import numpy as np
import pytest
from dlc_sentinel.integrations.verl_rows import RowNames, facts_of, needs_mask, token_versions, wire_segments


def sample(tokens, versions, turns=1, ids=None):
    names = ids or [f"e{i}" for i in range(len(tokens))]
    return {"dlc_segments": {"tokens": tokens, "versions": versions, "ids": names, "turns": turns}}


def test_a_row_of_one_version_needs_no_list_of_tokens():
    facts = [facts_of({"min_global_steps": 7, "max_global_steps": 7}), facts_of(sample([3, 2], [8, 8]))]

    assert token_versions(facts, 5, None).tolist() == [7, 8]


def test_a_resumed_row_has_the_version_of_each_piece_at_its_tokens():
    facts = [facts_of(sample([3, 2], [4, 6])), facts_of({"min_global_steps": 6, "max_global_steps": 6})]

    assert token_versions(facts, 6, None).tolist() == [[4, 4, 4, 6, 6, 6], [6] * 6]


def test_tool_text_between_turns_takes_no_version_from_the_pieces():
    facts = [facts_of(sample([2, 2], [4, 5], turns=2))]
    mask = np.array([[True, True, False, False, True, True]])

    assert needs_mask(facts)
    assert token_versions(facts, 6, mask).tolist() == [[4, 4, -1, -1, 5, 5]]


def test_only_rows_with_tool_text_between_versions_need_the_mask():
    assert not needs_mask([facts_of(sample([2, 2], [4, 4], turns=2)), facts_of(sample([2, 2], [4, 5]))])


def test_a_row_known_by_its_oldest_and_newest_version_only_is_unknown_at_every_token():
    facts = [facts_of({"min_global_steps": 3, "max_global_steps": 5})]

    assert token_versions(facts, 3, None).tolist() == [[-1, -1, -1]]


def test_a_row_without_any_version_is_unknown():
    assert token_versions([facts_of({})], 3, None).tolist() == [-1]


def test_a_response_cut_short_keeps_the_versions_of_what_is_left():
    assert token_versions([facts_of(sample([3, 4], [1, 2]))], 5, None).tolist() == [[1, 1, 1, 2, 2]]


@pytest.mark.parametrize("ids", [["a", ""], ["", ""]])
def test_no_segments_are_sent_unless_every_request_has_an_id(ids):
    assert wire_segments([facts_of(sample([3, 2], [4, 6], ids=ids))]) is None


def test_segments_name_each_request_from_its_own_first_token():
    assert wire_segments([facts_of(sample([3, 2], [4, 6]))]) == [[["e0", 0, 3], ["e1", 0, 2]]]


def test_rows_of_one_prompt_are_told_apart_and_ranks_too():
    first, second = RowNames(rank=0), RowNames(rank=1)
    names = [*first.take(["p", "p"], None), *second.take(["p"], None), *first.take(["p"], None)]

    assert len(set(names)) == 4


def test_names_begin_again_with_each_update():
    names = RowNames(rank=0)
    before = names.take(["p", "q"], [0, 1])
    names.restart()

    assert names.take(["p", "q"], [0, 1]) == before
