"""Panels and boards in the house's form: every panel explains itself, has a unit, and links to its runbook.

`RUNBOOKS` is where the pages are by default: the sentinel serves them itself; `grafana export --runbooks` changes it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dlc_sentinel import catalog
from dlc_sentinel.sinks.shipped import DEFAULT_RUNBOOKS as RUNBOOKS

with warnings.catch_warnings():
    # Schema v1 is what Grafana 10 to 13 read; the SDK would rather have 13 only.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common as common_builders
    from grafana_foundation_sdk.builders import dashboard as builders
    from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, text, timeseries

SELECTOR = 'run=~"$run",model_name=~"$model_name",engine=~"$engine"'
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAGS = ["dlc", "vllm"]
NATS = "suffix: nats"
GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "#009E73", "#F0E442", "#E69F00", "#D55E00", "#0072B2", "#8A8A8A"
"""Told apart by colour-blind eyes, too (Okabe and Ito)."""
BELOW_HALF = ((None, RED), (0.5, ORANGE), (0.6, GREEN))
"""The steps of every ESS: below 0.5 a RESYNC is due, above 0.6 the finding closes."""


class Builder(Protocol):
    def build(self) -> dashboard.Panel: ...


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str
    instant: bool = False
    is_table: bool = False


def series(name: str, /, **labels: str) -> str:
    """Selector of a metric of the catalogue under the board's variables; `label="x|y"` with a bar is a pattern."""
    metric = catalog.BY_NAME[name]
    unknown = set(labels) - set(metric.labels)
    if unknown:
        raise KeyError(f"{name}: no label {sorted(unknown)}; there are {metric.labels}")
    own = [f'{label}=~"{value}"' if "|" in value else f'{label}="{value}"' for label, value in labels.items()]
    inside = ",".join(([SELECTOR] if metric.of_run else []) + own)
    return f"{metric.full_name}{{{inside}}}" if inside else metric.full_name


def targets(queries: Sequence[Query]) -> list[Any]:
    made = []
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        target = prometheus.Dataquery().datasource(SOURCE).expr(query.expr).legend_format(query.legend).ref_id(letter)
        target = target.instant() if query.instant else target.range()
        made.append(target.format(PromQueryFormat.TABLE) if query.is_table else target)
    return made


def thresholds(steps: Sequence[tuple[float | None, str]]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=colour) for value, colour in steps])
    )


def runbook_link(page: str) -> builders.DashboardLink:
    link = builders.DashboardLink(f"Runbook: {page}").type(dashboard.DashboardLinkType.LINK).target_blank(True)
    return link.url(f"{RUNBOOKS}/{page}.md").icon("doc").tooltip("What it means, what to check first, what to do")


def _common(panel: Any, title: str, description: str, page: str, size: tuple[int, int]) -> Any:
    panel = panel.title(title).description(description).datasource(SOURCE).links([runbook_link(page)])
    return panel.span(size[0]).height(size[1])


def curve(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    page: str,
    unit: str = "none",
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
    log: bool = False,
    low: float | None = None,
    high: float | None = None,
    bars: bool = False,
    size: tuple[int, int] = (12, 8),
) -> timeseries.Panel:
    """Curves over time; with more than one step the thresholds are drawn as dashed lines."""
    panel = _common(timeseries.Panel(), title, description, page, size).targets(targets(queries)).unit(unit)
    panel = panel.thresholds(thresholds(steps)).line_width(2).fill_opacity(20 if bars else 0)
    style = common.GraphThresholdsStyleMode.DASHED if len(steps) > 1 else common.GraphThresholdsStyleMode.OFF
    panel = panel.thresholds_style(common_builders.GraphThresholdsStyleConfig().mode(style))
    panel = panel.draw_style(common.GraphDrawStyle.BARS if bars else common.GraphDrawStyle.LINE)
    panel = panel.line_interpolation(common.LineInterpolation.STEP_AFTER).show_points(common.VisibilityMode.AUTO)
    panel = panel.color_scheme(builders.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC))
    panel = panel.legend(
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE).placement(common.LegendPlacement.BOTTOM)
        .show_legend(True).calcs(["lastNotNull", "min", "max"])
    )  # fmt: skip
    panel = panel.tooltip(
        common_builders.VizTooltipOptions()
        .mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
    )  # fmt: skip
    if log:
        panel = panel.scale_distribution(
            common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10)
        )
    panel = panel if low is None else panel.min(low)
    return panel if high is None else panel.max(high)


def number(
    title: str,
    description: str,
    query: Query,
    *,
    page: str,
    unit: str = "none",
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
    name_only: bool = False,
    no_value: str = "not known",
    decimals: float | None = None,
    size: tuple[int, int] = (4, 5),
) -> stat.Panel:
    """One large number, or with `name_only` the legend's text, coloured by the value."""
    panel = _common(stat.Panel(), title, description, page, size).targets(targets([query])).unit(unit)
    panel = panel.thresholds(thresholds(steps)).no_value(no_value)
    panel = panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel = panel.color_mode(common.BigValueColorMode.BACKGROUND).justify_mode(common.BigValueJustifyMode.CENTER)
    panel = panel.graph_mode(common.BigValueGraphMode.NONE if name_only else common.BigValueGraphMode.AREA)
    panel = panel.text_mode(common.BigValueTextMode.NAME if name_only else common.BigValueTextMode.AUTO)
    return panel if decimals is None else panel.decimals(decimals)


