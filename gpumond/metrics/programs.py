"""What programs tell of themselves: scopes, steps, out-of-memory errors that they survived."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumond.metrics.family import Family, Kind, Row
from gpumond.model.frame import Frame
from gpumond.model.program import Program, ScopeDevice, ScopeUsage, StepUsage


def scope_device_family(name: str, value: Callable[[ScopeDevice], float], help: str) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        index = {device.uuid: str(device.index) for device in frame.snapshot.devices}
        for report in frame.snapshot.reports:
            for scope in report.program.scopes:
                for device in scope.devices:
                    labels = (device.device_uuid, index.get(device.device_uuid, ""), str(report.pid), report.workload)
                    yield (*labels, scope.name), value(device)

    return Family(f"gpumond_scope_{name}", "gauge", help, ("uuid", "gpu", "pid", "workload", "scope"), rows)


def scope_family(name: str, value: Callable[[ScopeUsage], float], help: str) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for report in frame.snapshot.reports:
            for scope in report.program.scopes:
                yield (str(report.pid), report.workload, scope.name), value(scope)

    return Family(f"gpumond_scope_{name}", "counter", help, ("pid", "workload", "scope"), rows)


def step_family(name: str, value: Callable[[StepUsage], float | None], help: str, kind: Kind = "gauge") -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for report in frame.snapshot.reports:
            if report.program.step is not None:
                yield (str(report.pid), report.workload), value(report.program.step)

    return Family(f"gpumond_{name}", kind, help, ("pid", "workload"), rows)


def program_family(name: str, value: Callable[[Program], float], help: str) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        for report in frame.snapshot.reports:
            yield (str(report.pid), report.workload), value(report.program)

    return Family(f"gpumond_{name}", "counter", help, ("pid", "workload"), rows)


FAMILIES: tuple[Family, ...] = (
    scope_device_family(
        "kept_bytes",
        lambda device: device.kept_bytes,
        "Live memory after the blocks of this name minus before, all passes together; negative if they freed.",
    ),
    scope_device_family(
        "peak_bytes", lambda device: device.peak_bytes, "The most live memory seen within the blocks of this name."
    ),
    scope_family("entries_total", lambda scope: scope.entries, "Passes through the blocks of this name."),
    scope_family(
        "retries_total", lambda scope: scope.retries, "Flushes of the allocators' own within the blocks of this name."
    ),
    scope_family(
        "ooms_total", lambda scope: scope.ooms, "Passes through the blocks of this name that ended out of memory."
    ),
    step_family("steps_total", lambda step: step.steps, "Steps of the program.", "counter"),
    step_family(
        "step_kept_bytes",
        lambda step: step.kept_bytes,
        "Live memory that each step keeps: the trend over the last steps.",
    ),
    step_family("step_live_bytes", lambda step: step.live_bytes, "Live memory at the end of a step."),
    step_family("step_stranded_bytes", lambda step: step.stranded_bytes, "Stranded memory at the end of a step."),
    step_family(
        "step_retries_total",
        lambda step: step.retries,
        "Flushes of the allocators' own since the first step.",
        "counter",
    ),
    program_family(
        "oom_retries_total", lambda program: program.oom_retries, "Calls tried again by retry_on_oom with less to do."
    ),
    program_family(
        "oom_rescues_total", lambda program: program.oom_rescues, "Calls that retry_on_oom brought to an end."
    ),
    program_family(
        "agent_refusals_total",
        lambda program: program.refusals,
        "What the program's agent would not hear or do: daemons of strangers, nonsense, orders that came too fast.",
    ),
)
