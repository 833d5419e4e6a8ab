"""``scope(name)``: the bytes that a block of the program keeps, and the most bytes that were live within it.

The values are for the whole process, by device: they include what other threads do in the meantime. The peak is exact
if the allocator's own peak counter rose within the block. Otherwise it is the largest value read at entry, at exit and
by the reports between them: a lower bound. The counter is never reset, since the program would notice. If the program
resets it within a block, the block's peak is a lower bound.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

from gpumond.agent.allocators.borrowing import BORROWING
from gpumond.agent.loaded_allocators import ALLOCATORS
from gpumond.agent.measure import is_async, refuse_generators
from gpumond.agent.measure.oom_record import OOMS, is_oom, request_bytes
from gpumond.agent.measure.steps import NO_USAGE, UsageByDevice, read_usage
from gpumond.facts.program import MAX_SCOPES, OTHER, ByteChange, ScopeDevice, ScopeRetained, ScopeUsage

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

MAX_NAME_PART_CHARACTERS = 64
MAX_NAME_CHARACTERS = 128
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-")
MAX_RECORDED_SCOPES = 8
"""Number of scopes in an out-of-memory snapshot."""


def check_arguments(name: object, flush: object, gc: object, borrow: object) -> None:
    """Raise TypeError or ValueError for wrong arguments of `gpumond.agent.scope`."""
    if not isinstance(name, str):
        raise TypeError(f"scope: expected str, got {type(name).__name__}")
    if not 1 <= len(name) <= MAX_NAME_PART_CHARACTERS or not _NAME_CHARACTERS.issuperset(name):
        raise ValueError(
            f"scope: expected 1 to {MAX_NAME_PART_CHARACTERS} characters of [A-Za-z0-9._/-], got {name!r:.80}"
        )
    for argument, value in (("flush", flush), ("gc", gc), ("borrow", borrow)):
        if not isinstance(value, bool):
            raise TypeError(f"scope: {argument}: expected bool, got {type(value).__name__}")
    if gc and not flush:
        raise ValueError("scope: gc=True has no effect without flush=True")


class ScopePeak:
    """The most live bytes on one device: at least ``low``, at most ``high`` (None: unknown)."""

    def __init__(self, low: int, high: int | None) -> None:
        self.low, self.high = low, high

    def merge(self, other: ScopePeak) -> None:
        """Merge with another peak: the maximum of both."""
        self.low = max(self.low, other.low)
        self.high = None if self.high is None or other.high is None else max(self.high, other.high)


class ScopeEntry:
    """One pass through a scope. Its values are available when it is over, None if it could not be measured."""

    def __init__(self, name: str, parent: ScopeEntry | None) -> None:
        self.name: str = name if parent is None else f"{parent.name}/{name}"
        self.parent = parent
        self.before: UsageByDevice | None = None
        self.sampled_peaks: dict[str, int] = {}
        self.retained: dict[str, int] | None = None
        self.peaks: dict[str, ScopePeak] | None = None
        self.retries: int | None = None
        self.annotations: list[Callable[[], object]] = []
        """Functions that end them."""

    @property
    def retained_bytes(self) -> int | None:
        """Live bytes after minus before, over all devices; ``retained`` contains them by device."""
        return None if self.retained is None else sum(self.retained.values())

    @property
    def peak_bytes(self) -> dict[str, int] | None:
        """The most live bytes by device; `ScopeDevice` states whether they are exact."""
        return None if self.peaks is None else {device: peak.low for device, peak in self.peaks.items()}

    def sample(self, usage: UsageByDevice) -> None:
        for device, device_usage in usage.items():
            self.sampled_peaks[device] = max(self.sampled_peaks.get(device, 0), device_usage.live_bytes)

    def end(self, after: UsageByDevice | None) -> None:
        before = self.before
        if before is None or after is None:
            return
        self.sample(after)
        devices = {*before, *after}
        self.retained = {
            device: after.get(device, NO_USAGE).live_bytes - before.get(device, NO_USAGE).live_bytes
            for device in devices
        }
        self.peaks = {device: self._measure_peak(device, before, after) for device in devices}
        retries_before, retries_after = (
            sum(device_usage.retries for device_usage in usage.values()) for usage in (before, after)
        )
        self.retries = retries_after - retries_before

    def _measure_peak(self, device: str, before: UsageByDevice, after: UsageByDevice) -> ScopePeak:
        start, end = before.get(device, NO_USAGE), after.get(device, NO_USAGE)
        low = self.sampled_peaks.get(device, 0)
        if start.peak_bytes is None or end.peak_bytes is None:
            return ScopePeak(low, None)
        # A lower peak than before was reset within the block.
        is_exact = end.is_only_pool and start.is_only_pool and end.peak_bytes != start.peak_bytes
        bound = end.peak_bytes if end.peak_bytes >= start.peak_bytes else None
        return ScopePeak(max(low, end.peak_bytes) if is_exact else low, bound)


class Scope:
    """A context manager and decorator; each pass through it is a `ScopeEntry`.

    ``flush`` is called at the end. With ``borrow``, which flushes the program's own caches, a function that runs out of
    memory is repeated once after a request to the daemon; after a block, only the request is made.
    """

    def __init__(
        self, name: str, flush: Callable[[], object] | None, borrow: Callable[[], object] | None = None
    ) -> None:
        self._name, self._flush, self._borrow = name, flush, borrow
        self._entries: list[ScopeEntry] = []

    def __enter__(self) -> ScopeEntry:
        entry = ScopeEntry(self._name, _current.get())
        _current.set(entry)
        self._entries.append(entry)
        SCOPE_TOTALS.begin(entry)
        return entry

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entry = self._entries.pop()
        oom = error if error is not None and is_oom(error) else None
        if oom is not None:
            OOMS.record_error(oom, "scope")
        _current.set(entry.parent)
        SCOPE_TOTALS.finish(entry, is_out_of_memory=oom is not None)
        if oom is not None and self._borrow is not None:
            self._request_room(oom, self._borrow)
        if self._flush is not None:
            try:
                self._flush()
            except Exception:  # the outcome of the block matters, not that of the flush
                pass

    def _request_room(self, error: BaseException, flush: Callable[[], object]) -> None:
        """Request room for the caller's next attempt: a block cannot be repeated."""
        try:
            flush()
            BORROWING.request(OOMS.newest_device(), request_bytes(error))
        except Exception:  # the program must receive its own error
            pass

    def __call__(self, function: FunctionT) -> FunctionT:
        refuse_generators("scope", function)
        if self._borrow is not None:
            from gpumond.agent.measure.retry import wrap_retry  # needed by such scopes only

            return wrap_retry(Scope(self._name, self._flush)(function), None, 1, self._borrow, self._borrow, True)

        if is_async(function):

            @functools.wraps(function)
            async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
                with Scope(self._name, self._flush):
                    return await function(*args, **kwargs)

            return async_wrapper  # type: ignore[return-value]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with Scope(self._name, self._flush):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


