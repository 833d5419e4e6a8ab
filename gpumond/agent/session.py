"""The agent's communication with the daemon: introduces itself, reports once a second, and flushes on request.

All received messages are read before any is acted on: a program that was stopped finds the daemon's CancelFlush after
its FlushCommand, and does not flush.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from contextlib import suppress

from gpumond import __version__
from gpumond.agent.allocators.adapters import AllocatorAdapter, TensorTracking, capture_guards
from gpumond.agent.allocators.borrowing import BORROWING
from gpumond.agent.loaded_allocators import LOADED, collect
from gpumond.agent.measure.oom_record import OOMS, causes, is_oom
from gpumond.agent.program_report import account_of, components, is_rank, job_of, place_in_job, program_report, sample
from gpumond.agent.requests import STEP_SECONDS, RequestHandler, supported_requests
from gpumond.agent.settings import AgentSettings
from gpumond.agent.transport import Transport
from gpumond.agent.wakeup import WakeupPipe
from gpumond.facts.messages import (
    AgentRequest,
    AgentResponse,
    BorrowResponse,
    CancelFlush,
    FlushCommand,
    FlushResult,
    Goodbye,
    Hello,
    Report,
    printable_text,
    program_socket,
)
from gpumond.facts.program import Ending

REPORT_SECONDS = 1.0
MAX_REQUESTS = 16


class AllocatorFacts:
    """Facts that change seldom, as of the last search for allocators."""

    def __init__(self, adapters: list[AllocatorAdapter]) -> None:
        guards = capture_guards()
        if guards is not None:
            guards.make_thread_capture_safe()
        self.adapters = adapters
        self.frameworks = tuple(dict.fromkeys(printable_text(adapter.framework()) for adapter in adapters))
        self.host_pools = tuple(collect(adapters, lambda adapter: adapter.host_pools()))
        self.distributed = is_rank()


class ResumeSignals:
    """Counts the signals SIGCONT of a program that `gpumond run --suspendable` has started; they resume it.

    They are blocked in all threads of such a program, since its main thread may wait for the driver.
    """

    def __init__(self, suspendable: bool) -> None:
        self._blocked, self._count = suspendable and _main_thread_blocks(signal.SIGCONT), 0

    def count(self) -> int:
        while self._blocked and signal.sigtimedwait({signal.SIGCONT}, 0) is not None:
            self._count += 1
        return self._count


def _main_thread_blocks(number: int) -> bool:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            blocked = next(line for line in status if line.startswith("SigBlk:"))
    except (OSError, StopIteration):
        return False
    return bool(int(blocked.split()[1], 16) >> (number - 1) & 1)


class AgentSession:
    """Belongs to the agent's thread; only `at_training_step` is called from another."""

    def __init__(self, settings: AgentSettings, wake: WakeupPipe) -> None:
        self._settings, self._wake = settings, wake
        self._transport = Transport()
        self._introduced: tuple[object, ...] = ()
        """The settings as of the connection, some of which the daemon knows."""
        self._report_at = 0.0
        self._commands: dict[str, tuple[FlushCommand, float]] = {}
        self.waiting: dict[str, tuple[FlushCommand | AgentRequest, float]] = {}
        """Commands that wait for `step`, each with its deadline."""
        self._step_results: deque[FlushResult | AgentResponse] = deque()
        self._requests: deque[AgentRequest] = deque(maxlen=MAX_REQUESTS)
        self._handler = RequestHandler(settings)
        self._resume_signals = ResumeSignals(settings.suspendable)
        self._facts: AllocatorFacts | None = None
        self._closing = False
        self.flushing = False

    def run_once(self) -> None:
        """Wait for messages, until the next report at the latest, and process them."""
        self._connect()
        arrived = self._wait()
        now = time.monotonic()
        for message in self._transport.receive(now) if arrived else ():
            if isinstance(message, FlushCommand):
                self._commands[message.id] = (message, now + message.timeout_seconds)
            elif isinstance(message, CancelFlush):
                self._cancel(message.id)
            elif isinstance(message, AgentRequest):
                self._requests.append(message)
            elif isinstance(message, BorrowResponse):
                BORROWING.deliver(message)
        if not self._transport.is_connected:
            BORROWING.end_all()
            self._commands.clear()
            self.waiting.clear()
            self._requests.clear()
        if not self._flush_next():
            self._respond_to_next_request()
        self._continue_requests()
        self._send_results(time.monotonic())
        for request in BORROWING.outgoing():
            self._transport.enqueue(request)
        self._report()
        self._transport.send_pending(time.monotonic())

    def at_training_step(self) -> None:
        """Carry out the waiting flushes in the program's own thread."""
        for name, (command, deadline) in list(self.waiting.items()):
            if time.monotonic() >= deadline or self.waiting.pop(name, None) is None:
                continue
            if isinstance(command, AgentRequest):
                self._step_results.append(self._handler.respond(command))
            else:
                try:
                    self._step_results.append(self._execute(command, deadline))
                except BaseException as error:
                    self._step_results.append(
                        FlushResult(command.id, "failed", printable_text(f"interrupted: {error!r}"))
                    )
                    raise
                self._report_at = 0.0
            self._wake.set()

    def _execute(self, command: FlushCommand, deadline: float) -> FlushResult:
        return LOADED.execute(command, self._settings.hooks, self._settings.main_thread, deadline)

    def _cancel(self, name: str) -> None:
        """Cancel a waiting command. Every flush has a result, so the daemon detects its end."""
        if any(request.id == name for request in self._requests):
            self._requests = deque((each for each in self._requests if each.id != name), MAX_REQUESTS)
            return
        if self._commands.pop(name, None) or self.waiting.pop(name, None):
            self._transport.enqueue(FlushResult(name, "deferred", "the daemon canceled the flush; nothing was done"))

    def close(self, exiting: bool) -> None:
        """Send a last report and a Goodbye, which states how the program ends if it is ``exiting``."""
        self._handler.cancel_recording()
        self._report_at, self._closing = 0.0, True
        try:
            if exiting and OOMS.has_records:
                self._connect()  # of a program that has just begun
            self._report()
        except Exception:  # the program and its libraries are about to end
            pass
        self._transport.send_pending(0.0)
        BORROWING.end_all()
        self._transport.enqueue(Goodbye(ending() if exiting else None))
        self._transport.send_pending(0.0)
        self._transport.reset()

    def record_ending(self) -> bool:
        """Record the out-of-memory error that ends the program, and return whether there is one.

        Called while the frames of the error exist.
        """
        if ending() != "out-of-memory":
            return False
        OOMS.record_unhandled()
        return True

    def abandon(self) -> None:
        """Close the parent's socket in a forked child, without a message."""
        self._transport.reset()

    def _connect(self) -> None:
        allowed = supported_requests(self._settings.allow_limit, bool(self._settings.end_functions))
        introduced = (self._settings.socket, self._settings.workload, allowed)
        if self._transport.is_connected:
            if introduced == self._introduced:
                return
            self._transport.reset()
        now = time.monotonic()
        if now >= self._transport.retry_at and self._transport.connect(self._settings.socket or program_socket(), now):
            self._introduced = introduced
            admission = printable_text(os.environ.get("GPUMOND_ADMISSION", ""))
            python = sys.version.split()[0]
            place = (*place_in_job(), job_of(), account_of())
            hello = Hello(self._settings.workload, __version__, python, allowed, admission, *place)
            self._transport.enqueue(hello)
            self._report_at = now
            BORROWING.wake = self._wake.set

    def _wait(self) -> bool:
        """Return whether the daemon has sent data or closed the connection."""
        now = time.monotonic()
        deadlines = [self._report_at, *(deadline for _, deadline in list(self.waiting.values()))]
        if not self._transport.is_connected:
            deadlines.append(self._transport.retry_at)
        poll = select.poll()
        wake, connection = self._wake.fileno(), self._transport.fileno()
        for descriptor, events in (
            (wake, select.POLLIN),
            (connection, select.POLLIN | select.POLLOUT if self._transport.has_unsent else select.POLLIN),
        ):
            if descriptor >= 0:
                poll.register(descriptor, events)
        seconds = 0.0 if self._commands or self._requests else max(0.0, min(deadlines) - now)
        events_by_descriptor = dict(poll.poll(1000 * min(seconds, REPORT_SECONDS)))
        if wake in events_by_descriptor:
            self._wake.clear()
        return bool(events_by_descriptor.get(connection, 0) & ~select.POLLOUT)

    def _flush_next(self) -> bool:
        """Carry out at most one flush, and return whether one was: messages that arrive during it, a CancelFlush among
        them, are read before the next command.
        """
        policy = self._settings.flush_policy
        for name in list(self._commands):
            command, deadline = self._commands.pop(name)
            if policy == "never":
                self._transport.enqueue(FlushResult(command.id, "refused", "this program's flush_policy is never"))
            elif policy == "step":
                self.waiting[name] = (command, deadline)
            elif time.monotonic() >= deadline:
                self._transport.enqueue(
                    FlushResult(command.id, "timeout", "the deadline passed before the flush started; nothing was done")
                )
            else:
                self.flushing = True
                try:
                    self._transport.enqueue(self._execute(command, deadline))
                finally:
                    self.flushing = False
                self._report_at = 0.0
                return True
        return False

    def _respond_to_next_request(self) -> None:
        if self._requests:
            request = self._requests.popleft()
            if request.kind == "classes" and self._settings.flush_policy == "step" and request.record_seconds is None:
                self.waiting[request.id] = (request, time.monotonic() + STEP_SECONDS)
            elif request.kind == "retainers":
                self._transport.enqueue(self._handler.start_search(request))
            elif request.record_seconds is not None:
                refusal = self._handler.start_recording(request)
                if refusal is not None:
                    self._transport.enqueue(refusal)
            else:
                self._transport.enqueue(self._handler.respond(request))
                self._report_at = 0.0

    def _continue_requests(self) -> None:
        self._handler.continue_search(time.monotonic())
        recorded = self._handler.finish_due_recording(time.monotonic())
        if recorded is not None:
            self._transport.enqueue(recorded)

    def _send_results(self, now: float) -> None:
        for name, (command, deadline) in list(self.waiting.items()):
            if now >= deadline and self.waiting.pop(name, None) is not None:
                if isinstance(command, AgentRequest):
                    reason = f"this program's flush_policy is step, but it called no step() within {STEP_SECONDS:g} s"
                    self._transport.enqueue(AgentResponse(command.id, reason))
                    continue
                reason = f"the program called no step() within {command.timeout_seconds:g} s; nothing was done"
                self._transport.enqueue(FlushResult(command.id, "deferred", reason))
        while self._step_results:
            self._transport.enqueue(self._step_results.popleft())

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._report_at:
            return
        self._report_at = now + REPORT_SECONDS
        adapters = LOADED.known()
        if self._settings.flush_policy == "allow":
            for adapter in adapters:
                if isinstance(adapter, TensorTracking):
                    with suppress(Exception):  # a version of the library that is not understood
                        adapter.find_older_objects()
        if self._transport.is_connected:
            pools = LOADED.read()
            if pools is not None:
                facts = self._facts
                if facts is None or facts.adapters is not adapters:
                    facts = self._facts = AllocatorFacts(adapters)
                sample(pools, last=self._closing)
                oom_pools = sys.modules.get("gpumond.agent.measure.oom_pool")  # if the program has one
                if oom_pools is not None:
                    oom_pools.OOM_POOLS.check()
                    pools = oom_pools.OOM_POOLS.with_uses(pools)
                refusals = self._transport.refusals + LOADED.refusals
                program = program_report(facts.distributed, refusals, self._handler.retainers)
                self._transport.enqueue(
                    Report(
                        self._settings.flush_policy,
                        facts.frameworks,
                        pools,
                        program,
                        facts.host_pools,
                        LOADED.limits(),
                        components(),
                        self._resume_signals.count(),
                        self._settings.suspendable,
                    )
                )


def ending() -> Ending | None:
    """Return how the program ends, None if unknown. Call it while exit handlers run.

    Python stores an unhandled exception in `sys.last_value` before it prints it. The status that a program passes to
    `sys.exit` is not visible to an exit handler: such an end is an ``exit``, whatever the status.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return None  # multiprocessing handles the errors of its children, and passes a status to sys.exit
    error = getattr(sys, "last_value", None)
    if error is None or isinstance(error, KeyboardInterrupt) or hasattr(sys, "ps1"):  # ps1: no error ends a prompt
        return "exit"
    return "out-of-memory" if any(map(is_oom, causes(error))) else "error"
