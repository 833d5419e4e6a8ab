"""ComfyUI's dynamic VRAM (comfy-aimdo 0.2 and later): pages that it maps for weights, outside of PyTorch's allocator.

aimdo's own total contains also what it has seen PyTorch allocate, and would count that twice. So the sizes of its two
kinds of objects are added up, of those that have been created since `track` was called, under ``gpumond run``. No
reference to an object is kept: its end unmaps pages, in the thread that drops the last one.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.adapters import AllocatorAdapter
from gpumond.facts.pools import PoolUsage, Reclaimable

OBJECTS = {"comfy_aimdo.model_vbar": ("ModelVBAR", "loaded_size"), "comfy_aimdo.vram_buffer": ("VRAMBuffer", "size")}
"""The class in each module, and its method that returns the bytes that it has mapped."""

_objects: dict[int, tuple[int, Callable[[], int]]] = {}
"""Device and size of each object, by its id."""
_lock = threading.RLock()  # the end of an object may be run by the garbage collector, inside a reading


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _objects.clear()


os.register_at_fork(after_in_child=_after_fork)


class AimdoAdapter(AllocatorAdapter):
    """It has no step: ComfyUI unmaps the pages that others need by itself, and all of them by ``POST /free``."""

    name = "aimdo"

    def framework(self) -> str:
        return f"comfy-aimdo {version('comfy-aimdo')}"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        mapped: dict[int, int] = {}
        with _lock:
            for ordinal, size in list(_objects.values()):
                mapped[ordinal] = mapped.get(ordinal, 0) + int(size())
        pools = ((cuda.device_uuid(ordinal), size) for ordinal, size in mapped.items())
        return tuple(_usage(uuid, size) for uuid, size in pools if uuid is not None)


def adapter() -> AimdoAdapter | None:
    return AimdoAdapter() if _objects else None


def track(module: Any) -> None:
    """Follow the objects of one of the modules ``OBJECTS`` that are created from now on."""
    name, size_method = OBJECTS[module.__name__]
    cls = getattr(module, name)
    original_init, size = cls.__init__, getattr(cls, size_method)
    if hasattr(original_init, "gpumond"):
        return

    @functools.wraps(original_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        size_reader = _SizeReader()
        size_reader.__dict__ = vars(self)  # the object's own, and so as it changes
        with _lock:
            _objects[id(self)] = int(self.device), functools.partial(size, size_reader)

    __init__.gpumond = True  # type: ignore[attr-defined]
    cls.__init__ = __init__
    for end in ("close", "__del__"):
        if hasattr(cls, end):
            setattr(cls, end, _wrap_end(getattr(cls, end)))


class _SizeReader:
    """Stands in for an object when its size is read."""


def _wrap_end(end: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, after which the object's memory must not be read."""

    @functools.wraps(end)
    def end_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _lock:
            _objects.pop(id(self), None)
        return end(self, *args, **kwargs)

    return end_wrapper


def _usage(uuid: str, size: int) -> PoolUsage:
    return PoolUsage(
        allocator="aimdo",
        device_uuid=uuid,
        live_bytes=size,
        held_bytes=size,
        reclaimable=Reclaimable(0, 0, 0, "not_releasable"),
        stranded_bytes=0,
    )
