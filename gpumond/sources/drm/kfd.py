"""Memory of ROCm programs, from amdgpu's compute driver (KFD) in sysfs, which every user can read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

Usages = Mapping[str, Mapping[int, int]]
"""Bytes by PCI address and pid."""


class Kfd:
    """Reader of KFD files. ``root`` replaces /sys."""

    def __init__(self, root: str = "/sys") -> None:
        self._root = f"{root}/class/kfd/kfd"
        self._devices: dict[str, str] = {}

    def read(self) -> Usages:
        usages: dict[str, dict[int, int]] = {}
        for pid, gpu, size in self._used():
            if gpu not in self._devices:
                self._devices = dict(self._topology())
            if gpu in self._devices:
                by_pid = usages.setdefault(self._devices[gpu], {})
                by_pid[pid] = by_pid.get(pid, 0) + size  # partitions of one device are added
        return usages

    def _used(self) -> Iterator[tuple[int, str, int]]:
        for pid in _names(f"{self._root}/proc"):
            for file in _names(f"{self._root}/proc/{pid}"):
                size = _text(f"{self._root}/proc/{pid}/{file}") if file.startswith("vram_") else ""
                if pid.isdecimal() and size.isdecimal():
                    yield int(pid), file.removeprefix("vram_"), int(size)

    def _topology(self) -> Iterator[tuple[str, str]]:
        for node in _names(f"{self._root}/topology/nodes"):
            directory = f"{self._root}/topology/nodes/{node}"
            lines = (line.split() for line in _text(f"{directory}/properties").splitlines())
            properties = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
            where = properties.get("location_id", 0)
            if where:
                bus, device, function = where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7
                address = f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
                yield _text(f"{directory}/gpu_id"), address


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(65536).strip()
    except OSError:
        return ""  # the process or its queue no longer exists
