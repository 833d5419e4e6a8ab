"""Out-of-memory errors of this program: recognized without importing the frameworks, with a record of the memory.

The record (`Oom`) is bounded in size and takes at most 50 ms; a call that succeeds costs nothing.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gpumond.agent.allocators.adapters import ADAPTERS, HistoryRecording, TensorTracking
from gpumond.agent.loaded_allocators import ALLOCATORS, read_all
from gpumond.agent.measure.steps import READ_TIMEOUT_SECONDS
from gpumond.facts.messages import to_json
from gpumond.facts.pools import PoolUsage
from gpumond.facts.program import (
    MAX_OOM_POOLS,
    MAX_OOMS,
    AllocationSite,
    Call,
    LiveClasses,
    Oom,
    OomDetection,
    OomPool,
    ScopeRetained,
    ThreadStack,
)

FULL_RECORD_SECONDS = 60.0
REPORTED_SECONDS = 600.0
"""Time for which reports contain a record, the first minute as a whole. The daemon counts it once, by its number."""

MAX_SITES, MAX_SITE_CALLS = 5, 6
"""Number of sites in a record, and of their calls."""

FINAL_SEARCH_SECONDS = 1.0
"""CPU time of a search for tensors outside modules, at the end of a program that did not handle its error. A program
that goes on isn't searched: the list of its objects alone can take longer than the 50 ms that its call may be delayed.
"""
MAX_RECORD_BYTES = 16 << 10
"""Longest record as JSON. A report contains one whole record, and has at most 64 KiB."""

OOM_TYPES = frozenset(spec.oom_error for spec in ADAPTERS)
OOM_TEXTS = tuple(text for spec in ADAPTERS for text in spec.oom_texts)
"""Compiled on the first error."""

REQUEST_PATTERN = (
    r"(?i)(?:allocat(?:e|ing)|out of memory allocating|failed to allocate):? ([\d,]+(?:\.\d+)?) ?(bytes|[KMGT]iB)"
)
FREE_PATTERN = r"(?i)([\d,]+(?:\.\d+)?) ?(bytes|[KMGT]iB) (?:is )?free"
LIMIT_PATTERN = r"(?:limit set to: |current/max/try size = [^,]+, )([\d,]+(?:\.\d+)?) ?(bytes|[KMGT]iB)"
"""CuPy's limit of a pool, and RMM's maximum size of one."""
XLA_DEVICE = r"GPU_(\d+)_bfc"
UNIT_BYTES = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
MAX_TEXT_CHARACTERS = 4096


def is_oom(error: BaseException) -> bool:
    """Return whether an error of one of the libraries in ``ADAPTERS`` means that device memory is exhausted."""
    classes = type(error).__mro__
    if any((cls.__module__.partition(".")[0], cls.__name__) in OOM_TYPES for cls in classes):
        return True
    names = {cls.__name__ for cls in classes}
    return any(name in names and re.search(text, _text(error)) for name, text in OOM_TEXTS)


def request_bytes(error: BaseException) -> int | None:
    """Return the requested bytes, if the error states them."""
    return _parse_size(REQUEST_PATTERN, error)


def free_bytes(error: BaseException) -> int | None:
    """Return the free bytes of the device, if the error states them."""
    return _parse_size(FREE_PATTERN, error)


def raising_allocator(error: BaseException) -> str:
    """Return the name of the allocator that raised the error; empty if it is unknown."""
    packages = {cls.__module__.partition(".")[0] for cls in type(error).__mro__} - {"builtins"}
    for spec in ADAPTERS:
        if spec.oom_error is not None and spec.oom_error[0] in packages:
            return spec.module.rpartition(".")[2]
    names = {cls.__name__ for cls in type(error).__mro__}
    for spec in ADAPTERS:
        if any(name in names and re.search(text, _text(error)) for name, text in spec.oom_texts):
            return spec.module.rpartition(".")[2]
    return ""


def _find_device(error: BaseException) -> str | None:
    """Return the device that the error's text states, else the only one that the program uses."""
    from gpumond.agent.allocators import cuda  # needed after an error only

    stated = re.search(XLA_DEVICE, _text(error))
    ordinals = [int(stated[1])] if stated else cuda.devices_with_context()
    return cuda.device_uuid(ordinals[0]) if len(ordinals) == 1 else None


