"""When this program ran out of memory: knows the frameworks' errors without importing them, and keeps a picture of
the memory at that moment."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from gpumond.agent.instrument.usage import READ_SECONDS
from gpumond.agent.registry import REGISTRY
from gpumond.model.pools import PoolUsage
from gpumond.model.program import OOM_POOLS, OOMS as KEPT, Oom, OomPool, ScopeKept, Seen

TOLD_SECONDS = 60.0
"""So long each report carries a picture; the daemon counts it once, by its number."""

TYPES = frozenset(
    (
        ("torch", "OutOfMemoryError"),
        ("cupy", "OutOfMemoryError"),
        ("tensorflow", "ResourceExhaustedError"),
        ("gpumond", "OutOfMemory"),  # the simulated card
    )
)
"""Package and class of errors that mean nothing else."""

TEXTS = (
    ("MemoryError", r"(?s)std::bad_alloc.*out_of_memory"),  # RMM; the host's own has no such text
    ("XlaRuntimeError", "RESOURCE_EXHAUSTED"),
    ("JaxRuntimeError", "RESOURCE_EXHAUSTED"),
    ("RuntimeError", "(CUDA|HIP) (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
    ("CUDARuntimeError", "cudaErrorMemoryAllocation"),
)
"""Class of errors that mean other things too, and the text that tells. Compiled when there is an error."""

REQUEST = r"(?i)(?:allocat(?:e|ing)|out of memory allocating|failed to allocate):? ([\d,]+(?:\.\d+)?) ?(bytes|[KMGT]iB)"
FACTORS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
MAX_TEXT = 4096


def is_oom(error: BaseException) -> bool:
    """Whether it says that the device's memory is out: PyTorch's, CuPy's, RMM's, JAX's, TensorFlow's error."""
    classes = type(error).__mro__
    if any((cls.__module__.partition(".")[0], cls.__name__) in TYPES for cls in classes):
        return True
    names = {cls.__name__ for cls in classes}
    return any(name in names and re.search(text, _text(error)) for name, text in TEXTS)


def request_bytes(error: BaseException) -> int | None:
    """How much was asked for, if the error says so."""
    found = re.search(REQUEST, _text(error))
    if found is None:
        return None
    return int(float(found[1].replace(",", "")) * FACTORS[found[2].lower()])


class Ooms:
    """The newest pictures of this process."""

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
    def happened(self) -> bool:
        """Whether there is anything to tell of this process."""
        return bool(self._count or self.retries)

    def tried_again(self) -> None:
        with self._lock:
            self.retries += 1

    def rescued(self) -> None:
        with self._lock:
            self.rescues += 1

    def saw(self, error: BaseException, seen: Seen) -> None:
        """The error on its way through; once, however many scopes it passes. Never raises."""
        if getattr(error, "_gpumond_saw", False):
            return
        try:
            error._gpumond_saw = True  # type: ignore[attr-defined]
            if type(error).__module__.partition(".")[0] in self._observed:
                return
            pools = REGISTRY.read(READ_SECONDS) or ()
            self._picture(
                pools, self._rose(pools, first_counts=True), seen, request_bytes(error), self.scope(), _largest_free()
            )
        except Exception:  # the program has trouble enough
            return

    def observe(self) -> None:
        """Asks the libraries that can tell of each error when it happens, before it is raised; each once, for good."""
        for adapter in REGISTRY.known():
            attach = getattr(adapter, "observe_ooms", None)
            if attach is not None and adapter.name not in self._observed and attach(self.observed):
                self._observed.add(adapter.name)

    def observed(self, device: str | None, size: int) -> None:
        """In the thread that wanted the memory. What is raised here would be raised in the error's stead."""
        try:
            pools = REGISTRY.read(READ_SECONDS) or ()
            self._rose(pools, first_counts=True)
            self._picture(pools, [device] if device else [], "observer", size, self.scope(), _largest_free())
        except Exception:
            return

    def look(self, pools: Sequence[PoolUsage]) -> None:
        """What a report has read: a counter that rose is an error that nobody has shown us."""
        for device in self._rose(pools, first_counts=False):
            self._picture(pools, [device], "counter")

    def recent(self) -> tuple[Oom, ...]:
        with self._lock:
            return tuple(oom for oom in self._recent if time.time() - oom.at < TOLD_SECONDS)

    def _rose(self, pools: Sequence[PoolUsage], first_counts: bool) -> list[str]:
        """The devices of the pools whose count of errors is higher than when last looked at.

        Of a pool that was never looked at, they may be old: they count with ``first_counts`` only.
        """
        rose = []
        with self._lock:
            for pool in pools:
                key, count = (pool.allocator, pool.device_uuid), pool.ooms or 0
                if count > self._counted.get(key, 0 if first_counts else count):
                    rose.append(pool.device_uuid)
                self._counted[key] = count
        return list(dict.fromkeys(rose))

    def _picture(
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
            self._recent.append(Oom(self._count, time.time(), seen, device, request, scope, shown, keepers))


OOMS = Ooms()


def _shown(pool: PoolUsage, largest_free: dict[tuple[str, str], int]) -> OomPool:
    return OomPool(
        pool.allocator,
        pool.device_uuid,
        pool.live_bytes,
        max(0, pool.held_bytes - pool.live_bytes - pool.stranded_bytes),
        pool.stranded_bytes,
        largest_free.get((pool.allocator, pool.device_uuid)),
    )


def _largest_free() -> dict[tuple[str, str], int]:
    """By allocator and device, of the adapters that can tell."""
    found: dict[tuple[str, str], int] = {}
    for adapter in REGISTRY.adapters():
        tell = getattr(adapter, "largest_free_bytes", None)
        if tell is not None:
            found.update(((adapter.name, uuid), size) for uuid, size in tell().items())
    return found


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except Exception:
        return ""
