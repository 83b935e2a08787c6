"""The sentinel's newest numbers of one run, fetched in a thread of its own: the job reads what is there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping

from dlc_sentinel import catalog
from dlc_sentinel.errors import SentinelError
from dlc_sentinel.sinks import snapshot_json
from dlc_sentinel.wire import address

METRICS_PORT = 9877
REFRESH_S = 5.0
AGAIN_S = 0.3
TRIES = 8
TIMEOUT_S = 2.0
_log = logging.getLogger("dlc_sentinel.verl")


def metrics_url() -> str | None:
    """Base address of the sentinel's metrics port: DLC_SENTINEL_METRICS (0 = off), else port 9877 where it listens."""
    given = os.environ.get("DLC_SENTINEL_METRICS", "").strip()
    if given:
        return None if given == "0" else given
    host = address.parse(os.environ.get("DLC_SENTINEL", "")).host or "127.0.0.1"
    return f"http://[{host}]:{METRICS_PORT}" if ":" in host else f"http://{host}:{METRICS_PORT}"


class Numbers:
    """Refreshed every five seconds, and after each `refresh`; empty while the sentinel cannot be read."""

    def __init__(self, run: str, url: str | None) -> None:
        self._run = run
        self._url = url
        self._values: Mapping[str, float] = {}
        self._step = -1
        self._wanted = threading.Event()
        self._said = False
        self._closed = False
        if url is not None:
            threading.Thread(target=self._follow, name="dlc-sentinel-numbers", daemon=True).start()

    def values(self) -> Mapping[str, float]:
        """{"dlc/...": number} of the run's last closed step."""
        return self._values

    def refresh(self, step: int) -> None:
        """`step` has ended: its numbers are due, as soon as the sentinel has them."""
        self._step = step
        self._wanted.set()

    def close(self) -> None:
        """Ends the thread, after the fetch it may be in; there are no values from then on."""
        self._closed = True
        self._values = {}
        self._wanted.set()

    def _follow(self) -> None:
        while True:
            self._wanted.wait(REFRESH_S)
            if self._closed:
                return
            self._wanted.clear()
            for _ in range(TRIES):
                values = self._fetch()
                self._values = {} if values is None or self._closed else values
                # A run whose first step is still open has no last step yet.
                if values is None or values.get("dlc/last_step", -1.0) >= self._step:
                    break
                time.sleep(AGAIN_S)

    def _fetch(self) -> Mapping[str, float] | None:
        """What the sentinel has of this run, None where it cannot be read."""
        assert self._url is not None
        try:
            snapshot = snapshot_json.fetch(self._url, timeout_s=TIMEOUT_S, history=1)
        except (OSError, SentinelError) as error:
            if not self._said:
                self._said = True
                _log.warning(
                    "dlc-sentinel: no dlc/ metrics in this job's log: %s; set DLC_SENTINEL_METRICS=http://host:port",
                    error,
                )
            return None
        return next((catalog.log_values(run) for run in snapshot.runs if run.run == self._run), {})
