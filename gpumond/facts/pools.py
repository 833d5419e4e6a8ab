"""Memory of allocators and results of flushes: the part of the model that an agent loads into its program.

This module is separate since each of its classes costs the program half a millisecond. Bytes are integers; unknown is
None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.facts.fast_dataclass import fast_dataclass

Exactness = Literal["exact", "interval", "not_releasable"]
FlushPolicy = Literal["allow", "step", "never"]
FlushOutcome = Literal[
    "freed", "partial", "nothing", "refused", "deferred", "timeout", "failed", "planned", "gone", "woken"
]
"""``gone`` and ``woken`` are of serving engines: the process that held the memory ended as intended, or the engine has
its memory again.
"""

STEPS: tuple[str, ...] = ("gc", "hooks", "spill", "ipc", "workspaces", "plans", "cache", "trim", "host")
"""All flush steps of programs, in the order in which they run."""

ENGINE_STEP = "engine"
"""The flush step of serving engines, which runs last."""

ALL_STEPS = (*STEPS, ENGINE_STEP)

SUSPENDED_REASON = "suspended, so not flushed; resume it, then flush it"
"""Reason of the outcome ``deferred`` for a process that the driver has locked or suspended."""

API_FORCE_HINT = 'with "force": true'
"""How a request ignores the cooldown, in messages of the API."""


def with_option_names(message: str) -> str:
    """Return a message of the API with the option of the command line in place of the request's key."""
    return message.replace(API_FORCE_HINT, "with --force")


DEFAULT_STEPS: tuple[str, ...] = ("ipc", "cache", "trim")


@fast_dataclass(frozen=True, slots=True)
class Reclaimable:
    """Bytes that a flush would release to the driver: between ``low`` and ``high``, most probably ``likely``."""

    low: int
    likely: int
    high: int
    exactness: Exactness = "exact"


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """One allocator's pool on one device: ``held = live + reclaimable.likely + stranded``.

    Counters grow from the start of the process, and are never deltas. None is unknown.
    """

    allocator: str
    """Name of the allocator, such as ``torch``."""
    device_uuid: str
    """UUID of the device."""
    live_bytes: int | None
    """Bytes that the program has allocated and not freed. None where nothing counts them: the rest of ``held_bytes``
    may be live or free."""
    held_bytes: int
    """Bytes that the pool has taken from the driver; see ``held_known``."""
    reclaimable: Reclaimable
    """Bytes that a flush would release."""
    stranded_bytes: int
    """Free bytes that a flush can't release."""
    inside: str | None = None
    """Allocator of the same process from whose pool this one allocates; these bytes are counted there."""
    peak_live_bytes: int | None = None
    """Maximum live bytes, as the allocator records them."""
    peak_held_bytes: int | None = None
    """Maximum held bytes, as the allocator records them."""
    ooms: int | None = None
    """Out-of-memory errors that the allocator raised."""
    retries: int | None = None
    """Allocations that the allocator retried after it had emptied its cache."""
    device_allocations: int | None = None
    """Allocations that the allocator requested from the driver."""
    device_frees: int | None = None
    """Allocations that the allocator returned to the driver."""
    refilled_flushes: int = 0
    """Flushes after which the program allocated half or more of the released bytes again within ten seconds."""
    held_known: bool = True
    """False if the library doesn't report its held bytes: ``held_bytes`` is then ``live_bytes``, a lower bound, or 0 if
    these are unknown as well."""
    spillable_bytes: int | None = None
    """Live bytes that the flush step ``spill`` can move to the host."""
    unmapped_bytes: int | None = None
    """Bytes that the allocator counts while their pages are released (sleep mode); neither live nor held."""
    private_bytes: int | None = None
    """Held bytes of private pools (CUDA graphs, ``MemPool``), the only ones whose pages a library releases."""
    live_allocations: int | None = None
    """Blocks that the program has not freed, which are those of ``live_bytes``."""
    managed: bool = False
    """Managed memory (``cudaMallocManaged``). How many of its bytes are on the device is unknown. Those are part of the
    device's used bytes, and not of the driver-reported usage of the process."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """An allocator's pool of pinned host memory: RAM of the machine, never part of a device's ledger."""

    allocator: str
    live_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    step: str
    released_bytes: int
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExpectedRelease:
    """Bytes that a flush with the requested steps would return: between ``low`` and ``high``, most probably ``likely``.

    ``likely`` is None if it is unknown. ``exactness`` is ``interval`` if a step's result can't be predicted, and None
    if the agent doesn't report it.
    """

    low: int
    likely: int | None
    high: int
    exactness: Exactness | None = None


@dataclass(frozen=True, slots=True)
class PoolBytes:
    """One pool, and the driver's count for its process, before or after a flush."""

    held_bytes: int
    live_bytes: int | None
    reclaimable_bytes: int | None
    driver_used_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Proof of one flush of one pool.

    ``released_bytes`` is the decrease of the allocator's held bytes; ``driver_released_bytes`` the decrease of the
    driver's count for this pid on this device, once it has settled. ``raced``: the program allocated or freed memory
    during the flush, so the two may differ. ``planned`` is the prediction of the plan that this flush executes,
    ``expected`` the prediction when it started. ``start_ticks`` is None in receipts that an agent makes.

    For a serving engine, ``pid`` is its listener, ``workload`` its name, and ``allocator`` its kind; the bytes are the
    driver's, for all its processes. ``method`` is the release method, and ``models`` what it released. ``wake`` says
    how the engine returns to service, and ``wake_seconds`` how long that took the last time. ``requested_for``: the
    program that waited for the memory, empty if none did.
    """

    pid: int
    workload: str
    device_uuid: str | None
    allocator: str | None
    outcome: FlushOutcome
    reason: str
    expected: ExpectedRelease | None
    released_bytes: int
    driver_released_bytes: int | None
    before: PoolBytes | None
    after: PoolBytes | None
    steps: tuple[StepResult, ...]
    raced: bool
    requested_by: str
    started_at: float
    duration_seconds: float
    planned: ExpectedRelease | None = None
    start_ticks: int | None = None
    method: str | None = None
    models: tuple[str, ...] = ()
    wake: str = ""
    wake_seconds: float | None = None
    requested_for: str = ""


def ordered_steps(steps: tuple[str, ...]) -> tuple[str, ...]:
    """Return the steps in the order in which they run, each once. Raises ValueError for an unknown step."""
    for step in steps:
        if step not in ALL_STEPS:
            raise ValueError(f"unknown step {step!r:.40}; expected one or more of {', '.join(ALL_STEPS)}")
    if not steps:
        raise ValueError(f"pass at least one of {', '.join(ALL_STEPS)}")
    return tuple(step for step in ALL_STEPS if step in steps)
