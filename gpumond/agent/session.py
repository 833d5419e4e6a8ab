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
from gpumond.agent.loaded_allocators import ALLOCATORS, read_all
from gpumond.agent.measure.oom_record import OOMS, error_chain, is_oom
from gpumond.agent.program_report import (
    components,
    is_distributed,
    job_name,
    program_report,
    rank_and_world_size,
    record_pools,
    slurm_account,
)
from gpumond.agent.requests import STEP_TIMEOUT_SECONDS, RequestHandler, supported_requests
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

REPORT_INTERVAL_SECONDS = 1.0
MAX_REQUESTS = 16


class AllocatorInfo:
    """Facts that change seldom, as of the last search for allocators."""

    def __init__(self, adapters: list[AllocatorAdapter]) -> None:
        guards = capture_guards()
        if guards is not None:
            guards.relax_thread_capture_mode()
        self.adapters = adapters
        self.frameworks = tuple(dict.fromkeys(printable_text(adapter.framework()) for adapter in adapters))
        self.host_pools = tuple(read_all(adapters, lambda adapter: adapter.host_pools()))
        self.distributed = is_distributed()


class ResumeSignals:
    """Counts the signals SIGCONT of a program that `gpumond run --suspendable` has started; they resume it.

    They are blocked in all threads of such a program, since its main thread may wait for the driver.
    """

    def __init__(self, suspendable: bool) -> None:
        self._is_blocked, self._received = suspendable and _main_thread_blocks(signal.SIGCONT), 0

    def count(self) -> int:
        while self._is_blocked and signal.sigtimedwait({signal.SIGCONT}, 0) is not None:
            self._received += 1
        return self._received


def _main_thread_blocks(signal_number: int) -> bool:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            blocked_line = next(line for line in status if line.startswith("SigBlk:"))
    except (OSError, StopIteration):
        return False
    return bool(int(blocked_line.split()[1], 16) >> (signal_number - 1) & 1)


