"""Processes of an engine: those of the driver's list that belong to the process listening at its address.

A process belongs to a listener if it descends from it, or if both are in the same container or system service. The
kernel states the listener: for a Unix socket by its peer credentials, else by /proc/PID/fd, which requires the same
user or root, or by /proc/PID/fdinfo, for which CAP_SYS_PTRACE is enough since Linux 5.14.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

from gpumond.devices.process.metadata import parse_placement
from gpumond.facts.program import ProcessKey
from gpumond.features.engines.spec import Address
from gpumond.host.machine import is_descendant, read_or_empty, read_start_ticks

LISTEN_STATE = "0A"
_CREDENTIALS = struct.Struct("3i")
CAP_SYS_PTRACE = 19
PTRACE_REMEDY = (
    "run `systemctl edit gpumond`, add the lines [Service], CapabilityBoundingSet=CAP_SYS_PTRACE and "
    "AmbientCapabilities=CAP_SYS_PTRACE, and restart the service; or run the daemon as that user or as root"
)
"""Remedy if the listener belongs to another user."""


class EngineProcesses(NamedTuple):
    """Processes of an engine. ``problem`` is the reason if they are unknown. ``uid``: the user of all its listeners."""

    listeners: frozenset[ProcessKey] = frozenset()
    processes: frozenset[ProcessKey] = frozenset()
    uid: int | None = None
    problem: str = ""


class _Socket(NamedTuple):
    inode: int
    uid: int


def find_processes(address: Address, candidates: Iterable[ProcessKey], proc: str = "/proc") -> EngineProcesses:
    """Return which of the candidates, the driver's processes, belong to the engine at this address."""
    keys = [
        key for key in candidates if key.start_ticks is not None and read_start_ticks(key.pid, proc) == key.start_ticks
    ]
    if address.scheme == "unix":
        return _unix_socket_processes(address.host, keys, proc)
    sockets = dict.fromkeys(_listening_sockets(address, keys, proc))
    if not sockets:
        where = "in the network namespace of a GPU process" if _is_remote(address) else "on this machine"
        return EngineProcesses(problem=f"no socket listens at {address} {where}")
    uid = next(iter(sockets)).uid
    if uids := sorted({each.uid for each in sockets} - {uid}):
        others = ", ".join(map(str, uids))
        return EngineProcesses(problem=f"sockets of several users listen at {address}: uid {uid} and {others}")
    listeners = _processes_with_socket({each.inode for each in sockets}, proc)
    if not listeners:
        return EngineProcesses(
            uid=uid, problem=f"the process listening at {address} belongs to uid {uid}, {_hidden_reason(proc)}"
        )
    return EngineProcesses(frozenset(listeners), _engine_processes(listeners, keys, proc), uid)


def _unix_socket_processes(path: str, keys: list[ProcessKey], proc: str) -> EngineProcesses:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(1.0)
            peer.connect(path)
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        return EngineProcesses(problem=f"unix:{path}: {error.strerror or 'no response'}")
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    ticks = read_start_ticks(pid, proc) if pid > 0 else None
    if ticks is None:
        return EngineProcesses(uid=uid, problem=f"the process listening at unix:{path} isn't visible to the daemon")
    listeners = {ProcessKey(pid, ticks)}
    return EngineProcesses(frozenset(listeners), _engine_processes(listeners, keys, proc), uid)


def _is_remote(address: Address) -> bool:
    return not ip_address(address.host).is_loopback


def _listening_sockets(address: Address, keys: list[ProcessKey], proc: str) -> Iterator[_Socket]:
    """Yield the sockets that listen at the address: in the daemon's network namespace for loopback, else in those of
    the processes.
    """
    if not _is_remote(address):
        yield from _sockets_in_namespace(f"{proc}/self/net", address)
        return
    seen: set[str] = set()
    for key in keys:
        directory = f"{proc}/{key.pid}/net"
        addresses = "".join(read_or_empty(f"{directory}/{name}") for name in ("fib_trie", "if_inet6"))
        if addresses not in seen and _has_address(addresses, address.host):
            yield from _sockets_in_namespace(directory, address)
        seen.add(addresses)


def _has_address(text: str, host: str) -> bool:
    """Return True if a namespace has the address, as fib_trie (IPv4) or if_inet6 (IPv6) list it."""
    parsed = ip_address(host)
    if parsed.version == 6:
        return parsed.packed.hex() in text.split()
    return re.search(rf"-- {re.escape(host)}\n +/32 host LOCAL", text) is not None


