"""Sleep mode on a real device: torch_memory_saver 0.0.10, which SGLang uses, and pages that the driver unmaps.

Needs the packages torch (CUDA), numpy and torch_memory_saver.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gpu.adapter_programs import run
from tests.gpu.gpu_programs import MIB, REPORT_SECONDS, reported
from tests.helpers.running import RunningDaemon, until

pytestmark = pytest.mark.gpu

GIB = 1 << 30
ASLEEP = 12 * GIB
CONTEXT = 2 * GIB
"""More than a CUDA context and its libraries occupy."""
PROGRAM = """
import sys, torch
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
def tensor(mib): return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
plain, unused = tensor(512), tensor(256)
del unused
with saver.region(tag="weights", enable_cpu_backup=True):
    weights = [tensor(256) for _ in range(16)]
with saver.region(tag="cache"):
    cache = tensor(8192)
if "hidden" in sys.argv: del sys.modules["torch_memory_saver"]
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    getattr(saver, line.strip())()
    torch.cuda.synchronize()
    print(torch.cuda.memory_allocated(), flush=True)
"""
PAGES = """
class Properties(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("id", ctypes.c_int),
                ("metadata", ctypes.c_void_p), ("flags", ctypes.c_char * 8)]
use(0)
size, address, handle = ctypes.c_size_t(64 * MIB), ctypes.c_uint64(), ctypes.c_uint64()
ask("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
ask("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(Properties(1, 0, 1, 0)), ctypes.c_uint64(0))
def mapped(): return elsewhere(lambda: cuda.is_mapped(address.value))
print(mapped(), end=" ")
ask("cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
print(mapped(), end=" ")
ask("cuMemUnmap", address, size)
plain = ctypes.c_uint64()
ask("cuMemAlloc_v2", ctypes.byref(plain), size)
print(mapped(), cuda.is_mapped(plain.value), cuda.is_mapped(allocate(64).value), contexts())
"""


def test_driver_states_whether_addresses_have_pages() -> None:
    assert run(PAGES) == ["False True False True True [0]"]


@contextlib.contextmanager
def running(daemon: RunningDaemon, *options: str) -> Iterator[Callable[[str], tuple[dict[str, Any], int]]]:
    """Run the program and yield a function that sends it a command, waits, and returns the process and its live bytes
    by PyTorch's own count.
    """
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA device")
    if subprocess.run([sys.executable, "-c", "import torch_memory_saver"], capture_output=True).returncode:
        pytest.skip("needs torch_memory_saver")
    command = [sys.executable, "-m", "gpumond", "run", "--workload", "engine", "--", sys.executable, "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, *options], env=daemon.environ, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def after(command: str) -> tuple[dict[str, Any], int]:
            process.stdin.write(f"{command}\n")
            process.stdin.flush()
            allocated = int(process.stdout.readline())
            since = time.time() + 4 * REPORT_SECONDS  # an inference takes three ticks
            until(lambda: reported(daemon, "engine", since), 60)
            frame = daemon.get("frame")
            check_ledger(frame)
            (own,) = [each for each in frame["processes"] if each["pid"] == process.pid]
            return own, allocated

        try:
            yield after
        finally:
            process.stdin.close()
            process.wait(timeout=60)


def check_ledger(frame: dict[str, Any]) -> None:
    """The lines add up to the driver's count, no process has more live bytes than the driver counts, and no fault."""
    assert [fault for fault in frame["faults"] if fault["source"] == "agent"] == []
    for device in frame["snapshot"]["devices"]:
        lines = [line for line in frame["ledger"]["lines"] if line["device_uuid"] == device["uuid"]]
        assert sum(line["used_bytes"] for line in lines) == device["used_bytes"]
    assert [each["overcount_bytes"] for each in frame["ledger"]["overcounts"] if each["overcount_bytes"]] == []
    for process in frame["processes"]:
        assert (process["live_bytes"] or 0) <= process["used_bytes"]


def test_sleeping_program_is_unmapped_to_the_byte(daemon: RunningDaemon) -> None:
    with running(daemon) as after:
        asleep, allocated = after("pause")
        assert asleep["unmapped_bytes"] == ASLEEP
        assert asleep["live_bytes"] == allocated - ASLEEP == 512 * MIB
        assert asleep["cached_bytes"] == 256 * MIB
        assert asleep["used_bytes"] < CONTEXT
        assert daemon.value("gpumond_pool_unmapped_bytes", pid=str(asleep["pid"])) == ASLEEP
        awake, allocated = after("resume")
        assert awake["unmapped_bytes"] == 0
        assert awake["live_bytes"] == allocated == ASLEEP + 512 * MIB
        assert awake["used_bytes"] - asleep["used_bytes"] == ASLEEP


def test_sleep_mode_of_an_unknown_library_is_inferred(daemon: RunningDaemon) -> None:
    with running(daemon, "hidden") as after:
        asleep, allocated = after("pause")
        assert ASLEEP - CONTEXT < asleep["unmapped_bytes"] <= ASLEEP
        assert asleep["live_bytes"] == allocated - asleep["unmapped_bytes"]
        assert "unmapped_estimated" in [each["kind"] for each in daemon.get("status")["conditions"]]
        awake, allocated = after("resume")
        assert not awake["unmapped_bytes"]
        assert awake["live_bytes"] == allocated
        assert daemon.get("status")["conditions"] == []
