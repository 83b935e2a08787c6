"""Real Prometheus and Alertmanager programs on loopback, for as long as a `with` lasts."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DEADLINE_S = 60.0


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def get(url, timeout=10):
    """Status and text; a refusal is an answer, too."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for(condition, what, deadline_s=DEADLINE_S):
    """The first true answer of `condition`; a program that is starting is asked again."""
    end_s = time.monotonic() + deadline_s
    pause = threading.Event()
    while True:
        try:
            found = condition()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < end_s, f"{what} did not come within {deadline_s:g} s"
        pause.wait(0.1)


class Program:
    """A server that is ready when `ready` answers 200, and is ended with the `with`."""

    def __init__(self, command, port, ready):
        self.url = f"http://127.0.0.1:{port}"
        self._ready = ready
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        wait_for(self._is_ready, self.url)
        return self

    def _is_ready(self):
        assert self._process.poll() is None, self._process.stderr.read()[-2000:]
        return get(f"{self.url}{self._ready}")[0] == 200

    def __exit__(self, *_):
        self._process.terminate()
        self._process.communicate(timeout=20)


class Prometheus(Program):
    """`config`: the YAML text; data lies in folder/data."""

    def __init__(self, folder, config):
        port = free_port()
        path = folder / "prometheus.yml"
        path.write_text(config)
        command = [
            "prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        super().__init__(command, port, "/-/ready")

    def ask(self, path, **arguments):
        status, text = get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}", timeout=30)
        tree = json.loads(text)
        assert status == 200, f"{arguments}: {tree.get('error')}"
        return tree["data"]

    def now(self, expr):
        return self.ask("query", query=expr)["result"]

    def over(self, expr, *, start_s, end_s, step_s=15):
        """Series of the range with at least one value."""
        return self.ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)["result"]


class Alertmanager(Program):
    def __init__(self, folder, config):
        port = free_port()
        path = folder / "alertmanager.yml"
        path.write_text(config)
        command = [
            "prometheus-alertmanager", f"--config.file={path}", f"--storage.path={folder}/alertmanager",
            f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=",
        ]  # fmt: skip
        super().__init__(command, port, "/-/ready")
        self.port = port


class Webhook:
    """Keeps what is posted to it: [(path, object)]."""

    def __init__(self):
        self.posts = []
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                posts.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def alerts(self):
        """[(path, alert)] of everything posted so far."""
        return [(path, alert) for path, body in list(self.posts) for alert in body["alerts"]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
