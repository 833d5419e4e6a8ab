"""Calls to the CUDA driver through the libcuda that the program has loaded.

No function here loads a library, initializes CUDA or creates a context. None means unknown. Devices are ordinals as the
program sees them (after CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

CAPTURED: WeakSet[Any] = WeakSet()
"""Captured CUDA graphs that can still be replayed, with the addresses that they had at the capture."""

CAPTURING: WeakSet[Any] = WeakSet()
"""CUDA graphs that are being captured in this process. A cudaFree during the capture would invalidate them."""

CAPTURE_CHECKS: list[Callable[[], bool]] = []
"""Functions that return True during a capture, for libraries whose captures cannot be watched."""

POOL_RESERVED, POOL_USED = 5, 7
"""CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and CU_MEMPOOL_ATTR_USED_MEM_CURRENT."""
POINTER_MAPPED, POINTER_POOL = 13, 17
"""CU_POINTER_ATTRIBUTE_MAPPED and CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE."""
INVALID_VALUE = 1
"""CUDA_ERROR_INVALID_VALUE"""
RUNNING = 0
"""CU_PROCESS_STATE_RUNNING"""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""

CAPTURE_SECONDS = 1.0
"""Longest wait of a capture for a flush in progress."""


_driver: ctypes.CDLL | None = None
_thread = threading.local()
_count: int | None = None
_flushing = threading.RLock()
_devices: dict[int, ctypes.c_int] = {}
_uuids: dict[int, str] = {}
_had_context = False
_lost = False


def _after_fork() -> None:
    """Disable the driver in the child of a process with a context: CUDA does not survive a fork."""
    global _lost, _flushing
    _lost, _flushing = _had_context, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def version() -> str | None:
    """Return the CUDA version that the driver supports, such as ``13.0``."""
    number = ctypes.c_int()
    if not _ask("cuDriverGetVersion", ctypes.byref(number)):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def device_count() -> int | None:
    global _count
    count = ctypes.c_int()
    if _count is None and _ask("cuDeviceGetCount", ctypes.byref(count)):
        _count = count.value
    return None if _lost else _count


def has_context(ordinal: int) -> bool | None:
    """Return whether this process has the device's primary context."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    device = _device(ordinal)
    if device is None or not _ask("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)):
        return None
    global _had_context
    _had_context = _had_context or bool(active.value)
    return bool(active.value)


def devices_with_context() -> list[int]:
    """Return the devices on which this process has a primary context."""
    return [ordinal for ordinal in range(device_count() or 0) if has_context(ordinal)]


def device_uuid(ordinal: int) -> str | None:
    """Return the UUID as NVML writes it. Only the second version of the call returns that of a MIG slice."""
    if ordinal in _uuids:
        return _uuids[ordinal]
    device = _device(ordinal)
    if device is None:
        return None
    parent, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    known = _ask("cuDeviceGetUuid", parent, device)
    if not _ask("cuDeviceGetUuid_v2", own, device):
        own = parent
        if not known:
            return None
    digits = bytes(own).hex()
    kind = "MIG" if known and bytes(own) != bytes(parent) else "GPU"
    _uuids[ordinal] = f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return _uuids[ordinal]


def default_pool(ordinal: int) -> int | None:
    """Return the handle of the device's default memory pool, which every ``cudaMallocAsync`` of the process shares.

    The device must have a context.
    """
    pool, device = ctypes.c_void_p(), _device(ordinal)
    return pool.value if device is not None and _ask("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device) else None


def pool_bytes(pool: int) -> tuple[int, int] | None:
    """Return the bytes that a pool has taken from the driver, and the part of them in use."""
    handle, reserved, used = ctypes.c_void_p(pool), ctypes.c_uint64(), ctypes.c_uint64()
    if not _ask("cuMemPoolGetAttribute", handle, POOL_RESERVED, ctypes.byref(reserved)):
        return None
    if reserved.value and not _ask("cuMemPoolGetAttribute", handle, POOL_USED, ctypes.byref(used)):
        return None
    return reserved.value, used.value


def pool_of(pointer: int) -> int | None:
    """Return the memory pool that an allocation came from, if any."""
    pool = ctypes.c_void_p()
    found = _ask("cuPointerGetAttribute", ctypes.byref(pool), POINTER_POOL, ctypes.c_uint64(pointer))
    return pool.value if found else None


def is_mapped(pointer: int) -> bool | None:
    """Return whether an allocation has pages; False if they were released and only its addresses are reserved."""
    mapped = ctypes.c_int()
    status = _status("cuPointerGetAttribute", ctypes.byref(mapped), POINTER_MAPPED, ctypes.c_uint64(pointer))
    return bool(mapped.value) if status in (0, INVALID_VALUE) else None


def trim(ordinal: int, pool: int) -> bool:
    """Return a pool's unused memory to the driver when the device is idle: freed but pending bytes would stay."""
    return synchronize(ordinal) and _ask("cuMemPoolTrimTo", ctypes.c_void_p(pool), ctypes.c_size_t(0))


def synchronize(ordinal: int) -> bool:
    """Wait until the device has completed its work."""
    with current_context(ordinal) as ready:
        return ready and _ask("cuCtxSynchronize")


def is_suspended() -> bool:
    """Return whether this process is locked or suspended (cuCheckpointProcess*); False if the driver does not say."""
    state = ctypes.c_int()
    asked = bool(devices_with_context()) and _ask(
        "cuCheckpointProcessGetState", ctypes.c_int(os.getpid()), ctypes.byref(state)
    )
    return asked and state.value != RUNNING


def wait_for_driver() -> None:
    """Return when the driver answers. While the process is suspended (cuCheckpointProcess*), calls wait for its
    resumption, and a call that changes something would then have its effect late.
    """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for ordinal in devices_with_context()[:1]:
        with current_context(ordinal) as ready:
            if ready:
                _ask("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))


@contextmanager
def capture_safe() -> Iterator[None]:
    """Prevent this thread's CUDA calls from ending the captures of other threads.

    In a thread's initial mode ("global", PyTorch's default), a query of a memory pool ends every capture in progress
    that forbids it.
    """
    mode = ctypes.c_int(RELAXED)
    exchanged = not getattr(_thread, "relaxed", False) and _exchange(mode)
    try:
        yield
    finally:
        if exchanged:
            _exchange(mode)


def make_thread_capture_safe() -> None:
    """Do the same for all future calls of this thread: it must be the agent's own."""
    if not getattr(_thread, "relaxed", False):
        _thread.relaxed = _exchange(ctypes.c_int(RELAXED))


def _exchange(mode: ctypes.c_int) -> bool:
    """Exchange this thread's capture mode with ``mode``, if there is a driver."""
    return _ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextmanager
def between_captures() -> Iterator[None]:
    """Guard a flush: a watched capture waits until the flush is over."""
    with _flushing, capture_safe():
        yield


@contextmanager
def current_context(ordinal: int) -> Iterator[bool]:
    """Make the device's primary context current in this thread for the block; False if there is none."""
    context, device = ctypes.c_void_p(), _device(ordinal)
    if device is None or not has_context(ordinal):
        yield False
        return
    if not _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device):
        yield False
        return
    try:
        pushed = _ask("cuCtxPushCurrent_v2", context)
        try:
            yield pushed
        finally:
            if pushed:
                _ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _ask("cuDevicePrimaryCtxRelease_v2", device)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured in this process, as far as the agent can detect it."""
    return bool(CAPTURING) or any(check() for check in CAPTURE_CHECKS)


def refusal() -> str:
    """Return the reason why nothing may be freed on any device now; empty if there is none."""
    if not devices_with_context():
        return "no device has a live CUDA context"
    return "a CUDA graph is being captured" if is_capturing() else ""


def watch_captures(owner: Any, begin: str = "capture_begin", end: str = "capture_end") -> None:
    """Wrap two methods of a class, so `CAPTURING` contains the objects between the two calls.

    No thread can query whether another one captures: the runtime answers for the caller's stream only.
    """
    begins, ends = getattr(owner, begin), getattr(owner, end)
    if getattr(begins, "gpumond", False):
        return

    @functools.wraps(begins)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        waited = _flushing.acquire(timeout=CAPTURE_SECONDS)
        CAPTURING.add(self)
        if waited:
            _flushing.release()
        try:
            return begins(self, *args, **kwargs)
        except BaseException:
            CAPTURING.discard(self)
            raise

    @functools.wraps(ends)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return ends(self, *args, **kwargs)
        finally:
            CAPTURED.add(self)
            CAPTURING.discard(self)

    capture_begin.gpumond = True  # type: ignore[attr-defined]
    setattr(owner, begin, capture_begin)
    setattr(owner, end, capture_end)


def _device(ordinal: int) -> ctypes.c_int | None:
    device = _devices.get(ordinal)
    if device is None:
        device = ctypes.c_int()
        if not _ask("cuDeviceGet", ctypes.byref(device), ordinal):
            return None
        _devices[ordinal] = device
    return device


def _ask(function: str, *arguments: Any) -> bool:
    return _status(function, *arguments) == 0


def _status(function: str, *arguments: Any) -> int | None:
    """Call a function of the driver and return its status; None without the function."""
    global _driver
    if _lost:
        return None
    if _driver is None:
        try:
            _driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return None
    call: Callable[..., int] | None = getattr(_driver, function, None)
    return None if call is None else call(*arguments)
