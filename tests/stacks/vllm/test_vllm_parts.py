"""The plug-in's own parts, without vLLM: the count of versions, and steps turned into rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dlc_sentinel.integrations.vllm_stream import EPOCH_TOKENS, PIECE_TOKENS, Collector, Row, Trail, grouped
from dlc_sentinel.integrations.vllm_weights import Counting, Update, Versions, changes_weights, lora_version


class Engine:
    """A version count, with the labels it set and what it told."""

    def __init__(self, counting: str = "") -> None:
        self.labels: list[str] = []
        self.told: list[Update] = []
        self.versions = Versions(Counting.parse(counting), self.labels.append, self.told.append)

    def rpc(self, method: str, *args: object, running: int = 0, in_flight: int = 0, **kwargs: object) -> None:
        self.versions.changed(method, args, kwargs, running=running, in_flight=in_flight)

    def step(self, num_out: int = 1) -> None:
        self.versions.before_step()
        self.versions.after_step(num_out)


@pytest.mark.parametrize(
    "method",
    ["reload_weights", "update_weights", "finish_weight_update", "update_named_param", "update_weights_from_ipc",
     "receive_weight_update", "load_weights", "broadcast_parameter", "areal_update_weight_xccl", "nccl_reshard_refit"],
)  # fmt: skip
def test_an_rpc_that_brings_weights_is_noticed_by_its_name(method: str) -> None:
    assert changes_weights(method)


@pytest.mark.parametrize(
    "method",
    ["compute_weight_checksums", "init_weight_transfer_engine", "get_model", "sleep", "wake_up", "report_device_id",
     "start_weight_update", "profile", "save_sharded_state", "load_model", "update_config", "synchronize_device"],
)  # fmt: skip
def test_an_rpc_that_brings_none_is_left_alone(method: str) -> None:
    assert not changes_weights(method)


def test_hundreds_of_rpcs_of_one_synchronisation_move_the_version_once_at_the_next_step() -> None:
    engine = Engine()

    for name in ("a", "b", "c"):
        engine.rpc("update_named_param", name)
    assert engine.labels == []
    engine.step()
    engine.step()

    assert engine.labels == ["auto-1"]


def test_a_synchronisation_that_the_engine_steps_through_still_counts_once() -> None:
    engine = Engine()

    for name in ("a", "b", "c", "a", "b"):
        engine.rpc("update_named_param", name, running=3)
        engine.step()

    assert engine.labels == ["auto-1", "auto-2"]
    assert [update.running for update in engine.told] == [3, 3]


def test_a_parameter_that_comes_twice_without_a_step_is_two_synchronisations() -> None:
    engine = Engine()

    for name in ("a", "b", "a", "b"):
        engine.rpc("update_named_param", name)
    engine.step()

    assert engine.labels == ["auto-1", "auto-2"]


def test_the_native_start_to_finish_counts_once_even_when_the_engine_steps_inside() -> None:
    engine = Engine()

    engine.versions.begin()
    for method in ("update_weights", "update_weights", "finish_weight_update"):
        engine.rpc(method)
        engine.step()
    engine.rpc("reload_weights")
    engine.step()

    assert engine.labels == ["auto-1", "auto-2"]


def test_batches_dispatched_before_the_update_keep_the_old_version() -> None:
    engine = Engine()

    engine.rpc("reload_weights", in_flight=2, running=5)
    engine.step()
    engine.step()
    assert engine.labels == []
    engine.step()

    assert engine.labels == ["auto-1"]


def test_an_explicit_label_covers_the_update_before_it_and_the_count_goes_on_from_there() -> None:
    engine = Engine()

    engine.rpc("update_weights")
    engine.versions.explicit("step-12")
    engine.step()
    assert engine.labels == []
    engine.rpc("update_weights")
    engine.step()

    assert engine.labels == ["auto-13"]
    assert [update.label for update in engine.told] == ["step-12", "auto-13"]


def test_a_version_inside_the_update_itself_is_taken() -> None:
    engine = Engine()

    engine.rpc("receive_weight_update", weight_version=31)
    engine.step()

    assert engine.labels == ["31"]


def test_a_label_given_late_to_counted_weights_is_told_as_a_name_not_as_new_weights() -> None:
    engine = Engine()

    engine.rpc("reload_weights")
    engine.step()
    engine.versions.explicit("step-5")
    engine.versions.explicit("step-6")

    assert [update.names_old for update in engine.told] == [False, True, False]


@pytest.mark.parametrize(("text", "first", "second"), [("", 0, 1), ("300:4", 300, 304), ("-1:1", -1, 0)])
def test_the_count_starts_and_steps_as_told(text: str, first: int, second: int) -> None:
    engine = Engine(text)

    engine.rpc("reload_weights")
    engine.step()

    counting = Counting.parse(text)
    assert [counting.version_of("default"), counting.version_of(engine.labels[0])] == [first, second]


def test_discarded_weights_have_no_version_until_some_are_loaded() -> None:
    engine = Engine()

    engine.versions.asleep()
    assert Counting().version_of(engine.labels[-1]) == -1
    engine.rpc("reload_weights")
    engine.step()

    assert engine.labels[-1] == "auto-1"


@pytest.mark.parametrize(
    ("name", "version"),
    [("policy-v12", 12), ("step_40", 40), ("run/checkpoint-7", 7), ("123", -1), ("lora1", -1), (None, -1)],
)
def test_only_a_versioned_adapter_name_gives_a_version(name: str | None, version: int) -> None:
    assert lora_version(name) == version


def output(request_id: str, *logprobs: float, width: int = 1, kept: int | None = None) -> Any:
    """One EngineCoreOutput: the sampled token's logprob comes first in each row."""
    rows = np.full((len(logprobs), width), -99, np.float32)
    rows[:, 0] = logprobs
    num_kept = len(logprobs) if kept is None else kept
    return SimpleNamespace(
        request_id=request_id, new_token_ids=[1] * num_kept, new_logprobs=(None, rows, None, None) if logprobs else None
    )


