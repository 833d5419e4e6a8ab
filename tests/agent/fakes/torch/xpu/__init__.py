"""Fake for the XPU half: the same blocks with fewer statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .. import _C
from ..world import WORLD


def __getattr__(name: str) -> Any:
    if name == "default_generators":
        return tuple(range(WORLD.devices if WORLD.initialized else 0))
    if name.startswith("__"):
        raise AttributeError(name)
    WORLD.calls.append(f"forbidden: {name}")
    raise AssertionError(f"the agent must not use torch.xpu.{name}")


def is_initialized() -> bool:
    return WORLD.initialized and not WORLD.bad_fork


def _is_in_bad_fork() -> bool:
    return WORLD.bad_fork


def get_device_properties(device: int) -> Any:
    """Devices 0 and 1 are tiles of one device on bus 3; the next is a device on bus 5."""
    bus, part = (3, device) if device < 2 else (3 + device, 0)
    uuid = bytes([0x86, 0x80, 0xDA, 0x0B, 0, 0, 0, 0, bus, 0, 0, 0, 0, 0, 0, part]).hex()
    return SimpleNamespace(uuid=f"{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:]}", device_id=0x0BDA)


def empty_cache() -> None:
    if is_initialized():
        _C._xpu_emptyCache()


class XPUGraph:
    def capture_begin(self) -> str:
        return "began"

    def capture_end(self) -> str:
        return "ended"
