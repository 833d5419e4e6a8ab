"""Fake for cuda.core: memory resources on the pools of the fake driver."""

from __future__ import annotations

import ctypes

from tests.agent.fakes.forbidden import forbidden

__version__ = "1.2.2"
DEFAULT_POOLS = 16
_driver = ctypes.CDLL("libcuda.so.1")
_driver.fake_pool_handle.restype = ctypes.c_uint64
Device = forbidden("Device")


class DeviceMemoryResource:
    """``pool`` is a number of the fake driver. A resource owns its pool unless it is a device's default one."""

    def __init__(self, device_id: int, pool: int, is_mapped: bool = False) -> None:
        self.device_id, self._pool, self.is_mapped = device_id, pool, is_mapped
        self.is_handle_owned = pool >= DEFAULT_POOLS

    @property
    def attributes(self) -> object:
        if self._pool is None:
            raise RuntimeError("DeviceMemoryResource has been closed")
        return object()

    @property
    def handle(self) -> int:
        return int(_driver.fake_pool_handle(self._pool))

    def close(self) -> None:
        self._pool = None
