"""Real sockets: ipc, tcp and CURVE; who may bind and who may send; nothing lost without being counted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from dlc_sentinel.errors import AddressError, AddressInUse, KeysError
from dlc_sentinel.records import Ack, Bye, Command, Heartbeat, Hello, Source, StepEnd, Train
from dlc_sentinel.wire import line
from dlc_sentinel.wire.codec import UNNUMBERED, encode
from dlc_sentinel.wire.control import Taken, Welcome, decode_down
from dlc_sentinel.wire.keys import new_keys
from dlc_sentinel.wire.receiver import Receiver
from dlc_sentinel.wire.sender import Sender
from tests.wire.live import Reader, hooked, wait

RESYNC = Command("c1", "run", "RESYNC", "sync_weights", not_before_step=3, expires_step=8)


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    with Receiver(f"ipc://{tmp_path}/s.sock") as bound:
        yield bound


def numbers(n: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.linspace(-3, 0, n, dtype=np.float32)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_what_a_hook_sends_arrives_in_order_and_numbered(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/s.sock" if transport == "ipc" else "tcp://127.0.0.1:0"
    with Receiver(address) as receiver:
        hook, reader = hooked(monkeypatch, receiver.address, model_name="m"), Reader(receiver)
        for step in range(5):
            hook.train(step, step, cur=numbers(9))
            hook.poll(step)
        reader.close(hook)

    assert reader.of(Hello)[0].model_name == "m"
    assert [record.step for record in reader.of(Train)] == list(range(5))
    assert [record.step for record in reader.of(StepEnd)] == list(range(5))
    assert reader.numbers == list(range(12))
    assert reader.of(Bye)[0].frames_sent == 12


def test_a_job_of_200_frames_arrives_whole(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
    for step in range(100):
        hook.train(step, step, cur=numbers(300_000), lengths=[300_000])
    reader.until(lambda: reader.num_tokens == 100 * 300_000)
    hook.close()

    assert reader.numbers == list(range(len(reader.numbers)))


def test_a_sentinel_that_is_behind_when_a_job_ends_loses_nothing_of_it(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
    reader.until_any(Hello, 2)
    for step in range(100):
        hook.train(step, step, cur=numbers(9))
    closing = threading.Thread(target=hook.close)
    closing.start()
    closing.join(0.3)
    reader.until(lambda: not closing.is_alive())

    assert reader.numbers == list(range(102))
    assert len(reader.of(Bye)) == 1


def test_a_sentinel_that_took_over_just_before_the_end_confirms_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line, "HEARTBEAT_S", 60.0)
    monkeypatch.setattr(line, "EXIT_S", 10.0)  # a busy machine may need more than a second to connect anew
    monkeypatch.setattr(Sender.close, "__defaults__", (10.0,))
    address = f"ipc://{tmp_path}/s.sock"
    with Receiver(address) as first:
        hook, reader = hooked(monkeypatch, address), Reader(first)
        reader.until_any(Hello, 2)
        for step in range(40):
            hook.train(step, step, cur=numbers(9))
        reader.until_any(Train, 40)
    with Receiver(address) as second:
        reader = Reader(second)
        reader.until(lambda: hook.train(40, 40, cur=numbers(9)) or reader.of(Train))
        reader.close(hook)

    assert caplog.records == []


def test_a_goodbye_that_is_read_before_its_control_socket_was_heard_is_confirmed_once_it_is(receiver: Receiver) -> None:
    context, source = zmq.Context(), Source("run", "trainer", "p0")
    with context.socket(zmq.PUSH) as data, context.socket(zmq.DEALER) as down:
        data.connect(receiver.address.data)
        for part in encode(Bye(source, 40), 0):
            data.send(part)
        reader = Reader(receiver)
        reader.until_any(Bye)
        down.connect(receiver.address.control)
        for part in encode(Heartbeat(source, 7, 40), UNNUMBERED):
            down.send(part)
        heard = []
        reader.until(lambda: down.poll(0) and (heard.append(decode_down(down.recv())) or len(heard) == 2))
    context.destroy(linger=0)

    assert [type(message) for message in heard] == [Welcome, Taken]


def test_a_producer_is_known_by_its_heartbeat(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, reader = hooked(monkeypatch, receiver.address, rank=0), Reader(receiver)

    beat = reader.until_any(Heartbeat)[0]
    hook.close()

    assert beat.source == hook.source


def test_a_sentinel_that_starts_late_still_gets_the_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"ipc://{tmp_path}/s.sock"
    with Receiver(address) as first:
        hook = hooked(monkeypatch, address)
        Reader(first).until_any(Hello, 2)
    with Receiver(address) as second:
        hello = Reader(second).until_any(Hello)[0]
    hook.close()

    assert hello.source == hook.source


def test_a_command_is_applied_once_and_acknowledged(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
    reader.until_any(Heartbeat)

    assert receiver.send_command(RESYNC) == 1
    assert receiver.send_command(RESYNC) == 1
    polled: list[Command] = []
    wait(lambda: polled.extend(filter(None, [hook.poll(5)])) or polled)  # type: ignore[func-returns-value]
    again = hook.poll(6)
    hook.ack(polled[0], "applied", version=7)
    ack = reader.until_any(Ack)[0]
    hook.close()

    assert polled == [RESYNC]
    assert again is None
    assert (ack.command_id, ack.outcome, ack.version, ack.step) == ("c1", "applied", 7, 6)


def test_an_expired_command_is_acknowledged_as_expired(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
    reader.until_any(Heartbeat)
    receiver.send_command(RESYNC)

    reader.until(lambda: hook.poll(9) or reader.of(Ack))
    hook.close()

    assert [(ack.command_id, ack.outcome) for ack in reader.of(Ack)] == [("c1", "expired")]


def test_only_rank_0_of_the_trainer_of_that_run_gets_commands(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[dict[str, object]] = [{"rank": 1}, {"role": "engine"}, {"run": "other"}]
    hooks = [hooked(monkeypatch, receiver.address, **who) for who in others]
    Reader(receiver).until_any(Heartbeat, 3)

    assert receiver.send_command(RESYNC) == 0
    for hook in hooks:
        hook.close()


def test_a_job_that_has_gone_gets_no_command(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
    reader.until_any(Heartbeat)
    hook.close()
    reader.until_any(Bye)

    wait(lambda: receiver.send_command(RESYNC) == 0)


def test_a_notice_is_one_line_on_the_jobs_stderr_and_rate_limited(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
    reader.until_any(Heartbeat)
    for text in ("lag is\nhigh", "again"):
        receiver.send_notice("run", "WARN", text)
    receiver.send_notice("run", "CRITICAL", "stop")
    receiver.send_command(RESYNC)
    wait(lambda: hook.poll(5))
    hook.close()

    assert capfd.readouterr().err == "dlc-sentinel WARN: lag is high\ndlc-sentinel CRITICAL: stop\n"


def test_random_bytes_on_both_sockets_are_passed_on_to_be_refused(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, rng = Reader(receiver), np.random.default_rng(0)
    frame = bytes(encode(StepEnd(Source("run", "trainer", "p"), 1), 0)[0])
    with zmq.Context() as context, context.socket(zmq.PUSH) as data, context.socket(zmq.DEALER) as control:
        data.linger = control.linger = 0
        data.connect(receiver.address.data)
        control.connect(receiver.address.control)
        for size in range(100):
            data.send(rng.bytes(size))
            control.send(rng.bytes(size))
        data.send_multipart([frame, b"", b"x"])
        control.send_multipart([b"", b""])
        reader.until(lambda: len(reader.refused) == 202)
        hook = hooked(monkeypatch, receiver.address)
        reader.until_any(Hello)
        hook.close()

    assert set(reader.refused) <= {"unparsable", "unknown_protocol"}


def test_a_message_above_the_limit_closes_only_its_own_connection(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(receiver)
    with zmq.Context() as context, context.socket(zmq.PUSH) as data:
        data.linger = 0
        data.connect(receiver.address.data)
        data.send(bytes(2**20 + 1))
        hook = hooked(monkeypatch, receiver.address)
        reader.until_any(Hello)
        hook.close()

    assert reader.refused == []


def test_a_second_ipc_sentinel_is_told_who_holds_the_address(receiver: Receiver) -> None:
    with pytest.raises(AddressInUse, match=f"pid {os.getpid()}"):
        Receiver(receiver.address)


def test_a_second_tcp_sentinel_is_refused() -> None:
    with Receiver("tcp://127.0.0.1:0") as first, pytest.raises(AddressInUse, match=str(first.address.port)):
        Receiver(str(first.address))


def test_a_taken_control_port_is_refused_and_leaves_the_data_port_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)):
            Receiver(f"tcp://127.0.0.1:{port - 1}")
        with socket.socket() as data:
            data.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            data.bind(("127.0.0.1", port - 1))


def test_an_address_is_free_again_after_close(tmp_path: Path) -> None:
    for _ in range(2):
        Receiver(f"ipc://{tmp_path}/s.sock").close()


def test_a_closed_sentinel_leaves_no_socket_behind(tmp_path: Path) -> None:
    Receiver(f"ipc://{tmp_path}/s.sock").close()

    assert [path.name for path in tmp_path.iterdir()] == ["s.sock.lock"]


def test_the_sockets_are_their_owners_alone(receiver: Receiver) -> None:
    path = receiver.address.ipc_path or ""

    assert {os.stat(name).st_mode & 0o777 for name in (path, path + ".ctl", path + ".lock")} == {0o600}


def test_tcp_off_loopback_is_not_bound_without_keys() -> None:
    with pytest.raises(AddressError, match="keys new"):
        Receiver("tcp://0.0.0.0:0")


def test_a_hook_with_the_right_keys_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_keys(tmp_path / "keys")
    monkeypatch.setenv("DLC_SENTINEL_KEYS", str(tmp_path / "keys"))
    with Receiver("tcp://127.0.0.1:0", keys=tmp_path / "keys") as receiver:
        hook, reader = hooked(monkeypatch, receiver.address), Reader(receiver)
        reader.until(lambda: reader.of(Hello) and reader.of(Heartbeat))
        hook.close()


def test_neither_an_unknown_key_nor_no_key_gets_anything_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    new_keys(tmp_path / "keys")
    new_keys(tmp_path / "strangers")
    (tmp_path / "strangers" / "sentinel.public").write_bytes((tmp_path / "keys" / "sentinel.public").read_bytes())
    with Receiver("tcp://127.0.0.1:0", keys=tmp_path / "keys") as receiver:
        reader = Reader(receiver)
        plain = hooked(monkeypatch, receiver.address, run="plain")
        monkeypatch.setenv("DLC_SENTINEL_KEYS", str(tmp_path / "strangers"))
        stranger = hooked(monkeypatch, receiver.address, run="stranger")
        monkeypatch.setenv("DLC_SENTINEL_KEYS", str(tmp_path / "keys"))
        known = hooked(monkeypatch, receiver.address, run="known")
        reader.until_any(Heartbeat)
        for hook in (plain, stranger):
            hook.train(1, 1, cur=numbers(5))
            hook.close()
        known.close()
        reader.until_any(Bye)

    assert {record.source.run for record in reader.records} == {"known"}
    said = [record.getMessage() for record in caplog.records if record.name.endswith("receiver")]
    assert said == ["a job was refused: its key is no producer*.public of this sentinel's keys (said once)"]


def test_readable_keys_stop_a_sentinel_before_it_binds(tmp_path: Path) -> None:
    new_keys(tmp_path)
    (tmp_path / "sentinel.secret").chmod(0o644)

    with pytest.raises(KeysError, match="0644"):
        Receiver("tcp://127.0.0.1:0", keys=tmp_path)


SENTINEL = """
import sys
from dlc_sentinel.wire.receiver import Receiver
with Receiver(sys.argv[1]) as receiver:
    print("bound", flush=True)
    while True:
        for frame in receiver.poll(1000):
            print(len(frame.payload), flush=True)
