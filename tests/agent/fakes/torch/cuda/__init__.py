from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .. import _C
from ..world import WORLD
from . import memory

__all__ = ["memory"]


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(range(WORLD.devices if WORLD.initialized else 0))
    if name.startswith("__"):
        raise AttributeError(name)
    WORLD.calls.append(f"forbidden: {name}")
    raise AssertionError(f"the agent must not use torch.cuda.{name}")


def is_initialized() -> bool:
    return WORLD.initialized and not WORLD.bad_fork


def _is_in_bad_fork() -> bool:
    return WORLD.bad_fork


def get_allocator_backend() -> str:
    return WORLD.backend


def get_device_properties(device: int) -> Any:
    return SimpleNamespace(uuid=f"00000000-0000-0000-0000-00000000000{device}")


def empty_cache() -> None:
    if is_initialized():
        _C._cuda_emptyCache()


class CUDAGraph:
    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> str:
        """Begin."""
        if capture_error_mode == "fail":
            raise RuntimeError("cannot capture")
        return "began"

    def capture_end(self) -> str:
        return "ended"
