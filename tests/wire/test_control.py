"""Commands: once each, in their steps, the newest first, ABORT before RESYNC."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc_sentinel.errors import FrameError
from dlc_sentinel.records import Command
from dlc_sentinel.wire.control import Inbox, Notice, Taken, Welcome, decode_down, encode_down

RESYNC = Command(
    "c1", "run", "RESYNC", "sync_weights", True, "lag", {"ess": 0.4, "steps": [1, 2]}, 3, 4, 9, version_at_least=2
)


def ids_at(inbox: Inbox, step: int) -> tuple[str | None, dict[str, str]]:
    command, settled = inbox.take(step)
    return (command.id if command else None), {done.command.id: done.outcome for done in settled}


@pytest.mark.parametrize(
    "message",
    [RESYNC, Command("c2", "run", "ABORT"), Notice("run", "WARN", "text"), Welcome(), Welcome(16), Taken()],
)
def test_every_message_comes_back_as_it_was_sent(message: Command | Notice | Welcome | Taken) -> None:
    assert decode_down(encode_down(message)) == message


@given(st.data())
def test_a_changed_byte_gives_a_message_or_a_frame_error(data: st.DataObject) -> None:
    frame = bytearray(encode_down(RESYNC))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    with contextlib.suppress(FrameError):
        decode_down(frame)


def test_evidence_longer_than_a_frame_is_refused() -> None:
    with pytest.raises(FrameError) as caught:
        encode_down(replace(RESYNC, evidence={"x": "y" * 2**20}))

    assert caught.value.cause == "oversize"


def test_a_command_waits_for_its_first_step_and_comes_once() -> None:
    inbox = Inbox("run")
    inbox.put(RESYNC)

    assert [ids_at(inbox, step) for step in (3, 4, 5)] == [(None, {}), ("c1", {}), (None, {})]


def test_a_command_may_be_applied_up_to_its_last_step_and_then_expires() -> None:
    on_time, late = Inbox("run"), Inbox("run")
    on_time.put(RESYNC)
    late.put(RESYNC)

    assert ids_at(on_time, 9) == ("c1", {})
    assert ids_at(late, 10) == (None, {"c1": "expired"})


def test_a_repeated_id_does_nothing() -> None:
    inbox = Inbox("run")
    inbox.put(RESYNC)
    ids_at(inbox, 5)
    inbox.put(RESYNC)

    assert ids_at(inbox, 6) == (None, {})
    assert inbox.num_replayed == 1


def test_the_newest_of_one_kind_wins_and_the_older_is_refused() -> None:
    inbox = Inbox("run")
    inbox.put(RESYNC)
    inbox.put(replace(RESYNC, id="c2"))

    assert ids_at(inbox, 5) == ("c2", {"c1": "refused"})


def test_abort_goes_before_a_newer_resync_which_follows() -> None:
    inbox = Inbox("run")
    inbox.put(replace(RESYNC, id="a", kind="ABORT", action=None))
    inbox.put(RESYNC)

    assert [ids_at(inbox, step) for step in (5, 6)] == [("a", {}), ("c1", {})]


def test_a_command_for_another_run_is_ignored() -> None:
    inbox = Inbox("other")
    inbox.put(RESYNC)

    assert ids_at(inbox, 5) == (None, {})
