"""What a real vLLM generates is what the plug-in streams: every token once, with its own logprob."""

from __future__ import annotations

import numpy as np
import pytest

from dlc_sentinel.core.join import Join
from dlc_sentinel.hook import Hook, connect, hash_id
from dlc_sentinel.records import Rollout, Train
from tests.stacks.vllm.support import Drive, Response, Stream, gap, listening, needs_vllm, rms

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm]

TABLE_RMS = {"fp32": 9.7e-7, "bf16": 1.03e-2, "fp8": 8.4e-2}
"""Trainer (Hugging Face, fp32) minus engine, nats rms, measured once on 8-16 k tokens of such a model."""


def pairs(drive: Drive, scene: str) -> list[tuple[dict[str, object], Response]]:
    """(what the engine returned, what was streamed) of a scene."""
    responses = drive.stream.responses
    return [(row, responses[str(row["id"])]) for row in drive.rows[scene]]


@pytest.mark.parametrize("engine", ["fp32", "bf16", "fp8"])
def test_the_discrepancy_of_an_engine_is_within_a_factor_2_of_what_its_numerics_give(
    inprocess: Drive, engine: str
) -> None:
    if engine not in inprocess.rows:
        pytest.skip("vLLM's FP8 keys need AVX-512 on a CPU; this one has none")

    measured = rms([gap(row, response) for row, response in pairs(inprocess, engine)])

    assert TABLE_RMS[engine] / 2 <= measured <= TABLE_RMS[engine] * 2


SCENES = ["fp32", "bf16", "many", "stop", "top", "mixed", "long", "in_flight", "crowded", "stale", "reset"]


@pytest.mark.parametrize("scene", SCENES)
def test_every_token_the_engine_returned_was_streamed_once_with_the_same_logprob(inprocess: Drive, scene: str) -> None:
    found = pairs(inprocess, scene)

    assert found
    for row, response in found:
        assert response.final
        assert len(response.logprobs) == len(row["tokens"])  # type: ignore[arg-type]
        assert row["logprobs"] is None or response.logprobs == row["logprobs"]
        assert response.finish == row["finish"]


def test_no_token_was_dropped_on_the_way(inprocess: Drive) -> None:
    assert inprocess.stream.dropped == 0


def test_a_stop_string_ends_a_response_after_the_token_that_completed_it(inprocess: Drive) -> None:
    found = pairs(inprocess, "stop")

    assert {response.finish for _, response in found} <= {"stop", "length"}
    assert sum(response.finish == "stop" for _, response in found) >= 8
    assert len({len(response.logprobs) for _, response in found}) > 3


def test_a_request_with_n_above_1_becomes_one_response_per_index(inprocess: Drive) -> None:
    ids = {str(row["id"]) for row in inprocess.rows["many"]}

    assert ids == {f"many-{i}:{index}" for i in range(4) for index in range(3)}


def test_a_request_the_client_gave_up_is_streamed_up_to_there(inprocess: Drive) -> None:
    responses = inprocess.stream.responses
    gone = [responses[f"abort-{i}"] for i in range(0, 8, 2)]

    assert {(len(response.logprobs), response.finish, response.final) for response in gone} == {(10, "abort", True)}
    assert {len(responses[f"abort-{i}"].logprobs) for i in range(1, 8, 2)} == {20}


def test_preempted_requests_lose_and_repeat_nothing(inprocess: Drive) -> None:
    preempted = {str(row["id"]).rsplit("-", 1)[0] for row in inprocess.rows["preempted"]}
    streamed = {str(row["id"]): response for row, response in pairs(inprocess, "crowded")}

    assert preempted
    assert preempted <= set(streamed)
    assert {len(response.logprobs) for response in streamed.values()} == {64}


def test_forced_logprobs_are_streamed_and_stay_hidden_from_the_client(inprocess: Drive) -> None:
    for row, response in pairs(inprocess, "unasked"):
        assert row["logprobs"] is None
        assert len(response.logprobs) == len(row["tokens"])  # type: ignore[arg-type]
        assert max(response.logprobs) < 0


def test_raw_and_processed_logprobs_are_told_apart_by_the_sampling_facts(inprocess: Drive) -> None:
    _, raw = pairs(inprocess, "fp32")[0]
    _, processed = pairs(inprocess, "crowded")[0]

    assert raw.sampling["logprobs_mode"] == "raw_logprobs"
    assert raw.sampling["temperature"] == 1.0
    wanted = {"logprobs_mode": "processed_logprobs", "temperature": 0.7, "top_p": 0.9, "top_k": 50}
    assert {name: processed.sampling[name] for name in wanted} == wanted


def test_the_hello_names_engine_model_and_dtype(inprocess: Drive) -> None:
    hellos = inprocess.stream.hellos

    assert {hello.stack for hello in hellos} == {"vllm"}
    assert {hello.source.role for hello in hellos} == {"engine"}
    assert {hello.dtypes["engine"] for hello in hellos} == {"float32", "bfloat16"}
    assert all(hello.versions["vllm"].startswith("0.") for hello in hellos)


def _train(rows: list[dict[str, object]], ids: list[str]) -> list[Train]:
    """The rows as a trainer in this process sends them, off the wire."""
    with pytest.MonkeyPatch.context() as patch, listening() as (receiver, stream):
        patch.setenv("DLC_SENTINEL", str(receiver.address))
        hook = connect(run="vllm", role="trainer")
        assert isinstance(hook, Hook)
        hook.train(0, 0, seq_id=ids, cur=[np.array(row["trainer"], np.float32) for row in rows], old_is="absent")
        hook.close()
    return [record for record in stream.records if isinstance(record, Train)]


def _joined(stream: Stream, trains: list[Train]) -> tuple[list[np.ndarray], list[tuple[str, int]]]:
    refused: list[tuple[str, int]] = []
    join = Join(lambda _, cause, tokens: refused.append((cause, tokens)), max_bytes=2**28, max_age_steps=64)
    for record in stream.records:
        if isinstance(record, Rollout):
            join.feed_rollout(record, 0)
    rows = [rows for train in trains for rows in join.feed_train(train)]
    return [part.cur_N - part.engine_N for part in rows], refused


def test_a_trainer_in_another_process_joins_every_token_by_request_id(inprocess: Drive) -> None:
    rows = inprocess.rows["fp32"]

    gaps, refused = _joined(inprocess.stream, _train(rows, [str(row["id"]) for row in rows]))

    assert sum(part.size for part in gaps) == 64 * 64
    assert rms(gaps) < 2e-6
    assert refused == []


def test_a_trainer_that_sees_no_request_id_joins_every_token_by_the_hash_of_its_tokens(inprocess: Drive) -> None:
    rows = inprocess.rows["hashed"]
    ids = [hash_id(row["prompt"], row["tokens"]) for row in rows]  # type: ignore[arg-type]

    gaps, refused = _joined(inprocess.stream, _train(rows, ids))

    assert sum(part.size for part in gaps) == 8 * 24
    assert rms(gaps) < 2e-6
    assert refused == []


def test_equal_responses_are_numbered_in_their_hash_ids(inprocess: Drive) -> None:
    row = inprocess.rows["alike"][0]

    for occurrence in (1, 2, 3):
        name = hash_id(row["prompt"], row["tokens"], occurrence)
        assert len(inprocess.stream.responses[name].logprobs) == 8
