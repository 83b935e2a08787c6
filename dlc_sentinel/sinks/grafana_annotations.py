"""Marks in Grafana's curves: every RESYNC and ABORT, what the job answered, and every weight sync.

A thread of its own talks to Grafana; what it cannot take in time is dropped and counted, never waited for.
"""

from __future__ import annotations

import html
import logging
import queue
import threading
from collections.abc import Mapping

from dlc_sentinel.errors import GrafanaError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Event, Json, RunSnapshot, Snapshot
from dlc_sentinel.sinks.grafana_http import Api

TAG = "dlc-sentinel"
MAX_WAITING = 256
CLOSE_S = 3.0
_log = logging.getLogger(__name__)


class GrafanaAnnotations:
    """Posts to /api/annotations. `num_lost` counts marks that did not get there."""

    def __init__(self, api: Api) -> None:
        self.num_lost = 0
        self._api = api
        self._waiting: queue.Queue[dict[str, Json] | None] = queue.Queue(MAX_WAITING)
        self._said = False
        self._closed = False
        self._last_sync: dict[str, Mapping[str, Json]] = {}
        self._thread = threading.Thread(target=self._post_all, name="dlc-sentinel-annotations", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        mark = _mark(event)
        if mark is not None:
            self._put(mark)

    def publish(self, snapshot: Snapshot) -> None:
        """A weight sync has no event of its own: it is seen in the list of the newest snapshot."""
        for run in snapshot.runs:
            for sync in self._new_syncs(run):
                text = f"weights of version {plain(sync.get('version'), 20)} delivered"
                step = sync.get("step")
                step = step if isinstance(step, int) else run.last_step
                self._put(_body(snapshot.t_s, run.run, step, "weight sync", "", text))

    def _new_syncs(self, run: RunSnapshot) -> list[Mapping[str, Json]]:
        """Those after the one seen last; the list is bounded, so it may be gone from it: then all."""
        new: list[Mapping[str, Json]] = []
        for sync in reversed(run.synced):
            if sync == self._last_sync.get(run.run):
                break
            new.insert(0, sync)
        if run.synced:
            self._last_sync[run.run] = run.synced[-1]
        return new

    def close(self) -> None:
        """What waits is still posted, for a short time; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _put(self, body: dict[str, Json]) -> None:
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            self.num_lost += 1

    def _post_all(self) -> None:
        while (body := self._waiting.get()) is not None:
            try:
                self._api.send("POST", "/annotations", body)
            except GrafanaError as error:
                self.num_lost += 1
                if not self._said:
                    self._said = True
                    _log.warning("annotations do not reach Grafana: %s", error)


def _mark(event: Event) -> dict[str, Json] | None:
    data = event.data
    if event.kind == "command":
        kind = str(data.get("kind") or "command")
        outcome = "sent" if data.get("sent") else "due, not sent"
        return _body(event.t_s, event.run, event.step, kind, outcome, str(data.get("reason") or event.text))
    if event.kind == "ack":
        return _body(event.t_s, event.run, event.step, "answer", str(data.get("outcome") or ""), event.text)
    return None


def _body(t_s: float, run: str, step: int, what: str, outcome: str, text: str) -> dict[str, Json]:
    """Tags are for filters, the text for people; both come from jobs, so they are made inert."""
    tags = [TAG, plain(what, 40), *([plain(outcome, 40)] if outcome else []), f"run:{plain(run, 60)}"]
    head = f"{what} {outcome}".strip()
    shown = html.escape(f"{plain(run, 60)} step {step}: {plain(head, 80)}: {plain(text, 240)}", quote=False)
    return {"time": int(t_s * 1000), "tags": tags, "text": shown}
