"""Remedies for the conditions that gpumond reports, in one line each, and the lookup of all remedies. No I/O.

``gpumond doctor``, ``gpumond status`` and ``/api/v1/status`` show these lines;
docs/how-to/troubleshoot.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpumond.errors import FAULTS

OF_A_RETURN_CODE = "only that field is missing; the name is NVML's return code: look for Xid in dmesg"
"""Remedy for the kinds that are not listed: the other return codes of NVML."""

CONDITIONS: Mapping[str, str] = {
    "private_pid_namespace": "the driver's pids may mean other processes here: run the daemon with the host's PID "
    "namespace (hostPID: true, --pid=host); until then agents and open device files are the source",
    "unified_memory": "size is the machine's memory and used the sum of the processes: use the free memory to judge it",
    "coherent_memory": "the host has the device's memory as a NUMA node, where the kernel may keep files: unclaimed "
    "memory is no leak (numastat -m; gpumond_device_file_cache_bytes)",
    "vgpu": "this is a part of a device: its host has the sensors and the process list; agents show the programs",
    "host_vgpu": "virtual machines share this device: their memory is unclaimed here, their programs run inside them",
    "host_vsga": "virtual machines share this device: their memory is unclaimed here, their programs run inside them",
    "mps": "memory of MPS clients may be counted for the server, and an error of one ends all: agents show the clients",
    "no_process_list": "the driver lists no processes (old vGPU, a container without the host's PID namespace): agents "
    "are the only source: gpumond run -- COMMAND",
    "reserved_in_used": "this driver counts its own reserved memory as used: update it (510 or later reports both "
    "separately)",
}


def remedy(kind: str) -> str:
    """Return the remedy for a fault or a condition of that kind."""
    return FAULTS.get(kind) or CONDITIONS.get(kind) or OF_A_RETURN_CODE
