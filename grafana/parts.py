"""Building blocks of dashboards: queries, panels, links. Every panel has a title, a description and a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from types import MappingProxyType

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries as lines,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as options, dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from gpumond.view.text import COLORS
from grafana.queries import SHARES, share

Panel = lines.Panel | stat.Panel | bargauge.Panel | table.Panel | statetimeline.Panel

DATASOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
NEUTRAL = "text"
"""Grafana's own name for the color of text, dark on light and light on dark."""

GOOD, WARNING, BAD, NOTE = "green", "orange", "red", "blue"
"""The levels of the rules device-nearly-full and pressure."""

ANY = ((1, BAD),)
ALL_WELL = ((1, GOOD),)
Levels = Sequence[tuple[float, str]]
PER_SECOND = "suffix:/s"
"""Grafana's unit of counts a second is written c/s."""


@dataclass(frozen=True)
class Query:
    """``legend``: its name in the legend, or, in a table, of its column. ``text``: words for values in a table."""

    expression: str
    legend: str = ""
    unit: str = ""
    text: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Column:
    """A label in a table. ``link``: where its cells lead to. A ``hidden`` one serves the links of others."""

    label: str
    name: str
    link: str = ""
    hidden: bool = False


YES = {"1": "yes"}


def runbook(section: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(f"Runbook: {section}").url(runbook_of(section)).target_blank(True)


def runbook_of(section: str) -> str:
    """The address of a section of the runbooks, which may be a variable."""
    return f"${{runbooks}}{section}"


def leads_to(board: str, **variables: str) -> str:
    """An address of another dashboard at the same time, with these values of its variables."""
    chosen = "".join(f"&var-{name}=${{{value}}}" for name, value in variables.items())
    kept = "var-datasource=${datasource}&${cluster:queryparam}&${job:queryparam}"
    return f"/d/gpumond-{board}?{kept}{chosen}&${{__url_time_range}}"


def page_of(machine: str) -> str:
    """The address of the page of a machine, which a variable names."""
    return f"${{page}}${{{machine}}}/"


def thresholds(levels: Levels, below: str) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(None, below), *(model.Threshold(value, color) for value, color in levels)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _color(name: str, color: str, *more: model.DynamicConfigValue) -> tuple[str, list[model.DynamicConfigValue]]:
    fixed = model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})
    return name, [fixed, *more]


def _as_line(name: str, dash: Sequence[float] = ()) -> tuple[str, list[model.DynamicConfigValue]]:
    style = {"fill": "dash", "dash": list(dash)} if dash else {"fill": "solid"}
    return _color(
        name,
        NEUTRAL,
        model.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "lines"}),
        model.DynamicConfigValue("custom.drawStyle", "line"),
        model.DynamicConfigValue("custom.fillOpacity", 0.0),
        model.DynamicConfigValue("custom.lineWidth", 2),
        model.DynamicConfigValue("custom.lineStyle", style),
    )


def _targets(queries: Sequence[Query], *, at_once: bool, as_table: bool = False) -> list[Builder[Dataquery]]:
    targets: list[Builder[Dataquery]] = []
    for letter, query in zip(ascii_uppercase, queries, strict=False):
        target = prometheus.Dataquery().datasource(DATASOURCE).ref_id(letter).expr(query.expression)
        target = target.instant() if at_once else target.range()
        if query.legend and not as_table:
            target = target.legend_format(query.legend)
        targets.append(target.format(PromQueryFormat.TABLE) if as_table else target)
    return targets


def _dressed(panel: Panel, title: str, about: str, width: int, height: int, links: Sequence[str]) -> Panel:
    panel = panel.title(title).description(about).datasource(DATASOURCE).span(width).height(height)
    return panel.links([runbook(section) for section in links]) if links else panel


