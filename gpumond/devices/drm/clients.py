"""Usage of a DRM device through one open descriptor, from /proc/PID/fdinfo/N. Performs no I/O.

Key names and units: Documentation/gpu/drm-usage-stats.rst of the kernel. amdgpu has the region ``vram`` and engine
times in nanoseconds; i915 ``local0`` and nanoseconds; xe ``vram0`` and both busy and total cycles.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from gpumond.facts.messages import MAX_INTEGER

_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_LOCAL = re.compile(r"drm-(resident|memory|total)-((?:vram|local)\d*)")
"""Regions in device memory; ``system``, ``gtt`` and ``cpu`` are host memory."""
_COMPUTE = {"compute", "ccs"}
_GRAPHICS = {"gfx", "render", "rcs"}


class EngineTime(NamedTuple):
    """Busy time of an engine: cycles out of ``total``, or nanoseconds if ``total`` is None."""

    busy: int
    total: int | None = None
    capacity: int = 1


class Client(NamedTuple):
    """DRM client. ``id`` is the same for all descriptors of a client, in any process."""

    id: int
    driver: str
    pci_bus_id: str | None
    used_bytes: int | None
    engines: Mapping[str, EngineTime]

    @property
    def kinds(self) -> tuple[str, ...]:
        busy = {name for name, engine in self.engines.items() if engine.busy}
        return tuple(kind for kind, names in (("compute", _COMPUTE), ("graphics", _GRAPHICS)) if busy & names)


def client(text: str) -> Client | None:
    """Return the client, or None without an ID: its memory could otherwise be counted twice."""
    values = dict(_pair(line) for line in text.splitlines())
    number = _number(values.get("drm-client-id", ""))
    if "drm-driver" not in values or number is None:
        return None
    return Client(number, values["drm-driver"], values.get("drm-pdev"), _used(values), _engines(values))


def utilization(before: Mapping[int, Client], now: Mapping[int, Client], seconds: float) -> float:
    """Return the busy fraction of the busiest engine, over the clients present at both times."""
    shares: defaultdict[str, float] = defaultdict(float)
    for number, client in now.items():
        for name, engine in client.engines.items():
            earlier = before[number].engines.get(name) if number in before else None
            if earlier is None:
                continue
            whole = seconds * 1e9
            if engine.total is not None:
                whole = engine.total - (earlier.total or 0)
            if whole > 0:
                # The counters may temporarily decrease.
                shares[name] += max(0, engine.busy - earlier.busy) / whole / engine.capacity
    return min(1.0, max(shares.values(), default=0.0))


def _used(values: Mapping[str, str]) -> int | None:
    """Return resident bytes. Kernels before 6.5 report ``memory``, and some only the requested size."""
    sizes: dict[str, dict[str, int]] = {}
    for key, value in values.items():
        match = _LOCAL.fullmatch(key)
        size = _bytes(value) if match else None
        if match and size is not None:
            sizes.setdefault(match[2], {})[match[1]] = size
    if not sizes:
        return None
    return sum(
        next(kinds[kind] for kind in ("resident", "memory", "total") if kind in kinds) for kinds in sizes.values()
    )


def _engines(values: Mapping[str, str]) -> dict[str, EngineTime]:
    engines: dict[str, EngineTime] = {}
    for key, value in values.items():
        for prefix in ("drm-engine-", "drm-cycles-"):
            name = key.removeprefix(prefix)
            busy = _number(value.removesuffix(" ns")) if name != key else None
            total = _number(values.get(f"drm-total-cycles-{name}", ""))
            if busy is None or (prefix == "drm-cycles-" and total is None) or name.startswith("capacity-"):
                continue
            capacity = _number(values.get(f"drm-engine-capacity-{name}", "")) or 1
            engines[name] = EngineTime(busy, total if prefix == "drm-cycles-" else None, capacity)
    return engines


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def _bytes(value: str) -> int | None:
    number, _, unit = value.partition(" ")
    count = _number(number)
    size = None if count is None or unit not in _UNITS else count * _UNITS[unit]
    return size if size is not None and size < MAX_INTEGER else None


def _number(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else None
