"""Facts that a program reports in addition to its pools: scopes, steps and out-of-memory errors.

All counters start with the process, so a lost report loses no information.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType

from gpumond.facts.fast_dataclass import fast_dataclass

TICKS_PER_SECOND = 100
"""Linux's USER_HZ, the unit of ``start_ticks``, on all architectures that have GPUs."""

MAX_PID = 1 << 22
"""Largest pid of Linux (PID_MAX_LIMIT). A larger number denotes a connection of an agent whose pid is unknown."""

IDLE_SECONDS = 1800.0
"""Time without use of a device after which a process that holds its memory counts as idle."""


class ProcessKey(NamedTuple):
    """Identity of a process: its pid and its start, as pids are reused.

    ``pid`` is above ``MAX_PID`` for an agent in a PID namespace that the daemon cannot see; its start is unknown.
    ``start_ticks`` counts from boot, in USER_HZ; None if it is unknown. Keys are equal if both parts are: a key with
    an unknown start equals no key with a known one. A named tuple, since a tick looks up thousands of keys, and the
    hash of a dataclass takes three times as long.
    """

    pid: int
    start_ticks: int | None

    def may_be(self, other: ProcessKey) -> bool:
        """Return False if the two are known to be different processes: other pids, or other known starts."""
        return self.pid == other.pid and (
            self.start_ticks is None or other.start_ticks is None or self.start_ticks == other.start_ticks
        )


class HasProcessKey:
    """A fact about one process."""

    __slots__ = ()
    pid: int
    start_ticks: int | None

    @property
    def key(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ticks)

    @property
    def process(self) -> ProcessKey:
        return self.key


def process_key(pid: int | None, start_ticks: int | None) -> ProcessKey | None:
    """Return the key of a process, or None for a value of a whole device."""
    return None if pid is None else ProcessKey(pid, start_ticks)


ByteChange = NewType("ByteChange", int)
"""Number of bytes by which a value grew; negative if it shrank."""

OomDetection = Literal["counter", "scope", "retry", "unhandled", "oom_pool"]

Ending = Literal["exit", "error", "out-of-memory"]
"""End of a program: without an unhandled exception (or by Ctrl-C), with one, or with an out-of-memory one."""

MAX_RANKS = 1 << 20
"""Maximum number of ranks of a job."""

MAX_SCOPES = 32
"""Maximum number of a program's scopes by name; the others are summed in ``OTHER``."""

OTHER = "other"
"""Name of a sum over scopes or pools beyond the maximum."""

MAX_OOMS = 4
"""Maximum number of OOM snapshots in a report."""

MAX_OOM_POOLS = 8


@dataclass(frozen=True, slots=True)
class ScopeDevice:
    """One scope on one device. Live bytes are those of the whole process, including its other threads.

    ``retained_bytes``: live bytes after minus before, summed over all runs; ``last_retained_bytes``: the same for the
    latest run. ``peak_bytes``: the highest live bytes within the scope; a lower bound unless ``peak_exact``.
    """

    device_uuid: str
    retained_bytes: ByteChange
    last_retained_bytes: ByteChange
    peak_bytes: int
    peak_exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeUsage:
    """All runs of the blocks with one name.

    ``ooms``: runs that ended out of memory. ``retries``: flushes by the allocators themselves within the runs.
    ``unmeasured``: runs that began or ended during a flush.
    """

    name: str
    entries: int
    ooms: int = 0
    retries: int = 0
    unmeasured: int = 0
    devices: tuple[ScopeDevice, ...] = ()


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """The program's steps.

    ``live_bytes`` and ``stranded_bytes`` are from the end of a step, at most a second or a step ago.
    ``steps_per_second`` and ``retained_bytes`` cover the last steps (``WINDOW`` samples) and are None until there are
    enough. ``retained_bytes`` is the growth of live memory per step: the median over all pairs of samples (Theil-Sen),
    so one evaluation or warm-up makes no trend.
    """

    steps: int
    steps_per_second: float | None = None
    retained_bytes: float | None = None
    live_bytes: int | None = None
    stranded_bytes: int | None = None
    retries: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomPool:
    """One pool at an out-of-memory error. ``largest_free_bytes`` is the size of its largest free block."""

    allocator: str
    device_uuid: str
    live_bytes: int
    cached_bytes: int
    stranded_bytes: int
    largest_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ScopeRetained:
    name: str
    retained_bytes: ByteChange


@dataclass(frozen=True, slots=True)
class Call:
    """One line of a Python stack. Values of variables are never read."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class AllocationSite:
    """Live memory of the blocks that one stack allocated; ``calls`` innermost first."""

    size_bytes: int
    blocks: int
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The calls of one thread, innermost first."""

    thread: str
    calls: tuple[Call, ...]


