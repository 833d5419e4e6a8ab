"""Identity of a pid from /proc: start time, command name, what it runs, owner, state.

Covers vanished pids, pids of another PID namespace (both unknown), reused pids (never mistaken for the previous
process), and names with any bytes. Does not cover containers and environments. Of a command line, only the program and
the script or module of a Python interpreter are kept, because other arguments may be secrets.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from glob import glob
from itertools import islice
from typing import NamedTuple

from gpumond.facts.messages import printable_text
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import DeviceReading, ProcessUsage
from gpumond.host.machine import (
    KERNEL_THREAD_FLAG,
    ProcessStat,
    parse_process_stat,
    read_head,
    read_or_empty,
    read_process_stat,
)


class ProcessIdentity(NamedTuple):
    """Identity of a process; all None if /proc does not have the pid. ``start_ticks`` counts from boot, in USER_HZ."""

    start_ticks: int | None = None
    comm: str | None = None
    uid: int | None = None
    user: str | None = None
    command: str | None = None


UNKNOWN_IDENTITY = ProcessIdentity()


class _CachedIdentity(NamedTuple):
    """``key``: command name and start of the process."""

    key: bytes
    identity: ProcessIdentity
    stat: ProcessStat | None


class ProcessTable:
    """Identities of the pids that devices list. ``root`` replaces /proc."""

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self._cached: dict[int, _CachedIdentity] = {}

    @property
    def process_stats(self) -> Mapping[int, ProcessStat]:
        """Data of the processes of the last ``read``, from their stat files."""
        return {pid: cached.stat for pid, cached in self._cached.items() if cached.stat}

    def pid_max(self) -> int:
        """Return the largest pid that this kernel assigns."""
        try:
            return int(read_head(f"{self._root}/sys/kernel/pid_max"))
        except (OSError, ValueError):
            return 4194304  # the kernel's own limit, PID_MAX_LIMIT

    def read(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return the identity of each pid; all other pids are forgotten."""
        self._cached = {pid: self._look_up(pid, self._cached.get(pid)) for pid in set(pids)}
        return {pid: cached.identity for pid, cached in self._cached.items()}

    def _look_up(self, pid: int, cached: _CachedIdentity | None) -> _CachedIdentity:
        """Read the owner once per start time and name; it changes only with an exec."""
        key, stat = self._key(pid)
        if cached is not None and cached.key == key:
            return _CachedIdentity(key, cached.identity, stat)
        name, _, ticks = key.rpartition(b")")
        try:
            uid = self._uid(pid)
            comm, command = printable_text(name.decode("utf-8", "replace")), self._command(pid)
            identity = ProcessIdentity(int(ticks), comm, uid, user_name(uid), command)
        except (OSError, ValueError, IndexError):
            return _CachedIdentity(b"", UNKNOWN_IDENTITY, stat)
        # The pid may have been reused between the two files.
        return (
            _CachedIdentity(key, identity, stat)
            if self._key(pid)[0] == key
            else _CachedIdentity(b"", UNKNOWN_IDENTITY, stat)
        )

    def _key(self, pid: int) -> tuple[bytes, ProcessStat | None]:
        """Return ``comm)start_ticks`` and the start data, or nothing if the process has exited.

        The name may contain parentheses.
        """
        try:
            line = read_head(f"{self._root}/{pid}/stat")
        except OSError:
            return b"", None
        before, _, after = line.rpartition(b")")
        fields = after.split(maxsplit=20)
        if len(fields) <= 20:
            return b"", None
        return before.partition(b"(")[2] + b")" + fields[19], parse_process_stat(fields)

    def _uid(self, pid: int) -> int:
        """Return the effective uid, like SO_PEERCRED; the directory's owner is root for undumpable processes."""
        status = read_head(f"{self._root}/{pid}/status", 4096)
        return int(status.partition(b"\nUid:")[2].split(maxsplit=2)[1])

    def _command(self, pid: int) -> str | None:
        try:
            return command_of(read_head(f"{self._root}/{pid}/cmdline", 4096))
        except OSError:
            return None


