"""The parent's half of the collector: a child process owns the driver, and nothing here waits for it.

A driver call may block for ever or crash its process, so the child is asked over a pipe and watched
on the monotonic clock. One that misses its deadline is left to finish, and another one is tried: at once
without the device at which it hangs, or after a while if it hangs elsewhere. No more than
``MAX_ABANDONED`` are left hanging.

This module does *not* cover: what is read (``sources/``) and what a missing reading means (``engine``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from gpumond.collector.ipc import ExcludedDevice, ReadResponse
from gpumond.collector.process import Child, Request, end
from gpumond.errors import FaultKind, ProtocolError, ReturnCode
from gpumond.model.snapshot import RELEASED, STARTING, Reading, SourceState, XidErrors
from gpumond.protocol.validator import from_json

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 5.0
REPLACE_AFTER_SECONDS = 60.0
MAX_ABANDONED = 2
MAX_RESTART_SECONDS = 10.0
QUICK_RESTARTS = 3
"""So many crashes in a row are answered at once; so many at one device, and it is left out."""
MAX_RETRY_SECONDS = 30.0
LEFT_OUT_SECONDS = 5.0
MAX_LEFT_OUT_SECONDS = 600.0
"""A device that crashed the driver is asked again after so long, doubling each time; one at which a child hangs when
that child is out of the driver, or after the longest time."""


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
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = SourceState(source, up=False, responsive=True, reason=STARTING)
        self._deadline, self._replace_after = deadline, replace_after
        self._environ, self._restarted, self._opened = environ, restarted, opened
        self._child: Child | None = None
        self._abandoned: list[Child] = []
        self._leaving: list[Child] = []
        """Those that have closed their end, and have yet to be reaped."""
        self._left_out: dict[ExcludedDevice, Child | None] = {}
        """Devices that are not asked, each with the child that hangs at it, or None if they crashed it."""
        self._times_left_out: Counter[str] = Counter()
        self._uuids: dict[int, str] = {}
        self._xids: tuple[XidErrors, ...] = ()
        """What the children before this one counted."""
        self._failures = 0
        self._crashed_at: list[int] = []
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

    async def release(self, seconds: float) -> bool:
        """Let go of the driver for so long, that it can be unloaded or the card reset. Whether every child is gone."""
        children = self._let_go()
        detail = f"released for {seconds:g} s"
        self._become(up=False, responsive=True, reason=RELEASED, detail=detail)
        self._schedule(seconds, self._spawn)
        gone = await end(children)
        if not gone:
            detail += "; a process that hangs in a driver call still holds the driver"
            self._become(up=False, responsive=False, reason=RELEASED, detail=detail)
        return gone

    async def stop(self) -> None:
        """Close the pipes, let the children shut the driver down, then SIGTERM. Takes less than a second."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await end(self._let_go())

    def _let_go(self) -> list[Child]:
        children = [*self._abandoned, *([self._child] if self._child else [])]
        leaving, self._leaving = self._leaving, []
        for child in children:
            self._unwatch(child)
            if child.request is not None:
                child.request.finish(None)
            self._xids = add_up(self._xids, child.xids)
        self._child = None
        self._abandoned = []
        self._left_out.clear()
        return children + leaving

    def _ask(self) -> Request | None:
        """The question under way, or a new one; None while there is no child to ask."""
        self._leaving = [child for child in self._leaving if not child.is_gone()]
        child = self._child
        if child is None or child.overdue:
            return None
        if child.request is None and child.opened:
            self._watch_deadline(child, child.ask(self._left_out))
        return child.request

    def _spawn(self) -> None:
        if self._stopped:
            return
        if self._started:
            self._restarted()
        self._started += 1
        self._xids = add_up(self._xids, self._child.xids if self._child else ())
        child = self._child = Child(self.state.name, self._environ)
        asyncio.get_running_loop().add_reader(child.stdout.fileno(), self._readable, child)
        assert child.request is not None
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
        if self._leave_out(child.place(), child):
            self._replace()
        else:
            self._schedule(self._replace_after, self._replace)

    def _leave_out(self, index: int, child: Child | None) -> bool:
        """Ask that device no more for a while; False if it is not known, or left out already."""
        uuid = self._uuids.get(index)
        if uuid is None or ExcludedDevice(index, uuid) in self._left_out:
            return False
        device = ExcludedDevice(index, uuid)
        log.warning("device %d %s is left out: the driver %s at it", index, uuid, "hangs" if child else "crashes")
        self._left_out[device] = child
        seconds = MAX_LEFT_OUT_SECONDS if child else LEFT_OUT_SECONDS * 2 ** self._times_left_out[uuid]
        self._times_left_out[uuid] += 1
        asyncio.get_running_loop().call_later(min(seconds, MAX_LEFT_OUT_SECONDS), self._try_again, device)
        return True

    def _try_again(self, device: ExcludedDevice) -> None:
        if len(self._abandoned) < MAX_ABANDONED:
            self._left_out.pop(device, None)
        elif device in self._left_out and not self._stopped:
            asyncio.get_running_loop().call_later(MAX_LEFT_OUT_SECONDS, self._try_again, device)

    def _replace(self) -> None:
        """Leave the hung child to itself and try another one, unless enough of them hang already."""
        child = self._child
        if child is not None and child.overdue:
            if len(self._abandoned) >= MAX_ABANDONED:
                self._schedule(self._replace_after, self._replace)
                return
            self._abandoned.append(child)
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
        while (stop := child.buffer.find(b"\n")) >= 0:
            line = bytes(child.buffer[:stop])
            del child.buffer[: stop + 1]
            try:
                self._answered(child, from_json(ReadResponse, line))
            except ProtocolError as error:
                log.error("collector child answered nonsense: %s", error)
                child.process.terminate()

    def _answered(self, child: Child, answer: ReadResponse) -> None:
        request, child.request = child.request, None
        late, child.overdue = child.overdue, False
        if child in self._abandoned:
            self._returned(child, answer.reading)
            return
        if child is not self._child or request is None:
            return
        if answer.reason:
            child.unavailable = True
            self._become(up=False, responsive=True, reason=answer.reason, detail=answer.message)
            request.finish(None)
            return
        if late and self._timer is not None:
            self._timer.cancel()
        if not child.opened:
            child.opened = True
            self._opened()
        reading = answer.reading
        if reading is not None:
            child.xids = reading.xids
            reading = replace(reading, xids=add_up(self._xids, reading.xids))
            self._failures, self._crashed_at = 0, []
            for device in reading.devices:
                if device.parent_uuid is None:
                    self._uuids[device.index] = device.uuid
                    self._times_left_out.pop(device.uuid, None)
            self._become(up=True, responsive=not self._abandoned, reading=reading)
        request.finish(None if late else reading)  # a late answer is about the past

    def _returned(self, child: Child, reading: Reading | None) -> None:
        """A child that was left hanging is out of the driver again, and the device at which it hung with it.

        What that device said meanwhile, only this child has heard.
        """
        asked_again = {device.uuid for device, hung in self._left_out.items() if hung is child}
        self._left_out = {device: hung for device, hung in self._left_out.items() if hung is not child}
        heard = {(errors.device_uuid, errors.xid): errors.count for errors in child.xids}
        news = [
            replace(errors, count=errors.count - heard.get((errors.device_uuid, errors.xid), 0))
            for errors in (reading.xids if reading else ())
            if errors.device_uuid in asked_again
        ]
        self._xids = add_up(self._xids, [errors for errors in news if errors.count > 0])
        child.stdin.close()

    def _ended(self, child: Child) -> None:
        """The child has left: because it could not open its source, or because the driver crashed."""
        self._unwatch(child)
        place = child.place()
        child.hang_up()
        self._leaving.append(child)
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
            self._crashed_at.append(place)
            if self._crashed_at[-QUICK_RESTARTS:] == [place] * QUICK_RESTARTS and self._leave_out(place, None):
                self._crashed_at, self._failures = [], 0
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
        self,
        *,
        up: bool,
        responsive: bool,
        reason: FaultKind | ReturnCode | Literal[""] = "",
        detail: str = "",
        reading: Reading | None = None,
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
