"""``scope(name)``: what a block of the program keeps, and the most that was live within it.

Figures are of the whole process, device by device: what other threads do meanwhile is in them. The peak is exact
if the allocator's own mark rose within the block. Else it is the most that was seen at entry, at exit and at the
reports between: a lower bound. The mark is never reset, that would be seen by the program; a program that resets
it within a block makes the block's peak a lower bound.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

from gpumond.agent.instrument import usage
from gpumond.agent.instrument.decorators import is_async, refuse_generators
from gpumond.agent.instrument.oom import OOMS, is_oom
from gpumond.agent.instrument.usage import NOTHING, Levels
from gpumond.model.program import OTHER, SCOPES, ByteChange, ScopeDevice, ScopeKept, ScopeUsage

F = TypeVar("F", bound=Callable[..., Any])

MAX_NAME = 128
KEEPERS = 8
"""So many scopes an out-of-memory picture names."""


class ScopePeak:
    """The most that was live on one device: at least ``low``, at most ``high`` (None: not known)."""

    __slots__ = ("high", "low")

    def __init__(self, low: int, high: int | None) -> None:
        self.low, self.high = low, high

    def join(self, other: ScopePeak) -> None:
        """The greater of two peaks."""
        self.low = max(self.low, other.low)
        self.high = None if self.high is None or other.high is None else max(self.high, other.high)


class Block:
    """One pass through a scope. What it tells is there once it is over, None if it could not be measured."""

    def __init__(self, name: str, parent: Block | None) -> None:
        self.name: str = name if parent is None else f"{parent.name}/{name}"
        self.parent = parent
        self.before: Levels | None = None
        self.most: dict[str, int] = {}
        self.kept: dict[str, int] | None = None
        self.peaks: dict[str, ScopePeak] | None = None
        self.retries: int | None = None

    @property
    def kept_bytes(self) -> int | None:
        """Live bytes after minus before, over all devices; ``kept`` has them by device."""
        return None if self.kept is None else sum(self.kept.values())

    @property
    def peak_bytes(self) -> dict[str, int] | None:
        """The most live bytes by device; `ScopeDevice` says how exact that is."""
        return None if self.peaks is None else {device: peak.low for device, peak in self.peaks.items()}

    def see(self, now: Levels) -> None:
        for device, level in now.items():
            self.most[device] = max(self.most.get(device, 0), level.live_bytes)

    def end(self, after: Levels | None) -> None:
        before = self.before
        if before is None or after is None:
            return
        self.see(after)
        devices = {*before, *after}
        self.kept = {
            device: after.get(device, NOTHING).live_bytes - before.get(device, NOTHING).live_bytes for device in devices
        }
        self.peaks = {device: self._peak(device, before, after) for device in devices}
        self.retries = sum(level.retries for level in after.values()) - sum(level.retries for level in before.values())

    def _peak(self, device: str, before: Levels, after: Levels) -> ScopePeak:
        was, now = before.get(device, NOTHING), after.get(device, NOTHING)
        low = self.most.get(device, 0)
        if was.peak_bytes is None or now.peak_bytes is None:
            return ScopePeak(low, None)
        reached = now.alone and was.alone and now.peak_bytes != was.peak_bytes  # less: it was reset within
        bound = now.peak_bytes if now.peak_bytes >= was.peak_bytes else None
        return ScopePeak(max(low, now.peak_bytes) if reached else low, bound)


class Scope:
    """A context manager and a decorator; each pass through it is a `Block`."""

    def __init__(self, name: str, flush: Callable[[], object] | None) -> None:
        self._name, self._flush = name, flush
        self._blocks: list[Block] = []

    def __enter__(self) -> Block:
        block = Block(self._name, _current.get())
        _current.set(block)
        self._blocks.append(block)
        SCOPES_SEEN.enter(block)
        return block

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        block = self._blocks.pop()
        oom = error is not None and is_oom(error)
        if oom and error is not None:
            OOMS.saw(error, "scope")
        _current.set(block.parent)
        SCOPES_SEEN.leave(block, oom)
        if self._flush is not None:
            try:
                self._flush()
            except Exception:  # the block's own outcome is what counts
                pass

    def __call__(self, function: F) -> F:
        refuse_generators("scope", function)

        if is_async(function):

            @functools.wraps(function)
            async def awaiting(*args: Any, **kwargs: Any) -> Any:
                with Scope(self._name, self._flush):
                    return await function(*args, **kwargs)

            return awaiting  # type: ignore[return-value]

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            with Scope(self._name, self._flush):
                return function(*args, **kwargs)

        return calling  # type: ignore[return-value]


class _Device:
    __slots__ = ("kept", "last_kept", "peak")

    def __init__(self, peak: ScopePeak) -> None:
        self.kept = self.last_kept = 0
        self.peak = ScopePeak(peak.low, peak.high)


class _Total:
    def __init__(self) -> None:
        self.entries = self.ooms = self.retries = self.unmeasured = 0
        self.devices: dict[str, _Device] = {}

    def add(self, block: Block, oom: bool) -> None:
        self.entries += 1
        self.ooms += oom
        if block.kept is None or block.peaks is None:
            self.unmeasured += 1
            return
        self.retries += max(0, block.retries or 0)
        for uuid, peak in block.peaks.items():
            device = self.devices.get(uuid)
            if device is None:
                device = self.devices[uuid] = _Device(peak)
            device.peak.join(peak)
            device.last_kept = block.kept[uuid]
            device.kept += device.last_kept

    def usage(self, name: str) -> ScopeUsage:
        devices = tuple(
            ScopeDevice(
                uuid,
                ByteChange(device.kept),
                ByteChange(device.last_kept),
                device.peak.low,
                device.peak.low == device.peak.high,
            )
            for uuid, device in self.devices.items()
        )
        return ScopeUsage(name, self.entries, self.ooms, self.retries, self.unmeasured, devices)


class Scopes:
    """Those of this process, by name."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a signal handler may enter a scope
        self._totals: dict[str, _Total] = {}
        self._open: WeakSet[Block] = WeakSet()  # a generator may leave a block for ever

    def enter(self, block: Block) -> None:
        block.before = usage.read()
        if block.before is not None:
            block.see(block.before)
        with self._lock:
            self._open.add(block)

    def leave(self, block: Block, oom: bool) -> None:
        block.end(usage.read())
        with self._lock:
            self._open.discard(block)
            self._total(block.name).add(block, oom)

    @property
    def under_way(self) -> bool:
        return bool(self._open)

    def see(self, now: Levels) -> None:
        """What a report has read, while blocks are under way."""
        with self._lock:
            for block in self._open:
                block.see(now)

    def usage(self) -> tuple[ScopeUsage, ...]:
        with self._lock:
            return tuple(total.usage(name) for name, total in self._totals.items())

    def keepers(self) -> tuple[ScopeKept, ...]:
        """Those that keep most, blocks under way left out."""
        kept = [
            ScopeKept(scope.name, ByteChange(sum(device.kept_bytes for device in scope.devices)))
            for scope in self.usage()
        ]
        return tuple(sorted((one for one in kept if one.kept_bytes), key=lambda one: -one.kept_bytes)[:KEEPERS])

    def _total(self, name: str) -> _Total:
        known = self._totals.get(name)
        if known is None and (len(self._totals) - (OTHER in self._totals) >= SCOPES or len(name) > MAX_NAME):
            name = OTHER
        return self._totals.setdefault(name, _Total())


_current: ContextVar[Block | None] = ContextVar("gpumond_scope", default=None)


def scope_name() -> str:
    """Of the innermost block that the caller is in; empty outside."""
    block = _current.get()
    return "" if block is None else block.name if len(block.name) <= MAX_NAME else OTHER


SCOPES_SEEN = Scopes()
OOMS.keepers, OOMS.scope = SCOPES_SEEN.keepers, scope_name
