"""The formats of recorded logs. The result of an importer depends on the file only.

To add one, write a module with a ``FORMAT``, and add its name to ``IMPORTERS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from gpumond.facts.errors import ConfigError
from gpumond.facts.snapshot import Snapshot
from gpumond.features.recordings.reader import Lines, Remarks
from gpumond.features.recordings.snapshots import Format

IMPORTERS = (
    "record",
    "prometheus",
    "gpu_z",
    "dmon",
    "csv_log",
    "nvidia_smi",
)
"""Modules in the order in which they are asked whether they know a log. The last one reads any other."""

FORMATS: tuple[Format, ...] = tuple(import_module(f"{__package__}.{name}").FORMAT for name in IMPORTERS)


def snapshots(
    lines: Lines, format_name: str, remarks: Remarks, size: float | None = None, interval: float | None = None
) -> Iterator[Snapshot]:
    """Yield the snapshots of a log. ``size``: capacity in bytes of devices without one. Raises ConfigError."""
    chosen = detect(lines) if format_name == "auto" else next(each for each in FORMATS if each.name == format_name)
    yield from chosen.read(lines, remarks, None if size is None else int(size), interval)
    if lines.cut_short:
        remarks.note("cut", "the compressed file is truncated; it was read as far as possible")
    remarks.check()


def detect(lines: Lines) -> Format:
    """Detect the format of a log from its first line. Raises ConfigError."""
    first = lines.first().strip()
    if not first:
        raise ConfigError(f"{lines.name}: the log is empty")
    return next((each for each in FORMATS if each.detect(first)), FORMATS[-1])
