from __future__ import annotations

import threading
from typing import Any

from .world import WORLD


def _cuda_memoryStats(device: int) -> dict[str, Any]:
    return WORLD.stats(device)


def __getattr__(name: str) -> Any:
    if name == "_cuda_hostMemoryStats" and WORLD.host is not None:  # 2.7
        return lambda: {key: {"current": value, "peak": value} for key, value in WORLD.host.items()}
    raise AttributeError(name)


def _host_emptyCache() -> None:
    WORLD.calls.append("empty_host_cache")
    if WORLD.host is not None:
        WORLD.host["allocated_bytes"] = WORLD.host["active_bytes"]


def _cuda_ipc_collect() -> None:
    WORLD.calls.append("ipc_collect")


def _cuda_clearCublasWorkspaces() -> None:
    WORLD.calls.append(f"clear_workspaces in {threading.current_thread().name}")


def _cuda_emptyCache() -> None:
    WORLD.calls.append(f"empty_cache on {WORLD.current}")
    WORLD.contexts.add(WORLD.current)  # a plain cudaFree uses the current device
    WORLD.empty_cache()


def _cuda_getDevice() -> int:
    return WORLD.current


def _cuda_setDevice(device: int) -> None:
    WORLD.contexts.add(device)  # as does CUDA from version 12
    WORLD.current = device


def _cuda_maybeExchangeDevice(device: int) -> int:
    before, WORLD.current = WORLD.current, device if device in WORLD.contexts else WORLD.current
    return before


def _cuda_hasPrimaryContext(device: int) -> bool:
    return device in WORLD.contexts


def _cuda_isHistoryEnabled() -> bool:
    return WORLD.records_history


def _cuda_setMemoryMetadata(metadata: str) -> None:
    WORLD.metadata = metadata


def _cuda_getMemoryMetadata() -> str:
    return WORLD.metadata


def _xpu_memoryStats(device: int) -> dict[str, Any]:
    names = ("allocated_bytes", "reserved_bytes", "active_bytes")
    return {name: stat for name, stat in WORLD.stats(device).items() if name in names}


def _xpu_emptyCache() -> None:
    WORLD.calls.append("empty_cache")
    WORLD.empty_cache()


def _accelerator_getAllocatorSettings() -> str:
    return WORLD.settings
