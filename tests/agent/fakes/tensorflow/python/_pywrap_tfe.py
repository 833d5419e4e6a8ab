from __future__ import annotations

MEMORY: dict[str, dict[str, int]] = {}
"""Memory of each device by name. A missing device raises ValueError, as in the library."""


def TFE_GetMemoryInfo(handle: object, device: str) -> dict[str, int]:
    if handle is None:
        raise TypeError("TFE_GetMemoryInfo without a context would crash")
    if device not in MEMORY:
        raise ValueError(f"No matching devices found for '{device}'")
    return MEMORY[device]
