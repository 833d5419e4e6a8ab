"""Reads of the operator's files, which refuse FIFOs and devices other than /dev/null; replaced files, and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

from gpumond.facts.errors import ConfigError
from gpumond.facts.units import has_control_characters

MAX_BYTES = 16 * 1024**2
NULL_DEVICE = os.makedev(1, 3)
"""Device number of /dev/null on Linux: an empty file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also if it is neither a regular file nor /dev/null."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) or (stat.S_ISCHR(status.st_mode) and status.st_rdev == NULL_DEVICE):
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


def unreadable_text(path: str | Path, error: OSError, expected: str) -> str:
    """Return why a user's file can't be read, with what is ``expected``."""
    remedy = "run this as a user who may read it" if isinstance(error, PermissionError) else f"expected {expected}"
    return f"{path}: {error.strerror or error}; {remedy}"


def unwritable_text(path: str | Path, error: OSError) -> str:
    """Return why a file can't be written."""
    if isinstance(error, FileNotFoundError):
        return f"{path}: {Path(path).parent} isn't a directory; create it, or choose another file"
    return f"{path}: {error.strerror or error}"


def read_secret(path: Path) -> str:
    """Return the only line of a file. It is read at each use, as the file can be replaced. Raises ConfigError.

    A control character is refused, since a newline in a token would begin another header.
    """
    try:
        text = read_text(path).removesuffix("\n").removesuffix("\r").strip(" \t")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "; expected a file with one line" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path} can't be read: {getattr(error, 'strerror', None) or 'not text'}{remedy}") from None
    if not text or has_control_characters(text):
        raise ConfigError(f"{path} is empty or has a newline or another control character; expected one line")
    return text


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole, or create it, for this user only. Raises OSError."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def lock_file(path: Path) -> int:
    """Return the descriptor of a file that is locked for its owner until it is closed.

    The file remains: somebody may have opened it before a removal, and would then hold another lock than the next one.

    Raises BlockingIOError if it is locked already, and OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
