"""The alert rules: one per verdict, each seen to fire and not to fire by promtool, each with a page of what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings

import factories_boards as boards
import pytest
import yaml

from dlc_sentinel import catalog, verdicts
from dlc_sentinel.sinks.shipped import DEFAULT_RUNBOOKS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    alerts = pytest.importorskip("dashboards.builders.alerts")

FILE = boards.FOLDER / "prometheus" / "dlc-rules.yml"
RULES = [rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in RULES if "record" in rule}
KNOWN = {metric.full_name for metric in catalog.METRICS} | {"up"}
has_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
RUN = 'run="r1",model_name="m",engine="0"'
SECTIONS = (
    "## What it means", "## How sure it is", "## What to check first", "## What to do", "## When to ignore it",
)  # fmt: skip


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def alert_of(verdict):
    return "Dlc" + "".join(word.capitalize() for word in verdict.split("_"))


@has_promtool
def test_promtool_finds_nothing_to_complain_about():
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", FILE)

    assert code == 0, said


def test_there_is_one_alert_per_verdict_other_than_healthy():
    of_verdicts = {rule["labels"].get("verdict"): name for name, rule in ALERTS.items()}
    of_verdicts.pop(None)

    assert of_verdicts == {v.name: alert_of(v.name) for v in verdicts.VERDICTS if v.name != "HEALTHY"}
    for verdict, name in of_verdicts.items():
        assert ALERTS[name]["expr"] == f'dlc_sentinel_finding_active{{verdict="{verdict}"}} == 1'


def test_the_sentinel_itself_is_watched_too():
    own = {name for name, rule in ALERTS.items() if "verdict" not in rule["labels"]}

    assert own == {
        "DlcSentinelDown", "DlcSentinelStuck", "DlcNoData", "DlcDropsHigh", "DlcFramesLost", "DlcActRefused",
        "DlcBreakerOpen", "DlcAbortDue",
    }  # fmt: skip


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_severity_a_text_with_values_and_a_runbook_with_all_its_parts(name):
    rule = ALERTS[name]
    notes = rule["annotations"]

    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "{{" in notes["summary"] + notes["description"] and "First:" in notes["description"]
    assert notes["dashboard"] in boards.NAMES
    page = boards.RUNBOOKS / notes["runbook_url"].removeprefix(f"{DEFAULT_RUNBOOKS}/")
    text = page.read_text()
    assert [text.count(section) for section in SECTIONS] == [1] * len(SECTIONS)
    assert f"`{name}`" in text and rule["expr"] in text


def test_every_runbook_belongs_to_an_alert_and_is_in_the_list():
    pages = {path.name for path in boards.RUNBOOKS.glob("*.md")} - {"README.md"}
    linked = {rule["annotations"]["runbook_url"].rpartition("/")[2] for rule in ALERTS.values()}

    assert pages == linked
    assert set(re.findall(r"\]\((\w+\.md)\)", (boards.RUNBOOKS / "README.md").read_text())) == pages


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_names_only_metrics_of_the_catalogue(rule):
    named = {name for name, _ in boards.selectors(rule["expr"])}
    named |= set(re.findall(r"dlc_sentinel_\w+", str(rule.get("annotations", ""))))

    assert named <= KNOWN | set(RECORDS)


# -- firing and not firing ---------------------------------------------------------------------------------------------


def own(name, /, **labels):
    """A series of the run."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"dlc_sentinel_{name}{{{RUN}{more}}}"


