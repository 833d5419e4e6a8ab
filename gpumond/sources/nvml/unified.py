"""Memory that devices share with the host.

Applies to devices without memory of their own, whose usage the driver does not report, and to devices whose memory is a
NUMA node of the host (Grace Hopper).
"""

from __future__ import annotations

import re

from gpumond.sources.validation import MemoryCounts

INTEGRATED = re.compile(r"\b(GB10|Orin|Thor)\b")
"""DGX Spark and Jetson. Other names are not matched: a discrete device without memory information must not show the
host's."""


def shared_memory(name: str, proc: str) -> MemoryCounts | None:
    """Return the host's memory without the device's usage, or None unless ``name`` is an integrated device."""
    if not INTEGRATED.search(name):
        return None
    try:
        with open(f"{proc}/meminfo", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file if b":" in line)
        size, free = (int(lines[key].split()[0]) * 1024 for key in (b"MemTotal", b"MemAvailable"))
    except (OSError, ValueError, LookupError):
        return None
    return MemoryCounts(size, None, free, None)


def file_cache(node: int, sys: str) -> int | None:
    """Return the bytes of page cache in the memory of a NUMA node, or None if the node does not exist."""
    try:
        with open(f"{sys}/devices/system/node/node{node}/meminfo", "rb") as file:
            lines = (line.split() for line in file if b"FilePages:" in line)
            return int(next(lines)[3]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None
