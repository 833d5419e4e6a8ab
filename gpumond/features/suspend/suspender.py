"""Suspends programs and resumes them: refuses what is unsafe, keeps each step in the store before the driver is asked,
and restores a program only while its whole memory is granted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from gpumond.core import AdmissionService, Clock, Core, Part, SuspendService, Tick
from gpumond.facts.errors import NoSuchEntry, NoSuchTarget, ProtocolError, StoreUnavailable, TooManyAdmissions
from gpumond.facts.messages import from_json, to_json
from gpumond.facts.program import ProcessKey
from gpumond.facts.quota import Admission
from gpumond.facts.snapshot import AgentReport, DeviceReading, ProcessUsage, Reading, Snapshot, Suspension
from gpumond.facts.suspension import SuspendedMemory, SuspendedProgram, SuspensionReceipt, largest_programs
from gpumond.facts.units import size_text
from gpumond.features.suspend.checkpoint_process import CheckpointRequest, CheckpointResponse
from gpumond.features.suspend.decision import (
    HostState,
    Refusal,
    SuspendRequest,
    already_suspended,
    checkpoint_outcome,
    memory_of,
    refusals,
    with_suspension_marks,
)
from gpumond.host.files import lock_file
from gpumond.host.machine import available_bytes, find_process, is_descendant, is_signal_pending
from gpumond.host.peer import PeerIdentity
from gpumond.host.python_commands import module_command
from gpumond.host.tasks import Tasks
from gpumond.store.table import Table, Transactions
from gpumond.tick.observe import as_unmapped

log = logging.getLogger(__name__)

MAX_RECEIPTS = 1000
POLL_SECONDS = 1.0
"""Time between two looks at a request for memory. Its place is lost after 10 s."""
MIN_WAIT_SECONDS = 2.0
"""Shortest wait for memory: the current frame may be older than a suspension or an end that has just freed it."""
MAX_RESUME_WAIT_SECONDS = 600.0
"""Longest wait for memory of a resumption that continues after a restart, or that the end of a program requests."""
QUERY_PAUSE_SECONDS, MAX_QUERY_PAUSE_SECONDS = 5.0, 300.0
"""Time between two questions about the driver's state of a program, which is unknown. It doubles."""
SETTLE_SECONDS = 5.0
"""Longest wait until the driver's counts show a suspension."""
MAX_SIGNAL_WAIT_SECONDS = 3.0
"""Longest wait until an agent takes a signal, which it does once a second."""
LISTED_GRACE_SECONDS = 15.0
"""Time for which the driver lists a suspended program until it is asked whether someone else has resumed it."""

SuspensionAction = Literal["suspend", "resume"]

NOT_STORED = "the store can't be written, so a restarted daemon wouldn't know about this program"


MAX_RESPONSE_BYTES = 64 * 1024
EXIT_POLLS, EXIT_POLL_SECONDS = 100, 0.01
BASE_TIMEOUT_SECONDS = 60.0
MIN_BYTES_PER_SECOND = 256 << 20
"""A quarter of the lowest rate that was measured, at which a program's bytes are moved while the daemon waits."""


