"""NVIDIA devices, through the driver's library NVML.

This module detects the library, and states why it cannot be loaded: a missing symbol or dependency, a damaged file, or
a file for another architecture. It does not import pynvml: the daemon itself only detects the library, and saves that
memory.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator

from gpumond.facts.errors import FaultKind, SourceUnavailable, remedy
from gpumond.facts.messages import printable_text

NVML = "libnvidia-ml.so.1"

LONGEST_REASON = 90
"""Maximum length of a reason in characters; the message of a failure has at most 256."""

_DIRECTORIES = ("/usr/lib64", "/usr/lib", "/usr/lib/*-linux-gnu", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")


def load_error() -> str | None:
    """Return the loader's error; an empty string if the file does not exist, None if it can be loaded."""
    try:
        ctypes.CDLL(NVML)
    except OSError as error:
        reason = str(error)
    else:
        return None
    if not reason.startswith(f"{NVML}: cannot open shared object file: No such file"):
        return reason
    # The loader silently skips a file for another architecture.
    path = next(_library_paths(), "")
    return f"{path} is built for another architecture" if path else ""


def not_loadable(reason: str) -> SourceUnavailable:
    """Return the failure with the end of the loader's error, whose beginning is a path."""
    text = printable_text(reason)
    if len(text) > LONGEST_REASON:
        text = f"…{text[1 - LONGEST_REASON :]}"
    kind: FaultKind = "library_not_loadable"
    return SourceUnavailable(kind, f"{NVML} can't be loaded ({text}): {remedy(kind)}")


def _library_paths() -> Iterator[str]:
    directories = [directory for directory in os.environ.get("LD_LIBRARY_PATH", "").split(":") if directory]
    for pattern in (*map(glob.escape, directories), *_DIRECTORIES):
        yield from filter(os.path.isfile, glob.glob(os.path.join(pattern, NVML)))


def detect(sys: str) -> bool:
    """Return True if the library can be loaded. Raises SourceUnavailable if it exists and cannot be loaded."""
    reason = load_error()
    if reason:
        raise not_loadable(reason)
    return reason is None
