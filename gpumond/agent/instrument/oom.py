"""Out-of-memory errors of this program: recognised without importing the frameworks, with a snapshot of the memory."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from gpumond.agent.adapters import ADAPTERS, LargestFreeReporting, OomObservable
from gpumond.agent.instrument.usage import READ_SECONDS
from gpumond.agent.registry import REGISTRY
from gpumond.model.pools import PoolUsage
from gpumond.model.program import OOM_POOLS, OOMS as KEPT, Oom, OomPool, ScopeKept, Seen

REPORTED_SECONDS = 60.0
"""Time for which reports contain a snapshot. The daemon counts it once, by its number."""

TYPES = frozenset(spec.oom_error for spec in ADAPTERS)
TEXTS = tuple(text for spec in ADAPTERS for text in spec.oom_texts)
"""Compiled on the first error."""

REQUEST = r"(?i)(?:allocat(?:e|ing)|out of memory allocating|failed to allocate):? ([\d,]+(?:\.\d+)?) ?(bytes|[KMGT]iB)"
FACTORS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
MAX_TEXT = 4096


def is_oom(error: BaseException) -> bool:
    """Return whether an error of PyTorch, CuPy, RMM, JAX or TensorFlow means that device memory is exhausted."""
    classes = type(error).__mro__
    if any((cls.__module__.partition(".")[0], cls.__name__) in TYPES for cls in classes):
        return True
    names = {cls.__name__ for cls in classes}
    return any(name in names and re.search(text, _text(error)) for name, text in TEXTS)


def request_bytes(error: BaseException) -> int | None:
    """Return the requested bytes, if the error states them."""
    found = re.search(REQUEST, _text(error))
    if found is None:
        return None
    return int(float(found[1].replace(",", "")) * FACTORS[found[2].lower()])


class Ooms:
    """The newest out-of-memory snapshots of this process."""

    def __init__(self) -> None:
        self.keepers: Callable[[], tuple[ScopeKept, ...]] = tuple
        self.scope: Callable[[], str] = str
        self.retries = self.rescues = 0
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._observed: set[str] = set()
        self._count = 0
        self._recent: deque[Oom] = deque(maxlen=KEPT)
        self._counted: dict[tuple[str, str], int] = {}
        self.retries = self.rescues = 0

    @property
    def occurred(self) -> bool:
        """True if there is something to report."""
        return bool(self._count or self.retries)

    def add_retry(self) -> None:
        with self._lock:
            self.retries += 1

    def add_rescue(self) -> None:
        with self._lock:
            self.rescues += 1

    def record_error(self, error: BaseException, seen: Seen) -> None:
        """Record an error that passes a scope or a retry; once, however many it passes. Never raises."""
        if getattr(error, "_gpumond_saw", False):
            return
        try:
            error._gpumond_saw = True  # type: ignore[attr-defined]
            if type(error).__module__.partition(".")[0] in self._observed:
                return
            pools = REGISTRY.read(READ_SECONDS) or ()
            self._record(
                pools,
                self._increased(pools, first_counts=True),
                seen,
                request_bytes(error),
                self.scope(),
                _largest_free(),
            )
        except Exception:  # the program must receive its own error
            return

    def observe(self) -> None:
        """Register for errors with the libraries that can report them before they raise; once each, permanently."""
        for adapter in REGISTRY.known():
            if (
                adapter.name not in self._observed
                and isinstance(adapter, OomObservable)
                and adapter.observe_ooms(self.observed)
            ):
                self._observed.add(adapter.name)

    def observed(self, device: str | None, size: int) -> None:
        """Record an error in the thread that requested the memory. An exception here would replace the error."""
        try:
            pools = REGISTRY.read(READ_SECONDS) or ()
            self._increased(pools, first_counts=True)
            self._record(pools, [device] if device else [], "observer", size, self.scope(), _largest_free())
        except Exception:
            return

    def record_counters(self, pools: Sequence[PoolUsage]) -> None:
        """Record errors that only a counter shows: nothing else has reported them."""
        for device in self._increased(pools, first_counts=False):
            self._record(pools, [device], "counter")

    def recent(self) -> tuple[Oom, ...]:
        with self._lock:
            return tuple(oom for oom in self._recent if time.time() - oom.at < REPORTED_SECONDS)

    def _increased(self, pools: Sequence[PoolUsage], first_counts: bool) -> list[str]:
        """Return the devices of the pools whose error count is higher than at the previous call.

        With ``first_counts``, the errors of a pool without a previous call count; otherwise they may be old.
        """
        increased = []
        with self._lock:
            for pool in pools:
                key, count = (pool.allocator, pool.device_uuid), pool.ooms or 0
                if count > self._counted.get(key, 0 if first_counts else count):
                    increased.append(pool.device_uuid)
                self._counted[key] = count
        return list(dict.fromkeys(increased))

    def _record(
        self,
        pools: Sequence[PoolUsage],
        devices: Sequence[str],
        seen: Seen,
        request: int | None = None,
        scope: str = "",
        largest_free: dict[tuple[str, str], int] | None = None,
    ) -> None:
        largest = sorted(pools, key=lambda pool: -pool.held_bytes)[:OOM_POOLS]
        shown = tuple(_shown(pool, largest_free or {}) for pool in largest)
        keepers = self.keepers()
        only = {pool.device_uuid for pool in pools} if not devices else set(devices)
        device = only.pop() if len(only) == 1 else None
        with self._lock:
            self._count += 1
            self._recent.append(
                Oom(
                    number=self._count,
                    at=time.time(),
                    seen=seen,
                    device_uuid=device,
                    request_bytes=request,
                    scope=scope,
                    pools=shown,
                    scopes=keepers,
                )
            )


OOMS = Ooms()


def _shown(pool: PoolUsage, largest_free: dict[tuple[str, str], int]) -> OomPool:
    return OomPool(
        allocator=pool.allocator,
        device_uuid=pool.device_uuid,
        live_bytes=pool.live_bytes,
        cached_bytes=max(0, pool.held_bytes - pool.live_bytes - pool.stranded_bytes),
        stranded_bytes=pool.stranded_bytes,
        largest_free_bytes=largest_free.get((pool.allocator, pool.device_uuid)),
    )


def _largest_free() -> dict[tuple[str, str], int]:
    """Return the largest free block by allocator and device, for the adapters that know it."""
    found: dict[tuple[str, str], int] = {}
    for adapter in REGISTRY.adapters():
        if isinstance(adapter, LargestFreeReporting):
            found.update(((adapter.name, uuid), size) for uuid, size in adapter.largest_free_bytes().items())
    return found


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except Exception:
        return ""
