"""The daemon's end of the helper processes: one at a time for a program, each awaited with a deadline.

A helper is never killed: a driver call that is cut off may leave its program locked. It holds an flock on a file of the
program until it ends, so that a daemon, also the next one, starts no second one beside it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import from_json, to_json
from gpumond.features.suspend.helper import Answer, Order

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 1024
ENDING_POLLS, ENDING_SECONDS = 100, 0.01
BASE_SECONDS = 60.0
BYTES_PER_SECOND = 256 << 20
"""A quarter of the lowest rate that was measured."""


def deadline_seconds(size: int) -> float:
    """Return the longest wait for a helper that moves this many bytes."""
    return BASE_SECONDS + size / BYTES_PER_SECOND


class Helpers:
    """``directory``: that of the lock files."""

    def __init__(self, directory: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._directory = directory
        self._environ = {name: text for name, text in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._processes: list[subprocess.Popen[bytes]] = []

    async def ask(self, order: Order, seconds: float) -> Answer | None:
        """Return the answer of a new helper; None if there is none in time, or if an earlier helper still works."""
        self._processes = [each for each in self._processes if each.poll() is None]
        try:
            lock = self._locked(order)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            return Answer(error=f"the lock file can't be opened: {error.strerror}")
        try:
            reading, writing = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "gpumond.features.suspend.helper", to_json(order).decode()],
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    env=self._environ,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
            except OSError as error:
                os.close(reading)
                return Answer(error=f"the helper can't be started: {error.strerror}")
            finally:
                os.close(writing)
        finally:
            os.close(lock)
        self._processes.append(process)
        text = await _content(reading, seconds)
        for _ in range(ENDING_POLLS):  # it holds the lock for a moment longer
            if text is None or process.poll() is not None:
                break
            await asyncio.sleep(ENDING_SECONDS)
        if text is None:
            log.warning("no answer from the helper for pid %d in %g s", order.pid, seconds)
            return None
        try:
            return from_json(Answer, text)
        except ProtocolError as error:
            return Answer(error=f"the helper ended without an answer: {error}"[:200])

    def forget(self, order_id: str) -> None:
        """Remove the lock file of a program that runs again or has ended."""
        with suppress(OSError):
            os.unlink(self._directory / f"{order_id}.lock")

    def _locked(self, order: Order) -> int:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{order.pid}-{order.start_ticks}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return lock


async def _content(descriptor: int, seconds: float) -> bytes | None:
    """Read a pipe until its end, and close it; None if it has not ended in time."""
    reader = asyncio.StreamReader(limit=MAX_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        return await asyncio.wait_for(reader.read(), seconds)
    except asyncio.TimeoutError:
        return None
    finally:
        transport.close()
