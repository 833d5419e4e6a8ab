"""Memory manager of a context, with its list of pending deallocations."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager
from typing import Any


class _Driver:
    """Functions are looked up, and the driver initialized, at the first use."""

    is_initialized = False

    def __getattr__(self, name: str) -> Any:
        self.is_initialized = True
        setattr(self, name, lambda handle: sys.stdout.write(f"{name}({handle}) "))
        return vars(self)[name]


driver = _Driver()


class _PendingDeallocs:
    def __init__(self) -> None:
        self._cons: deque[tuple[Any, int, int]] = deque()
        self._disable_count = 0

    def add_item(self, function: Any, handle: int, size: int) -> None:
        self._cons.append((function, handle, size))

    def clear(self) -> None:
        if not self.is_disabled:
            while self._cons:
                function, handle, _ = self._cons.popleft()
                function(handle)

    @contextmanager
    def disable(self) -> Any:
        self._disable_count += 1
        yield
        self._disable_count -= 1

    @property
    def is_disabled(self) -> bool:
        return self._disable_count > 0


class AutoFreePointer:
    def __init__(self, size: int) -> None:
        self.size = size


class MappedMemory(AutoFreePointer):
    pass


class ManagedMemory(AutoFreePointer):
    pass


class NumbaCUDAMemoryManager:
    def __init__(self) -> None:
        self.allocations: dict[int, AutoFreePointer] = {}
        self.deallocations = _PendingDeallocs()

    def allocate(self, handle: int, size: int, kind: type[AutoFreePointer] = AutoFreePointer) -> None:
        self.allocations[handle] = kind(size)

    def free(self, handle: int) -> None:
        block = self.allocations.pop(handle)
        function = driver.cuMemFreeHost if isinstance(block, MappedMemory) else driver.cuMemFree
        self.deallocations.add_item(function, handle, block.size)
