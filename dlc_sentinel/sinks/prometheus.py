"""The metrics port: /metrics, /healthz, /readyz and /api/v1/snapshot, all read from the last published snapshot.

And the runbooks, as plain text, so that the links of the shipped alerts lead somewhere without any other server.

One request changes something: POST /api/v1/actions/reset?run=NAME, for who knows the token, from this machine only.

One collector in a registry of its own reads one frozen Snapshot per scrape: no metric object is touched while frames
come in, and a scrape during a publish sees either the old picture or the new one, never half of each.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dlc_sentinel import catalog
from dlc_sentinel.errors import AddressInUse
from dlc_sentinel.records import Event, Snapshot
from dlc_sentinel.sinks import shipped, snapshot_json

_IDLE_TIMEOUT_S = 10.0
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
RESET_PATH = "/api/v1/actions/reset"
_PAGES = (
    "/metrics", "/healthz", "/readyz", snapshot_json.PATH, shipped.RUNBOOKS_PATH, f"{shipped.RUNBOOKS_PATH}/NAME",
)  # fmt: skip

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""


class SnapshotCollector(Collector):
    """Metric families of catalog.METRICS from the snapshot that `read` returns (None = nothing published yet)."""

    def __init__(self, read: Callable[[], Snapshot | None]) -> None:
        self._read = read

    def describe(self) -> Iterator[Family]:
        """Names only, so that registering needs no snapshot."""
        for metric in catalog.METRICS:
            yield _family(metric)

    def collect(self) -> Iterator[Family]:
        snapshot = self._read()
        if snapshot is None:
            return
        for metric in catalog.METRICS:
            family = _family(metric)
            for labels, value in catalog.series(metric, snapshot).items():
                _add(family, labels, value)
            if family.samples:
                yield family


def _family(metric: catalog.Metric) -> Family:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.full_name, metric.help, labels=metric.label_names)
    if metric.kind == "info":
        return InfoMetricFamily(metric.full_name.removesuffix("_info"), metric.help, labels=metric.label_names)
    return GaugeMetricFamily(metric.full_name, metric.help, labels=metric.label_names)


def _add(family: Family, labels: tuple[str, ...], value: float) -> None:
    if isinstance(family, InfoMetricFamily):
        family.add_metric(labels, {})
    elif isinstance(family, (CounterMetricFamily, GaugeMetricFamily)):
        family.add_metric(labels, value)


class PrometheusSink:
    """Serves the last snapshot over HTTP until closed. Raises: AddressInUse when the port is taken.

    Args: host: loopback unless told otherwise (there is no password on this port); port: 0 = any free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._snapshot: Snapshot | None = None
        self._reset: tuple[str, Callable[[str], None]] | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(SnapshotCollector(lambda: self._snapshot))
        try:
            self._server = _Server(host, port, self._answer, self._answer_post)
        except OSError as error:
            raise AddressInUse(
                f"metrics port {host}:{port} cannot be bound ({error.strerror or error}); is another sentinel running? "
                f"Set serve.metrics_port (0 = any free port)."
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="dlc-sentinel-http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is really bound."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Base address, e.g. http://127.0.0.1:9877."""
        host = str(self._server.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def accept_resets(self, token: str, apply: Callable[[str], None]) -> None:
        """From now on a POST with this token calls `apply(run)`, in a thread of this sink; before, none is obeyed."""
        self._reset = (token, apply)

    def handle(self, event: Event) -> None:
        """Nothing: all that is exported stands in the snapshot."""

    def publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, target: str, accept: str) -> Answer:
        """What a GET of `target` is answered with."""
        parts = urlsplit(target)
        if parts.path == "/metrics":
            encoder, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encoder(self.registry)
        if parts.path == "/healthz":
            return _text(HTTPStatus.OK, "alive")
        if parts.path == "/readyz":
            return self._ready()
        if parts.path == snapshot_json.PATH:
            return self._snapshot_answer(parse_qs(parts.query))
        if parts.path.rstrip("/") == shipped.RUNBOOKS_PATH:
            pages = (f"{shipped.RUNBOOKS_PATH}/{name}" for name in shipped.runbook_names())
            return _text(HTTPStatus.OK, "\n".join(pages))
        if parts.path.startswith(f"{shipped.RUNBOOKS_PATH}/"):
            page = shipped.runbook(parts.path.removeprefix(f"{shipped.RUNBOOKS_PATH}/"))
            if page is None:
                return _text(HTTPStatus.NOT_FOUND, f"no such runbook; {shipped.RUNBOOKS_PATH} lists them")
            return _text(HTTPStatus.OK, page.rstrip("\n"))
        if parts.path == "/":
            return _text(HTTPStatus.OK, f"dlc-sentinel: {'  '.join(_PAGES)}")
        return _text(HTTPStatus.NOT_FOUND, f"no such page; there are {', '.join(_PAGES)}")

    def _answer_post(self, target: str, authorization: str) -> Answer:
        """What a POST of `target` is answered with."""
        parts = urlsplit(target)
        if parts.path != RESET_PATH:
            return _text(HTTPStatus.NOT_FOUND, f"nothing to post to here; there is {RESET_PATH}?run=NAME")
        if self._reset is None:
            return _text(HTTPStatus.FORBIDDEN, "this sentinel takes no resets")
        token, apply = self._reset
        if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            return _text(HTTPStatus.UNAUTHORIZED, "wanted the token that `dlc-sentinel actions reset` sends")
        run = parse_qs(parts.query).get("run", [""])[0]
        if run not in {known.run for known in (self._snapshot.runs if self._snapshot else ())}:
            return _text(HTTPStatus.NOT_FOUND, "run: no run of that name here")
        apply(run)
        return _text(HTTPStatus.ACCEPTED, "the breaker is reset before the next frame is read")

    def _ready(self) -> Answer:
        snapshot = self._snapshot
        if snapshot is None:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "not ready: nothing published yet")
        if not any(producer.get("state") == "alive" for run in snapshot.runs for producer in run.producers):
            return _text(
                HTTPStatus.SERVICE_UNAVAILABLE, "not ready: no producer is alive; is DLC_SENTINEL set in the job?"
            )
        return _text(HTTPStatus.OK, "ready")

    def _snapshot_answer(self, query: dict[str, list[str]]) -> Answer:
        snapshot = self._snapshot
        if snapshot is None:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "nothing published yet")
        wanted = query.get("history", ["512"])[0]
        if not (wanted.isascii() and wanted.isdigit() and len(wanted) <= 6):
            return _text(HTTPStatus.BAD_REQUEST, "history: got no number, wanted 0..512 steps")
        body = snapshot_json.encode(snapshot, history=int(wanted)).encode()
        return HTTPStatus.OK, "application/json", body