def figure(
    title: str,
    about: str,
    unit: str,
    expression: str,
    *,
    levels: Levels = (),
    below: str = "",
    runbooks: Sequence[str] = (),
    width: int = 3,
    text: Mapping[str, str] | None = None,
) -> Panel:
    """One number, as it is now, or unknown: the last one of a curve may be old. ``text``: words for numbers.

    No number is negative; what is unknown has the color of what is less than all levels, which means nothing.
    """
    if levels:
        levels = ((0, below or GOOD), *levels)
    panel = (
        stat.Panel()
        .unit(unit)
        .thresholds(thresholds(levels, NEUTRAL))
        .targets(_targets([Query(expression)], at_once=True))
    )
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.graph_mode(options.BigValueGraphMode.NONE)
    panel = panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel = panel.color_mode(options.BigValueColorMode.VALUE).no_value("unknown")
    if unit == "short":
        panel = panel.decimals(0)
    if text:
        panel = panel.mappings([_words(text)])
    return _dressed(panel, title, about, width, 4, runbooks)


def _words(text: Mapping[str, str]) -> model.ValueMap:
    return model.ValueMap({value: model.ValueMappingResult(text=word) for value, word in text.items()})


def series(
    title: str,
    about: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    height: int = 8,
    limits: Sequence[str] = (),
    least: float | None = 0,
    most: float | None = None,
    stacked: bool = False,
    bars: bool = False,
    colors: Mapping[str, str] = MappingProxyType({}),
    runbooks: Sequence[str] = (),
) -> Panel:
    """Curves, or ``bars``. ``limits`` names those to stay below, dashed; ``least`` and ``most`` bound the axis.

    ``colors``: those of series by name. Others have the palette's in their order: by name, two of a few are alike.
    """
    panel = lines.Panel().unit(unit).targets(_targets(queries, at_once=False))
    panel = panel.show_points(options.VisibilityMode.NEVER).legend(_legend()).tooltip(_tooltip())
    panel = panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
    for name, color in colors.items():
        panel = panel.override_by_name(*_color(name, color))
    if bars:
        panel = panel.draw_style(options.GraphDrawStyle.BARS).fill_opacity(60)
    elif stacked:
        panel = panel.fill_opacity(60).line_width(0)
    else:
        panel = panel.fill_opacity(5).line_width(1)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    if least is not None:
        panel = panel.min(least)
    if unit == "short":
        panel = panel.axis_soft_max(1)  # or nothing at all looks like none of a hundred
    if most is not None:
        panel = panel.max(most)
    for name in limits:
        panel = panel.override_by_name(*_as_line(name, (10, 10)))
    return _dressed(panel, title, about, width, height, runbooks)


def ledger(
    title: str,
    about: str,
    scope: str,
    *levels: Query,
    shares: Sequence[str] = SHARES,
    of_share: Callable[[str, str], str] = share,
    width: int = 16,
    runbooks: Sequence[str] = (),
) -> Panel:
    """The shares as a stacked area, each in its color; ``levels`` as lines: the last one dashed.

    ``of_share``: returns the series of a share in a scope.
    """
    queries = [Query(f"sum({of_share(name, scope)})", name) for name in shares]
    panel = lines.Panel().unit("bytes").targets(_targets([*queries, *levels], at_once=False)).min(0)
    panel = panel.fill_opacity(70).line_width(0).show_points(options.VisibilityMode.NEVER)
    panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL).group("A"))
    panel = panel.legend(_table_of_values()).tooltip(_tooltip())
    for name in shares:
        panel = panel.override_by_name(*_color(name, COLORS[name]))
    for number, level in enumerate(levels, 1):
        panel = panel.override_by_name(*_as_line(level.legend, (10, 10) if number == len(levels) else ()))
    return _dressed(panel, title, about, width, 11, runbooks)


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).calcs(["lastNotNull"])
    return legend.display_mode(options.LegendDisplayMode.LIST).placement(options.LegendPlacement.BOTTOM)


def _table_of_values() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).calcs(["lastNotNull", "max"])
    return legend.display_mode(options.LegendDisplayMode.TABLE).placement(options.LegendPlacement.RIGHT)


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI).sort(options.SortOrder.DESCENDING)


