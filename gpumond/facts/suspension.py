"""Programs that gpumond suspends and resumes, and the receipts of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpumond.facts.program import HasProcessKey
from gpumond.facts.units import list_text, size_text

SuspensionState = Literal["suspending", "suspended", "waiting", "resuming", "stuck"]
"""``waiting``: to be resumed as soon as its memory is granted. ``stuck``: the driver reports an error that it cannot
correct.
"""

SuspensionOutcome = Literal["suspended", "resumed", "planned", "refused", "gone", "failed", "timeout"]


@dataclass(frozen=True, slots=True)
class SuspendedMemory:
    """The driver's count of a program on one device before its suspension: what its resumption needs there."""

    device_uuid: str
    device_index: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedProgram(HasProcessKey):
    """A program that gpumond suspends, has suspended, or resumes, until it runs again or has exited.

    ``since``: Unix time of the request to suspend it. ``resume_since``: Unix time of the pending request to resume it,
    or None. ``host_bytes``: growth of its host memory. ``requested_by``: who made the last request; ``grants`` are the
    IDs of requests for memory held in that name. ``reason``: why it is stuck, or why its last suspension or resumption
    failed.
    """

    id: str
    pid: int
    start_ticks: int
    uid: int
    workload: str
    state: SuspensionState
    since: float
    memory: tuple[SuspendedMemory, ...]
    host_bytes: int | None = None
    requested_by: str = ""
    grants: tuple[str, ...] = ()
    reason: str = ""
    resume_since: float | None = None

    @property
    def resume_bytes(self) -> int:
        """The bytes that its resumption needs, on all devices."""
        return sum(each.used_bytes for each in self.memory)

    @property
    def device_uuids(self) -> tuple[str, ...]:
        return tuple(each.device_uuid for each in self.memory)

    def __str__(self) -> str:
        return f"{self.workload or 'the program'} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """A program that holds memory on a device. ``granted_bytes``: what else it is granted, and doesn't hold yet."""

    pid: int | None
    workload: str
    used_bytes: int
    granted_bytes: int = 0

    def __str__(self) -> str:
        granted = f"{size_text(self.granted_bytes)} granted" if self.granted_bytes else ""
        used = size_text(self.used_bytes) if self.used_bytes else ""
        pid = "" if self.pid is None else f"pid {self.pid}"
        return f"{self.workload or 'a process'} ({', '.join(filter(None, (pid, used, granted)))})"


def largest_programs(device: str, holders: Sequence[str]) -> str:
    """Return which programs hold most of a device, such as GPU 0."""
    return f"{device}'s largest program{'s are' if len(holders) > 1 else ' is'} {list_text(holders)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionReceipt(HasProcessKey):
    """Proof of one suspension or resumption.

    ``started_at``: Unix time of the request. ``expected_bytes``: the driver's count for the program before it was
    suspended. ``released_bytes``: the decrease of this count in a suspension; ``returned_bytes``: the count after a
    resumption. Both are None if the driver didn't respond. ``host_bytes``: growth of the program's host memory.
    ``device_uuids``: where the program had this memory. ``state``: the program's state afterwards, empty if it runs or
    has exited. ``missing_bytes`` and ``holders``: what a resumption lacks, and who holds or is granted most of the
    device. ``steps``: seconds that each driver call took. ``requested_for``: the program that waited for the memory,
    empty if none did.
    """

    action: Literal["suspend", "resume"]
    pid: int
    start_ticks: int | None
    workload: str
    outcome: SuspensionOutcome
    requested_by: str
    started_at: float
    reason: str = ""
    remedy: str = ""
    state: SuspensionState | Literal[""] = ""
    expected_bytes: int | None = None
    released_bytes: int | None = None
    host_bytes: int | None = None
    missing_bytes: int | None = None
    holders: tuple[MemoryHolder, ...] = ()
    steps: tuple[tuple[str, float], ...] = ()
    duration_seconds: float = 0.0
    requested_for: str = ""
    device_uuids: tuple[str, ...] = ()
    returned_bytes: int | None = None