"""


def start_sentinel(address: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", SENTINEL, address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "bound\n"
    return process


def test_training_goes_on_when_the_sentinel_is_killed_and_a_new_one_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/s.sock"
    process = start_sentinel(address)
    hook = hooked(monkeypatch, address)
    hook.train(1, 1, cur=numbers(100))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    hook.train(2, 2, cur=numbers(100))

    with Receiver(address) as receiver:
        reader = Reader(receiver)
        reader.until(lambda: hook.train(3, 3, cur=numbers(100)) or any(t.step == 3 for t in reader.of(Train)))
        hook.close()

    assert hook.num_errors == {}


def test_tokens_received_and_tokens_dropped_add_up_to_those_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLC_SENTINEL_QUEUE_BYTES", str(2**22))
    address = f"ipc://{tmp_path}/s.sock"
    hook = hooked(monkeypatch, address)
    for step in range(150):
        hook.train(step, 1, cur=numbers(200_000))
    hook.train(150, 1, cur=numbers(3), mask=np.ones(2))
    hook.train(151, 1, seq_id=["x" * 2**20], cur=numbers(3))
    with Receiver(address) as receiver:
        reader = Reader(receiver)
        offered = hook.account()[0]
        reader.close(hook)
    dropped = reader.of(Bye)[0].dropped_tokens

    assert offered == 150 * 200_000 + 3 + 3
    assert dropped["queue_full"] > 0
    assert dropped["mis_sized"] == 3
    assert reader.refused == []
    assert reader.num_tokens + sum(dropped.values()) == offered
    assert reader.numbers == list(range(len(reader.numbers)))


def test_a_stopped_sentinel_never_stops_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLC_SENTINEL_QUEUE_BYTES", str(2**22))
    address = f"ipc://{tmp_path}/s.sock"
    process = start_sentinel(address)
    hook = hooked(monkeypatch, address)
    process.send_signal(signal.SIGSTOP)
    done = threading.Event()

    def job() -> None:
        for step in range(200):
            hook.train(step, 1, cur=numbers(200_000))
            hook.poll(step)
        done.set()

    threading.Thread(target=job, daemon=True).start()
    finished = done.wait(10)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    hook.close()

    assert finished
    assert hook.account()[1]["queue_full"] > 0
