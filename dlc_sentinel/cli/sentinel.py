"""A live sentinel put together: tape, sockets, monitor, sinks; and the two ways to run it (here, or in a thread)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from dlc_sentinel.cli import reset_token, screen
from dlc_sentinel.config import Config
from dlc_sentinel.core.monitor import Monitor
from dlc_sentinel.errors import AddressError, AddressInUse, RecordError, TapeError
from dlc_sentinel.evidence import Evidence
from dlc_sentinel.records import Event, Json, Snapshot
from dlc_sentinel.runtime import LiveSource, Runtime
from dlc_sentinel.sinks.alert_lines import AlertLines
from dlc_sentinel.sinks.base import Sink
from dlc_sentinel.sinks.event_log import EventLog
from dlc_sentinel.sinks.prometheus import PrometheusSink
from dlc_sentinel.sinks.systemd import SystemdNotify
from dlc_sentinel.tape.recorder import Recorder
from dlc_sentinel.tape.replay import last_states
from dlc_sentinel.tape.schema import STATE_FILE, is_tape
from dlc_sentinel.web.sink import PageSink
from dlc_sentinel.wire import address as addresses
from dlc_sentinel.wire.receiver import Receiver

EVENTS_FILE = "events.jsonl"
TOLD_BYTES = 8 * 2**20
"""Size of the state to go on from above which reading it is announced."""
_JOIN_S = 20.0
_log = logging.getLogger(__name__)


class Latest:
    """The sink that a view in the same process reads from: call it for the newest snapshot."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None

    def handle(self, event: Event) -> None:
        """Nothing: the snapshot holds all that is shown."""

    def publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def close(self) -> None:
        """Nothing to release."""

    def __call__(self) -> Snapshot:
        """The newest snapshot. Raises: OSError while there is none."""
        if self._snapshot is None:
            raise OSError("nothing published yet")
        return self._snapshot


def build_sinks(config: Config, *, alerts: bool = True) -> tuple[Sink, ...]:
    """Who hears the events of a live sentinel; `alerts` = lines on stderr. Raises: AddressInUse, OSError."""
    return (
        *([AlertLines(sys.stderr, no_color=screen.no_color())] if alerts else ()),
        *([EventLog(Path(config.tape.dir) / EVENTS_FILE)] if config.tape.dir else ()),
        *_annotations(config),
        *([SystemdNotify(where)] if (where := os.environ.get("NOTIFY_SOCKET", "")) else ()),
        PrometheusSink(config.serve.metrics_host, config.serve.metrics_port),
        *([PageSink(config.serve.page_port)] if config.serve.page else ()),
        *_notifier(config),
    )


def _notifier(config: Config) -> tuple[Sink, ...]:
    """Who tells people, where somebody is to be told. Raises: ConfigError for a target that is none."""
    settings = config.notify
    if not (settings.urls or settings.file):
        return ()
    from dlc_sentinel.sinks.notify import Notifier
    from dlc_sentinel.sinks.targets import targets_of

    notifier = Notifier(
        targets_of(settings),
        cooldown_s=settings.cooldown_s,
        escalate_s=settings.escalate_s,
        max_per_hour=settings.max_per_hour,
    )
    return (notifier,)


def _annotations(config: Config) -> tuple[Sink, ...]:
    """Marks in Grafana, where one is set. Raises: GrafanaError for an address or a token file that is none."""
    if not (config.grafana.url and config.grafana.annotate):
        return ()
    from dlc_sentinel.cli.grafana import server
    from dlc_sentinel.sinks.grafana_annotations import GrafanaAnnotations

    return (GrafanaAnnotations(server(config.grafana.url, config.grafana.token_file)),)


