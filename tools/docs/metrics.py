"""Generates docs/reference/metrics.md from the catalogue: ``make docs``."""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.metrics import dcgm
from gpumond.metrics.catalogue import FAMILIES
from gpumond.metrics.telemetry import Telemetry

HEADER = """\
# Metrics

Generated from the catalogue by `make docs`; a test keeps it current. All metrics use base units. An unknown value is an
absent series, never 0. Series of a device disappear after three readings without it; `gpumond_device_up` and
`gpumond_device_info` stay. `uuid` identifies a device; `gpu` is its index.

Start with `gpumond_memory_bytes` (memory by share; the sum is used memory), `gpumond_owner_used_bytes`,
`gpumond_pool_reclaimable_bytes` (the result of a flush), `gpumond_verdict`, `gpumond_alerts` and `gpumond_driver_up`.
`grafana/` contains five dashboards, `deploy/prometheus/` the alerting rules.

To export only a part, use `/metrics?collect[]=GROUP` once or several times: the group `device` (and
`gpumond_machine_*`), `owner` (`gpumond_owner_*`), `process` (other metrics with the label `pid`, `workload` or
`cgroup`) or `daemon` (all others). With `params: {"collect[]": [device, owner, daemon]}`, Prometheus doesn't store your
programs' series; sums, reports and alerts [keep their data](recorded-series.md#new-series-per-day).

If you sum over devices, you count a MIG device and its instances twice. Read `gpumond_machine_*` instead, or exclude
the instances with `unless on(uuid) gpumond_device_info{parent_uuid!=""}`.

`gpumond_process_info` names each process's owner. To sum used memory by one of your pods' labels, let
kube-state-metrics export the label (`--metric-labels-allowlist`), and query:

```promql
sum by (label_team) (
    sum by (pod, namespace) (
        gpumond_process_memory_used_bytes * on (job, instance, pid) group_left (pod, namespace)
        label_replace(label_replace(max by (job, instance, pid, pod_name, pod_namespace) (
            gpumond_process_info{pod_name!=""}
        ), "pod", "$1", "pod_name", "(.*)"), "namespace", "$1", "pod_namespace", "(.*)")
    )
    * on (pod, namespace) group_left (label_team) max by (pod, namespace, label_team) (kube_pod_labels)
)
```

## Metrics from the current frame

| name | type | labels | meaning |
|---|---|---|---|
"""

OWN = """
## Metrics about the daemon

`python_info` and `process_*` (processor time, memory, file descriptors, start) describe the daemon's process, as in
other Python exporters. `gpumond_collector_process_*` describe the process that reads the driver.

| name | type | labels | meaning |
|---|---|---|---|
"""


DCGM = """
## DCGM's names

`/metrics?compat=VERSION` exports NVIDIA devices with the names, labels and units of dcgm-exporter; `compat: VERSION` in
the configuration adds them to `/metrics`.

| dcgm-exporter's names | version | host label | driver version label |
|---|---|---|---|
| since 4.9.0, in base units | `dcgm`, `dcgm-4.9` | `hostname` | `DCGM_FI_SYSTEM_DRIVER_VERSION` |
| 4.8.3 and 4.8.4 | `dcgm-4.8` | `hostname` | `DCGM_FI_DRIVER_VERSION` |
| until 4.8.2 | `dcgm-4.7` | `Hostname` | `DCGM_FI_DRIVER_VERSION` |

`dcgm` follows the newest version, so name a version in your dashboards and rules. A device that only one container
uses also has the `pod`, `namespace` and `container` labels. The `PROF_*` ratios come from hardware counters, over ten
seconds (Hopper and later); PCIe values are 20 ms samples. To count Xid errors, use `gpumond_device_xid_errors_total`.

| name since 4.9 | former name | meaning |
|---|---|---|
"""

LEFT_OUT = """
Not available:

| name | reason |
|---|---|
"""


def document() -> str:
    ours = HEADER + "\n".join(sorted(frame_rows())) + "\n" + OWN + "\n".join(sorted(own_rows())) + "\n"
    theirs = DCGM + "".join(map(dcgm_row, dcgm.FAMILIES))
    theirs += "| DCGM_FI_DEV_XID_ERROR | DCGM_FI_DEV_XID_ERRORS | Number of the last Xid error; 0: none so far. |\n"
    return ours + theirs + LEFT_OUT + "".join(f"| {name} | {why} |\n" for name, why in dcgm.LEFT_OUT.items())


def dcgm_row(family: dcgm.DcgmFamily) -> str:
    former, unit = family.name(True), family.unit.former
    if former == family.name(False):
        former = ""
    elif unit != family.unit.name:
        former += f" ({unit})"
    return f"| {family.name(False)} | {former} | {family.help(False)} |\n"


def frame_rows() -> Iterator[str]:
    for family in FAMILIES:
        yield row(family.name, family.kind, family.labels, family.help)


def own_rows() -> Iterator[str]:
    registry = Telemetry().registry
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = tuple(registry._names_to_collectors[metric.name]._labelnames)  # type: ignore[attr-defined]
        yield row(name, metric.type, labels, metric.documentation)


def row(name: str, kind: str, labels: tuple[str, ...], meaning: str) -> str:
    columns = (f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), meaning.replace("|", "\\|"))
    return "| " + " | ".join(columns) + " |"


if __name__ == "__main__":
    print(document(), end="")  # noqa: T201
