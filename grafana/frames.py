"""Parts of every dashboard around its panels: variables, links and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from grafana.parts import DATASOURCE, Panel
from grafana.queries import FLEET

TAG = "gpumond"

Variable = dashboard.QueryVariable
Row = tuple[str, Sequence[Panel]]


class Marks(Builder[model.AnnotationQuery]):
    """Events of Prometheus as marks on every curve."""

    def __init__(self, name: str, colour: str, expression: str, text: str, *, value_is_time: bool = False) -> None:
        more: dict[str, object] = {
            "step": "15s",
            "titleFormat": name,
            "textFormat": text,
            "useValueForTime": value_is_time,
        }
        self._query = _PrometheusMarks(more, name=name, datasource=DATASOURCE, icon_color=colour, expr=expression)

    def build(self) -> model.AnnotationQuery:
        return self._query


class _PrometheusMarks(model.AnnotationQuery):
    """With the fields of its data source, which the builders leave out."""

    def __init__(self, more: dict[str, object], **fields: Any) -> None:
        super().__init__(**fields)
        self._more = more

    def to_json(self) -> dict[str, object]:
        return super().to_json() | self._more


def happened(name: str, colour: str, kind: str, text: str = "{{instance}}") -> Marks:
    events = f'gpumond_events_total{{{FLEET}, kind="{kind}"}}'
    return Marks(name, colour, f"sum by (instance) (increase({events}[$__rate_interval])) > 0", text)


def machine(several: bool) -> Variable:
    query = "label_values(gpumond_build_info, instance)"
    return _chosen(
        "machine", "Machine", query, several, "Address at which Prometheus scrapes the daemon of the machine."
    )


def device() -> Variable:
    named = 'label_join(gpumond_device_info{instance="$machine"}, "text", " ", "gpu", "name")'
    chosen = _chosen(
        "device", "Device", f"query_result({named})", False, "Index and name of the device; the value is its UUID."
    )
    return chosen.regex('/text="(?<text>[^"]+).*uuid="(?<value>[^"]+)/')


def workload() -> Variable:
    query = 'label_values(gpumond_agents{instance=~"$machine"}, workload)'
    return _chosen(
        "workload", "Workload", query, False, "Name of the workload; only programs with an agent report one."
    )


def job() -> Variable:
    query = 'label_values(gpumond_process_info{instance=~"$machine", job_id!=""}, job_id)'
    return _chosen("job_id", "Job", query, False, "Identity of the job, as its launcher states it to the agents.")


def _chosen(name: str, label: str, query: str, several: bool, about: str) -> Variable:
    chosen = dashboard.QueryVariable(name).label(label).description(about).datasource(DATASOURCE)
    chosen = chosen.query({"query": query, "refId": name}).sort(model.VariableSort.NATURAL_ASC)
    chosen = chosen.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).multi(several).include_all(several)
    if several:
        chosen = chosen.all_value(".*")  # or each query contains the name of every machine
        chosen = chosen.current(model.VariableOption(text="All", value="$__all"))
    return chosen


def board(
    name: str,
    title: str,
    about: str,
    variables: Sequence[Variable],
    *rows: Row,
    marks: Sequence[Marks] = (),
    since: str = "now-1h",
) -> model.Dashboard:
    made = dashboard.Dashboard(f"gpumond: {title}").uid(f"gpumond-{name}").description(about).tags([TAG])
    made = made.readonly().timezone("browser").time(since, "now").refresh("30s")
    made = made.tooltip(model.DashboardCursorSync.CROSSHAIR).link(_others())
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for variable in variables:
        made = made.with_variable(variable)
    made = made.with_variable(_runbooks()).annotations(list(marks))
    for heading, panels in rows:
        made = made.with_row(dashboard.Row(heading))
        for panel in panels:
            made = made.with_panel(panel)
    return made.build()


def _others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("gpumond").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)


def _runbooks() -> dashboard.TextBoxVariable:
    where = (
        dashboard.TextBoxVariable("runbooks").label("Runbooks").default_value("http://localhost:9917/docs/runbooks/")
    )
    return where.description("Beginning of links to runbooks: /docs/runbooks/ of any daemon.").hide(
        model.VariableHide.HIDE_VARIABLE
    )