class Sentinel:
    """Bound on construction, so that its addresses are known; then `run` it here, or `start` and `stop` a thread of it.

    Goes on from the state of config.tape.dir where there is one. Closed when it ends, or by leaving the `with`.
    Raises: AddressInUse, AddressError, KeysError, TapeError.
    """

    def __init__(self, config: Config, *extra: Sink, alerts: bool = True) -> None:
        self.error: Exception | None = None
        """What ended the thread before its time."""
        with ExitStack() as undo:
            # The address first: where it is taken, no tape folder is made.
            receiver = _receiver(config)
            undo.callback(receiver.close)
            _say_last_life(config)
            recorder = _recorder(config)
            if recorder is not None:
                undo.callback(recorder.close, 0.0)
            states = _states(config)
            sinks = (*build_sinks(config, alerts=alerts), *extra)
            self.address = receiver.address
            for sink in sinks:
                undo.callback(sink.close)
            self.metrics = next(sink for sink in sinks if isinstance(sink, PrometheusSink))
            self.page = next((sink for sink in sinks if isinstance(sink, PageSink)), None)
            source = LiveSource(receiver, states)
            self.runtime = Runtime(config, source, Monitor(config), recorder, sinks, evidence=Evidence())
            self._token = self._allow_resets()
            undo.pop_all()
        self._thread = threading.Thread(target=self._guarded, name="dlc-sentinel-runtime")

    def __enter__(self) -> Sentinel:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def addresses(self) -> dict[str, Json]:
        """{"data", "control", "metrics", "page"}: the value for DLC_SENTINEL, then URLs; page is None where off."""
        urls = {"metrics": self.metrics.url, "page": self.page.url if self.page else None}
        return {"data": self.address.data, "control": self.address.control, **urls}

    def run(self) -> None:
        """Returns after `runtime.stop()`; everything is closed then."""
        self.runtime.run()

    def start(self) -> None:
        """Runs in a thread from now on; a fault there is in `error`."""
        self._thread.start()

    def stop(self) -> None:
        """Drains and closes; a second call does nothing."""
        self.runtime.stop()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        else:
            self.runtime.close()
        if self._token:
            reset_token.remove(self.metrics.port, self._token)
        path = self.address.ipc_path
        if path is not None and path.endswith(_own_name("")):
            # Only of a socket that is named after this process: nobody else may wait for that lock.
            Path(f"{path}.lock").unlink(missing_ok=True)

    def _guarded(self) -> None:
        try:
            self.runtime.run()
        except Exception as error:  # noqa: BLE001  # the job beside it goes on; whoever stops the sentinel reads it
            self.error = error
            _log.error("the sentinel ended: %s: %s", type(error).__name__, error)

    def _allow_resets(self) -> str:
        try:
            secret = reset_token.write(self.metrics.port)
        except (OSError, AddressError) as error:
            _log.warning("`actions reset` will not reach this sentinel: %s", error)
            return ""
        self.metrics.accept_resets(secret, self.runtime.reset_breaker)
        if self.page is not None:
            self.page.accept_resets(secret, self.runtime.reset_breaker)
        return secret


def own_address(kind: str) -> str:
    """An address of this process alone. Raises: AddressError as `default_folder`."""
    return f"ipc://{addresses.default_folder() / _own_name(kind)}"


def _own_name(kind: str) -> str:
    return f"{kind}-{os.getpid()}.sock"


def _receiver(config: Config) -> Receiver:
    serve = config.serve
    try:
        return Receiver(
            serve.address,
            keys=serve.keys or None,
            insecure=serve.insecure,
            max_frame_bytes=serve.max_frame_bytes,
        )
    except AddressInUse as error:
        raise AddressInUse(f"{error} (--set serve.address=ipc:///PATH or tcp://127.0.0.1:PORT)") from error


def _say_last_life(config: Config) -> None:
    """A line where there is so much to go on from that reading it takes a moment."""
    state = Path(config.tape.dir) / STATE_FILE
    if config.tape.dir and state.exists() and (size := state.stat().st_size) >= TOLD_BYTES:
        screen.say(f"reading {size / 1e6:.0f} MB of tape of the last life ({state}) ...")


def _recorder(config: Config) -> Recorder | None:
    """The tape's writer, None where there is no tape. Raises: TapeError."""
    tape = config.tape
    if not tape.dir:
        return None
    try:
        return Recorder(tape.dir, tape.token_bytes, tape.part_bytes)
    except TapeError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise TapeError(f"{tape.dir}: no tape can be written there ({why}); choose another --tape folder") from error


def _states(config: Config) -> dict[str, Json]:
    """{run: state} to go on from. Raises: TapeError for states that this version cannot read."""
    if not config.tape.dir or not is_tape(config.tape.dir):
        return {}
    states = last_states(config.tape.dir)
    trial = Monitor(config)
    for run, state in states.items():
        try:
            trial.load_state(run, state)
        except RecordError as error:
            raise TapeError(f"{config.tape.dir}: {error}; choose another --tape folder") from error
    return states


@contextmanager
def until_signal(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop` once; the next one ends the process as if nothing were here."""
    caught = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in caught:
            signal.signal(each, before[each])
        stop()

    before = {each: signal.signal(each, on_signal) for each in caught}
    try:
        yield
    finally:
        for each in caught:
            signal.signal(each, before[each])
