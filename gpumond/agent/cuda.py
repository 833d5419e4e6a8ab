"""What the CUDA driver tells without being made to do anything, through the libcuda that the program has loaded.

No call here loads a library, initialises CUDA or creates a context. None means: not known.
Devices are ordinals as the program sees them (after CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

CAPTURED: WeakSet[Any] = WeakSet()
"""CUDA graphs that were captured and can still be replayed, with the addresses that they had then."""

CAPTURING: WeakSet[Any] = WeakSet()
"""CUDA graphs that are being captured somewhere in this process. A cudaFree meanwhile would spoil them."""

POOL_RESERVED, POOL_USED = 5, 7
"""CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT and CU_MEMPOOL_ATTR_USED_MEM_CURRENT."""
POINTER_POOL = 17
"""CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE"""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""

CAPTURE_SECONDS = 1.0
"""So long a capture waits for a flush under way to end."""

ABSENT_SECONDS = 5.0
"""So long a program without the driver is not searched for it again by each report: that takes longer than the rest of
the report. Whatever else asks the driver, and the first capture, end it."""

_driver: ctypes.CDLL | None = None
_absent_until = 0.0
_thread = threading.local()
_count: int | None = None
_flushing = threading.RLock()
_devices: dict[int, ctypes.c_int] = {}
_uuids: dict[int, str] = {}
_had_context = False
_lost = False


def _after_fork() -> None:
    """CUDA does not survive a fork: a child of a process with a context leaves the driver alone for ever."""
    global _lost, _flushing
    _lost, _flushing = _had_context, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def version() -> str | None:
    """Of CUDA, as the driver supports it: ``13.0``."""
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
    """Whether the device's primary context lives in this process."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    device = _device(ordinal)
    if device is None or not _ask("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)):
        return None
    global _had_context
    _had_context = _had_context or bool(active.value)
    return bool(active.value)


def contexts() -> list[int]:
    """The devices on which this process has a primary context."""
    return [ordinal for ordinal in range(device_count() or 0) if has_context(ordinal)]


def device_uuid(ordinal: int) -> str | None:
    """As NVML writes it. For a slice of a device (MIG) only the second version of the call tells the slice's own."""
    if ordinal in _uuids:
        return _uuids[ordinal]
    device = _device(ordinal)
    if device is None:
        return None
    whole, own = (ctypes.c_ubyte * 16)(), (ctypes.c_ubyte * 16)()
    known = _ask("cuDeviceGetUuid", whole, device)
    if not _ask("cuDeviceGetUuid_v2", own, device):
        own = whole
        if not known:
            return None
    digits = bytes(own).hex()
    kind = "MIG" if known and bytes(own) != bytes(whole) else "GPU"
    _uuids[ordinal] = f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return _uuids[ordinal]


def default_pool(ordinal: int) -> int | None:
    """Handle of the device's default memory pool, which every ``cudaMallocAsync`` of the process shares.

    Only for a device with a context.
    """
    pool, device = ctypes.c_void_p(), _device(ordinal)
    return pool.value if device is not None and _ask("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device) else None


def pool_bytes(pool: int) -> tuple[int, int] | None:
    """What a pool has taken from the driver, and how much of it is in use."""
    handle, reserved, used = ctypes.c_void_p(pool), ctypes.c_uint64(), ctypes.c_uint64()
    if not _ask("cuMemPoolGetAttribute", handle, POOL_RESERVED, ctypes.byref(reserved)):
        return None
    if reserved.value and not _ask("cuMemPoolGetAttribute", handle, POOL_USED, ctypes.byref(used)):
        return None
    return reserved.value, used.value


def pool_of(pointer: int) -> int | None:
    """The memory pool from which an allocation came, if it came from one."""
    pool = ctypes.c_void_p()
    asked = _ask("cuPointerGetAttribute", ctypes.byref(pool), POINTER_POOL, ctypes.c_uint64(pointer))
    return pool.value if asked else None


def trim(ordinal: int, pool: int) -> bool:
    """Gives a pool's unused memory back, once the device is idle: what is freed but still pending would stay."""
    return settle(ordinal) and _ask("cuMemPoolTrimTo", ctypes.c_void_p(pool), ctypes.c_size_t(0))


def settle(ordinal: int) -> bool:
    """Waits until the device has done what it was given."""
    with current(ordinal) as ready:
        return ready and _ask("cuCtxSynchronize")


@contextmanager
def beside_captures() -> Iterator[None]:
    """What this thread asks of CUDA meanwhile leaves the captures of others alone.

    In the mode in which a thread begins, to look at a memory pool is enough to end every capture that is under way in
    the process and forbids it ("global", PyTorch's default).
    """
    mode = ctypes.c_int(RELAXED)
    exchanged = not getattr(_thread, "relaxed", False) and _exchange(mode)
    try:
        yield
    finally:
        if exchanged:
            _exchange(mode)


def stay_beside_captures() -> None:
    """The same for all that this thread will ever ask: it must be the agent's own."""
    if not getattr(_thread, "relaxed", False):
        _thread.relaxed = _ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))


def _exchange(mode: ctypes.c_int) -> bool:
    """This thread's capture mode for that one, if there is a driver."""
    global _absent_until
    if _driver is None and time.monotonic() < _absent_until:
        return False
    exchanged = _ask("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    if _driver is None:
        _absent_until = time.monotonic() + ABSENT_SECONDS
    return exchanged


@contextmanager
def between_captures() -> Iterator[None]:
    """For a flush: a capture that is watched waits until it is over."""
    with _flushing, beside_captures():
        yield


@contextmanager
def current(ordinal: int) -> Iterator[bool]:
    """Makes the device's primary context this thread's, for as long as it takes; False if it has none."""
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


def watch_captures(owner: Any, begin: str = "capture_begin", end: str = "capture_end") -> None:
    """Wraps two methods of a class, so that `CAPTURING` holds what they enclose.

    No thread can ask whether another one captures: the runtime answers for the caller's stream only.
    """
    begins, ends = getattr(owner, begin), getattr(owner, end)
    if getattr(begins, "gpumond", False):
        return

    @functools.wraps(begins)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _absent_until
        waited = _flushing.acquire(timeout=CAPTURE_SECONDS)
        CAPTURING.add(self)
        _absent_until = 0.0
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
    global _driver
    if _lost:
        return False
    if _driver is None:
        try:
            _driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return False
    call: Callable[..., int] | None = getattr(_driver, function, None)
    return call is not None and call(*arguments) == 0
