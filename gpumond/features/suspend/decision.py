"""Decisions on suspensions: what is refused and why, and what follows from the driver's state. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Snapshot
from gpumond.facts.suspension import SuspendedMemory, SuspendedProgram, SuspensionOutcome
from gpumond.facts.units import duration_text, size_text
from gpumond.features.suspend.checkpoint_process import CheckpointResponse

MIN_DRIVER_VERSION, MIN_IPC_DRIVER_VERSION = 570, 610
"""First driver with cuCheckpointProcess*, and the first that suspends a program with shared device memory."""
HOST_MARGIN_RATIO = 0.1
"""Part of the driver's count that must remain free in host memory."""


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What the daemon has read for one program. ``free_host_bytes``: host memory that it can still allocate.

    ``children``: its descendants that the driver lists. ``daemon_uid``: the daemon's user.
    """

    free_host_bytes: int | None
    children: tuple[int, ...] = ()
    daemon_uid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRequest:
    """``uid``: the caller, None for an administrator. ``min_idle_seconds``: the minimum time without work.

    ``requested_for``: the program that waits for the memory.
    """

    process: ProcessKey
    uid: int | None = None
    min_idle_seconds: float = 0.0
    requested_for: str = ""


def listed_usages(snapshot: Snapshot, process: ProcessKey) -> list[tuple[DeviceReading, ProcessUsage]]:
    """Return the devices on which the driver lists a process."""
    usages = ((device, device.processes_by_key.get(process)) for device in snapshot.devices)
    return [(device, usage) for device, usage in usages if usage is not None and "holder" not in usage.kinds]


def memory_of(snapshot: Snapshot, process: ProcessKey) -> tuple[SuspendedMemory, ...]:
    """Return the driver's count of a process by device."""
    return tuple(
        SuspendedMemory(device.uuid, device.index, usage.used_bytes or 0)
        for device, usage in listed_usages(snapshot, process)
    )


def idle_seconds(snapshot: Snapshot, process: ProcessKey) -> float | None:
    """Return the time since a process last worked on any of its devices, None if unknown."""
    times = [usage.idle_seconds for _, usage in listed_usages(snapshot, process)]
    known_times = [each for each in times if each is not None]
    return min(known_times) if known_times and len(known_times) == len(times) else None


def is_idle(snapshot: Snapshot, process: ProcessKey, min_seconds: float) -> bool:
    """Return whether a process is known to have been idle for so long."""
    return not min_seconds or (idle_seconds(snapshot, process) or 0.0) >= min_seconds


def refusals(
    snapshot: Snapshot,
    report: AgentReport,
    request: SuspendRequest,
    allowed: bool,
    host_state: HostState | None,
    pending_bytes: int = 0,
) -> Iterator[Refusal]:
    """Yield why a program may not be suspended now, nothing if it may.

    ``host_state``: None for a decision on the snapshot alone. ``pending_bytes``: host memory of suspensions that are
    in progress.
    """
    if not allowed:
        yield Refusal("the configuration doesn't allow suspensions", "set allow_suspend: true")
    if not report.suspendable:
        remedy = "start it with gpumond run --suspendable, or call gpumond.agent.start(suspendable=True)"
        yield Refusal("the program doesn't allow suspension", remedy)
    if request.uid not in (None, report.uid):
        yield Refusal(f"the program belongs to uid {report.uid}", "ask its user or an administrator")
    if not report.has_pid:
        remedy = "run the daemon in the host's PID namespace (hostPID: true, --pid=host)"
        yield Refusal("the pid is unknown: the program is in another PID namespace", remedy)
    if any(each.confirmed and each.process == report.key for each in snapshot.suspensions):
        yield Refusal("the program is already suspended", f"to resume it: gpumond resume --pid {report.pid}")
    usages = listed_usages(snapshot, report.key)
    if not usages:
        yield Refusal("the driver lists no memory for the program", "nothing to do")
    for device, process in usages:
        yield from _device_refusals(device, process)
    yield from _driver_refusals(snapshot, report, {device.vendor for device, _ in usages})
    if any(pool.managed for pool in report.pools):
        yield Refusal("the program uses managed memory, which the driver can't suspend", "don't use managed memory")
    if "nccl" in report.components:
        yield Refusal(
            "the program has NCCL communicators, which may hang after a suspension", "shut down torch.distributed first"
        )
    if not is_idle(snapshot, report.key, request.min_idle_seconds):
        idle = idle_seconds(snapshot, report.key)
        reason = "the program's idle time is unknown"
        if idle is not None:
            required = duration_text(request.min_idle_seconds)
            reason = f"the program has been idle for {duration_text(idle)}, less than the required {required}"
        yield Refusal(reason, "try again later")
    if host_state is not None:
        yield from _machine_refusals(
            report,
            sum(process.used_bytes or 0 for device, process in usages if device.vendor != "sim"),  # only numbers
            host_state,
            pending_bytes,
        )


def _device_refusals(device: DeviceReading, process: ProcessUsage) -> Iterator[Refusal]:
    if device.parent_uuid is not None or device.gpu_instance_id is not None:
        yield Refusal("the program uses a MIG instance, which the driver can't suspend", "use a whole GPU")
    if device.has_mps_server:
        yield Refusal("the program is an MPS client, which the driver can't suspend", "run it without MPS")
    if process.used_bytes is None or device.missed_readings:
        yield Refusal(
            f"the driver doesn't report the program's memory on GPU {device.index}", "to see why: gpumond doctor"
        )
    if process.state == "stopped":
        yield Refusal("the program is stopped, so it can't respond to the driver", f"kill -CONT {process.pid}")


