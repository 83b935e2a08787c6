"""Marks in Grafana: what was sent, what was answered, when weights were delivered; and no harm when nobody is there."""

from __future__ import annotations

import threading
from contextlib import closing

from factories_snapshots import make_event, make_run, make_snapshot

from dlc_sentinel.errors import GrafanaError
from dlc_sentinel.sinks.grafana_annotations import MAX_WAITING, GrafanaAnnotations


class Api:
    """Remembers what is posted; `fault` is raised instead."""

    def __init__(self, fault=None):
        self.posts = []
        self.fault = fault

    def find(self, path):
        raise AssertionError("nothing is read")

    def send(self, method, path, body, headers=None):
        assert (method, path) == ("POST", "/annotations")
        if self.fault:
            raise self.fault
        self.posts.append(body)
        return {}


def marks(*events, snapshots=()):
    api = Api()
    with closing(GrafanaAnnotations(api)) as sink:
        for event in events:
            sink.handle(event)
        for snapshot in snapshots:
            sink.publish(snapshot)
    return api.posts


def command(**data):
    return make_event("command", step=33, t_s=1000.25, data={"kind": "RESYNC", "reason": "ESS 0.43", **data})


def test_a_resync_that_was_sent_is_a_mark_at_its_time_with_its_reason():
    (mark,) = marks(command(sent=True))

    assert mark["time"] == 1_000_250
    assert mark["tags"] == ["dlc-sentinel", "RESYNC", "sent", "run:r1"]
    assert mark["text"] == "r1 step 33: RESYNC sent: ESS 0.43"


def test_an_abort_that_is_due_and_not_sent_says_so():
    (mark,) = marks(command(kind="ABORT", sent=False))

    assert mark["tags"][1:3] == ["ABORT", "due, not sent"]


def test_the_jobs_answer_is_a_mark_of_its_own():
    (mark,) = marks(make_event("ack", text="applied at version 34", data={"outcome": "applied"}))

    assert mark["tags"][1:3] == ["answer", "applied"] and "version 34" in mark["text"]


def test_steps_and_findings_are_no_marks():
    assert marks(make_event("step"), make_event("finding"), make_event("note")) == []


def sync(version, step=5):
    return {"step": step, "version": version, "checksum": "", "label": "", "replica": "0"}


def test_every_weight_sync_is_marked_once():
    pictures = [make_snapshot(make_run(synced=tuple(sync(v) for v in range(n)))) for n in (0, 1, 1, 3, 3)]

    found = marks(snapshots=pictures)

    assert [mark["text"].split("version ")[1] for mark in found] == ["0 delivered", "1 delivered", "2 delivered"]
    assert {mark["tags"][1] for mark in found} == {"weight sync"}


def test_a_list_of_syncs_that_forgets_its_oldest_still_gives_each_once():
    pictures = [make_snapshot(make_run(synced=tuple(sync(v) for v in range(n, n + 4)))) for n in range(5)]

    assert len(marks(snapshots=pictures)) == 8


def test_text_from_a_job_is_inert_in_a_mark():
    event = command(sent=True, reason="<script>alert(1)</script>\x1b[31m")
    (mark,) = marks(make_event("command", run="<b>r</b>", data=event.data))

    assert "<script>" not in mark["text"] and "<b>" not in mark["text"] and "\x1b" not in mark["text"]


def test_a_grafana_that_is_not_there_costs_marks_only_and_is_said_once(caplog):
    with closing(GrafanaAnnotations(Api(GrafanaError("cannot be reached")))) as sink:
        for _ in range(3):
            sink.handle(command(sent=True))

    assert sink.num_lost == 3
    assert caplog.text.count("annotations do not reach Grafana") == 1


def test_a_grafana_that_hangs_never_holds_up_the_caller():
    go = threading.Event()

    class Slow(Api):
        def send(self, method, path, body, headers=None):
            go.wait(30)
            return {}

    sink = GrafanaAnnotations(Slow())
    for _ in range(MAX_WAITING + 50):
        sink.handle(command(sent=True))

    assert sink.num_lost >= 49
    go.set()
    sink.close()
    sink.close()
