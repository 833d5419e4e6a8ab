"""Device for the fake of CuPy: it counts allocations and writes the counts at the end."""

from __future__ import annotations

import atexit
import json
import os

MIB = 1 << 20
SIZE = int(os.environ.get("FAKE_SIZE_MIB", "8192")) * MIB
OTHERS = int(os.environ.get("FAKE_OTHERS_MIB", "0")) * MIB
"""Bytes used by another program."""


class Full(Exception):
    pass


class Device:
    def __init__(self) -> None:
        self.used = self.peak = self.allocations = self.worked = 0
        atexit.register(self.write)

    def allocate(self, size: int) -> None:
        if self.used + size > SIZE - OTHERS:
            raise Full
        self.used += size
        self.allocations += 1
        self.peak = max(self.peak, self.used)
        if self.allocations == 1:
            self.write()

    def free(self, size: int) -> None:
        self.used -= size

    def write(self) -> None:
        path = os.environ.get("FAKE_LOG")
        if path:
            with open(path, "w") as file:
                json.dump(vars(self), file)


class Pool:
    """Caching pool of chunks, which are only handed out as a whole."""

    def __init__(self, device: Device, rounding: int) -> None:
        self.device, self.rounding = device, rounding
        self.limit = SIZE
        self.live = self.held = 0
        self.free: list[int] = []

    def take(self, size: int) -> int:
        size = -(-size // self.rounding) * self.rounding
        chunk = min((chunk for chunk in self.free if chunk >= size), default=0)
        if chunk:
            self.free.remove(chunk)
        else:
            if self.held + size > self.limit:
                self.empty()
            if self.held + size > self.limit:
                raise Full
            self.device.allocate(size)
            self.held += size
            chunk = size
        self.live += chunk
        return chunk

    def give(self, chunk: int) -> None:
        self.live -= chunk
        self.free.append(chunk)

    def empty(self) -> None:
        for chunk in self.free:
            self.device.free(chunk)
            self.held -= chunk
        self.free.clear()


DEVICE = Device()
