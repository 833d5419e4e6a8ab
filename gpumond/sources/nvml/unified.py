"""Memory that devices share with the host.

Of devices that have none of their own and use the host's, where the driver does not say how much; and what the host
puts into a device's own (Grace Hopper), which it has as a NUMA node.
"""

from __future__ import annotations

import re

from gpumond.sources.validation import MemoryCounts

INTEGRATED = re.compile(r"\b(GB10|Orin|Thor)\b")
"""DGX Spark and Jetson. A name that is not here is not guessed at: a discrete card with no memory
information must not show the host's."""


def shared_memory(name: str, proc: str) -> MemoryCounts | None:
    """The machine's memory, what of it is used by the device not included; None unless ``name`` is integrated."""
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
    """Bytes of files that the kernel keeps in the memory of that node; None where there is no such node."""
    try:
        with open(f"{sys}/devices/system/node/node{node}/meminfo", "rb") as file:
            lines = (line.split() for line in file if b"FilePages:" in line)
            return int(next(lines)[3]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):
        return None