def ranking(
    title: str,
    about: str,
    unit: str,
    query: Query,
    *,
    levels: Levels = (),
    color: str = GOOD,
    most: float | None = None,
    link: str = "",
    width: int = 8,
    height: int = 7,
    runbooks: Sequence[str] = (),
) -> Panel:
    """The largest, as bars, with their names above. ``link``: where a bar leads to."""
    panel = bargauge.Panel().unit(unit).min(0).targets(_targets([query], at_once=True))
    panel = panel.thresholds(thresholds(levels, color))
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel = panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel = panel.orientation(options.VizOrientation.HORIZONTAL).display_mode(options.BarGaugeDisplayMode.BASIC)
    panel = panel.name_placement(options.BarGaugeNamePlacement.TOP).show_unfilled(True)
    panel = panel.sizing(options.BarGaugeSizing.MANUAL).min_viz_height(28).max_viz_height(34)
    panel = panel.text(common.VizTextDisplayOptions().title_size(13))
    if most is not None:
        panel = panel.max(most)
    if link:
        panel = panel.data_links([dashboard.DashboardLink("Open").url(link)])
    return _dressed(panel, title, about, width, height, runbooks)


def listing(
    title: str,
    about: str,
    columns: Sequence[Column],
    *queries: Query,
    sort: str,
    ascending: bool = False,
    width: int = 24,
    runbooks: Sequence[str] = (),
) -> Panel:
    """A table: a row for each set of labels, a column for each query. Queries keep the labels of ``columns`` only."""
    panel = table.Panel().targets(_targets(queries, at_once=True, as_table=True))
    panel = panel.unit("string").min_width(70)  # any other unit makes 17.1 K of the pid 17093
    values = {_field(letter, len(queries)): query for letter, query in zip(ascii_uppercase, queries, strict=False)}
    names = {column.label: column.name for column in columns} | {field: query.legend for field, query in values.items()}
    panel = panel.with_transformation(model.DataTransformerConfig("merge", options={}))
    arranged = {"excludeByName": {"Time": True}, "renameByName": names, "indexByName": _order(names)}
    panel = panel.with_transformation(model.DataTransformerConfig("organize", options=arranged))
    for query in queries:
        panel = panel.override_by_name(query.legend, [*_formats(query)])
    for column in columns:
        if properties := [*_properties(column)]:
            panel = panel.override_by_name(column.name, properties)
    panel = panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(not ascending)])
    return _dressed(panel, title, about, width, 9, runbooks)


def _field(letter: str, queries: int) -> str:
    return f"Value #{letter}" if queries > 1 else "Value"


def _order(names: Mapping[str, str]) -> dict[str, int]:
    return {field: position for position, field in enumerate(names)}


WIDTHS = {"": 70, "short": 70, "percentunit": 80, "bytes": 90, "s": 100, "dateTimeFromNow": 160}
"""Pixels of a column of values, by unit."""


def _formats(query: Query) -> Iterator[model.DynamicConfigValue]:
    yield model.DynamicConfigValue("unit", query.unit or "short")
    if query.unit in ("", "short"):
        yield model.DynamicConfigValue("decimals", 0)
    if query.unit.startswith("suffix:"):
        yield model.DynamicConfigValue("decimals", 2)
    width = max(WIDTHS.get(query.unit, 112), 24 + 8 * len(query.legend))
    yield model.DynamicConfigValue("custom.width", width)  # labels share the rest
    if query.text:
        options = {value: {"text": word} for value, word in query.text.items()}
        yield model.DynamicConfigValue("mappings", [{"type": "value", "options": options}])


def _properties(column: Column) -> Iterator[model.DynamicConfigValue]:
    links = [{"title": f"Open {column.name}", "url": column.link}] if column.link else []
    if column.label == "instance":
        links.append({"title": "Open the machine's web UI", "url": page_of("__value.raw"), "targetBlank": True})
        yield model.DynamicConfigValue("custom.minWidth", 140)  # an address is not to be cut
    if links:
        yield model.DynamicConfigValue("links", links)
    if column.hidden:  # the second one from Grafana 12 on
        yield model.DynamicConfigValue("custom.hidden", True)
        yield model.DynamicConfigValue("custom.hideFrom.viz", True)


def states(title: str, about: str, query: Query, text: Mapping[str, str], *, runbooks: Sequence[str] = ()) -> Panel:
    """When something was so, as bands; ``text``: words for the values."""
    panel = statetimeline.Panel().unit("short").targets(_targets([query], at_once=False)).mappings([_words(text)])
    panel = panel.thresholds(thresholds(((1, WARNING),), "transparent")).merge_values(True)
    panel = panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel = panel.show_value(options.VisibilityMode.NEVER).legend(common.VizLegendOptions().show_legend(False))
    return _dressed(panel, title, about, 12, 9, runbooks)
