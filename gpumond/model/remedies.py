"""Remedies for all faults and conditions that gpumond reports, in one line each. No I/O.

``gpumond doctor``, ``gpumond status`` and ``/api/v1/status`` show these lines;
docs/how-to/troubleshoot.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

_HARDWARE = (
    "look for Xid in dmesg; drain the machine, then reset the device (nvidia-smi --gpu-reset) or reboot; it is read "
    "again automatically"
)

FAULTS: Mapping[str, str] = {
    "library_not_found": "install the NVIDIA driver or, in a container, start it with the NVIDIA container toolkit "
    "(--gpus all); without a GPU try `gpumond demo`",
    "library_not_loadable": "reinstall the NVIDIA driver, and check LD_LIBRARY_PATH; in a container, check the "
    "architecture and the C library of its image",
    "no_driver": "install the driver of the GPU, or try `gpumond demo`, which needs none",
    "no_device": "load the driver, or try `gpumond demo`",
    "driver_not_loaded": "load it (modprobe nvidia) or install the driver",
    "uninitialized": "no action needed: the driver is opened again when it is available",
    "no_permission": "give this user read and write access to /dev/nvidia* (AMD, Intel: the group render, and "
    "CAP_PERFMON for the memory in use)",
    "device_access_lost": "recreate the container with CDI or explicit --device options",
    "lib_rm_version_mismatch": "reboot, or stop all users of the GPU and reload the module",
    "timeout": "look for Xid 119, 79 or 45 in dmesg; values are withheld until the call returns, and "
    "return automatically",
    "crashed": "it is restarted automatically; look for Xid in dmesg, and check that driver and library match",
    "starting": "wait: the driver is being opened for the first time",
    "released": "no action needed: the driver was released on request, and is attached again automatically",
    "left_out": "look for Xid in dmesg; the device is read again automatically when the call that hangs returns, "
    "or after a while",
    "gpu_is_lost": _HARDWARE,
    "gpu_not_found": _HARDWARE,
    "reset_required": _HARDWARE,
    "vanished": "look for Xid in dmesg, and check that the device is on the bus (lspci); it is read again "
    "automatically once it is back",
    "lost": "look in dmesg for the reason, and check that the device is on the bus (lspci); it is read again "
    "automatically once it is back",
    "processes_hidden": "run as root or with CAP_SYS_PTRACE; until then their memory is unclaimed",
    "impossible_value": "check that the driver matches its library and nvidia-ml-py, or the program whose agent "
    "reports it; such numbers are dropped",
    "claim_over_driver": "check the program of that pid: its agent is wrong, or its allocator counts memory that is "
    "not on the device (managed memory, released pages); the ledger shows the driver's count",
    "insufficient_size": "check that the driver matches its library and nvidia-ml-py; only that field is missing",
    "unreadable": "check that the driver matches its library; only that field is missing",
    "unknown": "look for Xid in dmesg; in a container, check that its device rules are complete (CDI)",
    "corrupt": "inspect the file that was set aside (sqlite3 FILE .recover), then remove it",
    "row_unreadable": "no action needed: the other rows are used; to keep such rows, copy the file before they are "
    "replaced (docs/reference/store.md)",
    "not_writable": "free space in the state directory, and check that the daemon's user owns it; writing is retried "
    "automatically",
    "damaged": "remove the simulated device's directory, or replace its `card.json`",
    "unset": "set GPUMOND_SIM_DIR to a directory of simulated devices, or run `gpumond demo`",
    "missing": "create it, or run `gpumond demo`",
}

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
