"""Pages in a headless Chromium, where one is installed: pictures at any width, light or dark, and what it complains of.

Spoken to over two pipes (its debugging protocol, JSON ended by a zero byte): no port, nothing else to install.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 60.0
_PIPES = (
    "import fcntl, os, sys\n"
    "read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])\n"
    "os.dup2(read, 3)\n"
    "os.dup2(write, 4)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)
"""Puts the pipes where the browser looks for them."""


class Tab:
    """One page in a browser. Every call raises OSError where the browser does not answer in time."""

    def __init__(self, out: int, back: int) -> None:
        self.complaints: list[str] = []
        """What the page's console and the browser's log said: errors, refusals of the content policy."""
        self._out, self._back = out, back
        self._buffer = b""
        self._number = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str, width: int, height: int, *, scale: float = 1.0, dark: bool = False) -> None:
        """Loads the page at this size and returns when it has loaded."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                   mobile=width < 600)  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[theme])
        self._call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise OSError(f"the page threw: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Returns when the expression is true."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.run(f"Boolean({script}) || new Promise(done => setTimeout(() => done(false), 50))"):
            if time.monotonic() > end_s:
                raise OSError(f"the page did not come to: {script}")

    def picture(self, *, whole: bool = False) -> bytes:
        """PNG of what is shown, or of the whole page however long it is."""
        clip = {}
        if whole:
            size = self._call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **clip)
        return base64.b64decode(answer["data"])

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        text = json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        end_s = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(end_s)
            self._note(answer)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise OSError(f"{method}: {answer['error'].get('message')}")
                return answer["result"]

    def _read(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(end_s - time.monotonic(), 0.0))
            got = os.read(self._back, 1 << 16) if ready else b""
            if not got:
                raise OSError("the browser does not answer")
            self._buffer += got
        text, self._buffer = self._buffer.split(b"\0", 1)
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer

    def _note(self, answer: dict[str, Any]) -> None:
        parameters = answer.get("params", {})
        if answer.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"].get("text")))
        elif answer.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(str(parameters["entry"]["text"]))


@contextmanager
def tab(wanted: str = "a picture") -> Iterator[Tab]:
    """A page in a browser of its own, which ends with the `with`. Raises: FileNotFoundError where none is installed."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise FileNotFoundError(f"{wanted} needs one of {', '.join(BROWSERS)} on the PATH; write .svg instead")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        its_read, out = os.pipe()
        back, its_write = os.pipe()
        command = [sys.executable, "-c", _PIPES, str(its_read), str(its_write), browser, *FLAGS,
                   f"--user-data-dir={folder}"]  # fmt: skip
        process = subprocess.Popen(
            command, pass_fds=(its_read, its_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(its_read)
        os.close(its_write)
        try:
            yield Tab(out, back)
        finally:
            process.terminate()
            os.close(out)
            os.close(back)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def shoot(page: str, out: Path, width: int, height: int, *, scale: float = 1.0) -> None:
    """Writes a PNG of HTML text. Raises: FileNotFoundError where there is no browser, OSError where it fails."""
    with tab(f"{out}: a PNG") as view, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        view.open(file.as_uri(), width, height, scale=scale)
        out.write_bytes(view.picture())
