"""Serves the page from a thread of its own, on loopback, until closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import uvicorn

from dlc_sentinel.errors import AddressInUse
from dlc_sentinel.records import Event, Snapshot
from dlc_sentinel.web.app import State, build

HOST = "127.0.0.1"
_CLOSE_S = 5.0


class PageSink:
    """The page of the last published snapshot. `port`: any free one where it is taken. Raises: AddressInUse."""

    def __init__(self, port: int = 0) -> None:
        self._state = State()
        self._socket = _bind(port)
        self.port = int(self._socket.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                build(self._state), log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
                loop="asyncio", server_header=False, timeout_keep_alive=10, timeout_graceful_shutdown=1,
                limit_concurrency=64,
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._serve, name="dlc-sentinel-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page, e.g. http://127.0.0.1:9878."""
        return f"http://{HOST}:{self.port}"

    def accept_resets(self, token: str, apply: Callable[[str], None]) -> None:
        """From now on a POST with this token calls `apply(run)`, in this sink's thread; before, none is obeyed."""
        self._state.reset = (token, apply)

    def handle(self, event: Event) -> None:
        """Nothing: all that is shown stands in the snapshot."""

    def publish(self, snapshot: Snapshot) -> None:
        self._state.snapshot = snapshot

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _bind(port: int) -> socket.socket:
    """A listening socket on loopback, at `port` or else at any free one."""
    for wanted in dict.fromkeys((port, 0)):
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((HOST, wanted))
            bound.listen(64)
        except OSError as error:
            bound.close()
            last = error
        else:
            return bound
    raise AddressInUse(f"page: no port of {HOST} can be bound ({last.strerror or last})") from last