def command_of(command_line: bytes) -> str | None:
    """Return the program of a command line, with the script or module that it runs if it is a Python interpreter.

    None if it is unknown. A program that has replaced its command line with a title with spaces, which may contain
    arguments, is unknown.
    """
    path, *arguments = command_line.decode("utf-8", "replace").split("\0")
    program = os.path.basename(path)
    if not program or any(map(str.isspace, path)):
        return None
    script = _python_script(arguments) if re.fullmatch(r"python[0-9.]*", program) else ""
    return printable_text(f"{program} {script}".rstrip())


def _python_script(arguments: Iterable[str]) -> str:
    """Return the script or ``-m MODULE`` among a Python interpreter's arguments; empty without any."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return word
        if word == "-" or word.startswith("--"):
            return ""
        option = re.match(r"-[^cmWX]*([cmWX])(.*)", word, re.DOTALL)  # these four take a value
        if option is None:
            continue
        letter, value = option.groups()
        if letter == "c":
            return ""
        value = value or next(words, "")
        if letter == "m":
            return f"-m {value}"
    return ""


@cache
def user_name(uid: int) -> str | None:
    """Return the account's name, or None for a uid without one."""
    try:
        return printable_text(pwd.getpwuid(uid).pw_name)
    except (KeyError, OSError):
        return None


MAX_PROCESSES = 32768
MAX_DESCRIPTORS = 4096
"""Maximum number of descriptors inspected per process."""


class DeviceNode(NamedTuple):
    descriptor: str
    path: str


class OpenDeviceNodes:
    """Search for open device nodes. ``prefixes`` are prefixes of their paths; ``root`` replaces /proc.

    After ``read``, ``hidden`` is the number of processes that cannot be inspected, as far as it is known.
    """

    def __init__(self, prefixes: tuple[str, ...], root: str = "/proc", inspect_every: int = 10) -> None:
        self._prefixes, self._root, self._inspect_every = prefixes, root, inspect_every
        self._reading = 0
        self._nodes: dict[int, tuple[DeviceNode, ...]] = {}
        self._hidden: set[int] = set()
        self._all_visible = True

    @property
    def hidden(self) -> int:
        return len(self._hidden) + (not self._all_visible)

    def read(self) -> Mapping[int, tuple[DeviceNode, ...]]:
        """Return the open nodes of each process that has any."""
        self._reading = (self._reading + 1) % self._inspect_every
        pids = self._pids()
        self._all_visible = 1 in pids  # otherwise /proc is mounted with hidepid
        self._hidden.intersection_update(pids)
        self._nodes = {
            pid: self.nodes(pid) if self._is_due(pid) else self._nodes[pid] for pid in islice(pids, MAX_PROCESSES)
        }
        return {pid: nodes for pid, nodes in self._nodes.items() if nodes}

    def nodes(self, pid: int) -> tuple[DeviceNode, ...]:
        """Return the open nodes of one process; none if it has exited or cannot be inspected."""
        directory = f"{self._root}/{pid}/fd"
        try:
            with os.scandir(directory) as entries:
                names = [entry.name for entry in islice(entries, MAX_DESCRIPTORS)]
        except PermissionError:
            stat = read_process_stat(self._root, pid)
            if stat is not None and not stat.flags & KERNEL_THREAD_FLAG:
                self._hidden.add(pid)
            return ()
        except OSError:
            return ()
        self._hidden.discard(pid)
        return tuple(self._matching(directory, names))

    def _is_due(self, pid: int) -> bool:
        return bool(self._nodes.get(pid, True)) or pid % self._inspect_every == self._reading

    def _pids(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._root) if name.isdecimal()]
        except OSError:
            return []

    def _matching(self, directory: str, names: Iterable[str]) -> Iterator[DeviceNode]:
        for name in names:
            try:
                path = os.readlink(f"{directory}/{name}")
            except OSError:
                continue  # closed in the meantime
            if path.startswith(self._prefixes):
                yield DeviceNode(name, path)


SCAN_SECONDS = 30.0
UNATTRIBUTED_RATIO = 0.05
"""Minimum fraction of a device's memory without an owner."""