def _text(status: HTTPStatus, line: str) -> Answer:
    return status, "text/plain; charset=utf-8", (line + "\n").encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: str, port: int, answer: Callable[[str, str], Answer], answer_post: Callable[[str, str], Answer]
    ) -> None:
        self.answer = answer
        self.answer_post = answer_post
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.only_local = ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def server_bind(self) -> None:
        # HTTPServer.server_bind asks DNS for the host's full name, which can hang for seconds; the name is not used.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "dlc-sentinel"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_TIMEOUT_S

    def do_GET(self) -> None:
        if self.server.only_local and not self._asked_for_local_host():
            self._send(_text(HTTPStatus.FORBIDDEN, "this port answers local names only (127.0.0.1, localhost)"))
        else:
            self._send(self.server.answer(self.path, self.headers.get("Accept", "")))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        # A body is not read, so the connection cannot go on.
        self.close_connection = True
        if not self._asked_for_local_host():
            self._send(_text(HTTPStatus.FORBIDDEN, "changes are taken from this machine only (127.0.0.1, localhost)"))
        else:
            self._send(self.server.answer_post(self.path, self.headers.get("Authorization", "")))

    def _asked_for_local_host(self) -> bool:
        # A web page whose name is made to resolve to 127.0.0.1 would else read the snapshot through the browser.
        host = self.headers.get("Host", "localhost")
        try:
            return (urlsplit(f"//{host}").hostname or "") in _LOCAL_NAMES
        except ValueError:
            return False

    def _send(self, answer: Answer) -> None:
        status, content_type, body = answer
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is no news."""
