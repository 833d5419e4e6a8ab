"""The parent's half of the collector: a child process owns the driver, and nothing here waits for it.

A driver call may block for ever or crash its process, so the child is asked over a pipe and watched
on the monotonic clock. A child that misses its deadline is not killed, as killing a process inside
the driver can wedge the card: it is left to finish, and after a while another one is tried, while
no more than ``MAX_ABANDONED`` hang.

This module does *not* cover: what is read (``sources/``) and what a missing reading means (``engine``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gpumond.errors import ProtocolError
from gpumond.model import STARTING, Reading, SourceState, XidErrors
from gpumond.sources import Answer
from gpumond.wire import from_json

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 5.0
REPLACE_AFTER_SECONDS = 60.0
MAX_ABANDONED = 2
MAX_RESTART_SECONDS = 10.0
QUICK_RESTARTS = 3
MAX_RETRY_SECONDS = 30.0


class Request:
    """One question to the child: done with a Reading, or with None if there will be none."""

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.done: asyncio.Future[Reading | None] = asyncio.get_running_loop().create_future()

    def finish(self, reading: Reading | None) -> None:
        if not self.done.done():
            self.done.set_result(reading)


class Child:
    """One process that runs a source, its pipes and the question that it is working on."""

    def __init__(self, command: list[str], environ: Mapping[str, str] | None) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the child in order
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.buffer = bytearray()
        self.request: Request | None = None
        self.opened = False
        self.overdue = False
        self.unavailable = False
        self.xids: tuple[XidErrors, ...] = ()
        """What it counted so far."""

    def ask(self, request: Request) -> None:
        self.request = request
        try:
            self.stdin.write(b"read\n")
        except OSError:
            pass  # it is gone; the end of its stdout says so

    def hang_up(self) -> None:
        """Close the pipes: the child leaves in order as soon as it is out of the driver."""
        self.stdin.close()
        self.stdout.close()


class Collector:
    """Readings of one source, at most one question under way. All times in seconds."""

    def __init__(
        self,
        source: str,
        *,
        deadline: float = DEADLINE_SECONDS,
        replace_after: float = REPLACE_AFTER_SECONDS,
        environ: Mapping[str, str] | None = None,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = SourceState(source, up=False, responsive=True, reason=STARTING)
        self._command = [sys.executable, "-m", "gpumond.sources", source]
        self._deadline, self._replace_after = deadline, replace_after
        self._environ, self._restarted = environ, restarted
        self._child: Child | None = None
        self._abandoned: list[Child] = []
        self._xids: tuple[XidErrors, ...] = ()
        """What the children before this one counted."""
        self._failures = 0
        self._started = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the child; does not wait for it."""
        self._spawn()

    async def read(self, wait: float) -> Reading | None:
        """A reading that began after this call, or None if none came within ``wait`` seconds."""
        asked = time.monotonic()
        while (request := self._ask()) is not None:
            left = asked + wait - time.monotonic()
            await asyncio.wait({request.done}, timeout=max(0.0, left))
            if not request.done.done():
                return None
            if request.asked >= asked:
                return request.done.result()
        return None

    async def stop(self) -> None:
        """Close the pipe, let the child shut the driver down, then SIGTERM. Takes less than a second; never SIGKILL."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        children = [*self._abandoned, *([self._child] if self._child else [])]
        for child in children:
            self._unwatch(child)
            child.hang_up()
        await self._gone(children, 0.5)
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
        await self._gone(children, 0.3)
        for child in children:
            child.process.returncode = child.process.poll() or 0  # whoever still hangs is not waited for

    @staticmethod
    async def _gone(children: list[Child], wait: float) -> None:
        until = time.monotonic() + wait
        while any(child.process.poll() is None for child in children) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _ask(self) -> Request | None:
        """The question under way, or a new one; None while there is no child to ask."""
        child = self._child
        if child is None or child.overdue:
            return None
        if child.request is None and child.opened:
            request = Request(time.monotonic())
            child.ask(request)
            self._watch_deadline(child, request)
        return child.request

    def _spawn(self) -> None:
        if self._stopped:
            return
        if self._started:
            self._restarted()
        self._started += 1
        self._xids = add_up(self._xids, self._child.xids if self._child else ())
        child = Child(self._command, self._environ)
        child.request = Request(time.monotonic())  # opening the driver can hang as any call can
        self._child = child
        asyncio.get_running_loop().add_reader(child.stdout.fileno(), self._readable, child)
        self._watch_deadline(child, child.request)

    def _watch_deadline(self, child: Child, request: Request) -> None:
        asyncio.get_running_loop().call_later(self._deadline, self._check_deadline, child, request)

    def _check_deadline(self, child: Child, request: Request) -> None:
        if child.request is not request or child is not self._child or self._stopped:
            return
        child.overdue = True
        request.finish(None)
        detail = f"a driver call has not returned for {self._deadline:g} s; values are withheld until it does"
        self._become(up=False, responsive=False, reason="timeout", detail=detail)
        self._schedule(self._replace_after, self._replace)

    def _replace(self) -> None:
        """Leave the hung child to itself and try another one, unless enough of them hang already."""
        child = self._child
        if child is not None and child.overdue:
            if len(self._abandoned) >= MAX_ABANDONED:
                self._schedule(self._replace_after, self._replace)
                return
            self._abandoned.append(child)
            child.stdin.close()
        self._spawn()

    def _readable(self, child: Child) -> None:
        try:
            chunk = child.stdout.read(1 << 20)
        except OSError:
            chunk = b""
        if chunk is None:
            return
        if not chunk:
            self._ended(child)
            return
        child.buffer += chunk
        while (end := child.buffer.find(b"\n")) >= 0:
            line = bytes(child.buffer[:end])
            del child.buffer[: end + 1]
            try:
                self._answered(child, from_json(Answer, line))
            except ProtocolError as error:
                log.error("collector child answered nonsense: %s", error)
                child.process.terminate()

    def _answered(self, child: Child, answer: Answer) -> None:
        request, child.request = child.request, None
        late, child.overdue = child.overdue, False
        if child is not self._child or request is None:
            return
        if answer.reason:
            child.unavailable = True
            self._become(up=False, responsive=True, reason=answer.reason, detail=answer.message)
            request.finish(None)
            return
        if late and self._timer is not None:
            self._timer.cancel()
        child.opened = True
        reading = answer.reading
        if reading is not None:
            child.xids = reading.xids
            reading = replace(reading, xids=add_up(self._xids, reading.xids))
            self._failures = 0
            self._become(up=True, responsive=True, reading=reading)
        request.finish(None if late else reading)  # a late answer is about the past

    def _ended(self, child: Child) -> None:
        """The child has left: because it could not open its source, or because the driver crashed."""
        self._unwatch(child)
        child.hang_up()
        child.process.poll()
        if child in self._abandoned:
            self._abandoned.remove(child)
        if child is not self._child or self._stopped:
            return
        self._child = None
        self._xids = add_up(self._xids, child.xids)
        if child.request is not None:
            child.request.finish(None)
        if child.unavailable:
            delay = min(MAX_RETRY_SECONDS, 2.0**self._failures)
        else:
            detail = f"the process that owns the driver ended with {child.process.poll()}"
            self._become(up=False, responsive=True, reason="crashed", detail=detail)
            delay = min(MAX_RESTART_SECONDS, 0.1 * 2 ** max(0, self._failures - QUICK_RESTARTS))
        self._failures += 1
        self._schedule(delay, self._spawn)

    def _unwatch(self, child: Child) -> None:
        if not child.stdout.closed:
            asyncio.get_running_loop().remove_reader(child.stdout.fileno())

    def _schedule(self, delay: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, action)

    def _become(
        self, *, up: bool, responsive: bool, reason: str = "", detail: str = "", reading: Reading | None = None
    ) -> None:
        """Log a change of state, once."""
        before = self.state
        known = before if reading is None else reading
        driver = known.driver_version
        self.state = SourceState(
            before.name, up, responsive, reason, detail, driver, known.library_version, known.cuda_version
        )
        if (before.up, before.reason) != (up, reason):
            if up:
                log.info("source %s is up, driver %s", before.name, driver or "unknown")
            else:
                log.warning("source %s is down: %s: %s", before.name, reason, detail)


def add_up(first: Iterable[XidErrors], second: Iterable[XidErrors]) -> tuple[XidErrors, ...]:
    """The errors of two children that did not listen at the same time."""
    sums = {(errors.device_uuid, errors.xid): errors for errors in first}
    for errors in second:
        before = sums.get((errors.device_uuid, errors.xid))
        count = errors.count + (before.count if before else 0)
        sums[errors.device_uuid, errors.xid] = replace(errors, count=count)
    return tuple(sums.values())
