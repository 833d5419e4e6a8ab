"""Where device facts come from. A source is one verb, ``read``, and runs in the collector's child process.

To add one: write ``sources/NAME.py`` with a class that has the three methods below, and add its
import string to ``SOURCES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from gpumond.model import Reading

SOURCES = {
    "nvml": "gpumond.sources.nvml:NvmlSource",
    "drm": "gpumond.sources.drm:DrmSource",
    "every": "gpumond.sources.every:EverySource",
    "sim": "gpumond.sources.sim:SimSource",
}


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


def load(name: str) -> DeviceSource:
    """A source by its name in the table; raises KeyError for a name that is not there."""
    module, _, attribute = SOURCES[name].partition(":")
    source: DeviceSource = getattr(import_module(module), attribute)()
    return source
