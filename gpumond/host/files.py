"""Non-blocking reads of the operator's files; FIFOs and devices are refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 16 * 1024**2


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file. Raises OSError, also for any other kind of file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
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
