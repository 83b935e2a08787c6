"""Notifications: what is told, to whom, how often, and that a secret is never shown."""

from __future__ import annotations

import json
import logging
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from factories_snapshots import NOW_S, make_event, make_finding, make_run, make_snapshot

from dlc_sentinel.config import Notify
from dlc_sentinel.errors import ConfigError
from dlc_sentinel.sinks.notify import Notifier, trouble
from dlc_sentinel.sinks.targets import hidden, targets_of

SECRET = "xoxb-s3cr3t"
SLACK = f"slack://{SECRET}/B1/C1"
SLACK_WEBHOOK = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcevi7FQ"


class Phone:
    """A target that remembers; `plays` are what it answers in turn, then True."""

    def __init__(self, *plays, only_critical=False):
        self.name, self.only_critical = "phone", only_critical
        self.heard, self.plays = [], list(plays)

    def send(self, title, body, level):
        play = self.plays.pop(0) if self.plays else True
        if isinstance(play, Exception):
            raise play
        if play:
            self.heard.append((title, body, level))
        return play

    @property
    def bodies(self):
        return [body for _, body, _ in self.heard]


def told(*events, phones=None, snapshots=(), **settings):
    """What a phone hears of events and snapshots."""
    phone = Phone()
    notifier = Notifier(phones or [phone], **{"retry_s": 0.0, **settings})
    for event in events:
        notifier.handle(event)
    for snapshot in snapshots:
        notifier.publish(snapshot)
    notifier.close()
    return phone


def finding(state="confirmed", t_s=NOW_S, level="WARN", **changes):
    return make_event("finding", t_s=t_s, level=level, data=make_finding(state=state, **changes))


def closed(t_s=NOW_S, **changes):
    return finding("closed", t_s, "INFO", **changes)


def open_at(t_s, **changes):
    return make_snapshot(make_run(verdict="LAG", findings=(make_finding(**changes),)), t_s=t_s)


def test_a_finding_is_told_with_run_evidence_and_next_move():
    title, body, level = told(finding()).heard[0]

    assert (title, level) == ("dlc-sentinel warn: r1", "WARN")
    assert body.startswith("[! ] r1 step 33: LAG (queue) opened (confirmed), since step 31")
    assert "lag_ess 0.43" in body
    assert "next: sync the weights now" in body


def test_a_finding_that_goes_on_is_told_once():
    assert len(told(*(finding(t_s=NOW_S + 3600.0 * n) for n in range(5))).heard) == 1


def test_a_finding_that_gets_worse_is_told_again():
    assert "escalated" in told(finding("suspected"), finding("confirmed", level="CRITICAL")).bodies[1]


def test_the_end_is_told_to_who_heard_the_beginning_and_to_nobody_else():
    assert "LAG (queue) closed" in told(finding(), closed()).bodies[1]
    assert told(closed()).heard == []


def test_an_applied_command_is_no_news_a_refused_one_is():
    data = {"id": "c", "outcome": "refused", "reason": "busy"}
    phone = told(
        make_event("ack", level="INFO", data={"id": "c", "outcome": "applied"}),
        make_event("ack", level="WARN", data=data),
        make_event("producer", level="INFO", data={"state": "alive"}),
        make_event("step", level="INFO"),
    )

    assert len(phone.heard) == 1
    assert "command refused: busy" in phone.bodies[0]


def test_flapping_is_held_back_for_the_cool_down_and_counted():
    flaps = [event for n in range(4) for event in (finding(t_s=NOW_S + 10 * n), closed(NOW_S + 10 * n + 5))]
    phone = told(*flaps, finding(t_s=NOW_S + 700), cooldown_s=600.0)

    words = [body.split("LAG (queue) ")[1].split()[0].strip(",") for body in phone.bodies]
    assert words == ["opened", "closed", "opened"]
    assert "(+3 like it held back)" in phone.bodies[2]


def test_no_more_than_the_limit_an_hour_but_for_what_is_critical():
    many = [finding(kind=f"k{n}", t_s=NOW_S + n) for n in range(6)]
    phone = told(*many, finding(kind="bad", level="CRITICAL", t_s=NOW_S + 10), max_per_hour=2)

    assert len(phone.heard) == 3
    assert phone.heard[2][2] == "CRITICAL"
    assert "(4 news before this one held back: more than 2 an hour)" in phone.bodies[2]


