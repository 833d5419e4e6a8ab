"""The formats of recorded logs. The result of an importer depends on the file only.

To add one, write a module with a ``FORMAT``, and add its name to ``IMPORTERS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from gpumond.facts.errors import ConfigError
from gpumond.facts.snapshot import Snapshot
from gpumond.features.recordings.reader import LogLines, Remarks
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
    lines: LogLines,
    format_name: str,
    remarks: Remarks,
    size_bytes: float | None = None,
    interval_seconds: float | None = None,
) -> Iterator[Snapshot]:
    """Yield the snapshots of a log. ``size_bytes``: capacity of devices without one. Raises ConfigError."""
    log_format = detect(lines) if format_name == "auto" else next(each for each in FORMATS if each.name == format_name)
    yield from log_format.read(lines, remarks, None if size_bytes is None else int(size_bytes), interval_seconds)
    if lines.is_truncated:
        remarks.note("cut", "the compressed file is truncated; it was read as far as possible")
    remarks.check()


def detect(lines: LogLines) -> Format:
    """Detect the format of a log from its first line. Raises ConfigError."""
    first_line = lines.first_line().strip()
    if not first_line:
        raise ConfigError(f"{lines.name}: the log is empty")
    return next((each for each in FORMATS if each.detect(first_line)), FORMATS[-1])
