"""Supervisor of the child process that owns the driver, called driver process in logs and collector in metrics.

A driver call may block for ever or crash its process, so requests go through a pipe and are supervised on the monotonic
clock. Nothing here waits for the child or kills it: interrupting a driver call may make the device unusable. A child
that misses its deadline is left to finish and another one is started: at once without the device on which it hangs, or
after a delay if it hangs elsewhere. At most ``MAX_ABANDONED`` children are left hanging.

Does *not* cover the content of readings (``devices/``) or the meaning of a missing reading (``tick/``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from signal import strsignal
from typing import Literal

from gpumond.devices import NO_INDEX
from gpumond.devices.child.pipe import DevicePosition, ExcludedDevice, ReadingCodec, ReadRequest, ReadResponse
from gpumond.facts.errors import FaultKind, ProtocolError, ReturnCode
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import RELEASED, STARTING, CgroupLimitChange, Reading, SourceState, XidErrors
from gpumond.facts.units import backoff_seconds
from gpumond.host.python_commands import module_command

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 5.0
REPLACE_AFTER_SECONDS = 60.0
MAX_ABANDONED = 2
MAX_RESTART_SECONDS = 10.0
GRACE_SECONDS = 0.5
"""Time in which a child may close the driver before it is sent SIGTERM."""
TERMINATION_SECONDS = 0.3
QUICK_RESTARTS = 3
"""Number of successive crashes after which a restart is delayed, or the device that causes them is excluded."""
MAX_RETRY_SECONDS = 30.0
EXCLUSION_SECONDS = 5.0
MAX_EXCLUSION_SECONDS = 600.0
"""Longest time for which a device is excluded.