class AgentSession:
    """Belongs to the agent's thread; only `on_training_step` is called from another."""

    def __init__(self, settings: AgentSettings, wakeup: WakeupPipe) -> None:
        self._settings, self._wakeup = settings, wakeup
        self._transport = Transport()
        self._settings_at_connection: tuple[object, ...] = ()
        """The settings as of the connection, some of which the daemon knows."""
        self._next_report_at = 0.0
        self._queued_flushes: dict[str, tuple[FlushCommand, float]] = {}
        self.waiting_for_step: dict[str, tuple[FlushCommand | AgentRequest, float]] = {}
        """Commands that wait for `step`, each with its deadline."""
        self._step_results: deque[FlushResult | AgentResponse] = deque()
        self._queued_requests: deque[AgentRequest] = deque(maxlen=MAX_REQUESTS)
        self._request_handler = RequestHandler(settings)
        self._resume_signals = ResumeSignals(settings.suspendable)
        self._allocator_info: AllocatorInfo | None = None
        self._is_closing = False
        self.is_flushing = False

    def run_once(self) -> None:
        """Wait for messages, until the next report at the latest, and process them."""
        self._connect()
        has_data = self._wait_for_data()
        now = time.monotonic()
        for message in self._transport.receive(now) if has_data else ():
            if isinstance(message, FlushCommand):
                self._queued_flushes[message.id] = (message, now + message.timeout_seconds)
            elif isinstance(message, CancelFlush):
                self._cancel(message.id)
            elif isinstance(message, AgentRequest):
                self._queued_requests.append(message)
            elif isinstance(message, BorrowResponse):
                BORROWING.deliver(message)
        if not self._transport.is_connected:
            BORROWING.cancel_waits()
            self._queued_flushes.clear()
            self.waiting_for_step.clear()
            self._queued_requests.clear()
        if not self._flush_next():
            self._respond_to_next_request()
        self._continue_requests()
        self._send_results(time.monotonic())
        for request in BORROWING.take_outgoing():
            self._transport.enqueue(request)
        self._report()
        self._transport.send_pending(time.monotonic())

    def on_training_step(self) -> None:
        """Carry out the waiting flushes in the program's own thread."""
        for command_id, (command, deadline) in list(self.waiting_for_step.items()):
            if time.monotonic() >= deadline or self.waiting_for_step.pop(command_id, None) is None:
                continue
            if isinstance(command, AgentRequest):
                self._step_results.append(self._request_handler.respond(command))
            else:
                try:
                    self._step_results.append(self._execute(command, deadline))
                except BaseException as error:
                    self._step_results.append(
                        FlushResult(command.id, "failed", printable_text(f"interrupted: {error!r}"))
                    )
                    raise
                self._next_report_at = 0.0
            self._wakeup.set()

    def _execute(self, command: FlushCommand, deadline: float) -> FlushResult:
        return ALLOCATORS.execute(command, self._settings.hooks, self._settings.main_thread, deadline)

    def _cancel(self, command_id: str) -> None:
        """Cancel a waiting command. Every flush has a result, so the daemon detects its end."""
        if any(request.id == command_id for request in self._queued_requests):
            self._queued_requests = deque(
                (queued for queued in self._queued_requests if queued.id != command_id), MAX_REQUESTS
            )
            return
        if self._queued_flushes.pop(command_id, None) or self.waiting_for_step.pop(command_id, None):
            self._transport.enqueue(
                FlushResult(command_id, "deferred", "the daemon canceled the flush; nothing was done")
            )

    def close(self, program_exits: bool) -> None:
        """Send a last report and a Goodbye, which states how the program ends if it exits."""
        self._request_handler.cancel_recording()
        self._next_report_at, self._is_closing = 0.0, True
        try:
            if program_exits and OOMS.has_records:
                self._connect()  # of a program that has just begun
            self._report()
        except Exception:  # the program and its libraries are about to end
            pass
        self._transport.send_pending(0.0)
        BORROWING.cancel_waits()
        self._transport.enqueue(Goodbye(program_ending() if program_exits else None))
        self._transport.send_pending(0.0)
        self._transport.reset()

    def record_ending(self) -> bool:
        """Record the out-of-memory error that ends the program, and return whether there is one.

        Called while the frames of the error exist.
        """
        if program_ending() != "out-of-memory":
            return False
        OOMS.record_unhandled()
        return True

    def abandon(self) -> None:
        """Close the parent's socket in a forked child, without a message."""
        self._transport.reset()

    def _connect(self) -> None:
        supported = supported_requests(self._settings.allow_limit, bool(self._settings.end_functions))
        current_settings = (self._settings.socket, self._settings.workload, supported)
        if self._transport.is_connected:
            if current_settings == self._settings_at_connection:
                return
            self._transport.reset()
        now = time.monotonic()
        if now >= self._transport.next_attempt_at and self._transport.connect(
            self._settings.socket or program_socket(), now
        ):
            self._settings_at_connection = current_settings
            admission = printable_text(os.environ.get("GPUMOND_ADMISSION", ""))
            python = sys.version.split()[0]
            job_fields = (*rank_and_world_size(), job_name(), slurm_account())
            hello = Hello(self._settings.workload, __version__, python, supported, admission, *job_fields)
            self._transport.enqueue(hello)
            self._next_report_at = now
            BORROWING.wake = self._wakeup.set

    def _wait_for_data(self) -> bool:
        """Return whether the daemon has sent data or closed the connection."""
        now = time.monotonic()
        deadlines = [self._next_report_at, *(deadline for _, deadline in list(self.waiting_for_step.values()))]
        if not self._transport.is_connected:
            deadlines.append(self._transport.next_attempt_at)
        poll = select.poll()
        wakeup_descriptor, socket_descriptor = self._wakeup.fileno(), self._transport.fileno()
        for descriptor, events in (
            (wakeup_descriptor, select.POLLIN),
            (socket_descriptor, select.POLLIN | select.POLLOUT if self._transport.has_unsent else select.POLLIN),
        ):
            if descriptor >= 0:
                poll.register(descriptor, events)
        wait_seconds = 0.0 if self._queued_flushes or self._queued_requests else max(0.0, min(deadlines) - now)
        events_by_descriptor = dict(poll.poll(1000 * min(wait_seconds, REPORT_INTERVAL_SECONDS)))
        if wakeup_descriptor in events_by_descriptor:
            self._wakeup.clear()
        return bool(events_by_descriptor.get(socket_descriptor, 0) & ~select.POLLOUT)

    def _flush_next(self) -> bool:
        """Carry out at most one flush, and return whether one was: messages that arrive during it, a CancelFlush among
        them, are read before the next command.
        """
        policy = self._settings.flush_policy
        for command_id in list(self._queued_flushes):
            command, deadline = self._queued_flushes.pop(command_id)
            if policy == "never":
                self._transport.enqueue(FlushResult(command.id, "refused", "this program's flush_policy is never"))
            elif policy == "step":
                self.waiting_for_step[command_id] = (command, deadline)
            elif time.monotonic() >= deadline:
                self._transport.enqueue(
                    FlushResult(command.id, "timeout", "the deadline passed before the flush started; nothing was done")
                )
            else:
                self.is_flushing = True
                try:
                    self._transport.enqueue(self._execute(command, deadline))
                finally:
                    self.is_flushing = False
                self._next_report_at = 0.0
                return True
        return False

    def _respond_to_next_request(self) -> None:
        if self._queued_requests:
            request = self._queued_requests.popleft()
            if request.kind == "classes" and self._settings.flush_policy == "step" and request.record_seconds is None:
                self.waiting_for_step[request.id] = (request, time.monotonic() + STEP_TIMEOUT_SECONDS)
            elif request.kind == "retainers":
                self._transport.enqueue(self._request_handler.start_search(request))
            elif request.record_seconds is not None:
                refusal = self._request_handler.start_recording(request)
                if refusal is not None:
                    self._transport.enqueue(refusal)
            else:
                self._transport.enqueue(self._request_handler.respond(request))
                self._next_report_at = 0.0

    def _continue_requests(self) -> None:
        self._request_handler.continue_search(time.monotonic())
        recorded = self._request_handler.finish_due_recording(time.monotonic())
        if recorded is not None:
            self._transport.enqueue(recorded)

    def _send_results(self, now: float) -> None:
        for command_id, (command, deadline) in list(self.waiting_for_step.items()):
            if now >= deadline and self.waiting_for_step.pop(command_id, None) is not None:
                if isinstance(command, AgentRequest):
                    waited = f"it called no step() within {STEP_TIMEOUT_SECONDS:g} s"
                    reason = f"this program's flush_policy is step, but {waited}"
                    self._transport.enqueue(AgentResponse(command.id, reason))
                    continue
                reason = f"the program called no step() within {command.timeout_seconds:g} s; nothing was done"
                self._transport.enqueue(FlushResult(command.id, "deferred", reason))
        while self._step_results:
            self._transport.enqueue(self._step_results.popleft())

    def _report(self) -> None:
        now = time.monotonic()
        if now < self._next_report_at:
            return
        self._next_report_at = now + REPORT_INTERVAL_SECONDS
        adapters = ALLOCATORS.adapters()
        if self._settings.flush_policy == "allow":
            for adapter in adapters:
                if isinstance(adapter, TensorTracking):
                    with suppress(Exception):  # a version of the library that is not understood
                        adapter.find_older_objects()
        if self._transport.is_connected:
            pools = ALLOCATORS.read()
            if pools is not None:
                info = self._allocator_info
                if info is None or info.adapters is not adapters:
                    info = self._allocator_info = AllocatorInfo(adapters)
                record_pools(pools, is_final=self._is_closing)
                oom_pools = sys.modules.get("gpumond.agent.measure.oom_pool")  # if the program has one
                if oom_pools is not None:
                    oom_pools.OOM_POOLS.record_uses()
                    pools = oom_pools.OOM_POOLS.add_uses(pools)
                refusals = self._transport.refusals + ALLOCATORS.refusals
                program = program_report(info.distributed, refusals, self._request_handler.retainers)
                self._transport.enqueue(
                    Report(
                        self._settings.flush_policy,
                        info.frameworks,
                        pools,
                        program,
                        info.host_pools,
                        ALLOCATORS.limits(),
                        components(),
                        self._resume_signals.count(),
                        self._settings.suspendable,
                    )
                )


def program_ending() -> Ending | None:
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
    return "out-of-memory" if any(map(is_oom, error_chain(error))) else "error"
