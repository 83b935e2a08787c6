"""The versions of a real engine's weights: where they change, who names them, and what no version reveals."""

from __future__ import annotations

import numpy as np
import pytest

from tests.stacks.vllm.support import Drive, gap, needs_vllm, rms

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm]


def spans(drive: Drive, scene: str) -> set[tuple[tuple[int, int], ...]]:
    return {tuple(drive.stream.responses[row["id"]].spans) for row in drive.rows[scene]}


def test_an_in_flight_update_splits_the_spans_at_the_exact_token(inprocess: Drive) -> None:
    responses = inprocess.stream.responses
    rows = inprocess.rows["in_flight"]

    assert spans(inprocess, "in_flight") == {((0, 0), (1, 30))}
    # Old weights up to token 30, new weights on the old keys from there: both sides of the boundary agree to float32.
    assert max(np.abs(gap(row, responses[row["id"]], "mixed_kv")).max() for row in rows) < 1e-5
    old = [gap(row, responses[row["id"]], "old_weights") for row in rows]
    assert max(np.abs(part[:30]).max() for part in old) < 1e-5
    assert np.median([np.abs(part[30]) for part in old]) > 1e-3


def test_keys_of_the_old_weights_leave_a_residue_that_the_new_version_does_not_explain(inprocess: Drive) -> None:
    rows = inprocess.rows["in_flight"]

    residue = rms([gap(row, inprocess.stream.responses[row["id"]], "new_weights")[30:] for row in rows])

    assert residue > 1e-3


def test_an_update_without_a_pause_is_flagged_with_the_requests_that_ran(inprocess: Drive) -> None:
    labels = [record.label for record in inprocess.stream.synced]

    assert "auto-1 (by reload_weights, not paused: 16 requests running)" in labels
    assert "auto-2 (by reload_weights)" in labels


def test_an_explicit_label_wins_over_the_count(inprocess: Drive) -> None:
    assert spans(inprocess, "after_reload") == {((2, 0),)}
    assert spans(inprocess, "labelled") == {((40, 0),)}


def test_weights_pushed_parameter_by_parameter_count_once_per_synchronisation(inprocess: Drive) -> None:
    assert spans(inprocess, "pushed") == {((41, 0),)}
    assert spans(inprocess, "pushed_again") == {((42, 0),)}


def test_an_update_that_changes_nothing_repeats_the_checksum(inprocess: Drive) -> None:
    by_version = {record.version: record.checksum for record in inprocess.stream.synced}

    assert by_version[1] != by_version[2]
    assert by_version[40] == ""  # a name for weights that had been counted already
    assert by_version[43] == by_version[42] != ""


def test_a_stale_prefix_cache_shows_only_in_responses_with_cached_tokens(inprocess: Drive) -> None:
    responses = inprocess.stream.responses

    def measured(scene: str) -> tuple[set[int], float]:
        rows = inprocess.rows[scene]
        return {responses[row["id"]].cached for row in rows}, rms([gap(row, responses[row["id"]]) for row in rows])

    stale_cached, stale_rms = measured("stale")
    fresh_cached, fresh_rms = measured("fresh")
    reset_cached, reset_rms = measured("reset")
    # All three carry the label of the new weights: the version alone accuses nobody.
    assert spans(inprocess, "stale") == spans(inprocess, "fresh") == spans(inprocess, "reset") == {((1, 0),)}
    assert (stale_cached, fresh_cached, reset_cached) == ({256}, {0}, {0})
    assert fresh_rms < 3e-6
    assert reset_rms < 3e-6
    assert stale_rms > 1000 * fresh_rms


def test_with_the_engine_core_in_its_own_process_the_stream_and_the_split_are_the_same(multiprocess: Drive) -> None:
    responses = multiprocess.stream.responses
    rows = multiprocess.rows["multi"]

    assert [responses[row["id"]].logprobs for row in rows] == [row["logprobs"] for row in rows]
    assert rms([gap(row, responses[row["id"]]) for row in rows]) < 2e-6
    for row in multiprocess.rows["multi_flight"]:
        (_, _, boundary), _ = row["spans"]
        assert responses[row["id"]].spans == [(0, 0), (1, boundary)]
        assert responses[row["id"]].logprobs == row["logprobs"]
    assert any("8 requests running" in record.label for record in multiprocess.stream.synced)


def test_the_first_line_of_each_process_says_what_was_wrapped(inprocess: Drive, multiprocess: Drive) -> None:
    for drive, processes in ((inprocess, ("MainProcess",)), (multiprocess, ("MainProcess", "EngineCore"))):
        for process in processes:
            lines = [line for line in drive.stderr.splitlines() if f"({process}, pid" in line]
            assert len(lines) == 1
            assert "wrapped OutputProcessor.add_request, OutputProcessor.process_outputs" in lines[0]
            assert "not wrapped" not in lines[0]


def test_an_adapter_named_by_its_version_gives_its_rows_that_version(inprocess: Drive) -> None:
    assert spans(inprocess, "base") == {((0, 0),)}
    assert spans(inprocess, "policy-v7") == {((7, 0),)}
    assert spans(inprocess, "policy-v8") == {((8, 0),)}


def test_loading_an_adapter_is_told_as_a_synchronisation_with_its_name(inprocess: Drive) -> None:
    told = [(s.version, s.label) for s in inprocess.stream.synced if "policy-v" in s.label]

    assert told == [(7, "lora policy-v7"), (8, "lora policy-v8")]
