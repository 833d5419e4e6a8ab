"""Host-side metadata of the processes in a reading: container, pod, unit, job and state.

All of it is read by the device child, not reported by the program. No command lines, no environments. Does not
cover the identity of a pid (procfs.py).

In its own PID namespace, the daemon may find another process under a pid of the host. There a process is accepted as
the listed one only if it has a device open.

Names of containers and pods come from files of their managers without privileges, else from the kubelet.
``/var/log/containers`` and ``/var/log/pods`` (kubelet) are readable by every user. The files of Docker, Podman, CRI-O
and containerd are mostly readable by root only: without them, a container has its ID and no name. Does not cover
containers of rootless Podman or Docker, whose files the user can write.
"""

from __future__ import annotations

import glob
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from gpumond.devices.process.procfs import DeviceHolders, OpenDeviceNodes
from gpumond.facts.messages import printable_text
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Reading
from gpumond.host.machine import (
    TICKS_PER_SECOND,
    ProcessStat,
    in_private_pid_namespace,
    read_or_empty,
    read_process_stat,
)

MAX_FILE_BYTES = 8 * 1024 * 1024

CONTAINER_STORES = ("var/lib/containers/storage", "run/containers/storage")
"""Directories of Podman and CRI-O; the second is for containers that are removed when they exit (--rm)."""
CONTAINERD_DIRECTORIES = ("run/containerd", "run/k3s/containerd")
NAME_ANNOTATIONS: tuple[tuple[str, ...], ...] = (
    ("io.kubernetes.cri.container-name", "io.kubernetes.container.name", "nerdctl/name"),
    ("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"),
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"),
)
"""Annotations of an OCI configuration that name the container, its pod and its namespace."""


class ContainerNames(NamedTuple):
    container: str | None = None
    pod: str | None = None
    namespace: str | None = None


class ContainerNameLookup:
    """Lookup of names. ``root`` is the host's root directory, or its mount point in a container."""

    def __init__(self, root: str = "/") -> None:
        self._root = root

    def names(self, placement: ProcessPlacement) -> ContainerNames:
        """Return the known names of a placement; none if it is delegated, because it could name any container."""
        if placement.container is None or placement.delegated:
            return ContainerNames()
        names = ContainerNames()
        for found in self._known_names(placement.container, placement.pod_uid):
            names = ContainerNames(
                *(
                    printable_text(ours or theirs) if ours or theirs else None
                    for ours, theirs in zip(names, found, strict=True)
                )
            )
            if names.container and (names.pod or not placement.pod_uid):
                break
        return names

    def _known_names(self, container: str, pod_uid: str | None) -> Iterator[ContainerNames]:
        for log in self._glob(f"var/log/containers/*_*_*-{container}.log"):
            pod, namespace, name = os.path.basename(log).removesuffix(f"-{container}.log").split("_", 2)
            yield ContainerNames(name, pod, namespace)
        if pod_uid:
            for directory in self._glob(f"var/log/pods/*_*_{pod_uid}"):
                namespace, pod, _ = os.path.basename(directory).split("_", 2)
                yield ContainerNames(None, pod, namespace)
        yield _parse_container_name(
            _text(self._json(f"var/lib/docker/containers/{container}/config.v2.json"), "Name").lstrip("/")
        )
        yield from self._names_in_storage(container)
        for root in CONTAINERD_DIRECTORIES:
            for file in self._glob(f"{root}/io.containerd.runtime.v2.task/*/{container}/config.json"):
                yield _annotated_names(self._json(file))

    def _names_in_storage(self, container: str) -> Iterator[ContainerNames]:
        for store in CONTAINER_STORES:
            directory = f"{store}/overlay-containers"
            yield _annotated_names(self._json(f"{directory}/{container}/userdata/config.json"))
            for index in ("containers.json", "volatile-containers.json"):
                entries = self._json(f"{directory}/{index}")
                for entry in entries if isinstance(entries, list) else ():
                    if _text(entry, "id") == container and isinstance(entry.get("names"), list) and entry["names"]:
                        yield _parse_container_name(str(entry["names"][0]))

    def _glob(self, pattern: str) -> list[str]:
        return glob.glob(pattern, root_dir=self._root)

    def _json(self, path: str) -> Any:
        try:
            with open(os.path.join(self._root, path), "rb") as file:
                return json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return None