class DeviceTotal:
    def __init__(self, peak: ScopePeak) -> None:
        self.retained = self.last_retained = 0
        self.peak = ScopePeak(peak.low, peak.high)


class ScopeTotal:
    def __init__(self) -> None:
        self.entries = self.ooms = self.retries = self.unmeasured = 0
        self.devices: dict[str, DeviceTotal] = {}

    def add(self, entry: ScopeEntry, is_out_of_memory: bool) -> None:
        self.entries += 1
        self.ooms += is_out_of_memory
        if entry.retained is None or entry.peaks is None:
            self.unmeasured += 1
            return
        self.retries += max(0, entry.retries or 0)
        for uuid, peak in entry.peaks.items():
            device = self.devices.get(uuid)
            if device is None:
                device = self.devices[uuid] = DeviceTotal(peak)
            device.peak.merge(peak)
            device.last_retained = entry.retained[uuid]
            device.retained += device.last_retained

    def usage(self, name: str) -> ScopeUsage:
        devices = tuple(
            ScopeDevice(
                uuid,
                ByteChange(device.retained),
                ByteChange(device.last_retained),
                device.peak.low,
                device.peak.low == device.peak.high,
            )
            for uuid, device in self.devices.items()
        )
        return ScopeUsage(
            name=name,
            entries=self.entries,
            ooms=self.ooms,
            retries=self.retries,
            unmeasured=self.unmeasured,
            devices=devices,
        )


