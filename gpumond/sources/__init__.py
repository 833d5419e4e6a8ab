"""Sources of device facts. A source has one main method, ``read``, and runs in the collector's child process.

To add one, write ``sources/NAME.py`` with a class that has the three methods below, and add its import string to
``SOURCES``.
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
    """Progress of a reading: a source that has one reports its current device, and skips the excluded ones."""

    def __init__(self, at: Callable[[int], None] = lambda index: None) -> None:
        self.at = at
        self.leave_out: Mapping[int, str] = {}
        """UUIDs of excluded devices by index."""
        self.process_starts: Mapping[int, ProcessStart] = {}
        """Start data of processes in the reading, if the source has read it."""


class DeviceSource(Protocol):
    name: str

    def open(self) -> None:
        """Open the driver. Raises SourceUnavailable."""

    def read(self) -> Reading:
        """Read all devices. May block. The failure of one device is a Fault in the Reading, not an error."""

    def close(self) -> None: ...


@runtime_checkable
class ProgressReporter(Protocol):
    """Source that can continue without a device on which its driver hangs."""

    def set_progress(self, progress: ReadProgress) -> None: ...


def load(name: str, progress: ReadProgress | None = None) -> DeviceSource:
    """Return the source with this name in ``SOURCES``. Raises KeyError."""
    module, _, attribute = SOURCES[name].partition(":")
    source: DeviceSource = getattr(import_module(module), attribute)()
    if progress is not None and isinstance(source, ProgressReporter):
        source.set_progress(progress)
    return source
