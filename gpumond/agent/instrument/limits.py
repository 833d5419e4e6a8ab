"""``limit(bytes, device)``: a soft quota, set at the program's own allocators. Beyond it they flush, then raise their
out-of-memory error, as if the device were smaller. It binds this process alone, and no byte is taken from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpumond.agent.adapters import FlushRefused
from gpumond.agent.registry import REGISTRY
from gpumond.model.program import AppliedLimit
from gpumond.protocol.messages import clean


class Limiter(Protocol):
    """An adapter whose library can be limited while it runs."""

    name: str

    def limit(self, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
        """``device``: a UUID, the number that the program knows it by, or None for all. Raises Refused."""


def check_limit(limit_bytes: object, device: object) -> None:
    """Raises TypeError, ValueError."""
    if limit_bytes is not None and (not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool)):
        raise TypeError(f"limit: bytes: expected int, or None for no limit, got {type(limit_bytes).__name__}")
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit: bytes: expected at least 1, or None for no limit, got {limit_bytes}")
    if device is not None and (not isinstance(device, (str, int)) or isinstance(device, bool)):
        raise TypeError(f"limit: device: expected a UUID, a number, or None for all, got {type(device).__name__}")


def apply(limit_bytes: int | None, device: str | int | None) -> tuple[AppliedLimit, ...]:
    """What became of it, allocator by allocator. Never raises."""
    return tuple(one for adapter in REGISTRY.adapters() for one in _apply(adapter, limit_bytes, device))


def _apply(adapter: object, limit_bytes: int | None, device: str | int | None) -> Sequence[AppliedLimit]:
    name, uuid = str(getattr(adapter, "name", "")), device if isinstance(device, str) else None
    limiter: Limiter | None = adapter if hasattr(adapter, "limit") else None  # type: ignore[assignment]
    if limiter is None:
        return (AppliedLimit(name, uuid, limit_bytes, False, f"{name} cannot be limited while it runs"),)
    try:
        applied = limiter.limit(limit_bytes, device)
    except FlushRefused as refusal:
        return (AppliedLimit(name, uuid, limit_bytes, False, clean(refusal)),)
    except Exception as error:  # the library's own
        return (AppliedLimit(name, uuid, limit_bytes, False, clean(f"{type(error).__name__}: {error}")),)
    return applied or (AppliedLimit(name, uuid, limit_bytes, False, f"{name} uses no such device"),)