def _own_limit(allocator: str, device: str | None) -> int | None:
    """Return the limit that the program has set for an allocator on a device, None without one."""
    limits = (ALLOCATORS.own_limits(adapter) for adapter in ALLOCATORS.adapters() if adapter.name == allocator)
    return next((by_device[device] for by_device in limits if device in by_device), None) if device else None


def _parse_size(pattern: str, error: BaseException) -> int | None:
    match = re.search(pattern, _text(error))
    if match is None:
        return None
    return int(float(match[1].replace(",", "")) * UNIT_BYTES[match[2].lower()])


class ErrorDetails(NamedTuple):
    """Parts of a record that are known in the thread of the error only, and the classes of live bytes."""

    largest_free: Mapping[tuple[str, str], int] = {}
    stack: tuple[Call, ...] = ()
    omitted_calls: int = 0
    threads: tuple[ThreadStack, ...] = ()
    classes: tuple[LiveClasses, ...] = ()
    sites: tuple[AllocationSite, ...] = ()


NO_DETAILS = ErrorDetails()


class OomRecords:
    """The newest out-of-memory snapshots of this process."""

    def __init__(self) -> None:
        self.retaining_scopes: Callable[[], tuple[ScopeRetained, ...]] = tuple
        self.current_scope: Callable[[], str] = str
        self.open_scopes: Callable[[], tuple[str, ...]] = tuple
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._recent: deque[Oom] = deque(maxlen=MAX_OOMS)
        self._previous_counts: dict[tuple[str, str], int] = {}
        self._unpublished: Oom | None = None
        """The record of an error that only a counter has shown so far."""
        self.recoveries = self._retries = self._reported_retries = 0

    @property
    def has_records(self) -> bool:
        """True if there is something to report."""
        return bool(self._count or self._retries)

    def add_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def withdraw_retry(self) -> None:
        """Take back a retry that doesn't take place, unless a report has counted it: its count never falls."""
        with self._lock:
            self._retries = max(self._retries - 1, self._reported_retries)

    def report_retries(self) -> int:
        """Return the number of retries for a report."""
        with self._lock:
            self._reported_retries = self._retries
            return self._retries

    def add_recovery(self) -> None:
        with self._lock:
            self.recoveries += 1

    def record_error(self, error: BaseException, detection: OomDetection) -> None:
        """Record an error, once, however many scopes and retries it passes. Never raises."""
        if getattr(error, "_gpumond_saw", False):
            return
        try:
            error._gpumond_saw = True  # type: ignore[attr-defined]
            pools = ALLOCATORS.read(READ_TIMEOUT_SECONDS) or ()
            devices = self._devices_with_new_errors(pools, counts_first_reading=True)
            requested_bytes = request_bytes(error)
            details = _details(error, FINAL_SEARCH_SECONDS if detection == "unhandled" else 0.0)
            record = self._record(pools, devices, detection, requested_bytes, self.current_scope(), details)
            allocator, device = raising_allocator(error), record.device_uuid or _find_device(error)
            complete = replace(record, device_uuid=device, free_bytes=free_bytes(error), allocator=allocator)
            self._publish(
                replace(complete, limit_bytes=_parse_size(LIMIT_PATTERN, error) or _own_limit(allocator, device))
            )
        except Exception:  # the program must receive its own error
            return

    def newest_device(self) -> str | None:
        """Return the device of the newest error, None if it is unknown."""
        with self._lock:
            return self._recent[-1].device_uuid if self._recent else None

    def record_unhandled(self) -> None:
        """Record the error that ends the program, if it is one."""
        self._record_newest(getattr(sys, "last_value", None), "unhandled")

    def _record_newest(self, error: BaseException | None, detection: OomDetection) -> bool:
        """Record the newest out-of-memory error in a chain of causes; return False if there is none to record."""
        oom = next(filter(is_oom, error_chain(error)), None)
        if oom is None or getattr(oom, "_gpumond_saw", False):
            return False
        self.record_error(oom, detection)
        return True

    def record_oom_pool(self, device: str | None, size_bytes: int, thread: int | None) -> None:
        """Record that an out-of-memory pool served a request, with the stack of this thread. Never raises."""
        from gpumond.agent.measure import stacks  # needed after an error only

        try:
            stack, omitted = stacks.of_thread(thread)
            details = ErrorDetails(_largest_free(), stack, omitted, (), live_classes(), _live_sites())
            devices = [device] if device else []
            record = self._record(
                ALLOCATORS.read(READ_TIMEOUT_SECONDS) or (), devices, "oom_pool", size_bytes, "", details
            )
            self._publish(replace(record, allocator="torch"))
        except Exception:
            return

    def record_counters(self, pools: Sequence[PoolUsage], is_final: bool = False) -> None:
        """Record errors that only a counter shows.

        If the program still handles the error, the record is as complete as at the error. Otherwise it waits for the
        next call, unless no call follows (``is_final``): the error may be on its way to a function that records it.
        """
        devices = self._devices_with_new_errors(pools, counts_first_reading=False)
        unpublished, self._unpublished = self._unpublished, None
        if (unpublished or devices) and any(self._record_newest(error, "counter") for error in _errors_in_progress()):
            if unpublished is None:
                devices = []
            unpublished = None
        details = ErrorDetails(classes=live_classes() if devices else ())
        records = [self._record(pools, [device], "counter", details=details) for device in devices]
        newest = records.pop() if records and not is_final else None
        for record in (unpublished, *records):
            if record is not None:
                self._publish(record)
        self._unpublished = newest

    def recent(self) -> tuple[Oom, ...]:
        """Return the records of the last ten minutes; only a new one, the newest, with its stacks and sites."""
        now = time.time()
        with self._lock:
            recent = [oom for oom in self._recent if now - oom.at < REPORTED_SECONDS]
        return tuple(
            oom
            if oom is recent[-1] and now - oom.at < FULL_RECORD_SECONDS
            else replace(oom, stack=(), omitted_calls=0, threads=(), sites=())
            for oom in recent
        )

    def _devices_with_new_errors(self, pools: Sequence[PoolUsage], counts_first_reading: bool) -> list[str]:
        """Return the devices of the pools whose error count is higher than at the previous call.

        With ``counts_first_reading``, the errors of a pool without a previous call count; otherwise they may be old.
        """
        increased = []
        with self._lock:
            for pool in pools:
                key, count = (pool.allocator, pool.device_uuid), pool.ooms or 0
                if count > self._previous_counts.get(key, 0 if counts_first_reading else count):
                    increased.append(pool.device_uuid)
                self._previous_counts[key] = count
        return list(dict.fromkeys(increased))

    def _record(
        self,
        pools: Sequence[PoolUsage],
        devices: Sequence[str],
        detection: OomDetection,
        requested_bytes: int | None = None,
        scope: str = "",
        details: ErrorDetails = NO_DETAILS,
    ) -> Oom:
        """Return a record without its number."""
        largest = sorted(pools, key=lambda pool: -pool.held_bytes)[:MAX_OOM_POOLS]
        device_uuids = {pool.device_uuid for pool in pools} if not devices else set(devices)
        device = device_uuids.pop() if len(device_uuids) == 1 else None
        return Oom(
            number=0,
            at=time.time(),
            seen=detection,
            device_uuid=device,
            request_bytes=requested_bytes,
            scope=scope,
            pools=tuple(
                _oom_pool(pool, pool.live_bytes, details.largest_free)
                for pool in largest
                if pool.live_bytes is not None
            ),
            scopes=self.retaining_scopes(),
            open_scopes=self.open_scopes(),
            stack=details.stack,
            omitted_calls=details.omitted_calls,
            threads=details.threads,
            classes=details.classes,
            sites=details.sites,
        )

    def _publish(self, record: Oom) -> None:
        """Add a record. One that waits is of the same error: the counter was read before the error arrived."""
        with self._lock:
            unpublished, self._unpublished = self._unpublished, None
            if unpublished is not None and record.device_uuid is None:
                record = replace(record, device_uuid=unpublished.device_uuid)
            self._count += 1
            self._recent.append(_shorten(replace(record, number=self._count)))


