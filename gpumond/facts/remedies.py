"""Remedies for the conditions that gpumond reports, in one line each, and the lookup of all remedies. No I/O.

``gpumond doctor``, ``gpumond status`` and ``/api/v1/status`` show these lines;
docs/how-to/troubleshoot.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.facts.errors import FAULTS

OF_A_RETURN_CODE = "look up the name, an NVML return code, and look for Xid errors in dmesg; only that field is missing"
"""Remedy for the kinds that are not listed: the other return codes of NVML."""

CONDITIONS: Mapping[str, str] = {
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
    "no_process_list": "start programs with gpumond run -- COMMAND: the driver lists no processes (old vGPU, or a "
    "container without the host's PID namespace), so agents are the only source",
    "unmapped_inferred": "no action needed if the program is in sleep mode: it needs these bytes again when it wakes "
    "up; otherwise its allocator counts memory that isn't on the GPU (managed memory)",
    "managed_memory": "no action needed: the driver counts managed memory for no process; gpumond attributes used "
    "bytes without another owner to the programs that hold managed memory, as far as they reach",
    "suspended": "no action needed: cuda-checkpoint, or a program that uses its interface, has suspended the process; "
    "it needs this memory again when it is resumed, and isn't flushed until then",
    "claim_over_size": "check the program with that pid: its agent is wrong, or its allocator counts memory that isn't "
    "on the GPU (managed memory, released pages)",
    "live_unknown": "start the program with gpumond run -- COMMAND, or wrap its RMM resource in "
    "rmm.mr.StatisticsResourceAdaptor: the resource doesn't count live bytes",
    "reserved_in_used": "update the driver: this one counts its own reserved memory as used (510 or later reports both "
    "separately)",
}


def remedy(kind: str) -> str:
    """Return the remedy for a fault or a condition of that kind."""
    return FAULTS.get(kind) or CONDITIONS.get(kind) or OF_A_RETURN_CODE
