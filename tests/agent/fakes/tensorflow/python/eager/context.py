from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

from forbidden import forbidden

from .. import _pywrap_tfe

PhysicalDevice = namedtuple("PhysicalDevice", ["name", "device_type"])
LogicalDevice = namedtuple("LogicalDevice", ["name", "device_type"])


class Context:
    """Context that is not initialized before the program uses it."""

    def __init__(self) -> None:
        self._initialized = False
        self._context_handle: object = None
        self._logical_devices: list[LogicalDevice] | None = None
        self._physical_devices: list[PhysicalDevice] | None = None
        self._visible_device_list: list[PhysicalDevice] = []
        self._virtual_device_map: dict[PhysicalDevice, list[object]] = {}
        self._server_def: Any = None
        self._collective_ops_server_def: Any = None

    ensure_initialized = forbidden("Context.ensure_initialized")
    get_memory_info = forbidden("Context.get_memory_info")
    reset_memory_stats = forbidden("Context.reset_memory_stats")

    def initialize(
        self,
        gpus: int,
        logical: Mapping[str, tuple[int, int]],
        hidden: Sequence[int] = (),
        split: Mapping[int, int] = {},
    ) -> None:
        """Initialize it. ``logical`` has bytes in use and their peak by device name."""
        cpu = PhysicalDevice("/physical_device:CPU:0", "CPU")
        physical = [PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(gpus)]
        self._physical_devices = [cpu, *physical]
        self._visible_device_list = [cpu, *(gpu for i, gpu in enumerate(physical) if i not in hidden)][::-1]
        self._virtual_device_map = {physical[i]: [object()] * parts for i, parts in split.items()}
        self._logical_devices = [LogicalDevice("/device:CPU:0", "CPU")]
        for name, (current, peak) in logical.items():
            self._logical_devices.append(LogicalDevice(name, "GPU"))
            _pywrap_tfe.MEMORY[name] = {"current": current, "peak": peak}
        self._context_handle, self._initialized = object(), True


_context: Context | None = None


def context_safe() -> Context | None:
    return _context


def context() -> Context:
    global _context
    _context = _context or Context()
    return _context
