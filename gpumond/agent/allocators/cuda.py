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
from typing import Any, NamedTuple
from weakref import WeakSet

CAPTURED_GRAPHS: WeakSet[Any] = WeakSet()
"""Captured CUDA graphs that can still be replayed, with the addresses that they had at the capture."""

CAPTURING_GRAPHS: WeakSet[Any] = WeakSet()
"""CUDA graphs that are being captured in this process. A cudaFree during the capture would invalidate them."""

CAPTURE_CHECKS: list[Callable[[], bool]] = []
"""Functions that return True during a capture, for libraries whose captures cannot be watched."""

MEMPOOL_RESERVED, MEMPOOL_USED = 5, 7
"""CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and CU_MEMPOOL_ATTR_USED_MEM_CURRENT."""
POINTER_MAPPED, POINTER_MEMPOOL = 13, 17
"""CU_POINTER_ATTRIBUTE_MAPPED and CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE."""
INVALID_VALUE = 1
"""CUDA_ERROR_INVALID_VALUE"""
PROCESS_RUNNING = 0
"""CU_PROCESS_STATE_RUNNING"""
CAPTURE_MODE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""

CAPTURE_WAIT_SECONDS = 1.0
"""Longest wait of a capture for a flush in progress."""


_driver: ctypes.CDLL | None = None
_thread_state = threading.local()
_device_count: int | None = None
_flush_lock = threading.RLock()
_devices: dict[int, ctypes.c_int] = {}
_uuids: dict[int, str] = {}
_has_had_context = False
_is_lost = False


def _after_fork() -> None:
    """Disable the driver in the child of a process with a context: CUDA does not survive a fork."""
    global _is_lost, _flush_lock
    _is_lost, _flush_lock = _has_had_context, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def version() -> str | None:
    """Return the CUDA version that the driver supports, such as ``13.0``."""
    version_number = ctypes.c_int()
    if not _succeeds("cuDriverGetVersion", ctypes.byref(version_number)):
        return None
    return f"{version_number.value // 1000}.{version_number.value % 1000 // 10}"


def device_count() -> int | None:
    global _device_count
    count = ctypes.c_int()
    if _device_count is None and _succeeds("cuDeviceGetCount", ctypes.byref(count)):
        _device_count = count.value
    return None if _is_lost else _device_count


def has_context(ordinal: int) -> bool | None:
    """Return whether this process has the device's primary context."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    device = _device(ordinal)
    if device is None or not _succeeds("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)):
        return None
    global _has_had_context
    _has_had_context = _has_had_context or bool(active.value)
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
    parent_uuid, uuid = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    has_parent = _succeeds("cuDeviceGetUuid", parent_uuid, device)
    if not _succeeds("cuDeviceGetUuid_v2", uuid, device):
        uuid = parent_uuid
        if not has_parent:
            return None
    digits = bytes(uuid).hex()
    kind = "MIG" if has_parent and bytes(uuid) != bytes(parent_uuid) else "GPU"
    _uuids[ordinal] = f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return _uuids[ordinal]


def default_pool(ordinal: int) -> int | None:
    """Return the handle of the device's default memory pool, which every ``cudaMallocAsync`` of the process shares.

    The device must have a context.
    """
    pool, device = ctypes.c_void_p(), _device(ordinal)
    return (
        pool.value
        if device is not None and _succeeds("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device)
        else None
    )


class MempoolBytes(NamedTuple):
    """The bytes that a pool has taken from the driver, and the part of them in use."""

    reserved: int
    used: int


def mempool_bytes(pool: int) -> MempoolBytes | None:
    handle, reserved, used = ctypes.c_void_p(pool), ctypes.c_uint64(), ctypes.c_uint64()
    if not _succeeds("cuMemPoolGetAttribute", handle, MEMPOOL_RESERVED, ctypes.byref(reserved)):
        return None
    if reserved.value and not _succeeds("cuMemPoolGetAttribute", handle, MEMPOOL_USED, ctypes.byref(used)):
        return None
    return MempoolBytes(reserved.value, used.value)


def mempool_of(pointer: int) -> int | None:
    """Return the memory pool that an allocation came from, if any."""
    pool = ctypes.c_void_p()
    succeeded = _succeeds("cuPointerGetAttribute", ctypes.byref(pool), POINTER_MEMPOOL, ctypes.c_uint64(pointer))
    return pool.value if succeeded else None


def is_mapped(pointer: int) -> bool | None:
    """Return whether an allocation has pages; False if they were released and only its addresses are reserved."""
    mapped = ctypes.c_int()
    status = _call_driver("cuPointerGetAttribute", ctypes.byref(mapped), POINTER_MAPPED, ctypes.c_uint64(pointer))
    return bool(mapped.value) if status in (0, INVALID_VALUE) else None


def trim_mempool(ordinal: int, pool: int) -> bool:
    """Return a pool's unused memory to the driver when the device is idle: freed but pending bytes would stay."""
    return synchronize(ordinal) and _succeeds("cuMemPoolTrimTo", ctypes.c_void_p(pool), ctypes.c_size_t(0))