def test_after_an_hour_news_flows_again():
    phone = told(finding(kind="a"), finding(kind="b"), finding(kind="c", t_s=NOW_S + 3601), max_per_hour=1)

    assert len(phone.heard) == 2


def test_what_stays_open_is_escalated_once_to_all():
    pager = Phone(only_critical=True)
    told(finding(), phones=[pager], escalate_s=1800.0,
         snapshots=[open_at(NOW_S), open_at(NOW_S + 1799), open_at(NOW_S + 1800), open_at(NOW_S + 9000)])  # fmt: skip

    assert len(pager.heard) == 1
    assert "LAG (queue) still open after 30 min, since step 31" in pager.bodies[0]
    assert pager.heard[0][2] == "CRITICAL"


def test_what_closed_in_between_starts_anew():
    healthy = make_snapshot(t_s=NOW_S + 900)
    phone = told(escalate_s=1800.0, snapshots=[open_at(NOW_S), healthy, open_at(NOW_S + 1000), open_at(NOW_S + 2000)])

    assert phone.heard == []


def test_zero_never_escalates():
    assert told(escalate_s=0.0, snapshots=[open_at(NOW_S), open_at(NOW_S + 10**6)]).heard == []


def test_a_pager_hears_only_what_is_critical():
    pager, chat = Phone(only_critical=True), Phone()
    told(finding(kind="a"), finding(kind="b", level="CRITICAL", catastrophic=True), phones=[pager, chat])

    assert (len(pager.heard), len(chat.heard)) == (1, 2)


@pytest.mark.parametrize("failure", [False, OSError("down"), RuntimeError(SECRET)])
def test_a_target_that_fails_once_is_tried_again(failure):
    phone = Phone(failure)
    told(finding(), phones=[phone])

    assert len(phone.heard) == 1


def test_a_dead_target_costs_its_news_not_the_others(caplog):
    dead, alive = Phone(*[RuntimeError(SECRET)] * 10), Phone()
    notifier = Notifier([dead, alive], retry_s=0.0)
    with caplog.at_level(logging.WARNING, "dlc_sentinel"):
        notifier.handle(finding())
        notifier.close()

    assert len(alive.heard) == 1
    assert (notifier.num_sent, notifier.num_lost) == (1, 1)
    assert SECRET not in caplog.text
    assert "RuntimeError" in caplog.text


class Stuck(Phone):
    """Hangs in its first call until it is released."""

    def __init__(self):
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def send(self, title, body, level):
        self.entered.set()
        return self.release.wait(30)


def test_a_target_that_hangs_never_holds_the_watch():
    stuck = Stuck()
    notifier = Notifier([stuck], retry_s=0.0)
    notifier.handle(finding(kind="first"))
    assert stuck.entered.wait(10)
    for n in range(1000):
        notifier.handle(finding(kind=f"k{n}", level="CRITICAL", t_s=NOW_S + n))

    assert notifier.num_lost >= 700
    stuck.release.set()
    notifier.close()


def test_news_that_found_no_room_are_lost_to_those_alone_who_would_have_got_them():
    stuck = Stuck()
    notifier = Notifier([stuck, Phone(only_critical=True)], retry_s=0.0, max_per_hour=10_000)
    notifier.handle(finding(kind="first"))
    assert stuck.entered.wait(10)
    for n in range(1000):
        notifier.handle(finding(kind=f"k{n}", t_s=NOW_S + n))
    lost = notifier.num_lost
    stuck.release.set()
    notifier.close()

    assert lost + notifier.num_sent == 1001


def test_escapes_mentions_and_links_of_a_run_name_are_inert():
    name = "\x1b[31m<!channel> @all http://evil #1"
    event = make_event("finding", run=name, data=make_finding(advice=name))
    title, body, _ = told(event).heard[0]

    for text in (title, body):
        assert not any(sign in text for sign in ("\x1b", "<", "@a", "://", "#1"))


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", [SLACK, f"json://user:{SECRET}@h/p", f"mailto://{SECRET}:p@h", f"{SECRET}", f"x y://{SECRET}"]
)
def test_of_an_address_only_the_scheme_is_shown(address):
    assert SECRET not in hidden(address)


