"""What to do about every fault, condition and verdict that gpumond states, in one line each. Pure.

``gpumond doctor``, ``gpumond status`` and ``/api/v1/status`` show these lines;
docs/how-to/troubleshoot.md has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

_HARDWARE = (
    "look for Xid in dmesg; drain the machine, then reset the device (nvidia-smi --gpu-reset) or reboot; it comes back "
    "by itself"
)

FAULTS: Mapping[str, str] = {
    "library_not_found": "install the NVIDIA driver or, in a container, start it with the NVIDIA container toolkit "
    "(--gpus all); without a GPU try `gpumond demo`",
    "library_not_loadable": "reinstall the NVIDIA driver, and check LD_LIBRARY_PATH; in a container, check the "
    "architecture and the C library of its image",
    "no_driver": "install the driver of the GPU, or try `gpumond demo`, which needs none",
    "no_device": "load the driver, or try `gpumond demo`",
    "driver_not_loaded": "load it (modprobe nvidia) or install the driver",
    "uninitialized": "it is opened anew once it is back",
    "no_permission": "give this user read and write access to /dev/nvidia* (AMD, Intel: the group render, and "
    "CAP_PERFMON for the memory in use)",
    "device_access_lost": "recreate the container with CDI or explicit --device options",
    "lib_rm_version_mismatch": "reboot, or stop all users of the GPU and reload the module",
    "timeout": "look for Xid 119, 79 or 45 in dmesg; values are withheld until the call returns, and "
    "come back by themselves",
    "crashed": "it is started again by itself; look for Xid in dmesg, and see that driver and its library match",
    "starting": "wait: the driver is being opened for the first time",
    "released": "nothing: the driver was let go of on purpose, and is attached again by itself",
    "left_out": "look for Xid in dmesg; the device is asked again by itself when the call that hangs at it returns, or "
    "after a while",
    "gpu_is_lost": _HARDWARE,
    "gpu_not_found": _HARDWARE,
    "reset_required": _HARDWARE,
    "vanished": "look for Xid in dmesg, and whether the device is still on the bus (lspci); it comes back by itself",
    "lost": "look in dmesg for why the device left, and whether it is on the bus (lspci); it comes back by itself",
    "processes_hidden": "run as root or with CAP_SYS_PTRACE; until then their memory is unclaimed",
    "impossible_value": "see that the driver matches its library and nvidia-ml-py, or look at the program whose agent "
    "says so; such numbers are dropped",
    "claim_over_driver": "look at the program of that pid: its agent is wrong, or its allocator counts memory that is "
    "not on the device (managed memory, released pages); the ledger shows what the driver counts",
    "insufficient_size": "see that the driver matches its library and nvidia-ml-py; only that field is missing",
    "unreadable": "see that the driver matches its library; only that field is missing",
    "unknown": "look for Xid in dmesg; in a container, see that its device rules are whole (CDI)",
    "corrupt": "look into the file that was set aside (sqlite3 FILE .recover), then take it away",
    "row_unreadable": "nothing: the other rows are in use; to keep such rows, copy the file before they are replaced "
    "(docs/reference/store.md)",
    "not_writable": "make room in the state directory, and see that it is the daemon's; it is tried again by itself",
    "damaged": "remove the simulated card's directory, or write its card.json anew",
    "unset": "let GPUMOND_SIM_DIR name a directory of simulated cards, or run `gpumond demo`",
    "missing": "create it, or run `gpumond demo`",
}

OF_A_RETURN_CODE = "only that field is missing; the name is NVML's return code: look for Xid in dmesg"
"""For the kinds that are not listed: the other return codes of NVML."""

CONDITIONS: Mapping[str, str] = {
    "private_pid_namespace": "the driver's pids may mean other processes here: run the daemon with the host's PID "
    "namespace (hostPID: true, --pid=host); until then agents are believed, and processes with the device open",
    "unified_memory": "size is the machine's memory and used the sum of the processes: judge it by what is free",
    "coherent_memory": "the host has the device's memory as a NUMA node, where the kernel may keep files: unclaimed "
    "memory is no leak (numastat -m; gpumond_device_file_cache_bytes)",
    "vgpu": "this is a part of a device: sensors and processes are its host's to tell; agents show the programs",
    "host_vgpu": "virtual machines share this device: their memory is unclaimed here, their programs are in them",
    "host_vsga": "virtual machines share this device: their memory is unclaimed here, their programs are in them",
    "mps": "clients of MPS may be counted to its server, and an error of one ends all: agents show the clients",
    "no_process_list": "the driver lists no processes (old vGPU, a container without the host's PID namespace): agents "
    "are the only source: gpumond run -- COMMAND",
    "reserved_in_used": "this driver counts what it reserves for itself as used: update it (510 or later tells them "
    "apart)",
}

VERDICTS: Mapping[str, str] = {
    "leak": "look for memory that the program keeps (tensors in a list, autograd graphs, an unbounded cache), and "
    "restart it",
    "fragmentation": "for PyTorch set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, else restart the program",
    "pressure": "flush the device (gpumond flush --device UUID), reduce a batch size, or end a program",
    "orphan": "end the process that keeps the device open (fuser -v /dev/nvidia*), or reset the device",
    "idle-holder": "end the program, or flush it: gpumond flush --pid PID",
    "crash": "read the program's log; look for Xid in dmesg",
    "crash-loop": "stop the supervisor that restarts the program, and read the program's log",
}
"""The remedies; the other kinds need none."""


def remedy(kind: str) -> str:
    """What to do about a fault of that kind, or a condition."""
    return FAULTS.get(kind) or CONDITIONS.get(kind) or OF_A_RETURN_CODE
