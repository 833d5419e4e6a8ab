"""What a program tells of itself beside its pools: its scopes, its steps, and when it ran out of memory.

Everything counts from the start of the process; a report that is lost costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

ByteChange = NewType("ByteChange", int)
"""Bytes by which something grew; negative if it shrank."""

Seen = Literal["counter", "scope", "retry", "observer"]

Ending = Literal["exit", "error", "out-of-memory"]
"""How a program ended: without an unhandled exception (or by Ctrl-C), with one, or with one of out-of-memory."""

SCOPES = 32
"""A program's scopes by name; those beyond are together in ``OTHER``."""

OTHER = "other"

OOMS = 4
"""So many pictures a report carries."""

OOM_POOLS = 8


@dataclass(frozen=True, slots=True)
class ScopeDevice:
    """One scope on one device. Live bytes of the whole process: what other threads do meanwhile is in them.

    ``kept_bytes``: live after minus before, all passes together; ``last_kept_bytes`` of the newest one.
    ``peak_bytes``: the most that was live within; a lower bound unless ``peak_exact``.
    """

    device_uuid: str
    kept_bytes: ByteChange
    last_kept_bytes: ByteChange
    peak_bytes: int
    peak_exact: bool = False


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """All passes through the blocks of one name. ``ooms`` of them ended out of memory; ``retries`` are the
    allocators' flushes within. ``unmeasured`` passes began or ended while a flush held the allocators."""

    name: str
    entries: int
    ooms: int = 0
    retries: int = 0
    unmeasured: int = 0
    devices: tuple[ScopeDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class StepUsage:
    """The program's steps. ``live_bytes`` and ``stranded_bytes`` at the end of one, at most a second or a step ago;
    the other two over the last steps (``WINDOW`` looks), None until there are enough.

    ``kept_bytes``: by how much live memory grows with a step, the median of all pairs of looks (Theil-Sen), so
    that one evaluation or one warm-up does not make a trend.
    """

    steps: int
    steps_per_second: float | None = None
    kept_bytes: float | None = None
    live_bytes: int | None = None
    stranded_bytes: int | None = None
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class OomPool:
    """One pool when the memory was out. ``largest_free_bytes``: its largest free block."""

    allocator: str
    device_uuid: str
    live_bytes: int
    cached_bytes: int
    stranded_bytes: int
    largest_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ScopeKept:
    name: str
    kept_bytes: ByteChange


@dataclass(frozen=True, slots=True)
class Oom:
    """What the memory looked like when it ran out; ``number`` counts from 1 in this process.

    Seen by ``scope``, ``retry`` or ``observer`` (PyTorch itself, if the program wants it): at the error. By
    ``counter``: at the report after it, up to a second later.
    ``device_uuid`` and ``request_bytes`` are None where neither counters nor the error's text tell them; torch
    writes the request with two decimals. ``scopes`` are those that keep most.
    """

    number: int
    at: float
    seen: Seen
    device_uuid: str | None = None
    request_bytes: int | None = None
    scope: str = ""
    pools: tuple[OomPool, ...] = ()
    scopes: tuple[ScopeKept, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """``oom_retries``: calls tried again by ``retry_on_oom``; ``oom_rescues``: those that it brought to an end.

    ``distributed``: it is one of the ranks of a job. ``refusals``: what its agent would not hear or do: frames that are
    none, daemons of strangers, orders that came too fast or named an unknown step.
    """

    scopes: tuple[ScopeUsage, ...] = ()
    step: StepUsage | None = None
    ooms: tuple[Oom, ...] = ()
    oom_retries: int = 0
    oom_rescues: int = 0
    distributed: bool = False
    refusals: int = 0


SILENT = Program()


@dataclass(frozen=True, slots=True)
class AppliedLimit:
    """A soft quota of one allocator on one device; ``limit_bytes`` None is none. ``reason``: why it is not applied."""

    allocator: str
    device_uuid: str | None
    limit_bytes: int | None
    applied: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Dump:
    """A framework's own memory snapshot in a file of the program's user. ``reason``: why ``path`` is None."""

    allocator: str | None
    path: str | None
    size_bytes: int
    reason: str = ""
