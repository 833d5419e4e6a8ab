"""The allocators of this process: read them, flush one, and say what came of it.

A flush is judged by the allocator's own count of held bytes, before minus after. What the driver saw is
the daemon's business. An order of the daemon is a stranger's: it comes seldom enough, or is refused.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from gpumond.agent.adapters import KNOWN, AllocatorAdapter, FlushRefused, present
from gpumond.agent.flush_result import held, judge, released_bytes
from gpumond.agent.flush_steps import Hook, Permits, carry_out, estimated
from gpumond.agent.instrument.thrash import Thrash
from gpumond.agent.rate_limit import RateLimit
from gpumond.agent.stranded import StrandedEstimate
from gpumond.model.pools import STEPS, PoolUsage, Receipt
from gpumond.protocol.messages import FlushCommand, FlushResult, clean

FLUSHES = (16, 6.0)
PLANS = (60, 1.0)
"""So many of the daemon's orders at once, then one each so many seconds. A plan may look at every block."""

SEARCH_SECONDS = 5.0
"""Some allocators are imported long before they are used; to ask them all takes longer than to read those in use."""

PROGRAM = Permits(own=True)


class AllocatorRegistry:
    """Every allocator that the program has imported. One flush at a time."""

    def __init__(self) -> None:
        self._found: dict[str, AllocatorAdapter | None] = {}
        self._known: list[AllocatorAdapter] = []
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a hook may call flush()
        self._modules, self._search_at = 0, 0.0
        self._thrash, self._remains = Thrash(), StrandedEstimate()
        self._flushes, self._plans = RateLimit(*FLUSHES), RateLimit(*PLANS)
        self.refusals = 0
        """Orders that came too fast, or asked for a step that there is not."""

    def adapters(self) -> list[AllocatorAdapter]:
        """Those known by now; looks for libraries that the program has imported since."""
        for library in KNOWN:
            if library not in self._found and library in sys.modules:
                try:
                    for adapter in present({library: KNOWN[library]}):
                        adapter.framework()
                        self._found[library] = adapter
                except Exception:  # a version of the library that the adapter does not understand
                    self._found[library] = None
        found = (self._found.get(library) for library in KNOWN)  # in its order, whichever was imported first
        self._known = [adapter for adapter in found if adapter is not None]
        self._modules, self._search_at = len(sys.modules), time.monotonic() + SEARCH_SECONDS
        return self._known

    def known(self) -> list[AllocatorAdapter]:
        """Those of the last look, if nothing was imported since; the same list until the next look."""
        if len(sys.modules) == self._modules and time.monotonic() < self._search_at:
            return self._known
        return self.adapters()

    def read(self, wait_seconds: float = 0.0) -> tuple[PoolUsage, ...] | None:
        """All pools now; None while a flush is under way: its library would stop us with the GIL in our hands."""
        if not self._lock.acquire(timeout=wait_seconds):
            return None
        try:
            adapters = self.known()
            with _cuda("beside_captures"):
                pools = [pool for adapter in adapters for pool in _read(adapter)]
            return tuple(self._thrash.counted(self._remains.counted(pools), time.monotonic()))
        finally:
            self._lock.release()

    def obey(self, order: FlushCommand, hooks: Sequence[Hook], main_thread: bool = False) -> FlushResult:
        """Carries out an order of the daemon in this thread, if it keeps to the rate.

        ``main_thread``: the program lets us work in its main thread, between two of its bytecodes.
        """
        rate = self._plans if order.dry_run else self._flushes
        if not rate.allows(time.monotonic()):
            self.refusals += 1
            return FlushResult(order.id, "refused", f"too many orders; {self.refusals} refused so far")
        return self.flush(order, hooks, Permits(main_thread))

    def flush(self, order: FlushCommand, hooks: Sequence[Hook], permits: Permits = PROGRAM) -> FlushResult:
        """Carries it out in this thread, by default for the program itself. Raises nothing but what ends the thread."""
        adapter = next((adapter for adapter in self.adapters() if adapter.name == order.allocator), None)
        unknown = [step for step in order.steps if step not in STEPS]
        if adapter is None or unknown:
            self.refusals += bool(unknown)
            what = (
                f"no step is called {unknown[0]!r}" if unknown else f"no allocator {order.allocator!r} in this process"
            )
            return FlushResult(order.id, "refused", clean(f"{what}; nothing was done"))
        with self._lock:
            try:
                hooked = self._hooked(adapter, hooks) if "hooks" in order.steps else 0
                with _cuda("between_captures"):
                    result = carry_out(order, adapter, hooks, permits, self._remains, hooked)
            except FlushRefused as refusal:
                return FlushResult(order.id, "refused", clean(refusal))
            except Exception as error:  # the library's own, whatever it is
                return FlushResult(order.id, "failed", clean(f"{type(error).__name__}: {error}"))
            if not order.dry_run:
                self._thrash.flushed(result.pools, time.monotonic())
            return result

    def _hooked(self, adapter: AllocatorAdapter, hooks: Sequence[Hook]) -> int | None:
        """The adapter's part, by live bytes, of what the hooks will free; None if that is unknown."""
        freed = estimated(hooks)
        if not freed or len(self._known) < 2:
            return freed
        with _cuda("beside_captures"):
            live = {each: sum(pool.live_bytes for pool in _read(each) if not pool.inside) for each in self._known}
        total = sum(live.values())
        return freed * live[adapter] // total if total else freed


REGISTRY = AllocatorRegistry()
"""Those of this process."""


def check_steps(steps: Sequence[str]) -> None:
    """Raises TypeError, ValueError."""
    if isinstance(steps, str):
        raise TypeError(f"steps: expected a sequence such as ('ipc', 'cache'), got {steps!r}")
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"steps: expected some of {', '.join(STEPS)}, got {step!r}")


def receipts(
    steps: Sequence[str], dry_run: bool, hooks: Sequence[Hook], workload: str, main_thread: bool = False
) -> list[Receipt]:
    """Flushes every allocator here and now."""
    found = []
    for adapter in REGISTRY.adapters():
        started_at, started = time.time(), time.perf_counter()
        result = REGISTRY.flush(
            FlushCommand("local", adapter.name, tuple(steps), dry_run), hooks, Permits(main_thread, own=True)
        )
        seconds = time.perf_counter() - started
        for change in result.pools or (None,):
            outcome = result.outcome
            if change and outcome in ("freed", "partial", "nothing"):
                outcome = judge(released_bytes(change), change.expected)
            found.append(
                Receipt(
                    pid=os.getpid(),
                    workload=workload,
                    device_uuid=change.before.device_uuid if change else None,
                    allocator=adapter.name,
                    outcome=outcome,
                    reason=result.reason,
                    expected=change.expected if change else None,
                    released_bytes=released_bytes(change) if change else 0,
                    driver_released_bytes=None,
                    before=held(change.before) if change else None,
                    after=held(change.after) if change else None,
                    steps=result.steps,
                    raced=change.raced if change else False,
                    requested_by="program",
                    started_at=started_at,
                    duration_seconds=seconds,
                )
            )
    return found


def _cuda(guard: str) -> AbstractContextManager[None]:
    """One of `cuda`'s guards; that module came with the first adapter that asks the driver, or never."""
    cuda = sys.modules.get("gpumond.agent.cuda")
    return nullcontext() if cuda is None else getattr(cuda, guard)()


def _read(adapter: AllocatorAdapter) -> Sequence[PoolUsage]:
    try:
        return adapter.read()
    except Exception:  # the library's own; the other allocators are still read
        return ()
