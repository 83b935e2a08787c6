"""grafana push: the same result every time, nothing overwritten that somebody changed, errors that say what to do."""

from __future__ import annotations

import json
import os
import socket
import stat
from contextlib import closing

import factories_boards as boards
import pytest
from factories_cli import ended, program
from factories_grafana import TOKEN, FakeGrafana

pytest.importorskip("grafana_api", reason="grafana-api is not installed")

from dlc_sentinel.errors import GrafanaError
from dlc_sentinel.sinks import grafana_push
from dlc_sentinel.sinks.grafana_http import TRIES, Grafana

PROMETHEUS = "http://prometheus:9090"


@pytest.fixture
def grafana():
    with closing(FakeGrafana()) as fake:
        yield fake


def connect(fake, secret=TOKEN):
    pauses = []
    api = Grafana(fake.url, secret, pause=pauses.append)
    return api, pauses


def push(fake, **settings):
    """{name: what became of it}."""
    outcomes = list(grafana_push.push(connect(fake)[0], **{"prometheus_url": PROMETHEUS, **settings}))
    named = ("dashboard", "data source")
    return {outcome.name if outcome.kind in named else outcome.kind: outcome.what for outcome in outcomes}


def test_the_first_push_creates_folder_data_source_five_boards_and_the_rules(grafana):
    made = push(grafana)

    assert set(made.values()) == {"created"} and len(made) == 1 + 1 + 5 + 1
    assert set(grafana.boards) == set(boards.NAMES)
    assert {board["folderUid"] for board in grafana.boards.values()} == set(grafana.folders) == {"dlc-sentinel"}
    assert grafana.sources["dlc-prometheus"]["url"] == PROMETHEUS
    rules = grafana.rules["dlc-sentinel"]["rules"]
    assert len(rules) == 17 and {rule["data"][0]["datasourceUid"] for rule in rules} == {"dlc-prometheus"}


def test_a_board_that_was_pushed_is_the_board_that_is_shipped(grafana):
    push(grafana)

    pushed = {
        key: value for key, value in grafana.boards["dlc-lag"]["dashboard"].items() if key not in ("id", "version")
    }
    shipped = {key: value for key, value in boards.load("dlc-lag").items() if key != "version"}
    assert pushed == shipped


def test_the_second_push_changes_nothing(grafana):
    push(grafana)
    before = len(grafana.written())

    assert set(push(grafana).values()) == {"unchanged"}
    assert len(grafana.written()) == before


def test_a_board_changed_in_grafana_is_left_alone_and_named(grafana):
    push(grafana)
    grafana.edit_in_the_ui("dlc-lag", title="mine")

    made = push(grafana)

    assert made["DLC / Lag"] == "refused" and made["DLC / Engine"] == "unchanged"
    assert grafana.boards["dlc-lag"]["dashboard"]["title"] == "mine"


def test_force_writes_over_what_was_changed(grafana):
    push(grafana)
    grafana.edit_in_the_ui("dlc-lag", title="mine")

    assert push(grafana, force=True)["DLC / Lag"] == "updated"
    assert grafana.boards["dlc-lag"]["dashboard"]["title"] == "DLC / Lag"
    assert set(push(grafana).values()) == {"unchanged"}


def test_a_newer_release_updates_what_an_older_one_pushed(grafana, monkeypatch):
    monkeypatch.setattr(grafana_push, "__version__", "0.0.1")
    push(grafana, runbooks="https://old.example/runbooks")
    monkeypatch.undo()

    made = push(grafana)

    assert made["DLC / Lag"] == "updated" and made["alert rules"] == "updated"
    assert set(push(grafana).values()) == {"unchanged"}


def test_a_rule_changed_in_grafana_is_left_alone_until_forced(grafana):
    push(grafana)
    grafana.rules["dlc-sentinel"]["rules"][3]["for"] = "42m"

    assert push(grafana)["alert rules"] == "refused"
    assert grafana.rules["dlc-sentinel"]["rules"][3]["for"] == "42m"
    assert push(grafana, force=True)["alert rules"] == "updated"
    assert grafana.rules["dlc-sentinel"]["rules"][3]["for"] != "42m"


def test_a_rule_that_somebody_put_into_our_group_is_not_lost(grafana):
    push(grafana)
    grafana.rules["dlc-sentinel"]["rules"].append({"uid": "theirs", "title": "theirs", "data": []})

    assert push(grafana)["alert rules"] == "refused"
    assert grafana.rules["dlc-sentinel"]["rules"][-1]["uid"] == "theirs"


def test_a_data_source_that_points_elsewhere_is_left_alone_until_forced(grafana):
    push(grafana)
    name = grafana_push.SOURCE_NAME

    assert push(grafana, prometheus_url="http://other:9090")[name] == "refused"
    assert push(grafana, prometheus_url="http://other:9090", force=True)[name] == "updated"
    assert grafana.sources["dlc-prometheus"]["url"] == "http://other:9090"


def test_without_an_address_the_default_prometheus_of_grafana_is_asked(grafana):
    grafana.sources = {
        "a": {"uid": "a", "type": "loki", "isDefault": True}, "b": {"uid": "b", "type": "prometheus"},
        "c": {"uid": "c", "type": "prometheus", "isDefault": True},
    }  # fmt: skip

    made = push(grafana, prometheus_url=None)

    assert grafana_push.SOURCE_NAME not in made
    assert grafana.rules["dlc-sentinel"]["rules"][0]["data"][0]["datasourceUid"] == "c"


