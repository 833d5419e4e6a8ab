"""A file whose content is taken up when it changes, without a restart."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from gpumond.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK_SECONDS = 1.0


class ReloadingFile(Generic[T]):
    """What ``read`` makes of some files. They are looked at when the value is asked for, at most once a second.

    A change that ``read`` refuses is said once in the log, and the value before it holds. The first reading raises
    ConfigError as ``read`` does. ``files``: of a value, which files it came from.
    """

    def __init__(
        self,
        read: Callable[[], T],
        files: Callable[[T], Iterable[Path]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._files, self._clock = read, files, clock
        self._value = read()
        self._seen = self._signature()
        self._looked_at = clock()

    @property
    def value(self) -> T:
        now = self._clock()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look()
        return self._value

    def _look(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("a changed file is wrong, what it said before holds: %s", error)
        else:
            log.info("a changed file was taken up: %s", ", ".join(map(str, self._files(self._value))))
            self._seen = self._signature()

    def _signature(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._files(self._value)]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
