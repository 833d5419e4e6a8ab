"""File that is reloaded when it changes, without a restart."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from gpumond.facts.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
CHECK_SECONDS = 1.0


class ReloadingFile(Generic[T]):
    """Value that ``read`` derives from files, which are checked on access, at most once a second.

    If ``read`` rejects a change, one error is logged and the previous value is kept. The first read raises ConfigError
    as ``read`` does. ``files`` maps a value to the files that it was read from.
    """

    def __init__(
        self,
        read: Callable[[], T],
        files: Callable[[T], Iterable[Path]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._files, self._clock = read, files, clock
        self._value = read()
        self._loaded = self._signature()
        self._checked_at = clock()

    @property
    def value(self) -> T:
        now = self._clock()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._check()
        return self._value

    def _check(self) -> None:
        signature = self._signature()
        if signature == self._loaded:
            return
        self._loaded = signature
        try:
            self._value = self._read()
        except ConfigError as error:
            log.error("a changed file is invalid; its previous content stays in effect: %s", error)
        else:
            log.info("reloaded after a change: %s", ", ".join(map(str, self._files(self._value))))
            self._loaded = self._signature()

    def _signature(self) -> list[tuple[int, int, int] | None]:
        return [_state(path) for path in self._files(self._value)]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
