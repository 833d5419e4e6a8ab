"""Host memory that processes can still allocate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpumond.host.machine import text_of


def available_bytes(pids: Iterable[int], proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Return the smallest of MemAvailable and the free bytes of each cgroup above the processes; None if unknown."""
    stated = re.search(r"^MemAvailable:\s+(\d+)", text_of(f"{proc}/meminfo"), re.MULTILINE)
    sizes = [int(stated[1]) << 10] if stated else []
    for pid in pids:
        sizes += _limits(text_of(f"{proc}/{pid}/cgroup"), cgroups)
    return min(sizes, default=None)


def _limits(text: str, cgroups: str) -> Iterator[int]:
    """Yield limit minus use of a process's memory cgroup and of all above it, in version 1 and 2."""
    for line in text.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            root, limit, current = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, current = f"{cgroups}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while path.strip("/"):
            most, used = text_of(f"{root}{path}/{limit}").strip(), text_of(f"{root}{path}/{current}").strip()
            if most.isdigit() and used.isdigit():
                yield max(0, int(most) - int(used) + _file_cache(f"{root}{path}/memory.stat"))
            path = path.rpartition("/")[0]


def _file_cache(path: str) -> int:
    """Return the bytes of files in memory, which the kernel drops before the limit applies."""
    return sum(int(size) for size in re.findall(r"^(?:in)?active_file (\d+)$", text_of(path), re.MULTILINE))