FIRES = {
    "DlcSentinelDown": [('up{job="dlc-sentinel",instance="h:1"}', "1x5 0x240")],
    "DlcSentinelStuck": [('dlc_sentinel_published_timestamp_seconds{instance="h:1"}', "0x240")],
    "DlcNoData": [
        (own("producers", role="trainer", state="alive"), "1x240"),
        (own("last_step"), "7x240"),
    ],
    "DlcDropsHigh": [
        (own("dropped_tokens_total", cause="unmatched"), "0+30x240"),
        (own("tokens_total", stream="cur"), "0+1000x240"),
    ],
    "DlcFramesLost": [
        (own("refused_frames_total", cause="unparsable"), "0x20 0+1x220"),
        (own("sequence_gaps_total"), "0x240"),
    ],
    "DlcActRefused": [(own("commands_total", kind="RESYNC", outcome="refused"), "0x230 1x20")],
    "DlcBreakerOpen": [(own("breaker_open"), "1x240")],
    "DlcAbortDue": [(own("commands_total", kind="ABORT", outcome="hypothetical"), "1x240")],
}
"""Series at 15 s that make each alert of the sentinel fire after an hour."""
QUIET = {
    "DlcSentinelDown": [('up{job="dlc-sentinel",instance="h:1"}', "1x240")],
    "DlcSentinelStuck": [('dlc_sentinel_published_timestamp_seconds{instance="h:1"}', "0+15x240")],
    "DlcNoData": [
        (own("producers", role="trainer", state="alive"), "1x240"),
        (own("last_step"), "0+0.1x240"),
    ],
    "DlcDropsHigh": [
        (own("dropped_tokens_total", cause="unmatched"), "0+5x240"),
        (own("tokens_total", stream="cur"), "0+1000x240"),
    ],
    "DlcFramesLost": [
        (own("refused_frames_total", cause="unparsable"), "3x240"),
        (own("sequence_gaps_total"), "2x240"),
    ],
    "DlcActRefused": [(own("commands_total", kind="RESYNC", outcome="applied"), "0+1x240")],
    "DlcBreakerOpen": [(own("breaker_open"), "0x240")],
    "DlcAbortDue": [(own("commands_total", kind="ABORT", outcome="sent"), "0x240")],
}
for verdict in verdicts.VERDICTS:
    if verdict.name != "HEALTHY":
        series = own("finding_active", verdict=verdict.name)
        FIRES[alert_of(verdict.name)] = [(series, "1x240")]
        QUIET[alert_of(verdict.name)] = [(series, "0x240")]
UP = ('up{job="dlc-sentinel",instance="h:1"}', "1x240")


def unit_test(folder, series, checks):
    """promtool's verdict over [(eval time, alert, expected alerts)]: exit code and what it said."""
    tree = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in dict([UP, *series]).items()],
                "alert_rule_test": [
                    {"eval_time": when, "alertname": name, "exp_alerts": expected} for when, name, expected in checks
                ],
            }
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(tree))
    return promtool("test", "rules", path)