class Sink:
    """A collector with all rows it sent."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.collector = Collector(self.rows.extend, lambda label: int(label or -1))

    def open(self, *ids: str, **about: Any) -> None:
        for name in ids:
            self.collector.open(name, Trail(name, SimpleNamespace(num_cached_tokens=4), {}, **about))

    def end(self, *ids: str) -> dict[str, Row]:
        for name in ids:
            self.collector.close(name, "length")
        self.collector.flush()
        return {row.id: row for row in self.rows}


def test_tokens_of_interleaved_requests_come_back_in_order() -> None:
    sink = Sink()
    sink.open("a", "b")

    sink.collector.step([output("a", -1), output("b", -10)], "0", {})
    sink.collector.step([output("b", -11), output("a", -2)], "0", {})
    rows = sink.end("a", "b")

    assert rows["a"].logprobs.tolist() == [-1, -2]
    assert rows["b"].logprobs.tolist() == [-10, -11]
    assert rows["a"].cached_tokens == 4


def test_several_tokens_a_step_and_several_widths_are_kept_apart() -> None:
    sink = Sink()
    sink.open("a", "b")

    # 2 + 1 + 3 values: as many as three rows of the first width would have.
    sink.collector.step([output("a", -1, -2, width=1), output("b", -10, width=4)], "0", {})
    sink.collector.step([output("a", -3, width=2), output("b", -11, width=2)], "0", {})
    sink.collector.step([output("a", width=1), output("b", -12, width=3)], "0", {})
    rows = sink.end("a", "b")

    assert rows["a"].logprobs.tolist() == [-1, -2, -3]
    assert rows["b"].logprobs.tolist() == [-10, -11, -12]


def test_a_change_of_label_begins_a_span_at_the_token_of_its_step() -> None:
    sink = Sink()
    sink.open("a", "b")

    sink.collector.step([output("a", -1)], "3", {})
    sink.collector.step([output("a", -2), output("b", -9)], "4", {})
    rows = sink.end("a", "b")

    assert (rows["a"].spans, rows["b"].spans) == ([(3, 0), (4, 1)], [(4, 0)])


def test_a_long_response_goes_out_in_pieces_that_name_their_place_and_versions() -> None:
    sink = Sink()
    sink.open("a")
    num_tokens = PIECE_TOKENS + EPOCH_TOKENS + 10

    for at in range(num_tokens):
        sink.collector.step([output("a", -at)], "1" if at < 100 else "2", {})
        if sink.collector.needs_flush():
            sink.collector.flush()
    sink.end("a")

    first, last = sink.rows
    assert (first.offset, first.finish, last.offset, last.finish) == (0, "", first.logprobs.size, "length")
    assert np.concatenate([first.logprobs, last.logprobs]).tolist() == [-at for at in range(num_tokens)]
    assert (first.spans, last.spans) == ([(1, 0), (2, 100)], [(2, 0)])
    assert [len(group) for group in grouped(sink.rows)] == [1, 1]


def test_hidden_logprobs_follow_the_tokens_that_a_stop_string_left() -> None:
    sink = Sink()
    sink.open("a", forced=True)
    outputs = [output("a", -1, -2, -3)]

    hidden = sink.collector.hide(outputs)
    assert outputs[0].new_logprobs is None
    del outputs[0].new_token_ids[2:]
    sink.collector.step(outputs, "0", hidden)

    assert sink.end("a")["a"].logprobs.tolist() == [-1, -2]


def test_tokens_of_requests_nobody_watches_or_that_are_over_are_left_out() -> None:
    sink = Sink()
    sink.open("a", "gone")
    sink.collector.close("gone", "abort")

    sink.collector.step([output("gone", -5), output("a", -1), output("stranger", -7), output("mute")], "0", {})

    assert [row.logprobs.tolist() for row in sink.end("a").values()] == [[-1]]
