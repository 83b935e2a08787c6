"""test-fire, and that the settings never show where notifications go."""

from __future__ import annotations

import pytest

SECRET = "xoxb-s3cr3t"
NOBODY = f"json://user:{SECRET}@127.0.0.1:9/x"


def test_without_a_target_it_is_a_usage_error_that_names_the_setting(cli):
    done = cli("test-fire")

    assert done.code == 2
    assert "notify.urls" in done.err


def test_a_target_that_is_not_reached_is_said_without_its_secret(cli):
    done = cli("test-fire", "--set", f"notify.urls={NOBODY}")

    assert done.code == 1
    assert done.out == "notify.urls 1 json://(hidden): not reached, no connection\n"
    assert SECRET not in done.out + done.err


def test_a_pager_is_left_alone_by_a_test_that_is_not_critical(cli):
    done = cli("test-fire", "--level", "warn", "--json", "--set", f"notify.urls=critical={NOBODY}")

    assert done.code == 0
    assert done.json()[0]["outcome"].startswith("skipped")


def test_check_and_its_errors_never_show_a_target(cli, home):
    shown = cli("check", "--set", f"notify.urls={NOBODY}")
    as_json = cli("check", "--json", "--set", f"notify.urls={NOBODY}")
    (home / "dlc-sentinel.toml").write_text(f'[notify]\nurls = ["{NOBODY}"]\n')
    listed = cli("check")
    (home / "dlc-sentinel.toml").write_text(f'[notify]\nurls = ["{NOBODY}", 3]\n')
    wrong = cli("check")

    assert "(hidden)" in shown.out
    assert listed.code == 0 and "(hidden)" in listed.out and SECRET not in listed.out + listed.err
    assert as_json.json()["notify.urls"]["value"] == "(hidden)"
    assert wrong.code == 2
    assert SECRET not in shown.out + shown.err + as_json.out + wrong.out + wrong.err


@pytest.mark.parametrize(
    "sets",
    [
        f"notify.urls={NOBODY} critical={NOBODY}",
        f'notify.urls=["{NOBODY}", "critical={NOBODY}"]',
        f"notify.urls=['{NOBODY}', 'critical={NOBODY}']",
    ],
    ids=["one text", "json", "toml"],
)
def test_targets_are_one_text_or_a_list(cli, sets):
    done = cli("test-fire", "--level", "warn", "--json", "--set", sets)

    assert [row["target"] for row in done.json()] == ["notify.urls 1 json://(hidden)", "notify.urls 2 json://(hidden)"]


@pytest.mark.parametrize("sets", [f'["{NOBODY}"', f'["{NOBODY} x"]', f'["{NOBODY}", ""]'])
def test_a_list_that_is_none_is_refused_without_its_secret(cli, sets):
    done = cli("check", "--set", f"notify.urls={sets}")

    assert done.code == 2 and "--set notify.urls: notify.urls = (hidden): " in done.err
    assert SECRET not in done.out + done.err


def test_a_sentinel_does_not_start_with_a_target_that_nobody_knows(cli, home):
    done = cli("serve", "--set", "serve.metrics_port=0", "--set", f"serve.address=ipc://{home}/s.sock",
               "--set", f"notify.urls=nosuch://{SECRET}")  # fmt: skip

    assert done.code == 2
    assert "none that apprise knows" in done.err
    assert SECRET not in done.err