class CheckpointProcesses:
    """The daemon's end of the checkpoint processes: one at a time for a program, each awaited with a deadline.

    None is ever killed: a driver call that is cut off may leave its program locked. It holds an flock on a file of
    the program until it ends, so a daemon, also the next one, starts no second one beside it. ``directory``: that
    of the lock files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._environ = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._processes: list[subprocess.Popen[bytes]] = []

    async def ask(self, request: CheckpointRequest, timeout_seconds: float) -> CheckpointResponse | None:
        """Return the answer of a new process; None if there is none in time, or if an earlier one still works."""
        self._processes = [each for each in self._processes if each.poll() is None]
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = lock_file(self._directory / f"{request.pid}-{request.start_ticks}.lock")
        except BlockingIOError:
            return None
        except OSError as error:
            return CheckpointResponse(error=f"the lock file can't be opened: {error.strerror}")
        try:
            read_end, write_end = os.pipe()
            try:
                process = subprocess.Popen(
                    [*module_command("gpumond.features.suspend.checkpoint_process"), to_json(request).decode()],
                    stdin=subprocess.DEVNULL,
                    stdout=write_end,
                    env=self._environ,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
            except OSError as error:
                os.close(read_end)
                return CheckpointResponse(error=f"the checkpoint process can't be started: {error.strerror}")
            finally:
                os.close(write_end)
        finally:
            os.close(lock)
        self._processes.append(process)
        response = await _read_to_end(read_end, timeout_seconds)
        for _ in range(EXIT_POLLS):  # it holds the lock for a moment longer
            if response is None or process.poll() is not None:
                break
            await asyncio.sleep(EXIT_POLL_SECONDS)
        if response is None:
            log.warning(
                "no response within %g s from the process that moves pid %d's memory", timeout_seconds, request.pid
            )
            return None
        try:
            return from_json(CheckpointResponse, response)
        except ProtocolError:
            exit_text = _exit_text(process.poll())
            return CheckpointResponse(error=f"the checkpoint process has crashed ({exit_text}); see the daemon's log")

    def remove_lock_file(self, program_id: str) -> None:
        """Remove the lock file of a program that runs again or has ended."""
        with suppress(OSError):
            os.unlink(self._directory / f"{program_id}.lock")


def _exit_text(code: int | None) -> str:
    if code is None:
        return "still ending"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _read_to_end(descriptor: int, timeout_seconds: float) -> bytes | None:
    """Read a pipe until its end, and close it; None if it has not ended in time."""
    reader = asyncio.StreamReader(limit=MAX_RESPONSE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        return await asyncio.wait_for(reader.read(), timeout_seconds)
    except asyncio.TimeoutError:
        return None
    finally:
        transport.close()


def suspension_table(store: Transactions) -> Table[SuspendedProgram]:
    """Return the store's table of programs that are suspended."""
    return Table(store, "suspensions", SuspendedProgram, key="id", is_valid=lambda each: bool(each.memory))


