"""The shipped boards: made from code, valid for Grafana, explained panel by panel, bound to the metric catalogue."""

from __future__ import annotations

import itertools
import json
import re
import warnings

import factories_boards as boards
import pytest

from dlc_sentinel import catalog
from dlc_sentinel.sinks.shipped import DEFAULT_RUNBOOKS

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    files = pytest.importorskip("dashboards.builders.files", reason="grafana-foundation-sdk is not installed")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

KNOWN = {metric.full_name: metric for metric in catalog.METRICS}
NO_QUERY = {"text"}


def unknown_metrics(expr):
    """What a query names that the catalogue does not have: metrics, and labels of metrics."""
    bad = []
    for name, labels in boards.selectors(boards.substituted(expr)):
        if name not in KNOWN:
            bad.append(name)
        else:
            bad += [f"{name}{{{label}}}" for label in labels if label not in KNOWN[name].label_names]
    return bad


def test_every_generated_file_is_what_the_code_makes():
    stale = [name for name, text in files.generated().items() if (boards.ROOT / name).read_text() != text]

    assert stale == [], "run python -m dashboards.builders"


def test_there_are_five_boards_with_their_tags():
    shipped = {path.stem for path in (boards.FOLDER / "grafana").glob("dlc-*.json")}

    assert shipped == set(boards.NAMES)
    for name in boards.NAMES:
        board = boards.load(name)
        assert {"dlc", "vllm"} <= set(board["tags"])
        assert board["uid"] == name and "id" not in board


@pytest.mark.parametrize("name", boards.NAMES)
def test_the_variables_are_data_source_model_run_and_engine(name):
    variables = boards.load(name)["templating"]["list"]

    assert [v["name"] for v in variables] == ["datasource", "model_name", "run", "engine"]
    for variable in variables[1:]:
        named = re.findall(r"dlc_sentinel_\w+", variable["definition"])
        assert named and set(named) <= set(KNOWN)
        assert f", {variable['name']})" in variable["definition"]


def dump(name):
    register_default_plugins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        tree = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(boards.load(name))))
    for item in (*tree["links"], *tree["annotations"]["list"]):
        item.pop("placement", None)
    return tree


@pytest.mark.parametrize("name", boards.NAMES)
def test_a_board_survives_the_way_through_grafanas_own_models(name):
    """A key that Grafana does not know gets lost on that way."""
    assert dump(name) == boards.load(name)


def schema_errors(board):
    from jsonschema import Draft7Validator

    schema = json.loads((boards.SCHEMAS / "dashboard.jsonschema.json").read_text())
    return [f"{list(error.absolute_path)}: {error.message}" for error in Draft7Validator(schema).iter_errors(board)]


has_schemas = pytest.mark.skipif(
    not (boards.SCHEMAS / "dashboard.jsonschema.json").is_file(),
    reason="Grafana's published schemas are not here (DLC_GRAFANA_SCHEMAS names their folder)",
)


@has_schemas
@pytest.mark.parametrize("name", boards.NAMES)
def test_a_board_is_valid_by_grafanas_published_schema(name):
    assert schema_errors(boards.load(name)) == []


@has_schemas
def test_the_schema_stops_a_key_that_grafana_does_not_know():
    board = boards.load("dlc-lag")
    board["panels"][1]["gridPoss"] = {}

    assert schema_errors(board) != []


@pytest.mark.parametrize("name", boards.NAMES)
def test_every_panel_is_explained_has_a_unit_a_threshold_and_a_runbook_that_exists(name):
    for panel in boards.panels(boards.load(name)):
        what = f"{name}/{panel['title']}"
        assert len(panel["description"]) > 30 and panel["description"].endswith("."), what
        links = [link["url"].removeprefix(f"{DEFAULT_RUNBOOKS}/") for link in panel["links"]]
        assert links and all((boards.RUNBOOKS / page).is_file() for page in links), what
        if panel["type"] in NO_QUERY:
            continue
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] and defaults["thresholds"]["steps"], what
        assert panel["targets"] and all(t["datasource"]["uid"] == "${datasource}" for t in panel["targets"]), what
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"]), what


@pytest.mark.parametrize("name", boards.NAMES)
def test_no_panel_lies_on_another_or_reaches_over_the_edge(name):
    board = boards.load(name)
    places = [(p["title"], p["gridPos"]) for p in board["panels"]]

    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    for title, at in places:
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24, title
    for (one, a), (other, b) in itertools.combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )  # fmt: skip
        assert apart, f"{one} lies on {other}"


@pytest.mark.parametrize("query", boards.ALL + boards.MARKS, ids=str)
def test_every_query_names_only_metrics_and_labels_of_the_catalogue(query):
    assert unknown_metrics(query.expr) == []


@pytest.mark.parametrize(
    "expr",
    [
        "dlc_sentinel_lag_ess_ratios",
        "dcl_sentinel_lag_ess_ratio",
        'rate(dlc_sentinel_frame_total{run=~"$run"}[$__rate_interval])',
        'dlc_sentinel_lag_nats{stats="rms"}',
    ],
)
def test_a_misspelt_metric_or_label_is_found(expr):
    assert unknown_metrics(expr) != []


def test_every_metric_of_the_catalogue_is_on_a_panel():
    shown = {name for query in boards.ALL for name, _ in boards.selectors(boards.substituted(query.expr))}

    assert set(KNOWN) - shown == set()


def test_every_rung_verdict_and_outcome_that_a_query_asks_for_exists():
    """A label value nobody publishes would give an empty panel for ever."""
    allowed = {
        "stat": {*catalog.STATS, "mean_abs", "max"}, "verdict": set(catalog.VERDICTS), "kind": set(catalog.COMMANDS),
        "outcome": set(catalog.OUTCOMES), "horizon": set(catalog.HORIZONS), "bound": {"low", "mid", "high"},
        "scope": {"prefix", "full"}, "direction": {"gen_now", "now_gen"},
        "name": {"reward", "entropy", "grad_norm", "response_length", "truncated_ratio", "lr"},
    }  # fmt: skip
    for query in boards.ALL + boards.MARKS:
        for _, labels in boards.selectors(boards.substituted(query.expr)):
            for label, pattern in labels.items():
                if label in allowed and pattern != ".*":
                    assert set(pattern.split("|")) <= allowed[label], query
