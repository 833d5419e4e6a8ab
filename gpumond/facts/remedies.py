"""Remedies for the conditions that gpumond reports, in one line each, and the lookup of all remedies. No I/O.

``gpumond doctor``, ``gpumond status`` and ``/api/v1/status`` show these lines;
docs/how-to/troubleshoot.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.facts.errors import FAULTS

OF_A_RETURN_CODE = "only that field is missing; the name is NVML's return code: look for Xid in dmesg"
"""Remedy for the kinds that are not listed: the other return codes of NVML."""

CONDITIONS: Mapping[str, str] = {
    "private_pid_namespace": "the driver's pids may denote other processes here: run the daemon with the host's PID "
    "namespace (hostPID: true, --pid=host); until then, agents and open device files identify the processes",
    "agent_pid_unknown": "these agents are in another PID namespace; the driver's count, age, user and container of "
    "their processes are unknown; flush them by the number of the connection, or share the namespace (hostPID: true, "
    "shareProcessNamespace: true)",
    "unified_memory": "size is the memory of the machine, and used is the sum of the processes; free is the "
    "memory that is available",
    "coherent_memory": "the host has the device's memory as a NUMA node, where the kernel may keep files: unattributed "
    "memory is not a leak (numastat -m; gpumond_device_file_cache_bytes)",
    "vgpu": "this is a part of a device: its host reports the sensors and the process list; agents report the programs",
    "host_vgpu": "virtual machines share this device: their memory is unattributed here, and their programs run inside "
    "them",
    "host_vsga": "virtual machines share this device: their memory is unattributed here, and their programs run inside "
    "them",
    "mps": "memory of MPS clients may be counted for the server, and an error of one client ends all of "
    "them: agents report the memory of each client",
    "no_process_list": "the driver lists no processes (old vGPU, a container without the host's PID namespace): "
    "programs with agents are the only source: start them with gpumond run -- COMMAND",
    "unmapped_inferred": "no action needed if the program is in sleep mode: it needs the bytes again when it wakes up; "
    "otherwise its allocator counts memory that is not on the device (managed memory)",
    "managed_memory": "no action needed: the driver counts managed memory for no process; used bytes without another "
    "owner are attributed to the programs that hold some, as far as they reach",
    "suspended": "no action needed: cuda-checkpoint, or a program that uses its interface, has suspended the process; "
    "it needs this memory again when it is resumed, and is not flushed until then",
    "claim_over_size": "check the program of that pid: its agent is wrong, or its allocator counts memory that is not "
    "on the device (managed memory, released pages)",
    "live_unknown": "RMM's resource doesn't count live bytes: start the program with gpumond run -- COMMAND, or wrap "
    "the resource in rmm.mr.StatisticsResourceAdaptor",
    "reserved_in_used": "this driver counts its own reserved memory as used: update it (510 or later reports both "
    "separately)",
}


def remedy(kind: str) -> str:
    """Return the remedy for a fault or a condition of that kind."""
    return FAULTS.get(kind) or CONDITIONS.get(kind) or OF_A_RETURN_CODE