def timeline(
    title: str, description: str, queries: Sequence[Query], *, page: str, on: str = "open", off: str = "no",
    colour: str = RED, size: tuple[int, int] = (12, 8),
) -> statetimeline.Panel:  # fmt: skip
    """When something was so: 1 = `on`, 0 = `off`."""
    panel = _common(statetimeline.Panel(), title, description, page, size).targets(targets(queries)).unit("none")
    words = {"0": (off, "transparent"), "1": (on, colour)}
    mapping = {
        value: dashboard.ValueMappingResult(text=word, color=shade, index=at)
        for at, (value, (word, shade)) in enumerate(words.items())
    }
    panel = panel.mappings([dashboard.ValueMap(options=mapping)]).thresholds(thresholds(((None, GREY), (1, colour))))
    return panel.show_value(common.VisibilityMode.NEVER).merge_values(True).row_height(0.85)


def rows(
    title: str, description: str, query: Query, *, page: str, unit: str = "none", hidden: Sequence[str] = (),
    link: str = "", size: tuple[int, int] = (12, 8),
) -> table.Panel:  # fmt: skip
    """A table of the newest samples, one row a series; every cell opens the page at `link`."""
    panel = _common(table.Panel(), title, description, page, size).targets(targets([query])).unit(unit)
    panel = panel.thresholds(thresholds(((None, BLUE),)))
    dropped = dict.fromkeys(("Time", "__name__", "instance", "job", *hidden), True)
    panel = panel.with_transformation(
        dashboard.DataTransformerConfig(id_val="organize", options={"excludeByName": dropped})
    )
    if link:
        opened = builders.DashboardLink("Runbook").type(dashboard.DashboardLinkType.LINK).url(link)
        panel = panel.data_links([opened.target_blank(True)])
    return panel


def words(title: str, description: str, markdown: str, *, page: str, size: tuple[int, int] = (12, 8)) -> text.Panel:
    return _common(text.Panel(), title, description, page, size).content(markdown)


def board(uid: str, title: str, description: str, parts: Sequence[tuple[str, Sequence[Builder]]]) -> dict[str, Any]:
    """The JSON object of a dashboard; `parts` = (row title, panels)."""
    made = builders.Dashboard(f"DLC / {title}").uid(uid).description(description).tags([*TAGS, f"dlc-{title.lower()}"])
    made = made.editable().refresh("30s").time("now-3h", "now").timezone("browser")
    made = made.tooltip(dashboard.DashboardCursorSync.CROSSHAIR).version(1)
    made = made.variables(_variables()).annotations(_annotations())
    for tag, label in (("dlc", "DLC boards"), ("vllm", "vLLM boards")):
        link = builders.DashboardLink(label).type(dashboard.DashboardLinkType.DASHBOARDS).tags([tag]).as_dropdown(True)
        made = made.link(link.include_vars(True).keep_time(True))
    number_ = 0
    for row, panels in parts:
        number_ += 1
        made = made.with_row(builders.Row(row).id(number_))
        for panel in panels:
            number_ += 1
            made = made.with_panel(panel.id(number_))  # type: ignore[attr-defined]  # each SDK builder has it
    built = made.build()
    built.id_val = None
    tree = json.loads(JSONEncoder(sort_keys=True).encode(built))
    for item in (*tree["links"], *tree["annotations"]["list"]):
        item.pop("placement", None)  # the SDK always says "in the menu"; Grafana's own default is in sight
    assert isinstance(tree, dict)
    return tree


def _variables() -> list[Any]:
    source = builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    first = catalog.BY_NAME["frames_total"].full_name
    chain = (
        ("model_name", "Model", first),
        ("run", "Run", f'{first}{{model_name=~"$model_name"}}'),
        ("engine", "Engine", f'{first}{{model_name=~"$model_name",run=~"$run"}}'),
    )
    made: list[Any] = [source]
    for name, label, metric in chain:
        query = f"label_values({metric}, {name})"
        variable = builders.QueryVariable(name).label(label).datasource(SOURCE).definition(query)
        variable = variable.query(query).multi(True).include_all(True)
        variable = variable.all_value(".*").refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        current = dashboard.VariableOption(selected=True, text=["All"], value=["$__all"])
        made.append(variable.sort(dashboard.VariableSort.ALPHABETICAL_ASC).current(current))
    return made


def _annotations() -> list[Any]:
    """What was sent and what changed the weights, from the counters; and what `serve` wrote into Grafana itself."""
    marks = (
        ("RESYNC sent", f"increase({series('commands_total', kind='RESYNC', outcome='sent')}[1m]) > 0", ORANGE),
        ("RESYNC applied", f"increase({series('commands_total', kind='RESYNC', outcome='applied')}[1m]) > 0", GREEN),
        ("ABORT due", f"increase({series('commands_total', kind='ABORT', outcome='sent|hypothetical')}[1m]) > 0", RED),
    )
    sync = ("Weight sync", f"changes({series('engine_version')}[1m]) > 0", BLUE)
    made = []
    for name, expr, colour in (*marks, sync):
        # A job that syncs every step would be all marks: that one is switched on by hand.
        mark = builders.AnnotationQuery().name(name).datasource(SOURCE).enable(name != sync[0]).icon_color(colour)
        mark = mark.expr(expr)
        made.append(mark.title_format(name).text_format("{{run}}").step("60s").tag_keys("run,kind,outcome"))
    grafana = common.DataSourceRef(type_val="grafana", uid="-- Grafana --")
    own = builders.AnnotationQuery().name("Written by the sentinel").datasource(grafana).enable(True).icon_color(BLUE)
    target = builders.AnnotationTarget().tags(["dlc-sentinel"]).limit(200).match_any(False).type("tags")
    made.append(own.target(target))
    return made
