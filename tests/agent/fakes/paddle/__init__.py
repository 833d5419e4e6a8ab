"""Fake for PaddlePaddle: its counters, and functions that would create contexts."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

from tests.agent.fakes.forbidden import forbidden

from .base import core

__version__ = "3.3.1"
_driver = ctypes.CDLL("libcuda.so.1")


def _empty_cache() -> None:
    for ordinal in range(2):
        _driver.fake_make_context(ordinal)
    for counters in core.COUNTERS.values():
        counters["Reserved"] = counters["Allocated"]
    core.emptied.append(threading.current_thread().name)


device = SimpleNamespace(
    cuda=SimpleNamespace(
        empty_cache=_empty_cache,
        memory_allocated=forbidden("memory_allocated"),
        get_device_properties=forbidden("get_device_properties"),
        memory_summary=forbidden("memory_summary"),
    )
)
