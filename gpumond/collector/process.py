"""One process that runs a source: its pipes, the question that it works on, and the device that it is at.

Nothing here waits for it, and nothing kills it: what it does in the driver may wedge the card if cut short.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

from gpumond.collector.ipc import DevicePosition, ExcludedDevice, ReadRequest
from gpumond.model.snapshot import Reading, XidErrors
from gpumond.protocol.messages import to_json
from gpumond.sources import NOWHERE


class Request:
    """One question to the child: done with a Reading, or with None if there will be none."""

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.done: asyncio.Future[Reading | None] = asyncio.get_running_loop().create_future()

    def finish(self, reading: Reading | None) -> None:
        if not self.done.done():
            self.done.set_result(reading)


class Child:
    """Starts at once. Opening the driver is its first question, as that can hang as any call can."""

    def __init__(self, source: str, environ: Mapping[str, str] | None) -> None:
        self._place = os.memfd_create("place", 0)
        DevicePosition(self._place).at(NOWHERE)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpumond.collector.worker", source, str(self._place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            bufsize=0,
            pass_fds=(self._place,),
            start_new_session=True,  # Ctrl-C is for the parent, which ends the child in order
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.buffer = bytearray()
        self.request: Request | None = Request(time.monotonic())
        self.opened = self.overdue = self.unavailable = False
        self.xids: tuple[XidErrors, ...] = ()
        """What it counted so far."""

    def ask(self, leave_out: Iterable[ExcludedDevice]) -> Request:
        self.request = Request(time.monotonic())
        try:
            self.stdin.write(to_json(ReadRequest(tuple(leave_out))) + b"\n")
        except OSError:
            pass  # it is gone; the end of its stdout says so
        return self.request

    def place(self) -> int:
        """Index of the device that it is at, NOWHERE between two."""
        return DevicePosition(self._place).where()

    def hang_up(self) -> None:
        """Close the pipes: the child leaves in order as soon as it is out of the driver."""
        self.stdin.close()
        self.stdout.close()
        if self._place >= 0:
            os.close(self._place)
            self._place = -1

    def is_gone(self) -> bool:
        return self.process.poll() is not None


async def end(children: Iterable[Child], grace: float = 0.5, last: float = 0.3) -> bool:
    """Hang up, wait, SIGTERM, wait again: less than a second, never SIGKILL. Whether all of them are gone."""
    children = tuple(children)
    for child in children:
        child.hang_up()
    await _gone(children, grace)
    for child in children:
        if not child.is_gone():
            child.process.terminate()
            child.process.send_signal(signal.SIGCONT)  # one that was stopped leaves only then
    await _gone(children, last)
    gone = all(child.is_gone() for child in children)
    for child in children:
        child.process.returncode = child.process.poll() or 0  # whoever still hangs is not waited for
    return gone


async def _gone(children: Iterable[Child], wait: float) -> None:
    until = time.monotonic() + wait
    while not all(child.is_gone() for child in children) and time.monotonic() < until:
        await asyncio.sleep(0.01)
