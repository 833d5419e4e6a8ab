"""A pipe that ends the agent's wait, and the question whether a descriptor is still ours.

A program that turns itself into a service closes every descriptor, and its own next file gets the number.
Ours must then not write to it, nor close it: whoever uses a descriptor asks first.
"""

from __future__ import annotations

import os


def identity(descriptor: int) -> tuple[int, int] | None:
    """What the descriptor stands for; None if for nothing."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class WakeupPipe:
    def __init__(self) -> None:
        self._read = self._write = -1
        self._identity: tuple[int, int] | None = None
        self.renew()

    def renew(self) -> None:
        """A new pipe; the old one is closed if it is still ours."""
        for descriptor in (self._read, self._write):
            if self._ours(descriptor):
                os.close(descriptor)
        try:
            self._read, self._write = os.pipe()
        except OSError:  # no descriptor left: waits then end by their timeout
            self._read = self._write = -1
            return
        self._identity = identity(self._read)
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """The end to wait on, -1 if there is none."""
        if not self._ours(self._read):
            self.renew()
        return self._read

    def set(self) -> None:
        if self._ours(self._write):
            try:
                os.write(self._write, b"\0")
            except BlockingIOError:
                pass

    def clear(self) -> None:
        try:
            while self._ours(self._read) and os.read(self._read, 4096):
                pass
        except BlockingIOError:
            pass

    def _ours(self, descriptor: int) -> bool:
        return descriptor >= 0 and identity(descriptor) == self._identity