MAX_HOLDERS = 32
"""Maximum number of processes listed per device."""


class DeviceHolders:
    """Search for processes that keep a device open although its driver lists no memory for them.

    They are searched for while a device has more used memory than the visible processes own. Memory of a process that
    has exited is often kept by a child, a debugger or a service with an open device node. This is a fact and not a
    verdict: a service may have a reason to keep it open.

    ``proc`` and ``sys`` replace /proc and /sys.
    """

    def __init__(
        self,
        proc: str = "/proc",
        sys: str = "/sys",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._sys, self._clock = proc, sys, clock
        self._descriptors = OpenDeviceNodes(("/dev/nvidia", "/dev/dri/renderD"), proc, inspect_every=1)
        self._table = ProcessTable(proc)
        self._next_scan_at = float("-inf")
        self._holders: dict[str, list[ProcessKey]] = {}
        """Processes by PCI address."""

    def add(self, devices: Sequence[DeviceReading]) -> Sequence[DeviceReading]:
        """Return the devices; those with unattributed memory include their holders as processes."""
        suspects = {device.uuid for device in devices if device.parent_uuid is None and _has_unattributed(device)}
        if not suspects:
            return devices
        if self._clock() >= self._next_scan_at:
            self._holders = self._scan()
            self._next_scan_at = self._clock() + SCAN_SECONDS
        identities = self._table.read(process.pid for holders in self._holders.values() for process in holders)

        def with_holders(device: DeviceReading) -> DeviceReading:
            listed = {p.pid for d in devices if device.uuid in (d.uuid, d.parent_uuid) for p in d.processes or ()}
            holders = tuple(
                ProcessUsage(pid=holder.pid, used_bytes=None, kinds=("holder",), **identities[holder.pid]._asdict())
                for holder in self._holders.get(_short_address(device.pci_bus_id), ())
                if holder.pid not in listed
                and holder.start_ticks is not None
                and identities[holder.pid].start_ticks == holder.start_ticks
            )
            return replace(device, processes=(*(device.processes or ()), *holders[:MAX_HOLDERS])) if holders else device

        return [with_holders(device) if device.uuid in suspects else device for device in devices]

    def _scan(self) -> dict[str, list[ProcessKey]]:
        addresses = {**_nvidia_addresses(self._proc), **_drm_addresses(self._sys)}
        nodes_by_pid = {pid: nodes for pid, nodes in self._descriptors.read().items() if pid != os.getpid()}
        identities = self._table.read(nodes_by_pid)
        holders: dict[str, list[ProcessKey]] = {}
        for pid, nodes in nodes_by_pid.items():
            for address in {addresses[node.path] for node in nodes if node.path in addresses}:
                holders.setdefault(address, []).append(ProcessKey(pid, identities[pid].start_ticks))
        return holders


def _has_unattributed(device: DeviceReading) -> bool:
    used = [process.used_bytes for process in device.processes or ()]
    if not device.size_bytes or device.used_bytes is None or device.unified or None in used:
        return False
    return device.used_bytes - sum(filter(None, used)) > UNATTRIBUTED_RATIO * device.size_bytes


def _nvidia_addresses(proc: str) -> Mapping[str, str]:
    """Return PCI addresses by device node; the numbers of the nodes are not NVML's indices."""
    return {
        f"/dev/nvidia{minor}": _short_address(os.path.basename(os.path.dirname(path)))
        for path in glob(f"{proc}/driver/nvidia/gpus/*/information")
        for minor in re.findall(r"^Device Minor:\s*(\d+)", read_or_empty(path), re.MULTILINE)
    }


def _drm_addresses(sys: str) -> Mapping[str, str]:
    return {
        f"/dev/dri/{os.path.basename(path)}": _short_address(os.path.basename(os.path.realpath(f"{path}/device")))
        for path in glob(f"{sys}/class/drm/renderD*")
    }


def _short_address(pci_bus_id: str) -> str:
    """Return the address in the format of sysfs; NVML has a longer domain in capitals."""
    return pci_bus_id[-12:].lower()