def _driver_refusals(snapshot: Snapshot, report: AgentReport, vendors: set[str]) -> Iterator[Refusal]:
    if not vendors <= {"nvidia", "sim"}:
        yield Refusal("only NVIDIA's driver can suspend programs", "nothing to do")
    if "nvidia" not in vendors:
        return
    version = snapshot.source.driver_version or ""
    major = version.partition(".")[0]
    major_version = int(major) if major.isdecimal() else 0
    if major_version < MIN_DRIVER_VERSION:
        remedy = f"install driver {MIN_DRIVER_VERSION} or newer"
        yield Refusal(f"the driver ({version or 'unknown version'}) can't suspend programs", remedy)
    if major_version < MIN_IPC_DRIVER_VERSION and "ipc" in report.components:
        remedy = f"install driver {MIN_IPC_DRIVER_VERSION} or newer, or free the shared tensors"
        yield Refusal(
            f"the program shares GPU memory with another process, which driver {version} can't suspend", remedy
        )


def _machine_refusals(
    report: AgentReport, used_bytes: int, host_state: HostState, pending_bytes: int
) -> Iterator[Refusal]:
    if host_state.daemon_uid not in (0, report.uid):
        yield Refusal(
            f"the program belongs to uid {report.uid}, and the daemon is uid {host_state.daemon_uid}",
            "run the daemon as root",
        )
    if host_state.children:
        pids = ", ".join(map(str, host_state.children))
        yield Refusal(f"the program's children use the GPU too (pid {pids})", "stop them first")
    need_bytes = int(used_bytes * (1 + HOST_MARGIN_RATIO)) + pending_bytes
    if host_state.free_host_bytes is None:
        yield Refusal("the free host memory is unknown", "mount /proc and /sys/fs/cgroup")
    elif host_state.free_host_bytes < need_bytes:
        free_text = size_text(host_state.free_host_bytes)
        yield Refusal(
            f"the program needs {size_text(need_bytes)} of host memory, but only {free_text} is free",
            "free host memory, or raise the cgroup's memory limit",
        )


def already_suspended(program: SuspendedProgram) -> Refusal:
    """Return why a program that gpumond has suspended, or is about to, can't be suspended again."""
    if program.state == "suspended":
        return Refusal("the program is already suspended", f"to resume it: gpumond resume --pid {program.pid}")
    if program.state == "suspending":
        return Refusal("the program is being suspended", "wait for its receipt")
    if program.state == "stuck":
        return Refusal(f"the program is stuck: {program.reason}", f"kill it: kill -9 {program.pid}")
    return Refusal("the program is about to be resumed", "suspend it when it runs again")


def with_suspension_marks(snapshot: Snapshot, min_idle_seconds: float) -> Iterator[AgentReport]:
    """Yield the reports, with marks on the programs that can be suspended on request, and without one."""
    for report in snapshot.reports:
        request = SuspendRequest(process=report.key)
        if report.key in snapshot.unresponsive or next(refusals(snapshot, report, request, True, None), None):
            yield report
        else:
            idle = is_idle(snapshot, report.key, min_idle_seconds)
            yield replace(report, can_suspend=True, may_suspend=idle)


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """What follows from a checkpoint process's answer: the program, None if it runs or has ended, and the outcome.

    ``outcome`` is None if the state is the same as before, or unknown. ``ask_again``: the driver must be asked again.
    """

    program: SuspendedProgram | None
    outcome: SuspensionOutcome | None
    reason: str = ""
    ask_again: bool = False


def checkpoint_outcome(
    program: SuspendedProgram, answer: CheckpointResponse | None, state_query: bool = False
) -> CheckpointOutcome:
    """Return what the driver's state means. ``answer`` is None if the checkpoint process has not answered in time.

    ``state_query``: it has only asked for the state, since that of an earlier process is unknown. A program that was
    to be resumed then still waits, and keeps its grants.
    """
    if answer is None:
        reason = "the driver hasn't responded in time, and may still be working"
        return CheckpointOutcome(replace(program, reason=reason), "timeout", reason, ask_again=True)
    error = answer.error
    if answer.state == "gone":
        return CheckpointOutcome(None, "gone", "the program has exited")
    if answer.state == "failed":
        reason = error or "the driver reports that the suspension or resumption failed"
        return CheckpointOutcome(replace(program, state="stuck", reason=reason), "failed", reason)
    if answer.state == "running":
        outcome: SuspensionOutcome = "failed" if program.state == "suspending" else "resumed"
        return CheckpointOutcome(None, outcome, error)
    if answer.state == "checkpointed" and program.state == "suspending":
        return CheckpointOutcome(replace(program, state="suspended", host_bytes=answer.host_bytes), "suspended")
    if answer.state == "checkpointed" and state_query and program.state in ("waiting", "resuming"):
        return CheckpointOutcome(replace(program, state="waiting"), None)
    if answer.state == "checkpointed":
        suspended = replace(program, state="suspended", reason=error, resume_since=None)
        return CheckpointOutcome(suspended, "failed" if program.state == "resuming" else None, error)
    if program.state in ("resuming", "suspending"):
        reason = error or "the driver's state is unknown"
        return CheckpointOutcome(
            replace(program, reason=reason), None if state_query else "failed", reason, ask_again=True
        )
    return CheckpointOutcome(program, None, error, ask_again=True)
