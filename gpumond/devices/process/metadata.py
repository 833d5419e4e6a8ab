"""Host-side metadata of the processes in a reading: container, pod, unit, job and state.

All of it is read by the device child, not reported by the program. No command lines, no environments. Does not
cover the identity of a pid (procfs.py).

In its own PID namespace, the daemon may find another process under a pid of the host. There a process is accepted as
the listed one only if it has a device open.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from gpumond.devices.process.containers import SOCKET, Containers, Kubelet, Names, ProcessPlacement, place
from gpumond.devices.process.device_nodes import DeviceHolders, OpenDeviceNodes
from gpumond.facts.messages import clean
from gpumond.facts.process import ProcessKey
from gpumond.facts.snapshot import DeviceReading, ProcessUsage, Reading
from gpumond.host.machine import ProcessStart, in_private_pid_namespace, process_start

FORGET_SECONDS = 30.0
"""Interval after which everything is looked up again: containers are renamed, and processes moved between cgroups."""

WAITING_SECONDS = 10.0
"""Time in an uninterruptible call after which a process counts as waiting; short waits are normal."""

_LOGIN = re.compile(r"session-.+\.scope")
"""Unit of an interactive session. Its processes outlive it, unless systemd ends them (KillUserProcesses)."""

_STATES = {"Z": "zombie", "X": "zombie", "T": "stopped", "t": "stopped"}


class _Owner(NamedTuple):
    place: ProcessPlacement
    names: Names


class _Completed(NamedTuple):
    """A process with its metadata, and where it runs, if that is known."""

    process: ProcessUsage
    place: ProcessPlacement | None = None


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
        self._containers = Containers(root)
        self._kubelet = kubelet or Kubelet(os.path.join(root, SOCKET))
        self._holders = DeviceHolders(proc, sys, clock)
        self._nodes = OpenDeviceNodes(("/dev/nvidia", "/dev/dri/"), proc)
        self._known: dict[ProcessKey, _Owner] = {}
        self._same: set[ProcessKey] = set()
        self._waiting: dict[ProcessKey, float] = {}
        self._orphans: dict[tuple[ProcessKey, int], bool] = {}
        """Orphan states by process and parent."""
        self._forget_at = float("-inf")

    def complete(self, reading: Reading, process_starts: Mapping[int, ProcessStart] = MappingProxyType({})) -> Reading:
        """Return the reading with metadata. ``process_starts``: start data of its processes that is already known."""
        self._process_starts = process_starts
        if self._clock() >= self._forget_at:
            self._known.clear()
            self._same.clear()
            self._orphans.clear()
            self._waiting = {key: since for key, since in self._waiting.items() if process_start(self._proc, key.pid)}
            self._forget_at = self._clock() + FORGET_SECONDS
        return replace(reading, devices=tuple(map(self._device, self._holders.add(reading.devices))))

    def _device(self, device: DeviceReading) -> DeviceReading:
        if not device.processes:
            return device
        in_doubt = self._is_private and self._has_nodes and device.vendor != "sim"
        completed = tuple(self._complete(process, in_doubt) for process in device.processes)
        return replace(device, processes=self._in_pods(device, completed))

    def _in_pods(self, device: DeviceReading, completed: tuple[_Completed, ...]) -> tuple[ProcessUsage, ...]:
        """Name the pod that no file names, if the device has one unnamed pod and is allocated to exactly one."""
        if len({each.place.pod_uid for each in completed if each.place and each.place.pod_uid}) != 1:
            return tuple(each.process for each in completed)
        return tuple(
            self._in_pod(device, process) if place and place.pod_uid and not place.delegated else process
            for process, place in completed
        )

    def _in_pod(self, device: DeviceReading, process: ProcessUsage) -> ProcessUsage:
        if process.pod_name or process.container is None or process.start_ticks is None:
            return process
        pod = self._kubelet.pod((device.uuid, device.pci_bus_id), process.start_ticks)
        return replace(process, pod_name=pod.name, pod_namespace=pod.namespace) if pod else process

    def _complete(self, process: ProcessUsage, in_doubt: bool) -> _Completed:
        now = self._process_starts.get(process.pid) or process_start(self._proc, process.pid)
        if now is None:
            return _Completed(process if self._is_private else replace(process, state="gone"))
        key = ProcessKey(process.pid, now.start_ticks)
        if in_doubt and not self._is_same(key):
            return _Completed(replace(process, start_ticks=None, comm=None, uid=None, user=None))
        if key != process.key:
            return _Completed(process)  # the pid has been reused since the reading
        owner = self._owner(key)
        return _Completed(self._with_owner(process, key, now, owner), owner.place)

    def _with_owner(self, process: ProcessUsage, key: ProcessKey, now: ProcessStart, owner: _Owner) -> ProcessUsage:
        return replace(
            process,
            container=owner.place.container,
            container_name=owner.names.container,
            pod_name=owner.names.pod,
            pod_namespace=owner.names.namespace,
            pod_uid=None if owner.place.delegated else owner.place.pod_uid,
            unit=clean(owner.place.unit) if owner.place.unit else None,
            slurm_job=owner.place.slurm_job,
            state=self._state(key, now),
            orphaned=self._is_orphan(key, now, owner.place),
        )

    def _is_orphan(self, process: ProcessKey, now: ProcessStart, place: ProcessPlacement) -> bool | None:
        """Return True if the parent has exited.

        A child is created in its parent's session. If its parent is in another session, a reaper (init or a subreaper)
        has adopted it. A session leader created its session, and may be detached on purpose.
        """
        if place.unit is not None and not _LOGIN.fullmatch(place.unit):
            return False  # a service manager supervises it, and can stop it
        if now.session == process.pid:
            return False
        key = (process, now.parent)
        if key not in self._orphans:
            parent = process_start(self._proc, now.parent) if now.parent else None
            if parent is None or not now.session:
                return None  # in another PID namespace, or exited just now
            self._orphans[key] = parent.session != now.session
        return self._orphans[key]

    def _state(self, process: ProcessKey, now: ProcessStart) -> str:
        if now.state != "D":
            self._waiting.pop(process, None)
            return _STATES.get(now.state, "alive")
        since = self._waiting.setdefault(process, self._clock())
        return "uninterruptible" if self._clock() - since >= WAITING_SECONDS else "alive"

    def _owner(self, process: ProcessKey) -> _Owner:
        known = self._known.get(process)
        if known is not None:
            return known
        where = place(self._cgroup(process.pid))
        owner = _Owner(where, self._containers.names(where))
        again = process_start(self._proc, process.pid)
        if again is None or again.start_ticks != process.start_ticks:
            return _Owner(ProcessPlacement(), Names())  # the cgroup was another process's
        self._known[process] = owner
        return owner

    def _is_same(self, process: ProcessKey) -> bool:
        if process not in self._same and self._nodes.nodes(process.pid):
            self._same.add(process)
        return process in self._same

    def _cgroup(self, pid: int) -> str:
        try:
            with open(f"{self._proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
                return file.read(16384)
        except OSError:
            return ""