class Suspender:
    """Suspends programs and resumes them; keeps their receipts.

    ``snapshot`` returns the current facts, ``read_driver`` new ones. ``host_state`` reads what concerns a process among
    those that the driver lists. ``is_flushing``: its agent executes a flush. ``wake`` makes a new snapshot due.
    """

    def __init__(
        self,
        *,
        allowed: Callable[[], bool],
        idle_seconds: Callable[[], float],
        snapshot: Callable[[], Snapshot | None],
        read_driver: Callable[[], Awaitable[Reading | None]],
        admissions: AdmissionService,
        processes: CheckpointProcesses,
        host_state: Callable[[ProcessKey, Collection[ProcessKey]], Awaitable[HostState]],
        is_alive: Callable[[ProcessKey], bool],
        has_pending_sigcont: Callable[[ProcessKey], bool],
        is_flushing: Callable[[AgentReport], bool],
        store: Transactions,
        audit: Callable[[str, str, Any], Awaitable[None]],
        publish: Callable[[SuspensionReceipt], None],
        wake: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._allowed, self._idle_seconds, self._snapshot = allowed, idle_seconds, snapshot
        self._read_driver, self._admissions, self._processes = read_driver, admissions, processes
        self._host_state, self._is_flushing = host_state, is_flushing
        self._is_alive, self._has_pending_sigcont = is_alive, has_pending_sigcont
        self._audit, self._publish, self._wake, self._clock = audit, publish, wake, clock
        self._table = suspension_table(store)
        self.loaded = False
        self.programs: dict[ProcessKey, SuspendedProgram] = {}
        self.receipts: deque[SuspensionReceipt] = deque(maxlen=MAX_RECEIPTS)
        self._suspension_lock = asyncio.Lock()
        """Suspensions follow each other: each must see what the one before has left of the host memory."""
        self._locks: WeakValueDictionary[ProcessKey, asyncio.Lock] = WeakValueDictionary()
        self._ask_at: dict[ProcessKey, float] = {}
        """When the driver's state of a program is asked for again."""
        self._pauses: dict[ProcessKey, float] = {}
        self._listed_since: dict[ProcessKey, float] = {}
        self._resume_signals: dict[ProcessKey, int] = {}
        """The signals SIGCONT that have resumed a program, or came before its suspension."""
        self._tasks = Tasks()
        self._at_work: set[ProcessKey] = set()
        self._canceled_by: dict[ProcessKey, str] = {}
        """Who has cancelled a resumption that waits."""

    async def load(self) -> list[str]:
        """Restore the programs of the previous daemon, and continue what it has begun. Raises StoreUnavailable."""
        rows = await self._table.rows()
        self.programs = {row.value.key: row.value for row in rows} | self.programs
        self.loaded = True
        for program in self.programs.values():
            if program.state not in ("suspended", "stuck"):
                self._extend_grants(program)
                self._ask_at[program.key] = self._clock.monotonic()
        return []

    async def close(self) -> None:
        """Stop waiting. Checkpoint processes continue, and the next daemon asks for their result."""
        await self._tasks.cancel()

    def observe(self, snapshot: Snapshot) -> Snapshot:
        """Add the suspended programs, also those that the driver's lists do not reveal, as after a restart."""
        if not self.programs and not self._allowed():
            return snapshot
        known_suspensions = {(each.device_uuid, each.process) for each in snapshot.suspensions}
        added: list[Suspension] = []
        changed_reports: dict[ProcessKey, AgentReport] = {}
        for program in self.programs.values():
            unlisted = [
                each
                for each in _unlisted_suspensions(program, snapshot)
                if (each.device_uuid, program.key) not in known_suspensions
            ]
            report = snapshot.reports_by_process.get(program.key)
            if report is not None and unlisted:
                pools = as_unmapped(report.pools, {each.device_uuid for each in unlisted})
                changed_reports[program.key] = replace(report, pools=pools, suspended=True)
            added += unlisted
        snapshot = replace(
            snapshot,
            suspensions=(*snapshot.suspensions, *added),
            reports=tuple(changed_reports.get(each.key, each) for each in snapshot.reports),
            suspended_programs=tuple(self.programs.values()),
        )
        if not self._allowed():
            return snapshot
        return replace(snapshot, reports=tuple(with_suspension_marks(snapshot, self._idle_seconds())))

    def execute(self, snapshot: Snapshot) -> None:
        """Note the programs that have ended, and ask for states that are unknown. Waits for nothing."""
        now = self._clock.monotonic()
        self._resume_signals = {
            key: count for key, count in self._resume_signals.items() if key in snapshot.reports_by_process
        }
        ended = {each.key for each in snapshot.ends}
        for key, program in list(self.programs.items()):
            if key in self._at_work:
                continue
            if program.state == "resuming":  # a checkpoint process may still be restoring it
                self._extend_grants(program)
            if not self._is_alive(key):
                self._tasks.start(self._conclude_gone(program))
            elif key in self._ask_at:
                if now >= self._ask_at[key]:
                    self._tasks.start(self._settle(key))
            elif program.state not in ("suspended", "stuck"):  # an error has ended its task
                self._ask_at[key] = now + QUERY_PAUSE_SECONDS
            elif program.state == "suspended" and key in ended:  # its exit waits for the driver
                self._tasks.start(self.resume(key, "exit", wait_seconds=MAX_RESUME_WAIT_SECONDS))
            elif program.state == "suspended" and self._received_sigcont(program, snapshot):
                self._tasks.start(self.resume(key, "SIGCONT", wait_seconds=MAX_RESUME_WAIT_SECONDS))
            elif program.state == "suspended" and _listed_bytes(program, snapshot.devices):
                if now - self._listed_since.setdefault(key, now) > LISTED_GRACE_SECONDS:
                    self._ask_at[key] = now
            else:
                self._listed_since.pop(key, None)

    def _received_sigcont(self, program: SuspendedProgram, snapshot: Snapshot) -> bool:
        """Return whether a program has received SIGCONT. Its agent has counted the signal, or is blocked itself."""
        report = snapshot.reports_by_process.get(program.key)
        pending = self._has_pending_sigcont(program.key)
        if report is None:
            return pending
        before = self._resume_signals.get(program.key)
        # A pending signal resumes the program at once. Its agent reports it later, perhaps after the next suspension.
        self._resume_signals[program.key] = max(report.resume_signals + pending, before or 0)
        return pending or (before is not None and report.resume_signals > before)

    async def _count_earlier_signals(self, report: AgentReport) -> None:
        """Wait until the agent has taken a signal SIGCONT that came before the suspension, and must not end it."""
        pending, end = self._has_pending_sigcont(report.key), self._clock.monotonic() + MAX_SIGNAL_WAIT_SECONDS
        while self._has_pending_sigcont(report.key) and self._clock.monotonic() < end:
            await asyncio.sleep(0.05)
        self._resume_signals[report.key] = max(report.resume_signals + pending, self._resume_signals.get(report.key, 0))

    async def suspend_idle(
        self, process: ProcessKey, requested_by: str, dry_run: bool = False, requested_for: str = ""
    ) -> SuspensionReceipt:
        request = SuspendRequest(process=process, min_idle_seconds=self._idle_seconds(), requested_for=requested_for)
        return await self.suspend(request, requested_by, dry_run)

    async def suspend(self, request: SuspendRequest, requested_by: str, dry_run: bool = False) -> SuspensionReceipt:
        """Suspend a program, and return when it is done or refused. A caller that leaves does not cancel it."""
        return await asyncio.shield(self._tasks.start(self._run_suspension(request, requested_by, dry_run)))

    async def resume(
        self, process: ProcessKey, requested_by: str, uid: int | None = None, wait_seconds: float = 0.0
    ) -> SuspensionReceipt:
        """Resume a program once its memory is granted, for which it waits at most ``wait_seconds``."""
        return await asyncio.shield(self._tasks.start(self._run_resumption(process, requested_by, uid, wait_seconds)))

    def cancel(self, pid: int, requested_by: str, uid: int | None = None) -> None:
        """End the wait of a resumption: the program stays suspended. Raises NoSuchTarget if none waits."""
        for key, program in self.programs.items():
            if key.pid == pid and program.state == "waiting" and uid in (None, program.uid):
                self._canceled_by[key] = requested_by
                return
        raise NoSuchTarget(f"no resumption of pid {pid} is waiting for memory")

    async def _run_suspension(self, request: SuspendRequest, requested_by: str, dry_run: bool) -> SuspensionReceipt:
        key, snapshot = request.process, self._snapshot()
        report = snapshot.reports_by_process.get(key) if snapshot else None
        receipt = self._new_receipt("suspend", key, report.workload if report else "", requested_by)
        receipt = replace(receipt, requested_for=request.requested_for)
        began = self._clock.monotonic()
        if snapshot is None or report is None or key.start_ticks is None:
            return replace(
                receipt, reason="no program with an agent has this pid", remedy="to list the programs: gpumond status"
            )
        async with self._suspension_lock, self._lock(key):
            refusal = await self._refusal(snapshot, report, request)
            memory = memory_of(snapshot, key)
            uuids = tuple(each.device_uuid for each in memory)
            receipt = replace(receipt, expected_bytes=sum(each.used_bytes for each in memory), device_uuids=uuids)
            if refusal or dry_run:
                reason, remedy = (refusal.reason, refusal.remedy) if refusal else ("", "")
                return replace(receipt, outcome="refused" if refusal else "planned", reason=reason, remedy=remedy)
            program = SuspendedProgram(
                id=f"{key.pid}-{key.start_ticks}",
                pid=key.pid,
                start_ticks=key.start_ticks,
                uid=report.uid,
                workload=report.workload,
                state="suspending",
                since=receipt.started_at,
                memory=memory,
                requested_by=requested_by,
            )
            if not await self._save(program):
                return replace(receipt, reason=NOT_STORED, remedy="free space on the disk of the store")
            await self._count_earlier_signals(report)
            with self._working(key):
                answer = await self._ask(program, "suspend")
                receipt = await self._conclude(program, answer, receipt)
                if receipt.outcome == "suspended":
                    still_counted = await self._driver_bytes(program, present=False)
                    receipt = replace(
                        receipt, released_bytes=None if still_counted is None else program.resume_bytes - still_counted
                    )
        return await self._record_receipt(replace(receipt, duration_seconds=self._clock.monotonic() - began))

    async def _run_resumption(
        self, key: ProcessKey, requested_by: str, uid: int | None, wait_seconds: float
    ) -> SuspensionReceipt:
        began = self._clock.monotonic()
        receipt = self._new_receipt("resume", key, "", requested_by)
        async with self._lock(key):
            program, snapshot = self.programs.get(key), self._snapshot()
            refusal = _resume_refusal(program, key, uid, snapshot)
            if program is None or refusal is not None:
                assert refusal is not None
                report = snapshot.reports_by_process.get(key) if snapshot else None
                return replace(
                    receipt,
                    workload=report.workload if report else "",
                    reason=refusal.reason,
                    remedy=refusal.remedy,
                    duration_seconds=self._clock.monotonic() - began,  # another request may have had the lock
                )
            since = receipt.started_at if program.resume_since is None else program.resume_since
            began -= receipt.started_at - since
            receipt = replace(
                receipt,
                workload=program.workload,
                expected_bytes=program.resume_bytes,
                device_uuids=program.device_uuids,
                started_at=since,
            )
            with self._working(key):
                requester = program.requested_by if program.grants else requested_by
                program = replace(program, state="waiting", reason="", requested_by=requester, resume_since=since)
                if not await self._save(program):
                    self.programs[key] = replace(program, state="suspended", resume_since=None)
                    return replace(receipt, reason=NOT_STORED, remedy="free space on the disk of the store")
                deadline = self._clock.monotonic() + max(wait_seconds, MIN_WAIT_SECONDS)
                self._canceled_by.pop(key, None)
                receipt = await self._wait_and_restore(program, receipt, deadline)
        return await self._record_receipt(replace(receipt, duration_seconds=self._clock.monotonic() - began))

    async def _wait_and_restore(
        self, program: SuspendedProgram, receipt: SuspensionReceipt, deadline: float
    ) -> SuspensionReceipt:
        """Restore a program that waits, once all its memory is granted. The driver is not asked before."""
        ungranted: Admission | None = None
        while True:
            program, ungranted = await self._request_grants(program)
            if ungranted is None and not self._is_alive(program.key):
                return await self._conclude(program, CheckpointResponse(state="gone"), receipt)
            if ungranted is None and (shortfall := await self._shortfall(program)) is None:
                program = replace(program, state="resuming")
                if await self._save(program):
                    break
            elif ungranted is None:
                ungranted = shortfall
            must_end = program.key in self._canceled_by or self._clock.monotonic() >= deadline
            if must_end or not self._is_alive(program.key):
                return await self._end_resumption(program, ungranted, receipt)
            await asyncio.sleep(POLL_SECONDS)
        grants_task = asyncio.create_task(self._keep_grants(program))
        try:
            answer = await self._ask(program, "resume")
        finally:
            grants_task.cancel()
        return await self._conclude(program, answer, receipt)

    async def _request_grants(self, program: SuspendedProgram) -> tuple[SuspendedProgram, Admission | None]:
        """Return the program with its requests for memory, and the first that is not granted; None if all are.

        The devices follow each other in the order of their names: two programs cannot wait for each other.
        """
        snapshot = self._snapshot()
        # An older snapshot counts the memory that the suspension has freed as allocated by this program.
        if snapshot is not None and all(each.key != program.key for each in snapshot.suspended_programs):
            snapshot = None
        request_ids: list[str] = []
        ungranted: Admission | None = None
        for index, memory in enumerate(sorted(program.memory, key=lambda each: each.device_uuid)):
            request_id = program.grants[index] if index < len(program.grants) else ""
            answer = self._request(program, memory, request_id, snapshot) if snapshot else None
            request_ids += [answer.id] if answer else [request_id] if request_id else []
            if answer is None or answer.state != "granted":
                ungranted = answer or _ungranted_request(memory)
                break
        if tuple(request_ids) != program.grants:
            program = replace(program, grants=tuple(request_ids))
            await self._save(program)
        has_grants = self._extend_grants(program)
        is_stored = await self._admissions.save() and has_grants and self._extend_grants(program)
        if ungranted is None and not is_stored:
            ungranted = _ungranted_request(program.memory[0])
        return program, ungranted

    def _request(
        self, program: SuspendedProgram, memory: SuspendedMemory, request_id: str, snapshot: Snapshot
    ) -> Admission | None:
        """Renew a request for memory, or make it; None if the device is not known, or not now."""
        if request_id:
            with suppress(NoSuchEntry):
                return self._admissions.renew(snapshot, request_id, program.requested_by)
        device = snapshot.device(memory.device_uuid)
        if device is None:
            return None
        try:
            return self._admissions.request(
                snapshot,
                device,
                memory.used_bytes,
                program.requested_by,
                uid=program.uid,
                pid=program.pid,
                workload=program.workload,
                wait=True,
                counts_in_full=True,
            )
        except TooManyAdmissions:
            return None

    async def _shortfall(self, program: SuspendedProgram) -> Admission | None:
        """Return the device whose memory was taken by a program without a grant; None if all of it is free."""
        reading = await self._read_driver()
        devices: Mapping[str, DeviceReading] = {each.uuid: each for each in reading.devices} if reading else {}
        for memory in program.memory:
            device = devices.get(memory.device_uuid)
            free_bytes = device.current_free_bytes if device else None
            if free_bytes is None or free_bytes < memory.used_bytes:
                return _ungranted_request(memory, free_bytes)
        return None

    async def _end_resumption(
        self, program: SuspendedProgram, ungranted: Admission | None, receipt: SuspensionReceipt
    ) -> SuspensionReceipt:
        self._cancel_grants(program)
        await self._save(replace(program, state="suspended", grants=(), resume_since=None), adopt_always=True)
        if canceled_by := self._canceled_by.pop(program.key, ""):
            remedy = f"to resume it: gpumond resume --pid {program.pid}"
            return replace(
                receipt, reason=f"{canceled_by} canceled the request to resume", remedy=remedy, state="suspended"
            )
        if ungranted is None:
            return replace(receipt, reason=NOT_STORED, remedy="free space on the disk of the store", state="suspended")
        snapshot = self._snapshot()
        grants = self._admissions.granted(snapshot) if snapshot else ()
        holders = snapshot.holders(ungranted.device_uuid, program.key, grants) if snapshot else ()
        missing_bytes = ungranted.need_bytes - max(0, ungranted.available_bytes or 0)
        gpu = f"GPU {ungranted.device_index}"
        reason = (
            f"{gpu} is {size_text(missing_bytes)} short of the {size_text(ungranted.need_bytes)} that the program needs"
        )
        remedy = f"to wait for the memory: gpumond resume --pid {program.pid} --wait 10m"
        return replace(
            receipt,
            reason=f"{reason}; {largest_programs(gpu, [*map(str, holders)])}" if holders else reason,
            remedy=remedy,
            state="suspended",
            missing_bytes=missing_bytes,
            holders=holders,
        )

    async def _conclude(
        self,
        program: SuspendedProgram,
        answer: CheckpointResponse | None,
        receipt: SuspensionReceipt,
        state_query: bool = False,
    ) -> SuspensionReceipt:
        """Adopt what the driver's state means, release grants that are no longer needed, and complete the receipt."""
        result = checkpoint_outcome(program, answer, state_query)
        after = result.program
        if after is None or after.state in ("suspended", "stuck"):
            self._cancel_grants(program)
            after = after and replace(after, grants=())
        self._ask_at.pop(program.key, None)
        if result.ask_again:
            pause = self._pauses.get(program.key, QUERY_PAUSE_SECONDS)
            self._pauses[program.key] = min(2 * pause, MAX_QUERY_PAUSE_SECONDS)
            self._ask_at[program.key] = self._clock.monotonic() + pause
        else:
            self._pauses.pop(program.key, None)
        if after is None:
            await self._forget(program)
        else:
            await self._save(after, adopt_always=True)
        return replace(
            receipt,
            outcome=result.outcome or receipt.outcome,
            reason=result.reason,
            state=after.state if after else "",
            host_bytes=after.host_bytes if after else None,
            steps=answer.steps if answer else (),
            returned_bytes=(await self._driver_bytes(program, present=True) if result.outcome == "resumed" else None),
        )

    async def _settle(self, key: ProcessKey) -> None:
        """Ask the driver for a state that is unknown, and continue what was begun."""
        async with self._lock(key):
            program = self.programs.get(key)
            if program is None:
                return
            with self._working(key):
                answer = await self._ask(program, "settle")
                action: SuspensionAction = "suspend" if program.state == "suspending" else "resume"
                receipt = await self._conclude(program, answer, self._receipt_of(program, action), state_query=True)
        if receipt.outcome not in ("refused", "timeout"):
            await self._record_receipt(receipt)
        current = self.programs.get(key)
        if current is not None and current.state == "waiting":
            await self.resume(key, program.requested_by, wait_seconds=MAX_RESUME_WAIT_SECONDS)

    async def _conclude_gone(self, program: SuspendedProgram) -> None:
        async with self._lock(program.key):
            if self.programs.get(program.key) is not program:
                return
            receipt = await self._conclude(
                program, CheckpointResponse(state="gone"), self._receipt_of(program, "suspend")
            )
        await self._record_receipt(receipt)

    async def _ask(
        self, program: SuspendedProgram, action: Literal["suspend", "resume", "settle"]
    ) -> CheckpointResponse | None:
        request = CheckpointRequest(action=action, pid=program.pid, start_ticks=program.start_ticks, uid=program.uid)
        return await self._processes.ask(request, BASE_TIMEOUT_SECONDS + program.resume_bytes / MIN_BYTES_PER_SECOND)

    async def _refusal(self, snapshot: Snapshot, report: AgentReport, request: SuspendRequest) -> Refusal | None:
        if report.key in self.programs:
            return already_suspended(self.programs[report.key])
        if self._is_flushing(report):
            return Refusal("a flush of the program is in progress", "wait for its receipt")
        if not self.loaded:
            return Refusal("the store hasn't been read yet", "try again in a few seconds")
        if refusal := next(refusals(snapshot, report, request, self._allowed(), None), None):
            return refusal
        listed = {key for device in snapshot.devices for key in device.processes_by_key}
        host_state = await self._host_state(report.key, listed)
        pending = sum(each.resume_bytes for each in self.programs.values() if each.state == "suspending")
        return next(refusals(snapshot, report, request, self._allowed(), host_state, pending), None)

    async def _driver_bytes(self, program: SuspendedProgram, present: bool) -> int | None:
        """Return the driver's count of a program, once it shows whether its memory is ``present``; None if unknown."""
        deadline = self._clock.monotonic() + SETTLE_SECONDS
        while True:
            reading = await self._read_driver()
            counted = None if reading is None else _listed_bytes(program, reading.devices)
            is_settled = counted is not None and bool(counted) == present
            if is_settled or self._clock.monotonic() >= deadline or not self._is_alive(program.key):
                return counted
            await asyncio.sleep(0.2)

    async def _keep_grants(self, program: SuspendedProgram) -> None:
        """Keep the grants of a program while it is restored."""
        while True:
            self._extend_grants(program)
            await self._admissions.save()
            await asyncio.sleep(POLL_SECONDS)

    def _extend_grants(self, program: SuspendedProgram) -> bool:
        """Extend all grants of a program, and return whether it still has them."""
        all_extended = True
        for request_id in program.grants:
            try:
                self._admissions.extend(request_id, program.requested_by)
            except NoSuchEntry:
                all_extended = False
        return all_extended

    def _cancel_grants(self, program: SuspendedProgram) -> None:
        for request_id in program.grants:
            with suppress(NoSuchEntry):
                self._admissions.cancel(request_id, program.requested_by)

    async def _save(self, program: SuspendedProgram, adopt_always: bool = False) -> bool:
        """Store the state of a program, then adopt it; False if it can't be stored.

        ``adopt_always``: adopt it even then.
        """
        try:
            await self._table.put(program.id, program)
        except StoreUnavailable:
            if adopt_always:
                self.programs[program.key] = program
            return False
        self.programs[program.key] = program
        return True

    async def _forget(self, program: SuspendedProgram) -> None:
        self.programs.pop(program.key, None)
        self._listed_since.pop(program.key, None)
        self._processes.remove_lock_file(program.id)
        with suppress(StoreUnavailable):  # a restarted daemon asks the driver, and then forgets it
            await self._table.delete(program.id, "")
        await self._admissions.save()

    async def _record_receipt(self, receipt: SuspensionReceipt) -> SuspensionReceipt:
        """Keep a receipt, publish its event, log it and record it in the audit."""
        self.receipts.append(receipt)
        self._publish(receipt)
        self._wake()  # the next frame shows the effect
        requester = (
            f"{receipt.requested_by} for {receipt.requested_for}" if receipt.requested_for else receipt.requested_by
        )
        description = f"{receipt.action} of pid {receipt.pid}, by {requester}"
        log.info("%s: %s%s", description, receipt.outcome, f": {receipt.reason}" if receipt.reason else "")
        await self._audit(receipt.requested_by, f"{receipt.action}.receipt", asdict(receipt))
        return receipt

    def _new_receipt(
        self, action: SuspensionAction, key: ProcessKey, workload: str, requested_by: str
    ) -> SuspensionReceipt:
        return SuspensionReceipt(
            action=action,
            pid=key.pid,
            start_ticks=key.start_ticks,
            workload=workload,
            outcome="refused",
            requested_by=requested_by,
            started_at=self._clock.wall(),
        )

    def _receipt_of(self, program: SuspendedProgram, action: SuspensionAction) -> SuspensionReceipt:
        receipt = self._new_receipt(action, program.key, program.workload, program.requested_by)
        since = program.resume_since if action == "resume" else program.since
        return replace(
            receipt,
            started_at=receipt.started_at if since is None else since,
            duration_seconds=0.0 if since is None else receipt.started_at - since,
            expected_bytes=program.resume_bytes,
            device_uuids=program.device_uuids,
        )

    def _lock(self, key: ProcessKey) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    @contextmanager
    def _working(self, key: ProcessKey) -> Iterator[None]:
        """A block in which a process is worked on."""
        self._at_work.add(key)
        try:
            yield
        finally:
            self._at_work.discard(key)


def _resume_refusal(
    program: SuspendedProgram | None, key: ProcessKey, uid: int | None, snapshot: Snapshot | None
) -> Refusal | None:
    if program is None:
        if snapshot is not None and any(each.key == key for each in snapshot.suspended_programs):
            return Refusal("the program has just been resumed", "to see by whom: gpumond receipts")
        if snapshot is not None and key in snapshot.possibly_suspended:
            return Refusal("the program was suspended, but not by gpumond", "resume it with the tool that suspended it")
        return Refusal("the program isn't suspended", "to list suspended programs: gpumond status")
    if uid not in (None, program.uid):
        return Refusal(f"the program belongs to uid {program.uid}", "ask its user or an administrator")
    if program.state == "stuck":
        return Refusal(f"the program is stuck: {program.reason}", f"kill it: kill -9 {program.pid}")
    if program.state not in ("suspended", "waiting"):
        reason = f" ({program.reason})" if program.reason else ""
        return Refusal(
            f"the program is {program.state}, and the driver hasn't reported whether it runs{reason}",
            "gpumond asks the driver again; retry in a few seconds",
        )
    return None


def _ungranted_request(memory: SuspendedMemory, available_bytes: int | None = None) -> Admission:
    return Admission(
        id="",
        state="waiting",
        device_uuid=memory.device_uuid,
        device_index=memory.device_index,
        need_bytes=memory.used_bytes,
        available_bytes=available_bytes,
    )


def _unlisted_suspensions(program: SuspendedProgram, snapshot: Snapshot) -> Iterable[Suspension]:
    """Yield a suspension for each device whose driver does not list a program that is on the host."""
    if program.state == "suspending":
        return
    for memory in program.memory:
        device = snapshot.device(memory.device_uuid)
        if device is not None and program.key not in device.used_by_process and device.used_bytes is not None:
            others = sum(count for count in device.used_by_process.values() if count is not None)
            usage = _usage(program, memory.used_bytes)
            yield Suspension(device.uuid, usage, device.used_bytes - others, snapshot.elapsed_seconds, confirmed=True)


def _usage(program: SuspendedProgram, used_bytes: int) -> ProcessUsage:
    return ProcessUsage(
        pid=program.pid,
        start_ticks=program.start_ticks,
        used_bytes=used_bytes,
        kinds=("compute",),
        comm=program.workload or None,
        uid=program.uid,
    )


def _listed_bytes(program: SuspendedProgram, devices: Sequence[DeviceReading]) -> int:
    """Return what the driver counts for a program on its devices."""
    uuids = {each.device_uuid for each in program.memory}
    return sum(device.used_by_process.get(program.key) or 0 for device in devices if device.uuid in uuids)


class SuspendPart(Suspender, Part):
    table = "suspensions"

    def __init__(self, core: Core) -> None:
        super().__init__(
            allowed=lambda: core.settings.allow_suspend,
            idle_seconds=lambda: core.settings.suspend_after_idle,
            snapshot=lambda: core.frame.snapshot if core.frame else None,
            read_driver=core.read_driver,
            admissions=core.get(AdmissionService),
            processes=CheckpointProcesses(core.store_file.parent / "suspend"),
            host_state=host_state,
            is_alive=is_alive,
            has_pending_sigcont=lambda each: is_signal_pending(each.pid, signal.SIGCONT),
            is_flushing=lambda each: core.programs.is_flushing(PeerIdentity(each.pid, each.start_ticks, each.uid)),
            store=core.store,
            audit=core.audit_change,
            publish=core.events.add_suspension_receipt,
            wake=core.dependencies.tick_due.set,
            clock=core.clock,
        )
        core.provide(SuspendService, self)
        core.provide(Suspender, self)

    def act(self, tick: Tick) -> None:
        self.execute(tick.frame.snapshot)


def is_alive(process: ProcessKey) -> bool:
    present = find_process(process.pid)
    return present is not None and present[0] == process


async def host_state(process: ProcessKey, listed: Collection[ProcessKey]) -> HostState:
    """Read what concerns a process among those that the driver lists."""
    return await asyncio.to_thread(_read_host_state, process, listed)


def _read_host_state(process: ProcessKey, listed: Collection[ProcessKey]) -> HostState:
    others = sorted(each.pid for each in listed if each.pid != process.pid)
    return HostState(
        free_host_bytes=available_bytes([process.pid]),
        children=tuple(pid for pid in others if is_descendant(pid, {process.pid})),
        daemon_uid=os.geteuid(),
    )
