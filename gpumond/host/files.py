"""Non-blocking reads of the operator's files; FIFOs and devices other than /dev/null are refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import has_control_characters

MAX_BYTES = 16 * 1024**2
NULL = os.makedev(1, 3)
"""Device number of /dev/null on Linux: an empty file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also if it is neither a regular file nor /dev/null."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev == NULL):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_text(path: Path) -> str:
    """Return a file's content as UTF-8. Raises OSError, UnicodeDecodeError."""
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_BYTES // 1024**2} MiB", str(path))
    return content.decode()


def read_secret(path: Path) -> str:
    """Return the only line of a file. It is read at each use, as the file can be replaced. Raises ConfigError.

    A control character is refused, since a line end in a token would begin another header.
    """
    try:
        text = read_text(path).removesuffix("\n").removesuffix("\r").strip(" \t")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or 'not text'}") from None
    if not text or has_control_characters(text):
        raise ConfigError(f"{path} is empty or has a line end or another control character; expected one line")
    return text