After a crash, the time doubles with each attempt. After a hang, the device is queried again when the call has returned,
or after the longest time.
"""


class PendingReading:
    """One request to the child. Finished with a Reading, or with None if there will be none."""

    def __init__(self, requested_at: float) -> None:
        self.requested_at = requested_at
        self.done: asyncio.Future[Reading | None] = asyncio.get_running_loop().create_future()

    def finish(self, reading: Reading | None) -> None:
        if not self.done.done():
            self.done.set_result(reading)


class DriverProcess:
    """Process that reads ``source``. Raises OSError if it cannot be started.

    Opening the driver is its first request, because that can hang like any call.
    """

    def __init__(self, source: str, environ: Mapping[str, str] | None = None) -> None:
        self._position_descriptor = os.memfd_create("position", 0)
        try:
            DevicePosition(self._position_descriptor).set_index(NO_INDEX)
            self.process = subprocess.Popen(
                [*module_command("gpumond.devices.child.worker"), str(self._position_descriptor), source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
                bufsize=0,
                pass_fds=(self._position_descriptor,),
                start_new_session=True,  # Ctrl-C is handled by the parent, which stops the child in order
            )
        except OSError:
            os.close(self._position_descriptor)
            raise
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)
        self.buffer = bytearray()
        self._codec = ReadingCodec()
        self.request: PendingReading | None = PendingReading(time.monotonic())
        self.opened = self.overdue = self.unavailable = False
        self.xids: tuple[XidErrors, ...] = ()
        """Xid errors that the child has counted so far."""

    def ask(self, request: ReadRequest) -> PendingReading:
        self.request = PendingReading(time.monotonic())
        with suppress(OSError):  # the child has exited; the end of its stdout reports that
            self.stdin.write(to_json(request) + b"\n")
        return self.request

    def decode(self, line: bytes) -> ReadResponse:
        """Return a response, whose reading is complete. Raises ProtocolError."""
        response = from_json(ReadResponse, line)
        if response.reading is None:
            return response
        return replace(response, reading=self._codec.decode(response.reading, response.pids))

    def device_index(self) -> int:
        """Return the index of the device that is being queried, or NO_INDEX."""
        return DevicePosition(self._position_descriptor).index()

    def hang_up(self) -> None:
        """Close the pipes. The child exits in order when its current driver call returns."""
        self.stdin.close()
        self.stdout.close()
        if self._position_descriptor >= 0:
            os.close(self._position_descriptor)
            self._position_descriptor = -1

    def is_gone(self) -> bool:
        return self.process.poll() is not None


async def end_processes(children: Iterable[DriverProcess]) -> bool:
    """Hang up, wait, send SIGTERM, wait again: less than a second, never SIGKILL. Returns True if all have exited."""
    children = tuple(children)
    for child in children:
        child.hang_up()
    await _wait_for_exit(children, GRACE_SECONDS)
    for child in children:
        if not child.is_gone():
            child.process.terminate()
            child.process.send_signal(signal.SIGCONT)  # a stopped process exits only after this
    await _wait_for_exit(children, TERMINATION_SECONDS)
    gone = all(child.is_gone() for child in children)
    for child in children:
        child.process.returncode = child.process.poll() or 0  # a child that still hangs is not waited for
    return gone


async def _wait_for_exit(children: Iterable[DriverProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(child.is_gone() for child in children) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


class Supervisor:
    """Readings of one source, with at most one request at a time. All times are in seconds."""

    def __init__(
        self,
        source: str,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        replace_after_seconds: float = REPLACE_AFTER_SECONDS,
        environ: Mapping[str, str] | None = None,
        restarted: Callable[[], None] = lambda: None,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = SourceState(name=source, up=False, responsive=True, reason=STARTING)
        self._deadline_seconds, self._replace_after_seconds = deadline_seconds, replace_after_seconds
        self._environ, self._restarted, self._opened = environ, restarted, opened
        self._child: DriverProcess | None = None
        self._abandoned: list[DriverProcess] = []
        self._closing: list[DriverProcess] = []
        """Children whose pipes are closed and that have not been reaped yet."""
        self._excluded: dict[ExcludedDevice, DriverProcess | None] = {}
        """Excluded devices, each with the child that hangs on it, or None if it crashed the driver."""
        self._exclusions: Counter[str] = Counter()
        self._uuids: dict[int, str] = {}
        self._xids: tuple[XidErrors, ...] = ()
        """Xid errors counted by previous children."""
        self._failures = 0
        self._crashed_at: list[int] = []
        self._started = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._limit_changes: tuple[CgroupLimitChange, ...] = ()

    @property
    def pid(self) -> int | None:
        """The process that reads the driver, or None."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> None:
        """Start the child without waiting for it."""
        self._spawn()

    async def read(self, wait: float) -> Reading | None:
        """Return a reading that began after this call, or None if none arrived within ``wait`` seconds."""
        requested_at = time.monotonic()
        while (request := self._ask()) is not None:
            remaining_seconds = requested_at + wait - time.monotonic()
            await asyncio.wait({request.done}, timeout=max(0.0, remaining_seconds))
            if not request.done.done():
                return None
            if request.requested_at >= requested_at:
                return request.done.result()
        return None

    def change_limits(self, changes: Iterable[CgroupLimitChange]) -> None:
        """Change limits with the next reading, which shows whether the driver has made the changes."""
        self._limit_changes += tuple(changes)

    async def detach_for(self, seconds: float) -> bool:
        """Release the driver for this time, so it can be unloaded or the device reset.

        Returns True if every child has exited.
        """
        children = self._hang_up_all()
        detail = f"detached from the driver for {seconds:g} s"
        self._set_state(up=False, responsive=True, reason=RELEASED, detail=detail)
        self._schedule(seconds, self._spawn)
        gone = await end_processes(children)
        if not gone:
            detail += "; a process that hangs in a driver call still uses the driver"
            self._set_state(up=False, responsive=False, reason=RELEASED, detail=detail)
        return gone

    async def stop(self) -> None:
        """Close the pipes, wait until the children have closed the driver, then send SIGTERM. Takes less than 1 s."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await end_processes(self._hang_up_all())

    def _hang_up_all(self) -> list[DriverProcess]:
        children = [*self._abandoned, *([self._child] if self._child else [])]
        closing, self._closing = self._closing, []
        for child in children:
            self._unwatch(child)
            if child.request is not None:
                child.request.finish(None)
            self._xids = sum_xid_errors(self._xids, child.xids)
        self._child = None
        self._abandoned = []
        self._excluded.clear()
        return children + closing

    def _ask(self) -> PendingReading | None:
        """Return the current request, or a new one; None while there is no child."""
        self._closing = [child for child in self._closing if not child.is_gone()]
        child = self._child
        if child is None or child.overdue:
            return None
        if child.request is None and child.opened:
            changes, self._limit_changes = self._limit_changes, ()
            self._watch_deadline(child, child.ask(ReadRequest(tuple(self._excluded), changes)))
        return child.request

    def _spawn(self) -> None:
        if self._stopped:
            return
        self._xids = sum_xid_errors(self._xids, self._child.xids if self._child else ())
        self._child = None
        try:
            child = DriverProcess(self.state.name, self._environ)
        except OSError as error:  # such as a limit of processes, memory or descriptors
            detail = f"the driver process can't be started: {error}"
            self._set_state(up=False, responsive=True, reason="crashed", detail=detail)
            self._schedule(self._restart_seconds(), self._spawn)
            self._failures += 1
            return
        if self._started:
            self._restarted()
        self._started += 1
        self._child = child
        asyncio.get_running_loop().add_reader(child.stdout.fileno(), self._on_readable, child)
        assert child.request is not None
        self._watch_deadline(child, child.request)

    def _watch_deadline(self, child: DriverProcess, request: PendingReading) -> None:
        timer = asyncio.get_running_loop().call_later(self._deadline_seconds, self._check_deadline, child, request)
        request.done.add_done_callback(lambda done: timer.cancel())  # else it keeps the reading until the deadline

    def _check_deadline(self, child: DriverProcess, request: PendingReading) -> None:
        if child.request is not request or child is not self._child or self._stopped:
            return
        child.overdue = True
        request.finish(None)
        detail = f"a driver call hasn't returned for {self._deadline_seconds:g} s; values are withheld until it returns"
        self._set_state(up=False, responsive=False, reason="timeout", detail=detail)
        if self._exclude(child.device_index(), child):
            self._replace()
        else:
            self._schedule(self._replace_after_seconds, self._replace)

    def _exclude(self, index: int, child: DriverProcess | None) -> bool:
        """Exclude a device for a while. Returns False if it is unknown or already excluded."""
        uuid = self._uuids.get(index)
        if uuid is None or ExcludedDevice(index, uuid) in self._excluded:
            return False
        device = ExcludedDevice(index, uuid)
        problem = "hangs" if child else "crashes"
        log.warning("device %d (%s) is excluded, because the driver %s when reading it", index, uuid, problem)
        self._excluded[device] = child
        crashes = self._exclusions[uuid]
        seconds = MAX_EXCLUSION_SECONDS if child else backoff_seconds(EXCLUSION_SECONDS, crashes, MAX_EXCLUSION_SECONDS)
        self._exclusions[uuid] += 1
        asyncio.get_running_loop().call_later(seconds, self._try_again, device)
        return True

    def _try_again(self, device: ExcludedDevice) -> None:
        if len(self._abandoned) < MAX_ABANDONED:
            self._excluded.pop(device, None)
        elif device in self._excluded and not self._stopped:
            asyncio.get_running_loop().call_later(MAX_EXCLUSION_SECONDS, self._try_again, device)

    def _replace(self) -> None:
        """Abandon the hung child and start another one, unless the limit of hung children is reached."""
        child = self._child
        if child is not None and child.overdue:
            if len(self._abandoned) >= MAX_ABANDONED:
                self._schedule(self._replace_after_seconds, self._replace)
                return
            self._abandoned.append(child)
        self._spawn()

    def _on_readable(self, child: DriverProcess) -> None:
        try:
            chunk = child.stdout.read(1 << 20)
        except OSError:
            chunk = b""
        if chunk is None:
            return
        if not chunk:
            self._handle_exit(child)
            return
        child.buffer += chunk
        while (stop := child.buffer.find(b"\n")) >= 0:
            line = bytes(child.buffer[:stop])
            del child.buffer[: stop + 1]
            try:
                self._handle_response(child, child.decode(line))
            except ProtocolError as error:
                log.error("invalid response from the driver process: %s", error)
                child.process.terminate()

    def _handle_response(self, child: DriverProcess, response: ReadResponse) -> None:
        request, child.request = child.request, None
        is_late, child.overdue = child.overdue, False
        if child in self._abandoned:
            self._handle_late_response(child, response.reading)
            return
        if child is not self._child or request is None:
            return
        if response.reason:
            child.unavailable = True
            self._set_state(up=False, responsive=True, reason=response.reason, detail=response.message)
            request.finish(None)
            return
        if is_late and self._timer is not None:
            self._timer.cancel()
        if not child.opened:
            child.opened = True
            self._opened()
        reading = response.reading
        if reading is not None:
            child.xids = reading.xids
            reading = replace(reading, xids=sum_xid_errors(self._xids, reading.xids))
            self._failures, self._crashed_at = 0, []
            for device in reading.devices:
                if device.parent_uuid is None:
                    self._uuids[device.index] = device.uuid
                    self._exclusions.pop(device.uuid, None)
            self._set_state(up=True, responsive=not self._abandoned, reading=reading)
        request.finish(None if is_late else reading)  # a late response is out of date

    def _handle_late_response(self, child: DriverProcess, reading: Reading | None) -> None:
        """Handle the response of an abandoned child, whose driver call has returned.

        Only this child has received the Xid events of its device in the meantime.
        """
        read_again = {device.uuid for device, hung in self._excluded.items() if hung is child}
        self._excluded = {device: hung for device, hung in self._excluded.items() if hung is not child}
        counted = {(errors.device_uuid, errors.xid): errors.count for errors in child.xids}
        new_errors = [
            replace(errors, count=errors.count - counted.get((errors.device_uuid, errors.xid), 0))
            for errors in (reading.xids if reading else ())
            if errors.device_uuid in read_again
        ]
        self._xids = sum_xid_errors(self._xids, [errors for errors in new_errors if errors.count > 0])
        child.stdin.close()

    def _handle_exit(self, child: DriverProcess) -> None:
        """Handle the exit of a child: its source could not be opened, or the driver crashed."""
        self._unwatch(child)
        device_index = child.device_index()
        child.hang_up()
        self._closing.append(child)
        if child in self._abandoned:
            self._abandoned.remove(child)
        if child is not self._child or self._stopped:
            return
        self._child = None
        self._xids = sum_xid_errors(self._xids, child.xids)
        if child.request is not None:
            child.request.finish(None)
        if child.unavailable:
            delay = backoff_seconds(1.0, self._failures, MAX_RETRY_SECONDS)
        else:
            detail = f"the driver process {_exit_text(child.process.poll())}"
            self._set_state(up=False, responsive=True, reason="crashed", detail=detail)
            delay = self._restart_seconds()
            self._crashed_at.append(device_index)
            if self._crashed_at[-QUICK_RESTARTS:] == [device_index] * QUICK_RESTARTS and self._exclude(
                device_index, None
            ):
                self._crashed_at, self._failures = [], 0
        self._failures += 1
        self._schedule(delay, self._spawn)

    def _restart_seconds(self) -> float:
        return backoff_seconds(0.1, self._failures - QUICK_RESTARTS, MAX_RESTART_SECONDS)

    def _unwatch(self, child: DriverProcess) -> None:
        if not child.stdout.closed:
            asyncio.get_running_loop().remove_reader(child.stdout.fileno())

    def _schedule(self, delay: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, action)

    def _set_state(
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
        versioned = before if reading is None else reading
        versions = {name: getattr(versioned, name) for name in ("driver_version", "library_version", "cuda_version")}
        self.state = replace(before, up=up, responsive=responsive, reason=reason, detail=detail, **versions)
        if (before.up, before.reason) != (up, reason):
            if up:
                log.info("source %s is up, driver %s", before.name, versioned.driver_version or "unknown")
            else:
                log.warning("source %s is down: %s: %s", before.name, reason, detail)


def _exit_text(status: int | None) -> str:
    if status is None:
        return "closed its output"
    return f"exited with status {status}" if status >= 0 else f"was ended by signal {-status} ({strsignal(-status)})"


def sum_xid_errors(first: Iterable[XidErrors], second: Iterable[XidErrors]) -> tuple[XidErrors, ...]:
    """Return the sum of the errors of two children that did not run at the same time."""
    sums = {(errors.device_uuid, errors.xid): errors for errors in first}
    for errors in second:
        before = sums.get((errors.device_uuid, errors.xid))
        count = errors.count + (before.count if before else 0)
        sums[errors.device_uuid, errors.xid] = replace(errors, count=count)
    return tuple(sums.values())


PROBE_SECONDS = 6.0


async def probe(source: str) -> tuple[SourceState, Reading | None]:
    """Take one reading without a daemon, in a child of its own, so a hanging driver does not block the caller."""
    supervisor = Supervisor(source)
    supervisor.start()
    reading = await supervisor.read(wait=PROBE_SECONDS)
    state = supervisor.state
    await supervisor.stop()
    return state, reading
