"""Counts live bytes in RMM's memory resources, for programs that run under ``gpumond run``.

RMM's pools don't count what they hand out. A program that was started to be measured gets RMM's own
StatisticsResourceAdaptor on top of each resource that it sets, unless an adaptor in that stack counts already. It costs
a lock and two additions for each allocation. A resource that was set before RMM's import returned, or that the program
allocates from directly (``DeviceBuffer(mr=…)``), is not counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from gpumond.agent.adapters.rmm_stack import forget_pools, read_stack

SETTERS = ("set_current_device_resource", "set_per_device_resource", "reinitialize")
MODULES = (
    "rmm",
    "rmm.rmm",
    "rmm.mr",
    "rmm.pylibrmm.memory_resource",
    "rmm.pylibrmm.memory_resource._memory_resource",
)
"""All modules of RMM that have these functions as attributes."""


def count(rmm: Any) -> None:
    """Count what the program allocates through RMM from now on. To be called before it uses RMM."""
    mr = rmm.mr
    if is_counting(rmm):
        return
    get, set_of_device, set_current = (
        mr.get_per_device_resource,
        mr.set_per_device_resource,
        mr.set_current_device_resource,
    )
    reset = rmm.reinitialize
    adaptors = _Adaptors(mr)

    @functools.wraps(set_of_device)
    def set_per_device_resource(device: int, mr: Any) -> Any:
        return set_of_device(device, adaptors.counting(mr))

    @functools.wraps(set_current)
    def set_current_device_resource(mr: Any) -> Any:
        return set_current(adaptors.counting(mr))

    @functools.wraps(reset)
    def reinitialize(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            forget_pools()
        result = reset(*args, **kwargs)
        with suppress(Exception):
            for device in mr.get_log_filenames():  # those that have a resource
                set_of_device(device, adaptors.counting(get(device)))
        return result

    _replace({set_of_device: set_per_device_resource, set_current: set_current_device_resource, reset: reinitialize})
    # RMM would create this resource by itself when the program first uses the device.
    set_of_device(0, adaptors.counting(mr.CudaMemoryResource()))


def is_counting(rmm: Any) -> bool:
    return hasattr(rmm.mr.set_per_device_resource, "gpumond")


class _Adaptors:
    """The adaptors that this module has created, as long as the program or RMM uses them."""

    def __init__(self, mr: Any) -> None:
        self._in_use: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._kind: Any = _adaptor(mr.StatisticsResourceAdaptor)
        self._logging = getattr(mr, "LoggingResourceAdaptor", ())

    def counting(self, resource: Any) -> Any:
        """Return the resource with an adaptor on top, and the same adaptor for the same resource.

        Return the resource itself if its stack counts already, if it isn't device memory, or if RMM looks for an
        adaptor of this kind on top of the stack.
        """
        try:
            forget_pools()  # the program replaces a resource
            if isinstance(resource, self._logging):
                return resource
            stack = read_stack(resource)
            if stack is None or stack.live is not None or stack.count is not None:
                return resource
            adaptor = self._in_use.get(id(resource))
            if adaptor is None:
                adaptor = self._in_use[id(resource)] = self._kind(resource)
            return adaptor
        except Exception:  # RMM itself tells the program what is wrong with its resource
            return resource


def _adaptor(statistics: Any) -> type:
    """Return a class of adaptors that have the attributes of the resource below them, and pass for its class."""

    class CountingResourceAdaptor(statistics):  # type: ignore[misc]
        """Counts the bytes that the program allocates. `upstream_mr` is the resource that the program has set."""

        __class__ = property(lambda self: type(self.upstream_mr))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.upstream_mr, name)

    return CountingResourceAdaptor


def _replace(functions: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    for new in functions.values():
        new.gpumond = True  # type: ignore[attr-defined]
    for module in filter(None, map(sys.modules.get, MODULES)):
        for name in SETTERS:
            old = getattr(module, name, None)
            if old in functions:
                setattr(module, name, functions[old])
