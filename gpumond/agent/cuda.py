"""What the CUDA driver tells without being made to do anything, through the libcuda that the program has loaded.

No call here loads a library, initialises CUDA or creates a context. None means: not known.
Devices are ordinals as the program sees them (after CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

CAPTURING: WeakSet[Any] = WeakSet()
"""CUDA graphs that are being captured somewhere in this process. A cudaFree meanwhile would spoil them."""

_driver: ctypes.CDLL | None = None


def device_count() -> int | None:
    count = ctypes.c_int()
    return count.value if _ask("cuDeviceGetCount", ctypes.byref(count)) else None


def has_context(ordinal: int) -> bool | None:
    """Whether the device's primary context lives in this process."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    device = _device(ordinal)
    if device is None or not _ask("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active)):
        return None
    return bool(active.value)


def contexts() -> list[int]:
    """The devices on which this process has a primary context."""
    return [ordinal for ordinal in range(device_count() or 0) if has_context(ordinal)]


def device_uuid(ordinal: int) -> str | None:
    """As NVML writes it. For a slice of a device (MIG) only the second version of the call tells the slice's own."""
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
    return f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def watch_captures(graph: Any) -> None:
    """Wraps a class's ``capture_begin`` and ``capture_end``, so that `CAPTURING` holds what they enclose.

    No thread can ask whether another one captures: the runtime answers for the caller's stream only.
    """
    begin, end = graph.capture_begin, graph.capture_end
    if getattr(begin, "gpumond", False):
        return

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        CAPTURING.add(self)
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            CAPTURING.discard(self)
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            CAPTURING.discard(self)

    capture_begin.gpumond = True  # type: ignore[attr-defined]
    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def _device(ordinal: int) -> ctypes.c_int | None:
    device = ctypes.c_int()
    return device if _ask("cuDeviceGet", ctypes.byref(device), ordinal) else None


def _ask(function: str, *arguments: Any) -> bool:
    global _driver
    if _driver is None:
        try:
            _driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return False
    call: Callable[..., int] | None = getattr(_driver, function, None)
    return call is not None and call(*arguments) == 0