def _parse_container_name(name: str) -> ContainerNames:
    """Parse a name of Docker's shim or CRI-O: ``k8s_NAME_POD_NAMESPACE_UID_ATTEMPT``."""
    parts = name.split("_")
    return ContainerNames(*parts[1:4]) if parts[0] == "k8s" and len(parts) >= 6 else ContainerNames(name)


def _annotated_names(configuration: Any) -> ContainerNames:
    annotations = configuration.get("annotations") if isinstance(configuration, dict) else None
    return ContainerNames(
        *(next(filter(None, (_text(annotations, key) for key in keys)), None) for keys in NAME_ANNOTATIONS)
    )


def _text(values: Any, key: str) -> str:
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, str) else ""


_CONTAINER = re.compile(r"(?:.*[-:])?([0-9a-f]{64})(?:\.scope)?")
_MONITOR = "conmon-"
"""Prefix of the scope of a monitor process, which contains the ID of its Podman or CRI-O container."""
_POD = re.compile(
    r"(?:kubepods[a-z-]*-)?pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?::.*)?"
)
_JOB = re.compile(r"job_(\d+)")


class ProcessPlacement(NamedTuple):
    container: str | None = None
    pod_uid: str | None = None
    delegated: bool = False
    unit: str | None = None
    slurm_job: str | None = None


def parse_placement(text: str) -> ProcessPlacement:
    """Return the placement that /proc/PID/cgroup describes; hierarchies without information are ignored."""
    placements = [_placement_of_path(path) for path in _paths(text)]
    in_container = next((entry for entry in placements if entry.container), ProcessPlacement())
    return in_container._replace(
        unit=next((entry.unit for entry in placements if entry.unit), None),
        slurm_job=next((entry.slurm_job for entry in placements if entry.slurm_job), None),
    )


def limitable_cgroup(text: str) -> str | None:
    """Return the path of a process's container, else of the process, in the unified hierarchy of /proc/PID/cgroup.

    None for the root, and for a cgroup outside of the daemon's cgroup namespace.
    """
    path = next((line[3:].removesuffix(" (deleted)") for line in text.splitlines() if line.startswith("0::")), "")
    segments: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            return None
        segments.append(segment)
        if _CONTAINER.fullmatch(segment) and _MONITOR not in segment:
            break
    return "/".join(segments).rstrip("/") or None


def _paths(text: str) -> list[str]:
    """Return the paths: the unified hierarchy first, then systemd's, then the controllers of version 1."""

    def priority(line: str) -> int:
        return 0 if line.startswith("0::") else 1 if ":name=systemd:" in line else 2

    lines = sorted((line for line in text.splitlines() if line.count(":") >= 2), key=priority)
    return [line.split(":", 2)[2].removesuffix(" (deleted)") for line in lines]


def _placement_of_path(path: str) -> ProcessPlacement:
    pod = unit = job = None
    delegated = kubernetes = slurm = False
    for segment in _segments(path):
        kubernetes = kubernetes or segment.startswith("kubepods")
        if kubernetes and (match := _POD.fullmatch(segment)):
            pod = match[1].replace("_", "-")
        if match := _CONTAINER.fullmatch(segment):
            if _MONITOR not in segment:
                return ProcessPlacement(match[1], pod, delegated, unit, job)
        elif slurm and not delegated and (match := _JOB.fullmatch(segment)):
            job = job or match[1]
        slurm = slurm or segment == "slurm" or segment.startswith("slurm_") or segment.endswith("slurmstepd.scope")
        if segment.endswith((".service", ".scope")):
            unit = unit or segment
            delegated = delegated or segment.startswith("user@")
    return ProcessPlacement(None, None, delegated, unit, job)