OOMS = OomRecords()


def _details(error: BaseException, search_seconds: float) -> ErrorDetails:
    """Return the details for an error that this thread handles."""
    from gpumond.agent.measure import stacks  # needed after an error only

    stack, omitted = stacks.of_error(error)
    classes = live_classes(search_seconds)
    return ErrorDetails(_largest_free(), stack, omitted, stacks.of_allocating_threads(), classes, _live_sites())


def _shorten(record: Oom) -> Oom:
    """Remove the largest parts until the record is short enough."""
    reductions: tuple[dict[str, Any], ...] = (
        {},
        {"threads": ()},
        {"sites": record.sites[:2]},
        {"stack": record.stack[:4]},
        {"sites": ()},
        {"stack": ()},
    )
    for reduction in reductions:
        record = replace(record, **reduction)
        if len(to_json(record)) <= MAX_RECORD_BYTES:
            break
    return record


def live_classes(search_seconds: float = 0.0) -> tuple[LiveClasses, ...]:
    """Return the classes of live bytes of all allocators that know them. Never raises.

    ``search_seconds``: time limit of each for a search of all objects; 0 for no search.
    """
    trackers = (adapter for adapter in ALLOCATORS.adapters() if isinstance(adapter, TensorTracking))
    return tuple(read_all(trackers, lambda adapter: adapter.live_classes(search_seconds))[:MAX_OOM_POOLS])