def _sockets_in_namespace(directory: str, address: Address) -> list[_Socket]:
    """Return the sockets that receive connections to the address.

    A socket of IPv4 receives none to an address of IPv6. One of IPv6 receives those to an address of IPv4 only if no
    socket of IPv4 does: the kernel lets both listen only if the one of IPv6 is limited to its family.
    """
    if ip_address(address.host).version == 6:
        return _sockets_in_table(f"{directory}/tcp6", address.port, address.host, "::")
    return _sockets_in_table(f"{directory}/tcp", address.port, address.host, "0.0.0.0") or _sockets_in_table(
        f"{directory}/tcp6", address.port, f"::ffff:{address.host}", "::"
    )


def _sockets_in_table(path: str, port: int, *hosts: str) -> list[_Socket]:
    addresses, sockets = {f"{_proc_hex(host)}:{port:04X}" for host in hosts}, []
    for line in read_or_empty(path).splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == LISTEN_STATE and fields[1] in addresses:
            sockets.append(_Socket(int(fields[9]), int(fields[7])))
    return sockets


def _proc_hex(host: str) -> str:
    """Return an address as /proc/net/tcp writes it: 32-bit words in the byte order of the machine."""
    packed = ip_address(host).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _hidden_reason(proc: str) -> str:
    """Return the reason why a listener is not visible, with its remedy."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_or_empty(f"{proc}/self/status"), re.MULTILINE)
    if effective and not int(effective[1], 16) >> CAP_SYS_PTRACE & 1:
        return f"and seeing it requires CAP_SYS_PTRACE, which the daemon lacks: {PTRACE_REMEDY}"
    return (
        "and isn't visible to the daemon: it runs in another PID namespace, or the kernel is older than Linux 5.14 "
        "and the daemon lacks CAP_DAC_READ_SEARCH"
    )


def _processes_with_socket(inodes: set[int], proc: str) -> set[ProcessKey]:
    """Return the processes that have one of these sockets open."""
    links = {f"socket:[{inode}]" for inode in inodes}
    with socket.socket(socket.AF_UNIX) as any_socket:  # all sockets are on the same internal mount
        mount = re.search(r"^mnt_id:.*$", read_or_empty(f"{proc}/self/fdinfo/{any_socket.fileno()}"), re.MULTILINE)
    fdinfo_lines = [{mount[0], f"ino:\t{inode}"} for inode in inodes] if mount else []
    processes = set()
    for name in os.listdir(proc):
        if name.isdecimal() and _has_socket(f"{proc}/{name}", links, fdinfo_lines):
            ticks = read_start_ticks(int(name), proc)
            if ticks is not None:
                processes.add(ProcessKey(int(name), ticks))
    return processes


def _has_socket(process: str, links: set[str], fdinfo_lines: list[set[str]]) -> bool:
    """Return True if a descriptor of the process has one of the links, or all lines of one of ``fdinfo_lines``."""
    try:
        return any(_link_target(f"{process}/fd/{name}") in links for name in os.listdir(f"{process}/fd"))
    except PermissionError:  # CAP_SYS_PTRACE does not include the permission to list fd
        pass
    except OSError:
        return False
    with suppress(OSError):
        for name in os.listdir(f"{process}/fdinfo"):
            lines = set(read_or_empty(f"{process}/fdinfo/{name}").splitlines())
            if any(info <= lines for info in fdinfo_lines):
                return True
    return False


def _link_target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _engine_processes(listeners: set[ProcessKey], keys: list[ProcessKey], proc: str) -> frozenset[ProcessKey]:
    pids = {key.pid for key in listeners}
    groups = {group for pid in pids if (group := _service_cgroup(pid, proc))}
    return frozenset(
        key for key in keys if is_descendant(key.pid, pids, proc) or _service_cgroup(key.pid, proc) in groups
    )


def _service_cgroup(pid: int, proc: str) -> str | None:
    """Return the cgroups of a process in a container or a system service; None in any other, such as a login."""
    text = read_or_empty(f"{proc}/{pid}/cgroup")
    placement = parse_placement(text)
    is_service = bool(placement.unit and placement.unit.endswith(".service") and not placement.delegated)
    return text if placement.container or is_service else None
