"""A real `vllm serve` with two API servers, asked over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlc_sentinel.records import Bye
from dlc_sentinel.wire.codec import UNNUMBERED, decode
from tests.stacks.vllm.server import MAX_TOKENS, serving
from tests.stacks.vllm.support import Stream, needs_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs_vllm]

NUM_REQUESTS = 32
LONG = MAX_TOKENS - 100


@pytest.fixture(scope="module")
def served(vllm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Stream]:
    """Every answer of one server's life, and all it streamed."""
    log = tmp_path_factory.mktemp("serve") / "log"

    with serving(vllm_folder / "fp32", log) as (server, stream):

        def ask(index: int) -> Any:
            body = {
                "model": "tiny", "prompt": [3 + index, 40, 50], "max_tokens": 20 + index % 3, "temperature": 1.0,
                "ignore_eos": True, "return_token_ids": True, "n": 1 + index % 2,
            }  # fmt: skip
            return server.post("/v1/completions", body if index % 4 == 0 else body | {"logprobs": 0})

        with ThreadPoolExecutor(8) as pool:
            answers: dict[str, Any] = {"first": list(pool.map(ask, range(NUM_REQUESTS)))}
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": LONG, "ignore_eos": True, "temperature": 1.0}
        answers["given_up"] = server.give_up(body, events=10)
        server.post("/collective_rpc", {"method": "reload_weights"})
        answers["reloaded"] = ask(101)
        server.post("/update_weight_version", {"new_version": "step-7"})
        answers["labelled"] = ask(102)
    answers["log"] = log.read_text()
    return answers, stream


def _ids(answer: dict[str, Any]) -> list[str]:
    many = len(answer["choices"]) > 1
    return [f"{answer['id']}-0" + (f":{choice['index']}" if many else "") for choice in answer["choices"]]


def test_two_api_servers_lose_no_token(served: tuple[dict[str, Any], Stream]) -> None:
    answers, stream = served
    responses = stream.responses

    for answer in answers["first"]:
        streamed = [responses[name] for name in _ids(answer)]
        assert [len(one.logprobs) for one in streamed] == [len(choice["token_ids"]) for choice in answer["choices"]]
        assert sum(len(one.logprobs) for one in streamed) == answer["usage"]["completion_tokens"]
        for choice, one in zip(answer["choices"], streamed, strict=True):
            asked = choice["logprobs"]
            assert asked is None or asked["token_logprobs"] == one.logprobs
    assert {responses[name].producer for answer in answers["first"] for name in _ids(answer)}.__len__() == 2
    assert stream.dropped == 0


def test_a_client_that_asked_for_no_logprobs_gets_none_though_they_were_forced(
    served: tuple[dict[str, Any], Stream],
) -> None:
    answers, _ = served

    assert [answer["choices"][0]["logprobs"] is None for answer in answers["first"]] == [
        index % 4 == 0 for index in range(NUM_REQUESTS)
    ]


def test_a_client_that_hangs_up_leaves_what_was_generated_so_far(served: tuple[dict[str, Any], Stream]) -> None:
    answers, stream = served

    given_up = stream.responses[f"{answers['given_up']}-0"]
    assert given_up.finish == "abort"
    assert 10 <= len(given_up.logprobs) < LONG


def test_a_reload_and_a_label_reach_both_api_servers_as_versions(served: tuple[dict[str, Any], Stream]) -> None:
    answers, stream = served
    responses = stream.responses

    assert {tuple(responses[name].spans) for name in _ids(answers["first"][0])} == {((0, 0),)}
    assert {tuple(responses[name].spans) for name in _ids(answers["reloaded"])} == {((1, 0),)}
    assert {tuple(responses[name].spans) for name in _ids(answers["labelled"])} == {((7, 0),)}


def test_a_server_that_may_end_by_itself_sends_what_it_holds_and_says_goodbye(
    served: tuple[dict[str, Any], Stream],
) -> None:
    _, stream = served
    byes = {record.source.producer: record.frames_sent for record in stream.records if isinstance(record, Bye)}
    numbers: dict[str, list[int]] = {}
    for record, number in map(decode, stream.payloads):
        if number != UNNUMBERED:
            numbers.setdefault(record.source.producer, []).append(number)

    assert len(byes) == 3  # two API servers and the engine core
    assert numbers == {producer: list(range(num_frames)) for producer, num_frames in byes.items()}


def test_each_process_of_the_server_says_what_it_wrapped(served: tuple[dict[str, Any], Stream]) -> None:
    answers, _ = served

    for process in ("EngineCore", "ApiServer_0", "ApiServer_1"):
        assert sum(f"({process}, pid" in line for line in answers["log"].splitlines()) == 1
