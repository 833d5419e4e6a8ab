"""A pipe that wakes the agent's thread, and the identity of descriptors: the program may close any of them."""

from __future__ import annotations

import os


def file_identity(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of the descriptor; None if it is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class WakeupPipe:
    def __init__(self) -> None:
        self._read = self._write = -1
        self._file_identity: tuple[int, int] | None = None
        self.renew()

    def renew(self) -> None:
        """Create a new pipe; close the old one if its descriptors still refer to it."""
        for descriptor in (self._read, self._write):
            if self._is_open(descriptor):
                os.close(descriptor)
        try:
            self._read, self._write = os.pipe()
        except OSError:  # the descriptor limit: waits then end by their timeout
            self._read = self._write = -1
            return
        self._file_identity = file_identity(self._read)
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """Return the descriptor to wait on, -1 if there is none."""
        if not self._is_open(self._read):
            self.renew()
        return self._read

    def set(self) -> None:
        if self._is_open(self._write):
            try:
                os.write(self._write, b"\0")
            except BlockingIOError:
                pass

    def clear(self) -> None:
        try:
            while self._is_open(self._read) and os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass

    def _is_open(self, descriptor: int) -> bool:
        return descriptor >= 0 and file_identity(descriptor) == self._file_identity