def _segments(path: str) -> Iterator[str]:
    return (segment for segment in path.split("/") if segment not in ("", ".."))


KUBELET_SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
LIST_METHOD = "/v1.PodResourcesLister/List"
QUERY_INTERVAL_SECONDS = 10.0
DEADLINE_SECONDS = 1.0
GRPC_OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


class Pod(NamedTuple):
    name: str
    namespace: str


class _KubeletAnswer(NamedTuple):
    asked_at: float = float("-inf")
    pods: Mapping[str, set[Pod]] = {}


def seconds_since_boot() -> float:
    """Return seconds since boot, on the clock of a process's start_ticks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Kubelet:
    """Allocation of devices to pods, from the kubelet's pod-resources socket.

    Queried rarely and in the background, because the kubelet answers ten requests a second for all clients together.
    After an error, nothing is known until the next query. Without grpcio (the extra ``kubernetes``), no query is made.
    Messages: k8s.io/kubelet/pkg/apis/podresources/v1/api.proto.

    Does not cover devices of a resource claim (DRA), and plugins whose IDs are neither a UUID nor a PCI address.
    """

    def __init__(self, path: str = f"/{KUBELET_SOCKET}", clock: Callable[[], float] = seconds_since_boot) -> None:
        self._path, self._clock = path, clock
        self._list: Any = None
        self._call: Any = None
        self._asked_at = float("-inf")
        self._answer = _KubeletAnswer()

    def pod(self, ids: Iterable[str], start_ticks: int) -> Pod | None:
        """Return the only pod that has the device with these IDs. Never waits: the first answer is used by a later
        reading.

        An answer from before the start of the process is ignored, because the device may have belonged to another pod.
        """
        self._take()
        self._ask()
        if start_ticks / TICKS_PER_SECOND >= self._answer.asked_at:
            return None
        pods = set[Pod]().union(*(self._answer.pods.get(name.lower(), ()) for name in ids))
        return pods.pop() if len(pods) == 1 else None

    def _take(self) -> None:
        if self._call is None or not self._call.done():
            return
        call, self._call = self._call, None
        if call.exception() is None:
            with suppress(ValueError):  # not a response of a kubelet
                self._answer = _KubeletAnswer(self._asked_at, _parse_allocations(call.result()))

    def _ask(self) -> None:
        now = self._clock()
        if self._call is not None or now - self._asked_at < QUERY_INTERVAL_SECONDS:
            return
        self._asked_at = now
        if not os.path.exists(self._path):
            return
        try:
            import grpc

            if self._list is None:
                self._list = grpc.insecure_channel(f"unix:{self._path}", GRPC_OPTIONS).unary_unary(LIST_METHOD)
            self._call = self._list.future(b"", timeout=DEADLINE_SECONDS)
        except ImportError:
            self._asked_at = float("inf")
        except (grpc.RpcError, RuntimeError):
            pass  # RuntimeError: no new thread can be started


def _parse_allocations(message: bytes) -> dict[str, set[Pod]]:
    """Return pods by lower-case device ID from a ListPodResourcesResponse. Raises ValueError if it is malformed."""
    pods: dict[str, set[Pod]] = defaultdict(set)
    for resources in _protobuf_fields(message, 1):
        name, namespace = (b"".join(_protobuf_fields(resources, number)).decode() for number in (1, 2))
        for container in _protobuf_fields(resources, 3):
            for devices in _protobuf_fields(container, 2):
                for device in _protobuf_fields(devices, 2):
                    device_id = device.decode().partition("::")[0]  # the ID of a shared device is UUID::REPLICA
                    pods[device_id.lower()].add(Pod(printable_text(name), printable_text(namespace)))
    return dict(pods)


def _protobuf_fields(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the length-delimited fields with this number in a protobuf message; all others are skipped."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        kind, size = key & 7, 0
        if kind == 0:
            _, offset = _varint(message, offset)
        elif kind == 2:
            size, offset = _varint(message, offset)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"protobuf wire type {kind}")
        if offset + size > len(message):
            raise ValueError("a protobuf field ends after its message")
        if kind == 2 and key >> 3 == number:
            yield message[offset : offset + size]
        offset += size


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(message[offset : offset + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, offset + shift + 1
    raise ValueError("an unterminated protobuf varint")


LOOKUP_SECONDS = 30.0
"""Interval after which everything is looked up again: containers are renamed, and processes moved between cgroups."""

WAITING_SECONDS = 10.0
"""Time in an uninterruptible call after which a process counts as waiting; short waits are normal."""

_LOGIN_SESSION = re.compile(r"session-.+\.scope")
"""Unit of an interactive session. Its processes outlive it, unless systemd ends them (KillUserProcesses)."""

_STATES = {"Z": "zombie", "X": "zombie", "T": "stopped", "t": "stopped"}


class _ProcessContext(NamedTuple):
    placement: ProcessPlacement
    names: ContainerNames


@lru_cache(2048)
def _with_context(process: ProcessUsage, context: _ProcessContext, state: str, orphaned: bool | None) -> ProcessUsage:
    """Return the process with these facts. Nearly every process is unchanged, and a lookup takes half as long as a new
    object."""
    return replace(
        process,
        container=context.placement.container,
        container_name=context.names.container,
        pod_name=context.names.pod,
        pod_namespace=context.names.namespace,
        pod_uid=None if context.placement.delegated else context.placement.pod_uid,
        unit=printable_text(context.placement.unit) if context.placement.unit else None,
        slurm_job=context.placement.slurm_job,
        state=state,
        orphaned=orphaned,
    )


class _CompletedProcess(NamedTuple):
    """A process with its metadata, and where it runs, if that is known."""

    process: ProcessUsage
    placement: ProcessPlacement | None = None


class ProcessMetadata:
    """Lookup of metadata. ``proc``, ``sys``, ``root`` and ``dev`` replace /proc, /sys, / and /dev."""

    def __init__(
        self,
        proc: str = "/proc",
        sys: str = "/sys",
        root: str = "/",
        dev: str = "/dev",
        clock: Callable[[], float] = time.monotonic,
        is_private: bool | None = None,
        kubelet: Kubelet | None = None,
    ) -> None:
        self._proc, self._clock = proc, clock
        self._is_private = bool(in_private_pid_namespace(proc)) if is_private is None else is_private
        self._has_nodes = any(os.path.exists(f"{dev}/{node}") for node in ("nvidiactl", "dri"))
        self._containers = ContainerNameLookup(root)
        self._kubelet = kubelet or Kubelet(os.path.join(root, KUBELET_SOCKET))
        self._holders = DeviceHolders(proc, sys, clock)
        self._open_nodes = OpenDeviceNodes(("/dev/nvidia", "/dev/dri/"), proc)
        self._contexts: dict[ProcessKey, _ProcessContext] = {}
        self._verified: set[ProcessKey] = set()
        self._waiting: dict[ProcessKey, float] = {}
        self._orphans: dict[tuple[ProcessKey, int], bool] = {}
        """Orphan states by process and parent."""
        self._forget_at = float("-inf")

    def complete(self, reading: Reading, process_stats: Mapping[int, ProcessStat] = MappingProxyType({})) -> Reading:
        """Return the reading with metadata. ``process_stats``: start data of its processes that is already known."""
        self._process_stats = process_stats
        if self._clock() >= self._forget_at:
            self._contexts.clear()
            self._verified.clear()
            self._orphans.clear()
            self._waiting = {
                key: since for key, since in self._waiting.items() if read_process_stat(self._proc, key.pid)
            }
            self._forget_at = self._clock() + LOOKUP_SECONDS
        return replace(reading, devices=tuple(map(self._device, self._holders.add(reading.devices))))

    def _device(self, device: DeviceReading) -> DeviceReading:
        if not device.processes:
            return device
        in_doubt = self._is_private and self._has_nodes and device.vendor != "sim"
        completed = tuple(self._complete(process, in_doubt) for process in device.processes)
        return replace(device, processes=self._in_pods(device, completed))

    def _in_pods(self, device: DeviceReading, completed: tuple[_CompletedProcess, ...]) -> tuple[ProcessUsage, ...]:
        """Name the pod that no file names, if the device has one unnamed pod and is allocated to exactly one."""
        if len({each.placement.pod_uid for each in completed if each.placement and each.placement.pod_uid}) != 1:
            return tuple(each.process for each in completed)
        return tuple(
            self._in_pod(device, process) if placement and placement.pod_uid and not placement.delegated else process
            for process, placement in completed
        )

    def _in_pod(self, device: DeviceReading, process: ProcessUsage) -> ProcessUsage:
        if process.pod_name or process.container is None or process.start_ticks is None:
            return process
        pod = self._kubelet.pod((device.uuid, device.pci_bus_id), process.start_ticks)
        return replace(process, pod_name=pod.name, pod_namespace=pod.namespace) if pod else process

    def _complete(self, process: ProcessUsage, in_doubt: bool) -> _CompletedProcess:
        stat = self._process_stats.get(process.pid) or read_process_stat(self._proc, process.pid)
        if stat is None:
            return _CompletedProcess(process if self._is_private else replace(process, state="gone"))
        key = ProcessKey(process.pid, stat.start_ticks)
        if in_doubt and not self._is_verified(key):
            return _CompletedProcess(replace(process, start_ticks=None, comm=None, uid=None, user=None, command=None))
        if key != process.key:
            return _CompletedProcess(process)  # the pid has been reused since the reading
        context = self._context_of(key)
        state, orphaned = self._state(key, stat), self._is_orphan(key, stat, context.placement)
        return _CompletedProcess(_with_context(process, context, state, orphaned), context.placement)

    def _is_orphan(self, process: ProcessKey, stat: ProcessStat, placement: ProcessPlacement) -> bool | None:
        """Return True if the parent has exited.

        A child is created in its parent's session. If its parent is in another session, a reaper (init or a subreaper)
        has adopted it. A session leader created its session, and may be detached on purpose.
        """
        if placement.unit is not None and not _LOGIN_SESSION.fullmatch(placement.unit):
            return False  # a service manager supervises it, and can stop it
        if stat.session == process.pid:
            return False
        key = (process, stat.parent)
        if key not in self._orphans:
            parent = read_process_stat(self._proc, stat.parent) if stat.parent else None
            if parent is None or not stat.session:
                return None  # in another PID namespace, or exited just now
            self._orphans[key] = parent.session != stat.session
        return self._orphans[key]

    def _state(self, process: ProcessKey, stat: ProcessStat) -> str:
        if stat.state != "D":
            self._waiting.pop(process, None)
            return _STATES.get(stat.state, "alive")
        since = self._waiting.setdefault(process, self._clock())
        return "uninterruptible" if self._clock() - since >= WAITING_SECONDS else "alive"

    def _context_of(self, process: ProcessKey) -> _ProcessContext:
        cached = self._contexts.get(process)
        if cached is not None:
            return cached
        placement = parse_placement(read_or_empty(f"{self._proc}/{process.pid}/cgroup"))
        context = _ProcessContext(placement, self._containers.names(placement))
        stat_again = read_process_stat(self._proc, process.pid)
        if stat_again is None or stat_again.start_ticks != process.start_ticks:
            return _ProcessContext(ProcessPlacement(), ContainerNames())  # the cgroup was another process's
        self._contexts[process] = context
        return context

    def _is_verified(self, process: ProcessKey) -> bool:
        if process not in self._verified and self._open_nodes.nodes(process.pid):
            self._verified.add(process)
        return process in self._verified
