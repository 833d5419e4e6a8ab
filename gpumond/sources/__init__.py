"""Where device facts come from. A source is one verb, ``read``, and runs in the collector's child process.

To add one: write ``sources/NAME.py`` with a class that has the three methods below, and add its
import string to ``SOURCES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol, runtime_checkable

from gpumond.model.snapshot import Reading
from gpumond.sources.process.procfs import ProcessStart

SOURCES = {
    "nvml": "gpumond.sources.nvml:NvmlSource",
    "drm": "gpumond.sources.drm:DrmSource",
    "every": "gpumond.sources.composite:CompositeSource",
    "sim": "gpumond.sources.sim:SimSource",
}


NOWHERE = -1


class ReadProgress:
    """How a reading goes: a source that ``follow``s it says at which device it is, and leaves out some."""

    def __init__(self, at: Callable[[int], None] = lambda index: None) -> None:
        self.at = at
        self.leave_out: Mapping[int, str] = {}
        """UUIDs by index."""
        self.lives: Mapping[int, ProcessStart] = {}
        """Of processes of the reading, where the source has looked."""


class DeviceSource(Protocol):
    name: str

    def open(self) -> None:
        """Raises SourceUnavailable."""

    def read(self) -> Reading:
        """May block. One bad device is a Fault in the Reading, not an error."""

    def close(self) -> None: ...


@runtime_checkable
class ProgressReporter(Protocol):
    """A source that can go on without a device at which its driver hangs."""

    def follow(self, course: ReadProgress) -> None: ...


def load(name: str, course: ReadProgress | None = None) -> DeviceSource:
    """A source by its name in the table; raises KeyError for a name that is not there."""
    module, _, attribute = SOURCES[name].partition(":")
    source: DeviceSource = getattr(import_module(module), attribute)()
    if course is not None and isinstance(source, ProgressReporter):
        source.follow(course)
    return source
