from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.agent.fakes.forbidden import forbidden

runtime: Any = None
DEVICES = 2


class Device:
    """``context`` and ``stream`` of a device create a context."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.has_context = False
        self.is_mempool_enabled = True
        self.captures: dict[str, str] = {}
        self._custom_allocator: Any = None

    context = stream = property(forbidden("context or stream of a device"))


def use(ordinal: int) -> Device:
    """Initialize Warp and create a context on a device, as a program does."""
    global runtime
    if runtime is None:
        core = SimpleNamespace(
            wp_cuda_device_get_mempool_used_mem_current=forbidden("wp_cuda_device_get_mempool_used_mem_current")
        )
        runtime = SimpleNamespace(cuda_devices=[Device(each) for each in range(DEVICES)], core=core)
    device: Device = runtime.cuda_devices[ordinal]
    device.has_context = True
    return device