@pytest.fixture(scope="module")
def fired(tmp_path_factory):
    """{alert: what promtool saw of it} an hour into a run in which everything is wrong."""
    series = [one for name in ALERTS for one in FIRES[name]]
    _, said = unit_test(tmp_path_factory.mktemp("fired"), series, [("60m", name, []) for name in ALERTS])
    parts = re.split(r"alertname: ?(\w+), time:", said)
    return {name: text.split("got:")[-1] for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@has_promtool
@pytest.mark.parametrize("name", ALERTS)
def test_the_alert_fires_on_what_it_is_for(name, fired):
    text = fired[name]

    assert f'severity="{ALERTS[name]["labels"]["severity"]}"' in text
    assert "error executing template" not in text and "%!" not in text, text
    assert ALERTS[name]["annotations"]["runbook_url"] in text


@has_promtool
def test_no_alert_fires_on_what_is_well(tmp_path):
    series = [one for name in ALERTS for one in QUIET[name]]
    checks = [(when, name, []) for name in ALERTS for when in ("5m", "30m", "60m")]
    code, said = unit_test(tmp_path, series, checks)

    assert code == 0, said


@has_promtool
@pytest.mark.parametrize(("name", "waits"), [("DlcLag", "5m"), ("DlcBlind", "10m"), ("DlcEngine", "2m")])
def test_the_alert_waits_its_time_and_stays_for_a_while_when_it_flaps(name, waits, tmp_path):
    verdict = ALERTS[name]["labels"]["verdict"]
    minutes = int(waits.removesuffix("m"))
    open_ = 4 * (minutes + 2)
    series = [(f'dlc_sentinel_finding_active{{{RUN},verdict="{verdict}"}}', f"1x{open_} 0x100")]

    before, said = unit_test(tmp_path, series, [(f"{minutes - 1}m", name, [])])
    during, _ = unit_test(tmp_path, series, [(f"{minutes + 1}m", name, [])])
    kept, _ = unit_test(tmp_path, series, [(f"{minutes + 5}m", name, [])])
    after, later = unit_test(tmp_path, series, [(f"{minutes + 9}m", name, [])])

    assert (before, during, kept, after) == (0, 1, 1, 0), said + later


@has_promtool
def test_the_text_names_the_numbers_of_the_run(tmp_path):
    series = [
        *FIRES["DlcLag"],
        (own("action_lag_ess_ratio"), "0.4312x240"),
        (own("version_age", stat="mean"), "3.1x240"),
        (own("finding_since_step", verdict="LAG"), "31x240"),
        (own("mode_info", mode="observe"), "1x240"),
    ]
    _, said = unit_test(tmp_path, series, [("30m", "DlcLag", [])])

    text = " ".join(said.split("got:")[-1].split())
    assert "Lag ESS 0.43" in text and "age mean 3.1" in text and "Since step 31" in text and "mode observe" in text
    assert "run r1 (m)" in text


@has_promtool
def test_a_number_that_is_not_there_is_said_to_be_unknown(tmp_path):
    _, said = unit_test(tmp_path, FIRES["DlcLag"], [("30m", "DlcLag", [])])

    assert "Lag ESS not known" in " ".join(said.split("got:")[-1].split())


def test_grafanas_own_rules_are_the_same_alerts():
    import json

    own = json.loads((boards.FOLDER / "grafana" / "alert-rules.json").read_text())["rules"]

    assert {rule["title"] for rule in own} == set(ALERTS)
    for rule in own:
        shipped = ALERTS[rule["title"]]
        assert rule["labels"] == shipped["labels"] and rule["for"] == shipped.get("for", "0s")
        named = {name for name, _ in boards.selectors(rule["data"][0]["model"]["expr"])}
        assert rule["data"][0]["model"]["expr"].endswith(") * 0 + 1"), "Grafana fires on what is not 0"
        assert named <= KNOWN, "Grafana asks a Prometheus that may not have our recording rules"
        assert len(rule["uid"]) <= 40 and rule["annotations"]["__dashboardUid__"] in boards.NAMES


@pytest.mark.skipif(not (boards.SCHEMAS / "alerting.jsonschema.json").is_file(), reason="no Grafana schemas here")
def test_grafanas_own_rules_are_valid_by_its_published_schema():
    import json

    from jsonschema import Draft7Validator

    schema = json.loads((boards.SCHEMAS / "alerting.jsonschema.json").read_text())
    validator = Draft7Validator({"definitions": schema["definitions"], "$ref": "#/definitions/Rule"})
    for rule in json.loads((boards.FOLDER / "grafana" / "alert-rules.json").read_text())["rules"]:
        query = {**rule["data"][0], "datasourceUid": "p"}
        whole = {**rule, "folderUID": "f", "data": [query]}
        assert [error.message for error in validator.iter_errors(whole)] == []


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")
def test_the_alertmanager_example_is_accepted():
    path = boards.FOLDER / "alertmanager" / "alertmanager.yml"
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alertmanager_example_names_alerts_that_exist():
    named = set(re.findall(r"Dlc\w+", (boards.FOLDER / "alertmanager" / "alertmanager.yml").read_text()))

    assert named and named <= set(ALERTS)
