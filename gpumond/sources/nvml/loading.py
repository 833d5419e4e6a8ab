"""Why the loader does not load a driver's library.

Covers: a missing symbol or dependency, a damaged file, a file for another machine. Does not cover: what the library
answers once it is loaded (nvml_library.py).
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterator, Mapping

from gpumond.errors import FaultKind, SourceUnavailable
from gpumond.model.remedies import remedy
from gpumond.protocol.messages import clean

NVML = "libnvidia-ml.so.1"

LONGEST_REASON = 90
"""Characters: the message of a failure has at most 256."""

_DIRECTORIES = ("/usr/lib64", "/usr/lib", "/usr/lib/*-linux-gnu", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib")


def load_error(library: str = NVML, environ: Mapping[str, str] = os.environ) -> str | None:
    """The reason why the library cannot be loaded: empty if there is no such file, None if it can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        reason = str(error)
    else:
        return None
    if not reason.startswith(f"{library}: cannot open shared object file: No such file"):
        return reason
    # The loader skips a file for another machine without a word.
    path = next(_places(library, environ), "")
    return f"{path} is built for another machine" if path else ""


def not_loadable(reason: str, library: str = NVML) -> SourceUnavailable:
    """The failure with the loader's reason, of which the end counts: it begins with a path."""
    said = clean(reason)
    if len(said) > LONGEST_REASON:
        said = f"…{said[1 - LONGEST_REASON :]}"
    kind: FaultKind = "library_not_loadable"
    return SourceUnavailable(kind, f"{library} cannot be loaded ({said}): {remedy(kind)}")


def _places(library: str, environ: Mapping[str, str]) -> Iterator[str]:
    own = [directory for directory in environ.get("LD_LIBRARY_PATH", "").split(":") if directory]
    for pattern in (*map(glob.escape, own), *_DIRECTORIES):
        yield from filter(os.path.isfile, glob.glob(os.path.join(pattern, library)))
