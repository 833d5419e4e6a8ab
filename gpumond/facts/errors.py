"""Exceptions that gpumond raises, and the kinds of faults with their remedies. serve/routes.py has their statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NewType

UNKNOWN_PATH_PREFIX = "this daemon doesn't serve"
"""Beginning of the detail of the answer to a path that a daemon doesn't serve; the command line then asks whether the
daemon is older."""

FaultKind = Literal[
    "library_not_found",
    "library_not_loadable",
    "no_driver",
    "no_device",
    "driver_not_loaded",
    "uninitialized",
    "no_permission",
    "device_access_lost",
    "lib_rm_version_mismatch",
    "timeout",
    "crashed",
    "starting",
    "released",
    "skipped",
    "gpu_is_lost",
    "gpu_not_found",
    "reset_required",
    "vanished",
    "lost",
    "processes_hidden",
    "impossible_value",
    "report_exceeds_driver",
    "insufficient_size",
    "unreadable",
    "unknown",
    "corrupt",
    "row_unreadable",
    "not_writable",
    "not_loaded",
    "damaged",
    "unset",
    "missing",
    "socket_lost",
    "port_in_use",
    "limit_refused",
]
"""Kinds of faults, each with a remedy in ``FAULT_REMEDIES``."""

_HARDWARE_REMEDY = (
    "look for Xid errors in dmesg; drain the machine, then reset the GPU (gpumond detach-driver --for 5m, then "
    "nvidia-smi --gpu-reset) or reboot; gpumond reads it again automatically"
)

FAULT_REMEDIES: Mapping[str, str] = {
    "library_not_found": "install the NVIDIA driver; in a container, use the NVIDIA container toolkit (--gpus all); "
    "without a GPU, try `gpumond demo`",
    "library_not_loadable": "reinstall the NVIDIA driver, and check LD_LIBRARY_PATH; in a container, check the "
    "architecture and the C library of its image",
    "no_driver": "install the GPU driver, or try `gpumond demo`, which needs none",
    "no_device": "no action needed on a machine without a GPU; otherwise look for the GPU in lspci. `gpumond demo` "
    "needs none",
    "driver_not_loaded": "load the driver (modprobe nvidia), or install it",
    "uninitialized": "no action needed: gpumond opens the driver again when it is available",
    "no_permission": "give this user read and write access to /dev/nvidia* (AMD, Intel: the render group; the memory "
    "in use also requires CAP_PERFMON)",
    "device_access_lost": "recreate the container with CDI or explicit --device options",
    "lib_rm_version_mismatch": "reboot, or stop all programs that use the GPU and reload the kernel module",
    "timeout": "look for Xid 119, 79 or 45 in dmesg; this GPU's values are hidden until the driver call returns",
    "crashed": "look for Xid errors in dmesg, and check that the driver and its library match; the driver process is "
    "restarted automatically",
    "starting": "wait: gpumond is opening the driver for the first time",
    "released": "no action needed: gpumond was asked to detach from the driver, and reattaches automatically",
    "skipped": "look for Xid errors in dmesg; gpumond reads the GPU again when the hung driver call returns "
    "or, after a crash, 5 s to 10 min later",
    "gpu_is_lost": _HARDWARE_REMEDY,
    "gpu_not_found": _HARDWARE_REMEDY,
    "reset_required": _HARDWARE_REMEDY,
    "vanished": "look for Xid errors in dmesg, and check that the GPU is on the bus (lspci); gpumond reads it again "
    "once it is back",
    "lost": "look for the reason in dmesg, and check that the GPU is on the bus (lspci); gpumond reads it again once "
    "it is back",
    "processes_hidden": "run gpumond as root or with CAP_SYS_PTRACE; until then, the memory of these processes is "
    "unattributed",
    "impossible_value": "check that the driver matches its library and nvidia-ml-py; gpumond drops impossible values",
    "report_exceeds_driver": "check the program with that pid: its agent reports wrong values, or its allocator counts "
    "memory that isn't on the GPU (managed memory); gpumond uses the driver-reported value",
    "insufficient_size": "check that the driver matches its library and nvidia-ml-py; only that field is missing",
    "unreadable": "check that the driver matches its library; only that field is missing",
    "unknown": "look for Xid errors in dmesg; in a container, check that its device rules are complete (CDI)",
    "corrupt": "inspect the renamed file (sqlite3 FILE .recover), then remove it",
    "row_unreadable": "no action needed: gpumond uses the other rows; to keep unreadable ones, copy the file before "
    "they are replaced",
    "not_writable": "free space in the state directory, and check that the daemon's user owns it; gpumond retries "
    "automatically",
    "not_loaded": "fix the file, check it with `gpumond check-config FILE`, then reload it (systemctl reload gpumond, "
    "or SIGHUP); until then, its last valid content stays in effect",
    "damaged": "remove the simulated device's directory, or replace its `card.json`",
    "unset": "set GPUMOND_SIM_DIR to a directory of simulated devices, or run `gpumond demo`",
    "missing": "create the directory that GPUMOND_SIM_DIR names, or run `gpumond demo`",
    "socket_lost": "remove the other file, or fix the directory; gpumond then binds the socket again automatically",
    "port_in_use": "stop the program that listens there (ss -ltnp), or set `listen` to another port; gpumond retries "
    "automatically; meanwhile, api.sock responds",
    "limit_refused": "run the daemon as root, in the host's cgroup namespace, with the host's /sys/fs/cgroup mounted, "
    "or remove cgroup_limit from the quota; gpumond retries automatically",
}
"""Remedy of each kind of fault, in one line; docs/reference/faults.md has a row for each."""

ReturnCode = NewType("ReturnCode", str)
"""A return code of NVML in lower case, such as ``corrupted_inforom``, or ``error_NUMBER``; NVML may add more."""


HttpFailure = Literal[
    "address", "dns", "refused", "untrusted", "tls", "certificate", "timeout", "not_http", "connection", "too_large"
]
"""Reasons why an HTTP exchange fails."""


class GpumondError(Exception):
    """Base of all errors that gpumond raises on purpose."""


class ConfigError(GpumondError):
    """A value from a file, the environment or the command line cannot be used.

    ``place`` is the file, the line and the key, without the value, which may be a secret; empty if it is unknown.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class SourceUnavailable(GpumondError):
    """A device source cannot be opened. ``reason`` is the kind of the fault; the message ends with the remedy."""

    def __init__(self, reason: FaultKind | ReturnCode, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SourceUnavailable], tuple[str, str]]:
        return type(self), (self.reason, str(self))