def synchronize(ordinal: int) -> bool:
    """Wait until the device has completed its work."""
    with current_context(ordinal) as ready:
        return ready and _succeeds("cuCtxSynchronize")


def is_suspended() -> bool:
    """Return whether this process is locked or suspended (cuCheckpointProcess*); False if the driver does not say."""
    state = ctypes.c_int()
    succeeded = bool(devices_with_context()) and _succeeds(
        "cuCheckpointProcessGetState", ctypes.c_int(os.getpid()), ctypes.byref(state)
    )
    return succeeded and state.value != PROCESS_RUNNING


def wait_for_driver() -> None:
    """Return when the driver answers. While the process is suspended (cuCheckpointProcess*), calls wait for its
    resumption, and a call that changes something would then have its effect late.
    """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for ordinal in devices_with_context()[:1]:
        with current_context(ordinal) as ready:
            if ready:
                _succeeds("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Prevent this thread's CUDA calls from ending the captures of other threads.

    In a thread's initial mode ("global", PyTorch's default), a query of a memory pool ends every capture in progress
    that forbids it.
    """
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    exchanged = not getattr(_thread_state, "relaxed", False) and _exchange_capture_mode(mode)
    try:
        yield
    finally:
        if exchanged:
            _exchange_capture_mode(mode)


def relax_thread_capture_mode() -> None:
    """Do the same for all future calls of this thread: it must be the agent's own."""
    if not getattr(_thread_state, "relaxed", False):
        _thread_state.relaxed = _exchange_capture_mode(ctypes.c_int(CAPTURE_MODE_RELAXED))


def _exchange_capture_mode(mode: ctypes.c_int) -> bool:
    """Exchange this thread's capture mode with ``mode``, if there is a driver."""
    return _succeeds("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextmanager
def delayed_captures() -> Iterator[None]:
    """Guard a flush: a watched capture waits until the flush is over."""
    with _flush_lock, relaxed_capture_mode():
        yield


@contextmanager
def current_context(ordinal: int) -> Iterator[bool]:
    """Make the device's primary context current in this thread for the block; False if there is none."""
    context, device = ctypes.c_void_p(), _device(ordinal)
    if device is None or not has_context(ordinal):
        yield False
        return
    if not _succeeds("cuDevicePrimaryCtxRetain", ctypes.byref(context), device):
        yield False
        return
    try:
        pushed = _succeeds("cuCtxPushCurrent_v2", context)
        try:
            yield pushed
        finally:
            if pushed:
                _succeeds("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _succeeds("cuDevicePrimaryCtxRelease_v2", device)


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured in this process, as far as the agent can detect it."""
    return bool(CAPTURING_GRAPHS) or any(check() for check in CAPTURE_CHECKS)


def why_not_flushable() -> str:
    """Return the reason why nothing may be freed on any device now; empty if there is none."""
    if not devices_with_context():
        return "no device has a live CUDA context"
    return "a CUDA graph is being captured" if is_capturing() else ""


def watch_captures(cls: Any, begin_name: str = "capture_begin", end_name: str = "capture_end") -> None:
    """Wrap two methods of a class, so `CAPTURING_GRAPHS` contains the objects between the two calls.

    No thread can query whether another one captures: the runtime answers for the caller's stream only.
    """
    original_begin, original_end = getattr(cls, begin_name), getattr(cls, end_name)
    if getattr(original_begin, "gpumond", False):
        return

    @functools.wraps(original_begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        acquired = _flush_lock.acquire(timeout=CAPTURE_WAIT_SECONDS)
        CAPTURING_GRAPHS.add(self)
        if acquired:
            _flush_lock.release()
        try:
            return original_begin(self, *args, **kwargs)
        except BaseException:
            CAPTURING_GRAPHS.discard(self)
            raise

    @functools.wraps(original_end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original_end(self, *args, **kwargs)
        finally:
            CAPTURED_GRAPHS.add(self)
            CAPTURING_GRAPHS.discard(self)

    capture_begin.gpumond = True  # type: ignore[attr-defined]
    setattr(cls, begin_name, capture_begin)
    setattr(cls, end_name, capture_end)


def _device(ordinal: int) -> ctypes.c_int | None:
    device = _devices.get(ordinal)
    if device is None:
        device = ctypes.c_int()
        if not _succeeds("cuDeviceGet", ctypes.byref(device), ordinal):
            return None
        _devices[ordinal] = device
    return device


def _succeeds(function: str, *arguments: Any) -> bool:
    return _call_driver(function, *arguments) == 0


def _call_driver(function: str, *arguments: Any) -> int | None:
    """Call a function of the driver and return its status; None without the function."""
    global _driver
    if _is_lost:
        return None
    if _driver is None:
        try:
            _driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return None
    call: Callable[..., int] | None = getattr(_driver, function, None)
    return None if call is None else call(*arguments)
