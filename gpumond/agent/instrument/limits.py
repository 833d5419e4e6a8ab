"""``limit(bytes, device)``: a soft quota, set at the program's own allocators.

Above it they flush, then raise their out-of-memory error, as if the device were smaller. It applies to this process
only, and frees nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumond.agent.adapters import AllocatorAdapter, FlushRefused, Limitable
from gpumond.agent.registry import REGISTRY
from gpumond.model.program import AppliedLimit
from gpumond.protocol.messages import clean


def check_limit(limit_bytes: object, device: object) -> None:
    """Raise TypeError or ValueError for wrong arguments."""
    if limit_bytes is not None and (not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool)):
        raise TypeError(f"limit: bytes: expected int, or None for no limit, got {type(limit_bytes).__name__}")
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit: bytes: expected at least 1, or None for no limit, got {limit_bytes}")
    if device is not None and (not isinstance(device, (str, int)) or isinstance(device, bool)):
        raise TypeError(f"limit: device: expected a UUID, a number, or None for all, got {type(device).__name__}")


def apply(limit_bytes: int | None, device: str | int | None) -> tuple[AppliedLimit, ...]:
    """Set the limit at each allocator, and return the results. Never raises."""
    return tuple(one for adapter in REGISTRY.adapters() for one in _apply(adapter, limit_bytes, device))


def _apply(adapter: AllocatorAdapter, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
    name, uuid = adapter.name, device if isinstance(device, str) else None
    if not isinstance(adapter, Limitable):
        return (AppliedLimit(name, uuid, limit_bytes, False, f"{name} cannot be limited at run time"),)
    try:
        applied = adapter.limit(limit_bytes, device)
    except FlushRefused as refusal:
        return (AppliedLimit(name, uuid, limit_bytes, False, clean(refusal)),)
    except Exception as error:  # an error of the library
        return (AppliedLimit(name, uuid, limit_bytes, False, clean(f"{type(error).__name__}: {error}")),)
    return applied or (AppliedLimit(name, uuid, limit_bytes, False, f"{name} does not use this device"),)
