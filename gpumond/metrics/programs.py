"""Metric families that programs report: scopes, steps, and out-of-memory errors that were handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpumond.facts.frame import Frame
from gpumond.facts.program import Program, ScopeDevice, ScopeUsage, StepUsage
from gpumond.metrics.families import Family, Kind, Row


def scope_device_family(name: str, value: Callable[[ScopeDevice], float], help: str) -> Family:
    def rows(frame: Frame) -> Iterator[Row]:
        index = frame.snapshot.gpu_labels
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
        "Live memory after the scope minus before it, summed over all entries; negative if the scope freed memory.",
    ),
    scope_device_family("peak_bytes", lambda device: device.peak_bytes, "Peak live memory within the scope."),
    scope_family("entries_total", lambda scope: scope.entries, "Number of times the scope was entered."),
    scope_family(
        "retries_total", lambda scope: scope.retries, "Cache flushes by the allocators themselves within the scope."
    ),
    scope_family(
        "ooms_total", lambda scope: scope.ooms, "Entries of the scope that ended with an out-of-memory error."
    ),
    step_family("steps_total", lambda step: step.steps, "Steps that the program has completed.", "counter"),
    step_family(
        "step_kept_bytes",
        lambda step: step.kept_bytes,
        "Growth of live memory per step, as the trend over the last steps.",
    ),
    step_family("step_live_bytes", lambda step: step.live_bytes, "Live memory at the end of a step."),
    step_family("step_stranded_bytes", lambda step: step.stranded_bytes, "Stranded memory at the end of a step."),
    step_family(
        "step_retries_total",
        lambda step: step.retries,
        "Cache flushes by the allocators themselves since the first step.",
        "counter",
    ),
    program_family(
        "oom_retries_total",
        lambda program: program.oom_retries,
        "Calls that retry_on_oom repeated with a smaller batch.",
    ),
    program_family(
        "oom_rescues_total", lambda program: program.oom_rescues, "Calls that succeeded after a retry by retry_on_oom."
    ),
    program_family(
        "agent_refusals_total",
        lambda program: program.refusals,
        "Daemons and commands that the program's agent refused: untrusted, malformed, or above its rate limit.",
    ),
)
