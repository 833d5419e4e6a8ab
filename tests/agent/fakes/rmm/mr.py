from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable

from forbidden import forbidden

from .statistics import Statistics

_driver = ctypes.CDLL("libcuda.so.1")
_driver.fake_allocate.restype = _driver.fake_pool_handle.restype = ctypes.c_uint64
_driver.fake_free.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
_driver.fake_allocate.argtypes = [ctypes.c_int, ctypes.c_uint64]

get_current_device_resource = forbidden("rmm.mr.get_current_device_resource")  # cudaGetDevice
available_device_memory = forbidden("rmm.mr.available_device_memory")


class DeviceMemoryResource:
    """Has no weak references, like RMM's."""

    __slots__ = ()

    def allocate(self, nbytes: int) -> int:
        return 1

    def deallocate(self, ptr: int, nbytes: int) -> None:
        pass


class UpstreamResourceAdaptor(DeviceMemoryResource):
    __slots__ = ("upstream_mr",)

    def __init__(self, upstream_mr: DeviceMemoryResource) -> None:
        self.upstream_mr = upstream_mr

    def allocate(self, nbytes: int) -> int:
        return self.upstream_mr.allocate(nbytes)

    def deallocate(self, ptr: int, nbytes: int) -> None:
        self.upstream_mr.deallocate(ptr, nbytes)


class CudaMemoryResource(DeviceMemoryResource):
    __slots__ = ()


class ManagedMemoryResource(DeviceMemoryResource):
    __slots__ = ()


class CudaAsyncMemoryResource(DeviceMemoryResource):
    """Resource with a driver pool of its own, whose handle it does not return."""

    __slots__ = ("_index",)
    pools = 16

    def __init__(self) -> None:
        self._index = CudaAsyncMemoryResource.pools
        CudaAsyncMemoryResource.pools += 1

    def allocate(self, nbytes: int) -> int:
        return int(_driver.fake_allocate(self._index, nbytes))

    def deallocate(self, ptr: int, nbytes: int) -> None:
        _driver.fake_free(ptr, nbytes)

    def __del__(self, destroy: Callable[[], object] = _driver.fake_runtime_call) -> None:
        destroy()


class CudaAsyncViewMemoryResource(DeviceMemoryResource):
    __slots__ = ("_index",)

    def __init__(self, index: int) -> None:
        self._index = index

    def pool_handle(self) -> int:
        return int(_driver.fake_pool_handle(self._index))

    def allocate(self, nbytes: int) -> int:
        return int(_driver.fake_allocate(self._index, nbytes))

    def deallocate(self, ptr: int, nbytes: int) -> None:
        _driver.fake_free(ptr, nbytes)


class PoolMemoryResource(UpstreamResourceAdaptor):
    """Keeps its initial size and freed memory in the pool."""

    __slots__ = ("_free", "_size")

    def __init__(self, upstream_mr: DeviceMemoryResource, initial_pool_size: int) -> None:
        super().__init__(upstream_mr)
        self._size = self._free = initial_pool_size
        upstream_mr.allocate(initial_pool_size)

    def allocate(self, nbytes: int) -> int:
        if nbytes > self._free:
            self.upstream_mr.allocate(nbytes)
            self._size, self._free = self._size + nbytes, self._free + nbytes
        self._free -= nbytes
        return 1

    def deallocate(self, ptr: int, nbytes: int) -> None:
        self._free += nbytes

    def pool_size(self) -> int:
        return self._size


class ArenaMemoryResource(UpstreamResourceAdaptor):
    __slots__ = ()


class FixedSizeMemoryResource(UpstreamResourceAdaptor):
    __slots__ = ()


class BinningMemoryResource(UpstreamResourceAdaptor):
    __slots__ = ("bin_mrs",)

    def __init__(self, upstream_mr: DeviceMemoryResource) -> None:
        super().__init__(upstream_mr)
        self.bin_mrs: list[DeviceMemoryResource] = []

    def add_bin(self, allocation_size: int, bin_resource: DeviceMemoryResource | None = None) -> None:
        self.bin_mrs.append(bin_resource or FixedSizeMemoryResource(self.upstream_mr))


class FailureCallbackResourceAdaptor(UpstreamResourceAdaptor):
    __slots__ = ("_callback",)

    def __init__(self, upstream_mr: DeviceMemoryResource, callback: Callable[[int], bool]) -> None:
        super().__init__(upstream_mr)
        self._callback = callback

    def allocate(self, nbytes: int) -> int:
        while True:
            try:
                return self.upstream_mr.allocate(nbytes)
            except MemoryError:
                if not self._callback(nbytes):
                    raise


class StatisticsResourceAdaptor(UpstreamResourceAdaptor):
    __slots__ = ("_counters",)

    def __init__(self, upstream_mr: DeviceMemoryResource) -> None:
        super().__init__(upstream_mr)
        self._counters = [Statistics()]

    @property
    def allocation_counts(self) -> Statistics:
        return self._counters[-1]

    def push_counters(self) -> None:
        self._counters.append(Statistics())

    def pop_counters(self) -> None:
        inner = self._counters.pop()
        outer = self._counters[-1]
        outer.add(inner.current_bytes, inner.current_count)
        outer.total_count += inner.total_count

    def allocate(self, nbytes: int) -> int:
        self._counters[-1].add(nbytes, 1)
        return super().allocate(nbytes)

    def deallocate(self, ptr: int, nbytes: int) -> None:
        self._counters[-1].add(-nbytes, -1)
        super().deallocate(ptr, nbytes)


class TrackingResourceAdaptor(UpstreamResourceAdaptor):
    __slots__ = ("_bytes",)

    def __init__(self, upstream_mr: DeviceMemoryResource) -> None:
        super().__init__(upstream_mr)
        self._bytes = 0

    def get_allocated_bytes(self) -> int:
        return self._bytes

    def allocate(self, nbytes: int) -> int:
        self._bytes += nbytes
        return super().allocate(nbytes)

    def deallocate(self, ptr: int, nbytes: int) -> None:
        self._bytes -= nbytes
        super().deallocate(ptr, nbytes)


class LimitingResourceAdaptor(TrackingResourceAdaptor):
    __slots__ = ()


class LoggingResourceAdaptor(UpstreamResourceAdaptor):
    __slots__ = ()


_per_device_mrs: defaultdict[int, DeviceMemoryResource] = defaultdict(CudaMemoryResource)


def get_per_device_resource(device: int) -> DeviceMemoryResource:
    return _per_device_mrs[device]


def set_per_device_resource(device: int, mr: DeviceMemoryResource) -> None:
    if not isinstance(mr, DeviceMemoryResource):
        raise TypeError(f"expected DeviceMemoryResource, got {type(mr).__name__}")
    _per_device_mrs[device] = mr


def set_current_device_resource(mr: DeviceMemoryResource) -> None:
    """The current device is always the first here."""
    _set(0, mr)


_set = set_per_device_resource


def get_log_filenames() -> dict[int, str | None]:
    return dict.fromkeys(_per_device_mrs)


def initialize(pool_allocator: bool, managed_memory: bool, initial_pool_size: int, devices: list[int]) -> None:
    _per_device_mrs.clear()
    below = ManagedMemoryResource if managed_memory else CudaMemoryResource
    for device in devices:
        _set(device, PoolMemoryResource(below(), initial_pool_size) if pool_allocator else below())
