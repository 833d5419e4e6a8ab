"""Devices and their contexts. Nothing is listed before the program uses a device."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

from tests.agent.fakes.forbidden import forbidden

from .driver import NumbaCUDAMemoryManager

get_context = reset = forbidden("get_context or reset")
DEVICES = 2


class _DeviceContextManager:
    def __init__(self, ordinal: int) -> None:
        self._device = SimpleNamespace(id=ordinal, primary_context=None)

    def __getattr__(self, name: str) -> Any:
        forbidden(name)()
        raise AttributeError(name)


class _DeviceList:
    @property
    @functools.cache  # noqa: B019
    def lst(self) -> list[_DeviceContextManager]:
        sys.stdout.write("initialized ")
        return [_DeviceContextManager(ordinal) for ordinal in range(DEVICES)]


gpus = _DeviceList()


def use(ordinal: int, manager: Any = None) -> Any:
    """Create a context on a device, as a program does, and return its memory manager."""
    device = gpus.lst[ordinal]._device
    device.primary_context = SimpleNamespace(memory_manager=manager or NumbaCUDAMemoryManager())
    return device.primary_context.memory_manager
