"""docs/metrics.md, from the catalogue: ``make docs``."""

from __future__ import annotations

from collections.abc import Iterator

from gpumond.metrics.families import FAMILIES
from gpumond.metrics.telemetry import Telemetry

HEADER = """\
# Metrics

Generated from the catalogue by `make docs`; a test keeps it current. Base units throughout. A value that is
unknown is an absent series, never 0. Series of a device vanish after three readings without it;
`gpumond_device_up` and `gpumond_device_info` stay. `uuid` identifies a device, `gpu` is its index, a label only.

Sums over devices count a MIG card and its instances twice; leave out the instances with
`unless on(uuid) gpumond_device_info{parent_uuid!=""}`.

## Of the current frame

| name | type | labels | meaning |
|---|---|---|---|
"""

OWN = """
## Of the daemon itself

| name | type | labels | meaning |
|---|---|---|---|
"""


def document() -> str:
    return HEADER + "\n".join(sorted(frame_rows())) + "\n" + OWN + "\n".join(sorted(own_rows())) + "\n"


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
