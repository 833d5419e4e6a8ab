"""Where device facts come from. A source is one verb, ``read``, and runs in the collector's child process.

To add one: write ``sources/NAME.py`` with a class that has the three methods below, and add its
import string to ``SOURCES``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, runtime_checkable

from gpumond.model import Reading
from gpumond.sources.processes import Life

SOURCES = {
    "nvml": "gpumond.sources.nvml:NvmlSource",
    "drm": "gpumond.sources.drm:DrmSource",
    "every": "gpumond.sources.every:EverySource",
    "sim": "gpumond.sources.sim:SimSource",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that the child must not ask, since the driver hangs or crashes at it."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One line to the child that runs a source: read, but leave out these."""

    leave_out: tuple[LeftOut, ...] = ()


NOWHERE = -1


class Place:
    """Which device the child is at, in a file in memory that its parent can read while the child hangs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def at(self, index: int) -> None:
        os.pwrite(self._descriptor, index.to_bytes(4, "little", signed=True), 0)

    def where(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 4, 0), "little", signed=True)


class Course:
    """How a reading goes: a source that ``follow``s it says at which device it is, and leaves out some."""

    def __init__(self, at: Callable[[int], None] = lambda index: None) -> None:
        self.at = at
        self.leave_out: Mapping[int, str] = {}
        """UUIDs by index."""
        self.lives: Mapping[int, Life] = {}
        """Of processes of the reading, where the source has looked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One line from the child that runs a source: opened (empty), a reading, or why there is none."""

    reading: Reading | None = None
    reason: str = ""
    message: str = ""


class DeviceSource(Protocol):
    name: str

    def open(self) -> None:
        """Raises SourceUnavailable."""

    def read(self) -> Reading:
        """May block. One bad device is a Fault in the Reading, not an error."""

    def close(self) -> None: ...


@runtime_checkable
class Follower(Protocol):
    """A source that can go on without a device at which its driver hangs."""

    def follow(self, course: Course) -> None: ...


def load(name: str, course: Course | None = None) -> DeviceSource:
    """A source by its name in the table; raises KeyError for a name that is not there."""
    module, _, attribute = SOURCES[name].partition(":")
    source: DeviceSource = getattr(import_module(module), attribute)()
    if course is not None and isinstance(source, Follower):
        source.follow(course)
    return source