def test_a_grafana_without_any_prometheus_is_told_what_to_do(grafana):
    with pytest.raises(GrafanaError, match="--prometheus URL"):
        push(grafana, prometheus_url=None)


def test_runbook_links_go_where_they_are_told_to(grafana):
    push(grafana, runbooks="https://wiki.example/dlc/")

    text = json.dumps([grafana.boards, grafana.rules])
    assert "https://wiki.example/dlc/LAG.md" in text and "127.0.0.1:9877" not in text


def test_a_push_that_failed_half_way_goes_on_from_there(grafana):
    grafana.has_alerting = False
    with pytest.raises(GrafanaError, match="404"):
        push(grafana)
    grafana.has_alerting = True

    made = push(grafana)

    assert made["DLC / Lag"] == "unchanged" and made["alert rules"] == "created"


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "Service accounts"),
        (403, "role Editor"),
        (404, "path"),
        (409, "rename"),
        (412, "--force"),
        (400, "accept"),
    ],
)
def test_a_refusal_says_what_it_means_and_what_to_do(grafana, status, says):
    api, pauses = connect(grafana)
    grafana.failures = [(status, "because")]

    with pytest.raises(GrafanaError, match=rf"{status}, .*{says}.*because") as caught:
        api.send("POST", "/folders", {"uid": "f"})

    assert caught.value.status == status and pauses == []


def test_a_server_that_stumbles_is_asked_again_and_waited_for_longer_each_time(grafana):
    api, pauses = connect(grafana)
    grafana.failures = [(503, "starting"), (429, "slow down")]

    assert api.send("POST", "/folders", {"uid": "f"}) == {"uid": "f"}
    assert pauses == [0.5, 1.0]


def test_a_server_that_stays_down_is_given_up_with_its_own_words(grafana):
    api, pauses = connect(grafana)
    grafana.failures = [(503, "database is locked")] * 9

    with pytest.raises(GrafanaError, match=r"503.*database is locked"):
        api.find("/folders/x")
    assert len(pauses) == TRIES - 1


def test_an_absent_server_is_said_to_be_unreachable():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    api = Grafana(f"http://127.0.0.1:{port}", TOKEN, pause=lambda _: None)

    said = rf"127.0.0.1:{port}: cannot be reached after {TRIES} tries \(Connection refused\); is Grafana running there"
    with pytest.raises(GrafanaError, match=said):
        api.find("/folders/x")


def test_a_server_under_a_path_is_reached():
    with closing(FakeGrafana(prefix="/grafana")) as fake:
        assert connect(fake)[0].send("POST", "/folders", {"uid": "f"}) == {"uid": "f"}


def test_user_and_password_work_in_place_of_a_token(grafana):
    import base64

    grafana.token = "never"
    seen = []
    take = grafana.take
    grafana.take = lambda method, path, body, authorization: seen.append(authorization) or take(method, path, body, "")
    api, _ = connect(grafana, "admin:geheim")

    with pytest.raises(GrafanaError, match="401"):
        api.find("/folders/x")
    assert seen == ["Basic " + base64.b64encode(b"admin:geheim").decode()]


@pytest.mark.parametrize("secret", [TOKEN, "admin:hunter2hunter2", TOKEN + "\n"], ids=["token", "password", "newline"])
def test_no_secret_gets_into_an_error(grafana, secret):
    api, _ = connect(grafana, secret)
    grafana.failures = [(400, f"invalid key {secret.strip()}, that is {secret.strip().rpartition(':')[2]}")]

    with pytest.raises(GrafanaError) as caught:
        api.find("/folders/x")

    shown = str(caught.value) + repr(caught.value.__cause__)
    assert TOKEN not in shown and "hunter2" not in shown


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:x", "http://u:pw@h:3000", "file:///etc/passwd"])
def test_an_address_that_is_none_is_refused_without_showing_a_password(url):
    with pytest.raises(GrafanaError) as caught:
        Grafana(url, TOKEN)

    assert "pw" not in str(caught.value)


# -- the command -----------------------------------------------------------------------------------------------------


def run(fake, *arguments, token=TOKEN):
    env = {**os.environ, "GRAFANA_TOKEN": token}
    return ended(program("grafana", "push", "--url", fake.url, "--prometheus", PROMETHEUS, *arguments, env=env))


@pytest.mark.slow
def test_the_command_tells_each_thing_and_exits_1_only_where_it_left_something_alone(grafana):
    first, second = run(grafana), run(grafana, "--json")
    grafana.edit_in_the_ui("dlc-engine", title="mine")
    third = run(grafana)
    bad = run(grafana, token="wrong-token-wrong")

    assert (first.code, second.code, third.code, bad.code) == (0, 0, 1, 2)
    assert "created    dashboard DLC / Lag" in first.out
    assert {item["what"] for item in second.json()} == {"unchanged"}
    assert "refused    dashboard DLC / Engine" in third.out and "--force" in third.out
    assert "401" in bad.err and "wrong-token-wrong" not in bad.out + bad.err


@pytest.mark.slow
def test_the_command_reads_the_token_from_a_file_and_says_when_there_is_none(grafana, tmp_path):
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(stat.S_IRUSR)

    found = run(grafana, "--token-file", token, token="")
    missing = run(grafana, token="")

    assert found.code == 0, found.err
    assert missing.code == 2 and "--token-file" in missing.err