class Scopes:
    """The scopes of this process, by name."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a signal handler may begin a scope
        self._totals: dict[str, ScopeTotal] = {}
        self._open: WeakSet[ScopeEntry] = WeakSet()  # a generator may never finish its block

    def begin(self, entry: ScopeEntry) -> None:
        entry.before = read_usage()
        if entry.before is not None:
            entry.sample(entry.before)
        entry.annotations = _begin_annotations(entry.name)
        with self._lock:
            self._open.add(entry)

    def finish(self, entry: ScopeEntry, is_out_of_memory: bool) -> None:
        for end in entry.annotations:
            end()
        entry.end(read_usage())
        with self._lock:
            self._open.discard(entry)
            self._total_of(entry.name).add(entry, is_out_of_memory)

    @property
    def has_open_entries(self) -> bool:
        return bool(self._open)

    def sample(self, usage: UsageByDevice) -> None:
        """Update the open blocks with the values of a report."""
        with self._lock:
            for entry in self._open:
                entry.sample(usage)

    def usage(self) -> tuple[ScopeUsage, ...]:
        with self._lock:
            return tuple(total.usage(name) for name, total in self._totals.items())

    def retaining_scopes(self) -> tuple[ScopeRetained, ...]:
        """Return the scopes that keep most bytes, without open blocks."""
        scopes = [
            ScopeRetained(scope.name, ByteChange(sum(device.retained_bytes for device in scope.devices)))
            for scope in self.usage()
        ]
        retaining = sorted((scope for scope in scopes if scope.retained_bytes), key=lambda scope: -scope.retained_bytes)
        return tuple(retaining[:MAX_RECORDED_SCOPES])

    def open_scopes(self) -> tuple[str, ...]:
        """Return the names of the blocks that have begun and not ended, in all threads."""
        with self._lock:
            return tuple(sorted({_reported_name(entry) for entry in self._open})[:MAX_RECORDED_SCOPES])

    def _total_of(self, name: str) -> ScopeTotal:
        total = self._totals.get(name)
        if total is None and (
            len(self._totals) - (OTHER in self._totals) >= MAX_SCOPES or len(name) > MAX_NAME_CHARACTERS
        ):
            name = OTHER
        return self._totals.setdefault(name, ScopeTotal())


def _begin_annotations(name: str) -> list[Callable[[], object]]:
    """Annotate this thread's allocations where a history is recorded, and return functions that end it. Never raises.

    In an event loop, other tasks would allocate under the name: nothing is annotated there.
    """
    events = sys.modules.get("asyncio.events")
    if events is not None and events._get_running_loop() is not None:
        return []
    try:
        return [end for adapter in ALLOCATORS.find_adapters() if (end := adapter.annotate(name)) is not None]
    except Exception:  # an error of the library, which the program did not call
        return []


_current: ContextVar[ScopeEntry | None] = ContextVar("gpumond_scope", default=None)


def scope_name() -> str:
    """Return the name of the caller's innermost block; empty outside."""
    entry = _current.get()
    return "" if entry is None else _reported_name(entry)


def _reported_name(entry: ScopeEntry) -> str:
    return entry.name if len(entry.name) <= MAX_NAME_CHARACTERS else OTHER


SCOPE_TOTALS = Scopes()
OOMS.retaining_scopes, OOMS.current_scope, OOMS.open_scopes = (
    SCOPE_TOTALS.retaining_scopes,
    scope_name,
    SCOPE_TOTALS.open_scopes,
)