class ProtocolError(GpumondError):
    """A message violates the agent protocol (``facts.messages``). ``reason`` is one word for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


LIST_PROGRAMS_HINT = "; to list the programs: gpumond status"


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return ``; did you mean NAME?`` with the most similar known name, else with up to three that contain the given
    one; empty without any.
    """
    import difflib  # needed for one error only, and not by agents

    names = [*known_names]
    similar = difflib.get_close_matches(name, names, n=1) or [each for each in names if name and name in each][:3]
    alternatives = " or ".join(filter(None, (", ".join(similar[:-1]), *similar[-1:])))
    return f"; did you mean {alternatives}?" if similar else ""


class FlushError(GpumondError):
    """A flush cannot start; nothing was done."""


class NoSuchTarget(FlushError):
    """No connected agent matches the target."""


class FlushInProgress(FlushError):
    """A flush of the process is in progress."""


class CooldownActive(FlushError):
    """The process was flushed recently; the message states when it may be flushed again."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoSuchDevice(GpumondError):
    """The name matches no device; the message lists the devices."""


class AmbiguousDevice(GpumondError):
    """The name matches several devices; the message lists them."""


class StoreUnavailable(GpumondError):
    """The store cannot commit; nothing was changed. ``full``: the disk is full."""

    def __init__(self, message: str, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class NoSuchEntry(GpumondError):
    """No rule, quota, silence, baseline, receiver or request for memory has that name or id."""


class EntryChanged(GpumondError):
    """The current etag of the rule or quota differs from the one in the request."""


class EntryConflict(GpumondError):
    """The entry is read-only or exists already, or there are too many; the message ends with the remedy."""


class TooManyAdmissions(GpumondError):
    """The limit of requests for memory is reached."""


class HttpError(GpumondError):
    """An HTTP exchange failed: a word for the reason, and a sentence without the address or a secret."""

    def __init__(self, reason: HttpFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(GpumondError):
    """A serving engine doesn't respond, or its response isn't one of its kind."""


class EngineRejected(EngineError):
    """A serving engine answered with an HTTP status other than 2xx."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(f"HTTP status {status}" + (f": {text}" if text else ""))
        self.status = status


