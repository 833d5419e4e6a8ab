"""Memory of the machine that processes can still allocate: the kernel's estimate, and the limits of their cgroups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CGROUPS = "/sys/fs/cgroup"


def available_bytes(pids: Iterable[int], proc: str = "/proc", cgroups: str = CGROUPS) -> int | None:
    """Return the smallest of MemAvailable and the free bytes of each cgroup above the processes; None if unknown."""
    known = [_meminfo(f"{proc}/meminfo")]
    for pid in pids:
        known += _limits(_text(f"{proc}/{pid}/cgroup"), cgroups)
    found = [size for size in known if size is not None]
    return min(found) if found else None


def _meminfo(path: str) -> int | None:
    for line in _text(path).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


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
            most, used = _text(f"{root}{path}/{limit}").strip(), _text(f"{root}{path}/{current}").strip()
            if most.isdigit() and used.isdigit():
                yield max(0, int(most) - int(used) + _file_cache(f"{root}{path}/memory.stat"))
            path = path.rpartition("/")[0]


def _file_cache(path: str) -> int:
    """Return the bytes of files in memory, which the kernel drops before the limit applies."""
    names = ("active_file", "inactive_file")
    fields = (line.split() for line in _text(path).splitlines())
    return sum(int(size) for name, size in fields if name in names)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