def _oom_pool(pool: PoolUsage, live_bytes: int, largest_free: Mapping[tuple[str, str], int]) -> OomPool:
    return OomPool(
        allocator=pool.allocator,
        device_uuid=pool.device_uuid,
        live_bytes=live_bytes,
        cached_bytes=max(0, pool.held_bytes - live_bytes - pool.stranded_bytes),
        stranded_bytes=pool.stranded_bytes,
        largest_free_bytes=largest_free.get((pool.allocator, pool.device_uuid)),
    )


def _largest_free() -> dict[tuple[str, str], int]:
    """Return the largest free block by allocator and device, for the adapters that know it."""
    largest_free: dict[tuple[str, str], int] = {}
    for adapter in ALLOCATORS.find_adapters():
        largest_free.update(((adapter.name, uuid), size) for uuid, size in adapter.largest_free_bytes().items())
    return largest_free


def _live_sites() -> tuple[AllocationSite, ...]:
    """Return the sites that keep most memory, of all allocators whose history is recorded."""
    adapters = [adapter for adapter in ALLOCATORS.find_adapters() if isinstance(adapter, HistoryRecording)]
    live_sites = [site for adapter in adapters for site in adapter.live_sites()]
    live_sites.sort(key=lambda site: -site.size_bytes)
    return tuple(replace(site, calls=site.calls[:MAX_SITE_CALLS]) for site in live_sites[:MAX_SITES])


def error_chain(error: BaseException | None, excluded: BaseException | None = None) -> Iterator[BaseException]:
    """Yield the error, its causes and the errors of a group, each after those that it caused, and not ``excluded``."""
    yielded: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is not None and cause is not excluded and id(cause) not in yielded:
            yielded.add(id(cause))
            pending += (cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ()))
            yield cause


def _errors_in_progress() -> Iterator[BaseException | None]:
    """Yield the errors that threads handle now, and the one that ends the program."""
    for current in sys._current_exceptions().values():
        yield current[1] if isinstance(current, tuple) else current  # a tuple before Python 3.12
    yield getattr(sys, "last_value", None)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT_CHARACTERS]
    except Exception:
        return ""
