"""A server that says the same bytes to whoever connects, whatever is asked; or nothing at all."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def says(answer: bytes | None) -> Iterator[str]:
    """The address, http://127.0.0.1:port, while it listens. None: it takes the question and never answers."""
    end = threading.Event()

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            if answer is None:
                end.wait()
            else:
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            end.set()
            server.shutdown()
            thread.join()