class EngineTimeout(EngineError):
    """A serving engine did not answer in time. Its call may still be in progress."""


class DaemonError(GpumondError):
    """The daemon cannot be reached or refused. ``status`` is the HTTP status, 0 without a response.

    ``problem`` is the problem document in the response, empty without one.
    """

    def __init__(self, message: str, status: int = 0, problem: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {}


class DiscoveryError(GpumondError):
    """The machines or series of a request cannot be listed, or the name of a machine has no single address."""


class TokenReviewError(GpumondError):
    """The API server of Kubernetes does not answer, or refuses to verify tokens for the daemon."""


RETURN_CODE_REMEDY = "look up this NVML return code, and look for Xid errors in dmesg; only that field is missing"
"""Remedy for the kinds that are not listed: the other return codes of NVML."""

CONDITION_REMEDIES: Mapping[str, str] = {
    "private_pid_namespace": "run the daemon in the host's PID namespace (hostPID: true, --pid=host): here, the "
    "driver's pids may belong to other processes; until then, agents and open device files identify the processes",
    "agent_pid_unknown": "share the PID namespace (hostPID: true, shareProcessNamespace: true): these agents are in "
    "another one, so driver-reported usage, age, user and container of their processes are unknown; until then, flush "
    "them by connection number",
    "unified_memory": "no action needed: this GPU has no memory of its own; size and free are the machine's, and used "
    "is the sum over all processes",
    "coherent_memory": "no action needed: this GPU's memory is also a NUMA node, so the kernel may use it as page "
    "cache; unattributed memory here isn't a leak (numastat -m; gpumond_device_file_cache_bytes)",
    "vgpu": "no action needed: this is part of a GPU; its host reports the sensors and the process list, and agents "
    "report the programs",
    "host_vgpu": "run gpumond in the virtual machines that share this GPU: their programs are visible only there, and "
    "their memory is unattributed here",
    "host_vsga": "run gpumond in the virtual machines that share this GPU: their programs are visible only there, and "
    "their memory is unattributed here",
    "mps": "start programs with gpumond run -- COMMAND: the driver may count the memory of MPS clients for the server, "
    "and only agents report it by client; an error in one client terminates all of them",
    "no_process_list": "start programs with gpumond run -- COMMAND: the driver lists no processes (as on old vGPUs), "
    "so agents are the only source",
    "unmapped_estimated": "no action needed if the program is in sleep mode: it needs these bytes again when it wakes "
    "up; otherwise its allocator counts memory that isn't on the GPU (managed memory)",
    "managed_memory": "no action needed: the driver counts managed memory for no process; gpumond divides the "
    "bytes that belong to no other process among the programs with managed memory, up to the sizes of their pools",
    "suspended": "no action needed: cuda-checkpoint, or a program that uses its interface, has suspended the process; "
    "it needs this memory again when it is resumed, and isn't flushed until then",
    "pool_exceeds_device": "check the program with that pid: its agent reports wrong values, or its allocator counts "
    "memory that isn't on the GPU (managed memory, released pages)",
    "live_unknown": "start the program with gpumond run -- COMMAND, or wrap its RMM resource in "
    "rmm.mr.StatisticsResourceAdaptor: the resource doesn't count live bytes",
    "memory_partition": "no action needed: the daemon runs in a cgroup whose memory on this GPU is limited; the "
    "values are the whole GPU's, and used memory includes the driver's own reserved memory",
    "reserved_in_used": "update the driver: this one counts its own reserved memory as used (510 or later reports both "
    "separately)",
}


def remedy(kind: str) -> str:
    """Return the remedy for a fault or a condition of that kind."""
    return FAULT_REMEDIES.get(kind) or CONDITION_REMEDIES.get(kind) or RETURN_CODE_REMEDY