def test_targets_come_from_the_settings_and_from_a_file(tmp_path):
    file = tmp_path / "targets"
    file.write_text("# chat\njson://localhost/a\n\ncritical=json://localhost/b\n")
    file.chmod(0o600)
    targets = targets_of(Notify(urls=f"json://h/{SECRET} critical=jsons://h", file=str(file)))

    assert [(target.name, target.only_critical) for target in targets] == [
        ("notify.urls 1 json://(hidden)", False),
        ("notify.urls 2 jsons://(hidden)", True),
        ("notify.file line 2 json://(hidden)", False),
        ("notify.file line 4 json://(hidden)", True),
    ]


def test_nobody_is_told_where_nothing_is_set():
    assert targets_of(Notify()) == ()


@pytest.mark.parametrize("address", [f"nosuch://{SECRET}", SECRET, "slack://"])
def test_an_address_that_nobody_knows_is_an_error_without_its_secret(address, caplog, capfd):
    with pytest.raises(ConfigError, match=r"notify.urls 1 .*none that apprise knows") as caught:
        targets_of(Notify(urls=address))

    assert SECRET not in str(caught.value) + caplog.text + "".join(capfd.readouterr())


def test_a_file_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "targets"
    file.write_text(SLACK)
    file.chmod(0o644)

    with pytest.raises(ConfigError, match="chmod 600"):
        targets_of(Notify(file=str(file)))


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(FileNotFoundError\)"):
        targets_of(Notify(file=str(tmp_path / "none")))


@pytest.fixture
def webhook():
    """(address, list of bodies) of a real HTTP server on loopback."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(401 if self.path == "/locked" else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"json://127.0.0.1:{server.server_address[1]}/hook", bodies
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_real_webhook_gets_title_text_and_kind(webhook):
    address, bodies = webhook
    notifier = Notifier(targets_of(Notify(urls=address)))
    notifier.handle(finding())
    notifier.close()

    assert bodies[0]["title"] == "dlc-sentinel warn: r1"
    assert "LAG (queue) opened" in bodies[0]["message"]
    assert bodies[0]["type"] == "warning"


def test_what_a_service_answered_is_the_reason_and_nothing_else_of_it(webhook, caplog):
    (target,) = targets_of(Notify(urls=webhook[0].replace("/hook", "/locked").replace("://", f"://u:{SECRET}@")))

    assert trouble(target, "t", "b", "INFO") == "refused, HTTP 401"
    assert caplog.text == ""


@pytest.mark.parametrize(
    "address",
    [
        SLACK_WEBHOOK,
        "pagerduty://integration@0123456789abcdef/source/component",
        "mailtos://u:p@example.com",
        "syslog://",
    ],
)
def test_chat_pager_mail_and_log_are_known(address):
    assert len(targets_of(Notify(urls=address))) == 1


class Mailbox(socketserver.StreamRequestHandler):
    """Enough of SMTP to take one letter."""

    def handle(self):
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline():
            verb = line.split()[0].upper() if line.split() else b""
            if verb == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                letter = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.letters.append(letter.decode())
            elif verb == b"QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            self.wfile.write(b"250 ok\r\n")


def test_a_real_mail_server_gets_a_letter():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mailbox) as server:
        server.letters = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        port = server.server_address[1]
        notifier = Notifier(targets_of(Notify(urls=f"mailto://127.0.0.1:{port}?from=a@b.example&to=c@d.example")))
        notifier.handle(finding())
        notifier.close()
        server.shutdown()
        thread.join()

    assert notifier.num_sent == 1
    assert "Subject: dlc-sentinel warn: r1" in server.letters[0]


def test_a_webhook_that_nobody_serves_is_lost_news_and_no_more():
    notifier = Notifier(targets_of(Notify(urls=f"json://user:{SECRET}@127.0.0.1:9/x")), retry_s=0.0)
    notifier.handle(finding())
    notifier.close()

    assert notifier.num_lost == 1
