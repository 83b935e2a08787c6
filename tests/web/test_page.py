"""The page's server, asked over a real socket: what it answers, what it refuses, what it escapes."""

from __future__ import annotations

import http.client
import json
import math
import shutil

import pytest
from factories_snapshots import (
    make_command,
    make_event,
    make_finding,
    make_producer,
    make_run,
    make_snapshot,
    make_step,
)
from factories_story import COVERED_TEXTS, make_strip

from dlc_sentinel import browser
from dlc_sentinel.web.sink import PageSink

TOKEN = "t" * 43
slow = pytest.mark.slow
in_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">\x1b[31m\u202e"
PAGES = (
    "/",
    "/page.js",
    "/strips.js",
    "/page.css",
    "/uPlot.iife.min.js",
    "/uPlot.min.css",
    "/uPlot.LICENSE",
    "/icon.svg",
)


@pytest.fixture
def sink():
    sink = PageSink()
    yield sink
    sink.close()


def ask(sink, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{sink.port}"} | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def page_of(sink, query=""):
    status, _, body = ask(sink, f"/api/v1/page{query}")
    assert status == 200, body
    return json.loads(body)


def test_all_that_the_page_needs_comes_from_this_port(sink):
    assert {path: ask(sink, path)[0] for path in PAGES} == dict.fromkeys(PAGES, 200)


def test_the_page_names_no_other_host_and_holds_no_inline_script(sink):
    text = ask(sink, "/")[2]

    assert "http" not in text
    assert "<script>" not in text
    assert "onclick" not in text


def test_every_answer_carries_the_strict_policy(sink):
    for path in (*PAGES, "/healthz", "/api/v1/page", "/nowhere"):
        headers = ask(sink, path)[1]

        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "DENY", path


def test_health_is_alive_at_once_and_ready_when_a_producer_is(sink):
    assert ask(sink, "/healthz")[0] == 200
    assert ask(sink, "/readyz")[0] == 503

    sink.publish(make_snapshot(make_run(producers=(make_producer(state="gone"),))))
    assert ask(sink, "/readyz")[0] == 503

    sink.publish(make_snapshot())
    assert ask(sink, "/readyz")[0] == 200


def test_before_anything_was_published_the_page_says_so(sink):
    assert ask(sink, "/api/v1/page")[0] == 503


def test_the_curves_are_columns_of_the_history(sink):
    sink.publish(make_snapshot(make_run(step=make_step(12, lag_ess={"32": 0.4}))))
    columns = page_of(sink)["run"]["columns"]

    assert columns["step"] == list(range(13))
    assert columns["ess_32"] == [0.968] * 12 + [0.4]
    assert columns["lag"] == [0.0082] * 13


def test_since_gives_only_later_steps(sink):
    sink.publish(make_snapshot())

    assert page_of(sink, "?since=10")["run"]["columns"]["step"] == [11, 12]


@pytest.mark.parametrize("since", ["x", "1e3", "%00", "9" * 40, "--1"])
def test_a_since_that_is_no_number_is_refused(sink, since):
    sink.publish(make_snapshot())

    assert ask(sink, f"/api/v1/page?since={since}")[0] == 400


def test_what_is_not_known_is_null_never_zero(sink):
    sink.publish(make_snapshot(make_run(step=make_step(12, lag={"rms": None}), verdict_latency_s=math.nan)))
    run = page_of(sink)["run"]

    assert run["columns"]["lag"][-1] is None
    assert run["latency_s"] is None


def test_the_run_worst_off_is_shown_unless_one_is_asked_for(sink):
    sink.publish(make_snapshot(make_run(run="a"), make_run(run="b", verdict="LAG")))

    assert page_of(sink)["run"]["run"] == "b"
    assert page_of(sink, "?run=a")["run"]["run"] == "a"
    assert page_of(sink, "?run=none")["run"] is None


@pytest.mark.parametrize("verdict", ["BLIND", "UNWIRED"])
def test_a_verdict_that_proves_nothing_is_marked_as_not_known(sink, verdict):
    sink.publish(make_snapshot(make_run(verdict=verdict)))

    assert page_of(sink)["run"]["is_known"] is False


def test_a_blind_page_says_which_number_is_missing(sink):
    sink.publish(make_snapshot(make_run(verdict="BLIND", history=({"step": 1, "num_tokens": 12},))))

    assert page_of(sink)["run"]["meaning"] == "cannot say: 12 of the 1,000 tokens that a verdict needs"


def test_a_reward_that_the_stack_reports_becomes_a_curve(sink):
    scalars = ({"step": 1, "critic/rewards/mean": 0.2}, {"step": 2, "critic/rewards/mean": 0.3})
    sink.publish(make_snapshot(make_run(scalars=scalars)))

    assert page_of(sink)["run"]["scalars"] == [
        {"kind": "reward", "name": "critic/rewards/mean", "step": [1, 2], "value": [0.2, 0.3]}
    ]


# -- under attack ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9878", "127.0.0.1.evil.example", "", "[::1", "0.0.0.0"])
def test_a_foreign_host_name_is_refused_everywhere(sink, host):
    sink.publish(make_snapshot())

    for path in ("/", "/api/v1/page", "/page.js", "/healthz"):
        assert ask(sink, path, Host=host)[0] in (400, 403), path


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:9878", "LOCALHOST:1"])
def test_a_local_name_is_answered_at_any_port_for_tunnels(sink, host):
    assert ask(sink, "/healthz", Host=host)[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost", "http://localhost:1", ""])
def test_a_foreign_origin_is_refused(sink, origin):
    sink.publish(make_snapshot())

    assert ask(sink, "/api/v1/page", Host="localhost", Origin=origin)[0] == 403


def test_the_pages_own_origin_is_answered(sink):
    sink.publish(make_snapshot())

    assert ask(sink, "/api/v1/page", Host="localhost:9", Origin="http://localhost:9")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_request_that_another_site_makes_is_refused(sink, site):
    sink.publish(make_snapshot())

    assert ask(sink, "/api/v1/page", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
    assert ask(sink, "/page.js", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0] == 403


def test_a_link_from_another_site_may_open_the_page(sink):
    assert ask(sink, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200


def reset(sink, run="r1", method="POST", **headers):
    return ask(sink, f"/api/v1/actions/reset?run={run}", method, **headers)[0]


def test_nothing_is_obeyed_before_the_sentinel_allows_it(sink):
    sink.publish(make_snapshot())

    assert reset(sink, Authorization="Bearer ") == 403


def test_a_reset_needs_the_token(sink):
    done = []
    sink.accept_resets(TOKEN, done.append)
    sink.publish(make_snapshot())

    assert [reset(sink), reset(sink, Authorization="Bearer wrong"), reset(sink, Authorization=TOKEN)] == [401] * 3
    assert done == []
    assert reset(sink, Authorization=f"Bearer {TOKEN}") == 202
    assert done == ["r1"]


def test_the_token_does_not_help_from_elsewhere(sink):
    done = []
    sink.accept_resets(TOKEN, done.append)
    sink.publish(make_snapshot())
    good = {"Authorization": f"Bearer {TOKEN}"}

    assert reset(sink, Host="evil.example", **good) == 403
    assert reset(sink, Origin="http://evil.example", **good) == 403
    assert reset(sink, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", **good) == 403
    assert done == []


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_a_reset_is_a_post_and_nothing_else(sink, method):
    done = []
    sink.accept_resets(TOKEN, done.append)
    sink.publish(make_snapshot())

    assert reset(sink, method=method, Authorization=f"Bearer {TOKEN}") == 405
    assert done == []


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_no_other_route_changes_anything(sink, method):
    sink.publish(make_snapshot())

    for path in (*PAGES, "/api/v1/page", "/healthz", "/readyz"):
        assert ask(sink, path, method)[0] == 405, path


def test_a_reset_of_a_run_that_is_not_there_is_refused(sink):
    done = []
    sink.accept_resets(TOKEN, done.append)
    sink.publish(make_snapshot())

    assert reset(sink, run="r2", Authorization=f"Bearer {TOKEN}") == 404
    assert done == []


def test_a_path_out_of_the_folder_finds_nothing(sink):
    assert ask(sink, "/../sink.py")[0] == 404
    assert ask(sink, "/%2e%2e/sink.py")[0] == 404
    assert ask(sink, "/static/index.html")[0] == 404


def hostile_snapshot():
    strip = make_strip(id=HOSTILE, group=HOSTILE, replica=HOSTILE)
    run = make_run(
        run=HOSTILE, model_name=HOSTILE, engines=(HOSTILE,), verdict="LAG", breaker_open=True, worst=(strip,),
        findings=(make_finding(advice=HOSTILE, kind=HOSTILE, evidence={HOSTILE: HOSTILE}),),
        commands=(make_command(reason=HOSTILE, outcome=HOSTILE, action=HOSTILE),),
        events=(make_event(text=HOSTILE),), producers=(make_producer(host=HOSTILE, state=HOSTILE, role=HOSTILE),),
        scalars=({"step": 12, f"reward{HOSTILE}": 1.0},), dropped_tokens={HOSTILE: 3},
    )  # fmt: skip
    return make_snapshot(run)


def test_no_escape_or_invisible_sign_of_a_text_reaches_the_page(sink):
    sink.publish(hostile_snapshot())
    shown = page_of(sink)["run"]
    shown.pop("run")  # the name as it is, for the question back; the page shows `name`
    for strip in shown["worst"]:
        strip.clear()  # cleaned where it is made: tests/test_evidence.py
    text = json.dumps(shown, ensure_ascii=False)

    assert "\x1b" not in text
    assert "\u202e" not in text


@slow
@in_chromium
def test_markup_in_any_text_is_only_text_in_a_real_browser(sink):
    sink.publish(hostile_snapshot())
    with browser.tab() as tab:
        tab.open(sink.url, 1280, 900)
        tab.until("document.querySelector('.badge.bad') && document.querySelector('svg.strip')")
        tags = set(tab.run("[...document.querySelectorAll('body *')].map(node => node.tagName.toLowerCase())"))
        scripts = tab.run("[...document.scripts].map(script => script.getAttribute('src'))")

        assert scripts == ["uPlot.iife.min.js", "strips.js", "page.js"]
        assert not tags & {"img", "iframe", "object", "embed", "a[onclick]"}
        assert tab.run("document.title") != "pwned"
        assert "<img src=x onerror" in tab.run("document.body.innerText")
        assert tab.complaints == []


@slow
@in_chromium
def test_the_browser_refuses_a_script_that_got_into_the_page(sink):
    sink.publish(make_snapshot())
    with browser.tab() as tab:
        tab.open(sink.url, 800, 600)
        tab.run("(() => { const s = document.createElement('script'); s.textContent = 'document.title=1';"
                " document.body.append(s); return 1; })()")  # fmt: skip
        tab.until("true")

        assert any("Content Security Policy" in text for text in tab.complaints)


@slow
@in_chromium
def test_nothing_is_cut_off_or_covers_another_text_at_any_width(sink):
    run = make_run(
        verdict="LAG", findings=(make_finding(),), commands=(make_command(),), events=(make_event(text="x" * 300),),
        worst=(make_strip(), make_strip(id="y" * 120)), model_name="m" * 120,
    )  # fmt: skip
    sink.publish(make_snapshot(run))
    with browser.tab() as tab:
        for width in (360, 800, 1280):
            tab.open(sink.url, width, 900)
            tab.until("document.querySelector('canvas') && document.querySelector('svg.strip')")

            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run(COVERED_TEXTS) == []


@slow
@in_chromium
def test_new_steps_are_added_and_a_breaker_is_reset_with_the_token_only(sink):
    done = []
    sink.accept_resets(TOKEN, done.append)
    sink.publish(make_snapshot(make_run(breaker_open=True)))
    with browser.tab() as tab:
        tab.open(sink.url, 1280, 900)
        tab.until("document.querySelector('canvas')")
        sink.publish(make_snapshot(make_run(breaker_open=True, step=make_step(13), last_step=13)))
        tab.until("document.querySelector('#head').innerText.includes('step 13')")
        for token in ("wrong", TOKEN):
            tab.run(f"document.querySelector('#token').value = '{token}'")
            tab.run("document.querySelector('#breaker button').click()")
            tab.until(f"document.querySelector('#answer').value.includes('{'reset' if token == TOKEN else 'wanted'}')")

    assert done == ["r1"]