CLASS_NAMES: Mapping[str, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "buffers",
    "tensors": "other leaf tensors",
    "activations": "activations and the rest",
}
"""Names of the classes of live bytes for people, by the beginning of their fields in LiveClasses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClasses:
    """Live bytes of one allocator on one device, by class. Each storage is counted once, however many views it has.

    ``parameters_bytes``: what modules have registered and optimizers update. ``tensors_bytes``: other leaf tensors,
    such as inputs and values retained without a graph. ``activations_bytes``: the rest, which is results of
    differentiable functions, memory that only autograd or C++ code refers to, workspaces, and the allocator's rounding.
    A class that is None is unknown, and its bytes are in no other class. Without ``tensors_bytes``,
    ``activations_bytes`` is unknown too. The sum of the known classes is then less than ``live_bytes``; otherwise it is
    ``live_bytes`` plus ``excess_bytes``, which belong to storages of another allocator.
    """

    allocator: str
    device_uuid: str
    live_bytes: int
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    buffers_bytes: int | None = None
    tensors_bytes: int | None = None
    activations_bytes: int | None = None
    excess_bytes: int = 0

    @property
    def unknown_bytes(self) -> int:
        """Live bytes in no known class. With known parameters, gradients, optimizer state and buffers, these are other
        tensors and activations.
        """
        if self.activations_bytes is not None:
            return 0
        classes = (self.parameters_bytes, self.gradients_bytes, self.optimizer_bytes, self.buffers_bytes)
        return max(0, self.live_bytes - sum(size or 0 for size in (*classes, self.tensors_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """The record of an out-of-memory error; ``number`` counts from 1 in this process.

    ``seen`` is ``scope`` or ``retry`` if the record was made at the error, ``unhandled`` if it was made when the error
    ended the program, and ``counter`` if it was made at the next report, up to a second later. ``oom_pool``: memory
    that was set aside has served the request, so the program has no error; the stack is then the main thread's, up to a
    second later. ``device_uuid``, ``request_bytes`` and the device's ``free_bytes`` are None if neither counters nor
    the error's text contain them; torch writes sizes with two decimals. ``allocator``: the one that failed, empty if
    unknown. ``limit_bytes``: its limit, if the program or the library has set one. ``scopes`` are those that retain the
    most, ``open_scopes`` those that had begun and not ended. ``stack`` is the failing call's, innermost first, without
    ``omitted_calls`` in its middle; it is empty if ``seen`` is ``counter`` and the program no longer handled the error.
    ``threads``: the other threads that were inside a library with an allocator. ``sites``: those that retain the most
    memory, if the program records the allocator's history. In a report, only the newest record has ``stack``,
    ``threads`` and ``sites``, for a minute.
    """

    number: int
    at: float
    seen: OomDetection
    device_uuid: str | None = None
    request_bytes: int | None = None
    scope: str = ""
    pools: tuple[OomPool, ...] = ()
    scopes: tuple[ScopeRetained, ...] = ()
    open_scopes: tuple[str, ...] = ()
    stack: tuple[Call, ...] = ()
    omitted_calls: int = 0
    threads: tuple[ThreadStack, ...] = ()
    classes: tuple[LiveClasses, ...] = ()
    sites: tuple[AllocationSite, ...] = ()
    free_bytes: int | None = None
    allocator: str = ""
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retainer:
    """A line of a program that retains tensors: where the variable or attribute ``name`` grows, or is set.

    ``size_bytes`` and ``tensors``: what it retained in twenty seconds, with the graphs that these tensors refer to.
    """

    file: str
    line: int
    function: str
    name: str
    size_bytes: int
    tensors: int


@fast_dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Facts about one program besides its pools.

    ``oom_retries``: calls repeated by ``retry_on_oom``; ``oom_recovered``: how many of them succeeded. ``distributed``:
    the program is one rank of several. ``refusals``: input that its agent rejected: malformed messages, untrusted
    daemons, and commands above the rate limit or with an unknown step. ``retainers``: the newest result of the search
    for lines that retain memory, which the daemon requests once per leak.
    """

    scopes: tuple[ScopeUsage, ...] = ()
    step: StepUsage | None = None
    ooms: tuple[Oom, ...] = ()
    oom_retries: int = 0
    oom_recovered: int = 0
    distributed: bool = False
    refusals: int = 0
    retainers: tuple[Retainer, ...] = ()


EMPTY_PROGRAM = Program()


PACKAGE_DIRECTORIES = re.compile(r".*/(?:site|dist)-packages/")


def location_text(code: Call | Retainer) -> str:
    """Return a line of code, such as ``torch/nn/modules/linear.py:125``: packages without the directory they are in."""
    return f"{PACKAGE_DIRECTORIES.sub('', code.file)}:{code.line}"


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """The limit that one allocator of the program has on one device. ``quota``: the quota that set it, or empty."""

    allocator: str
    device_uuid: str
    limit_bytes: int
    quota: str = ""


@dataclass(frozen=True, slots=True)
class AppliedLimit:
    """A limit of one allocator on one device; ``limit_bytes`` is None for no limit.

    ``reason``: why it isn't applied.
    """

    allocator: str
    device_uuid: str | None
    limit_bytes: int | None
    applied: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Dump:
    """A file of the program's user that contains a framework's own memory snapshot. ``reason``: why ``path`` is None.

    ``id`` is its number in ``GET /api/v1/agents/PID/snapshots/ID``, and None if it wasn't written for a request.
    """

    allocator: str | None
    path: str | None
    size_bytes: int
    reason: str = ""
    id: int | None = None
