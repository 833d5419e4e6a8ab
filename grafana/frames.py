"""Parts of every dashboard around its panels: variables, links and annotations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as model

from grafana.parts import DATASOURCE, Panel, page_of
from grafana.queries import FLEET, MACHINE, TARGET, TARGETS

TAG = "gpumond"
INPUT = "DS_PROMETHEUS"
"""Name of the data source for which Grafana asks when a user imports a dashboard."""

Variable = dashboard.QueryVariable
Row = tuple[str, Sequence[Panel]]


class Marks(Builder[model.AnnotationQuery]):
    """Events of Prometheus as marks on every curve."""

    def __init__(self, name: str, color: str, expression: str, text: str, *, value_is_time: bool = False) -> None:
        more: dict[str, object] = {
            "step": "15s",
            "titleFormat": name,
            "textFormat": text,
            "useValueForTime": value_is_time,
        }
        self._query = _PrometheusMarks(more, name=name, datasource=DATASOURCE, icon_color=color, expr=expression)

    def build(self) -> model.AnnotationQuery:
        return self._query


class _PrometheusMarks(model.AnnotationQuery):
    """With the fields of its data source, which the builders leave out."""

    def __init__(self, more: dict[str, object], **fields: Any) -> None:
        super().__init__(**fields)
        self._more = more

    def to_json(self) -> dict[str, object]:
        return super().to_json() | self._more


def happened(name: str, color: str, kind: str) -> Marks:
    """Events of machines."""
    events = f'gpumond_events_total{{{FLEET}, kind="{kind}"}}'
    return Marks(name, color, f"sum by (instance) (increase({events}[$__rate_interval])) > 0", "{{instance}}")


def flushes(scope: str, pools: str = "") -> Marks:
    """Flushes of workloads. ``pools``: only of workloads that have such pools, since flushes name no device."""
    labels = f"{TARGET}, workload"
    counted = f"sum by ({labels}) (increase(gpumond_workload_flushes_total{{{scope}}}[$__rate_interval])) > 0"
    if pools:
        counted += f" and on ({labels}) gpumond_pool_held_bytes{{{pools}}}"
    return Marks("Flush", "green", counted, "{{workload}} on {{instance}}")


def ooms(scope: str) -> Marks:
    counted = f"sum by (instance, workload, pid) (increase(gpumond_pool_ooms_total{{{scope}}}[$__rate_interval])) > 0"
    return Marks("Out of memory", "orange", counted, "{{workload}} (pid {{pid}}) on {{instance}}")


def alerts(scope: str, more: str = "") -> Marks:
    """Firing alerts of Prometheus' rules, which name device and program.

    Without these rules, those of the daemons, which name the rule. The text is one label, because Grafana writes the
    name of a label that a series does not have.
    """
    fired = f'ALERTS{{{scope}, alertname=~"Gpumond.+", alertstate="firing"{more}}}'
    machines = FLEET if scope == FLEET else MACHINE
    own = f'gpumond_alerts{{{machines}, phase="firing"}} > 0 unless on ({TARGET}) gpumond:up{{{machines}}}'
    named = f'label_join({fired}, "text", " ", "alertname", "workload", "pid")'
    plain = f'label_join({own}, "text", " ", "rule")'
    return Marks("Alert", "yellow", f"max by (instance, text) ({named} or {plain})", "{{text}} on {{instance}}")


def cluster() -> Variable:
    query = "label_values(gpumond_build_info, cluster)"
    return _chosen("cluster", "Cluster", query, True, "Label `cluster` of the daemons, if Prometheus adds one.")


def job_of_daemons() -> Variable:
    query = 'label_values(gpumond_build_info{cluster=~"$cluster"}, job)'
    return _chosen("job", "Scrape job", query, True, "The daemons' scrape job in Prometheus.")


def namespace() -> Variable:
    query = f"label_values(gpumond_owner_used_bytes{{{TARGETS}}}, pod_namespace)"
    return _chosen("namespace", "Namespace", query, True, "Kubernetes namespaces of the owners.")


def machine(several: bool) -> Variable:
    query = f"label_values(gpumond_build_info{{{TARGETS}}}, instance)"
    return _chosen("machine", "Machine", query, several, "Address at which Prometheus scrapes the machine's daemon.")


def device() -> Variable:
    named = f'label_join(gpumond_device_info{{{MACHINE}}}, "text", " ", "gpu", "name")'
    chosen = _chosen(
        "device", "Device", f"query_result({named})", False, "Index and name of the device; the value is its UUID."
    )
    return chosen.regex('/text="(?<text>[^"]+).*uuid="(?<value>[^"]+)/')


def workload() -> Variable:
    query = f"label_values(gpumond_agents{{{FLEET}}}, workload)"
    return _chosen(
        "workload", "Workload", query, False, "Name of the workload; only programs with an agent report one."
    )


def job() -> Variable:
    query = f'label_values(gpumond_process_info{{{FLEET}, job_id!=""}}, job_id)'
    return _chosen("job_id", "Job", query, False, "The job's identity, as its launcher passes it to the agents.")


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
    collapsed: Collection[str] = (),
    of_machine: bool = False,
    since: str = "now-1h",
) -> model.Dashboard:
    """Return a dashboard. Queries of ``collapsed`` rows are sent when a user opens them; not all machines have these
    values. ``of_machine``: it shows one machine, to whose page it links.
    """
    made = dashboard.Dashboard(f"gpumond: {title}").uid(f"gpumond-{name}").description(about).tags([TAG])
    made = made.readonly().timezone("browser").time(since, "now").refresh("1m")
    made = made.tooltip(model.DashboardCursorSync.CROSSHAIR).link(_others())
    if of_machine:
        page = dashboard.DashboardLink("Web UI of the machine").type(model.DashboardLinkType.LINK)
        made = made.link(page.url(page_of("machine")).target_blank(True))
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    made = made.with_variable(source.current(model.VariableOption(text=f"${{{INPUT}}}", value=f"${{{INPUT}}}")))
    for variable in (cluster(), job_of_daemons(), *variables, *_addresses()):
        made = made.with_variable(variable)
    made = made.annotations(list(marks))
    for heading, panels in rows:
        row = dashboard.Row(heading)
        if heading in collapsed:
            for panel in panels:
                row = row.with_panel(panel)
        made = made.with_row(row)
        if heading not in collapsed:
            for panel in panels:
                made = made.with_panel(panel)
    return made.build()


def _others() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("gpumond").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.include_vars(True).keep_time(True)


def _addresses() -> tuple[dashboard.TextBoxVariable, ...]:
    """Return the variables that links begin with."""
    runbooks = dashboard.TextBoxVariable("runbooks").label("Runbooks").hide(model.VariableHide.HIDE_VARIABLE)
    runbooks = runbooks.default_value("http://localhost:9917/docs/runbooks/")
    page = dashboard.TextBoxVariable("page").label("Web UI").hide(model.VariableHide.HIDE_VARIABLE)
    return (
        runbooks.description("Prefix of links to runbooks: any daemon's /docs/runbooks/."),
        page.default_value("http://").description("Prefix of links to a machine's web UI, before the machine's name."),
    )
