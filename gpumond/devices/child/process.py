"""One process that runs a source: its pipes, its current request, and the device that it is querying.

Nothing here waits for the process or kills it: interrupting a driver call may make the device unusable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO, NamedTuple

from gpumond.devices import NOWHERE
from gpumond.devices.child.pipe import DevicePosition, ExcludedDevice, ReadingChanges, ReadRequest, ReadResponse
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import Reading, XidErrors


class Request:
    """One request to the child. Finished with a Reading, or with None if there will be none."""

    def __init__(self, requested_at: float) -> None:
        self.requested_at = requested_at
        self.done: asyncio.Future[Reading | None] = asyncio.get_running_loop().create_future()

    def finish(self, reading: Reading | None) -> None:
        if not self.done.done():
            self.done.set_result(reading)


class Child:
    """Child process. Opening the driver is its first request, because that can hang like any call."""

    def __init__(self, worker: Worker) -> None:
        self.process, self.stdin, self.stdout, self._place = worker
        os.set_blocking(self.stdout.fileno(), False)
        self.buffer = bytearray()
        self._changes = ReadingChanges()
        self.request: Request | None = Request(time.monotonic())
        self.opened = self.overdue = self.unavailable = False
        self.xids: tuple[XidErrors, ...] = ()
        """XID errors that the child has counted so far."""

    def ask(self, leave_out: Iterable[ExcludedDevice]) -> Request:
        self.request = Request(time.monotonic())
        try:
            self.stdin.write(to_json(ReadRequest(tuple(leave_out))) + b"\n")
        except OSError:
            pass  # the child has exited; the end of its stdout reports that
        return self.request

    def decode(self, line: bytes) -> ReadResponse:
        """Return a response, whose reading is complete. Raises ProtocolError."""
        answer = from_json(ReadResponse, line)
        if answer.reading is None:
            return answer
        return replace(answer, reading=self._changes.decode(answer.reading, answer.pids))

    def place(self) -> int:
        """Return the index of the device that is being queried, or NOWHERE."""
        return DevicePosition(self._place).where()

    def hang_up(self) -> None:
        """Close the pipes. The child exits in order when its current driver call returns."""
        self.stdin.close()
        self.stdout.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1

    def is_gone(self) -> bool:
        return self.process.poll() is not None


async def end(children: Iterable[Child], grace: float = 0.5, last: float = 0.3) -> bool:
    """Hang up, wait, send SIGTERM, wait again: less than a second, never SIGKILL. Returns True if all have exited."""
    children = tuple(children)
    for child in children:
        child.hang_up()
    await _wait_for_exit(children, grace)
    for child in children:
        if not child.is_gone():
            child.process.terminate()
            child.process.send_signal(signal.SIGCONT)  # a stopped process exits only after this
    await _wait_for_exit(children, last)
    gone = all(child.is_gone() for child in children)
    for child in children:
        child.process.returncode = child.process.poll() or 0  # a child that still hangs is not waited for
    return gone


async def _wait_for_exit(children: Iterable[Child], wait: float) -> None:
    until = time.monotonic() + wait
    while not all(child.is_gone() for child in children) and time.monotonic() < until:
        await asyncio.sleep(0.01)


GRACE_SECONDS = 0.5


class Worker(NamedTuple):
    """A started process, its pipes, and the descriptor of its DevicePosition."""

    process: subprocess.Popen[bytes]
    stdin: BinaryIO
    stdout: BinaryIO
    place: int

    def open(self, source: str) -> None:
        """Name the source, which the process opens at once."""
        with suppress(BrokenPipeError):  # it has exited; the end of its stdout reports that
            self.stdin.write(source.encode() + b"\n")

    def end(self) -> None:
        """End the process of a daemon that cannot start: hang up, wait, send SIGTERM; never SIGKILL (decision 001)."""
        self.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        self.process.terminate()


def start_worker(environ: Mapping[str, str] | None = None) -> Worker:
    """Start a process that waits for the name of its source. It exits when its stdin is closed. Raises OSError."""
    place = os.memfd_create("place", 0)
    try:
        DevicePosition(place).at(NOWHERE)
        process = subprocess.Popen(
            [sys.executable, "-m", "gpumond.devices.child.worker", str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            bufsize=0,
            pass_fds=(place,),
            start_new_session=True,  # Ctrl-C is handled by the parent, which stops the child in order
        )
    except OSError:
        os.close(place)
        raise
    assert process.stdin is not None
    assert process.stdout is not None
    return Worker(process, process.stdin, process.stdout, place)  # type: ignore[arg-type]
