"""Programs that hold memory of a real device through an allocator."""

from __future__ import annotations

import subprocess
import sys

MIB = 1 << 20


DRIVER = f"""
import ctypes, os, threading
driver = ctypes.CDLL("libcuda.so.1")
MIB = {MIB}
def ask(function, *arguments):
    status = getattr(driver, function)(*arguments)
    assert status == 0, (function, status)
def use(ordinal):
    device, context = ctypes.c_int(), ctypes.c_void_p()
    ask("cuDeviceGet", ctypes.byref(device), ordinal)
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    ask("cuCtxSetCurrent", context)
    return device
def allocate(mib, pool=None):
    pointer = ctypes.c_uint64()
    size = ctypes.c_size_t(mib * MIB)
    if pool is None:
        ask("cuMemAllocAsync", ctypes.byref(pointer), size, None)
    else:
        ask("cuMemAllocFromPoolAsync", ctypes.byref(pointer), size, pool, None)
    return pointer
def keep(pool):
    most = ctypes.c_uint64(2**64 - 1)
    ask("cuMemPoolSetAttribute", pool, 4, ctypes.byref(most))
def elsewhere(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start(), thread.join()
    return answers[0]
import gpumond.agent.allocators.cuda
from gpumond.agent import flush, report
from gpumond.agent.allocators import cuda
contexts = cuda.devices_with_context
ask("cuInit", 0)
"""


def run(code: str, **values: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", DRIVER + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
